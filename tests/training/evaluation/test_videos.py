"""YouTube Faces, iQIYI-VID and Trillion-Pairs from the command line, in the published layouts, made of LFW's photos."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from models.pack.manifest import ModelPack
from models.vision.alignment import TEMPLATE_XY, align
from models.vision.detection import Detector
from models.vision.recognition import Recognizer, l2_normalize
from training.cli.commands import app
from training.config import ConfigError
from training.data.identities import read_rgb
from training.evaluation.lfw import verify_similarities
from training.evaluation.protocols import trillion_pairs
from training.evaluation.videos import VideoEmbedder, evaluate_iqiyi, evaluate_ytf, read_iqiyi

Evaluate = Callable[..., str]


@pytest.fixture
def people(data: Path) -> list[list[Path]]:
    """Four photos of each of six people."""
    found = sorted(p for p in (data / "lfw" / "images").iterdir() if len(list(p.iterdir())) >= 4)[:6]
    return [sorted(person.iterdir())[:4] for person in found]


@pytest.fixture
def videos(detector: Detector, recognizer: Recognizer) -> VideoEmbedder:
    return VideoEmbedder(recognizer.embed, recognizer.alignment, detector, frames=20)


@pytest.fixture
def evaluate(
    pack: ModelPack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Evaluate:
    """Run `kith-train evaluate` and return what it printed, with single spaces."""
    monkeypatch.chdir(tmp_path)

    def run(*options: object) -> str:
        app(["evaluate", str(pack.directory), *map(str, options)], standalone_mode=False)
        return " ".join(capsys.readouterr().out.split())

    return run


def mean_vector(videos: VideoEmbedder, photos: list[NDArray[np.uint8]], largest: bool = False) -> NDArray[np.float64]:
    """Return the normalized mean embedding of the largest faces, or of those nearest the middle, photo by photo."""
    crops = []
    for photo in photos:
        faces = videos.detector.detect([photo])[0]
        row = faces.largest() if largest else faces.nearest(photo.shape[1] / 2, photo.shape[0] / 2)
        crops.append(align(photo, faces.landmarks_xy[row][None], videos.alignment)[0])
    mean = videos.embed(np.stack(crops)).mean(0, dtype=np.float64)
    return np.asarray(mean / np.linalg.norm(mean))


def write_ytf(root: Path, people: list[list[Path]]) -> list[tuple[int, str, str, bool]]:
    """Write two videos of two frames per person, and a list of two folds."""
    rows = []
    for i, photos in enumerate(people):
        for video in (0, 1):
            place = root / "aligned_images_DB" / f"P{i}" / str(video)
            place.mkdir(parents=True)
            for frame in (0, 1):
                # Frames 9 and 10: their order is that of the numbers.
                (place / f"aligned_detect_{video}.{9 + frame}.jpg").symlink_to(photos[2 * video + frame])
        rows.append((i % 2 + 1, f"P{i}/0", f"P{i}/1", True))
        rows.append((i % 2 + 1, f"P{i}/0", f"P{(i + 2) % len(people)}/1", False))
    lines = [f"{fold}, {a}, {b}, , {int(same)}, {int(same)}" for fold, a, b, same in rows]
    (root / "splits.txt").write_text("\n".join(["split number, first name, second name, , is same, is same", *lines]))
    return rows


def test_youtube_faces_by_the_command(
    people: list[list[Path]], tmp_path: Path, videos: VideoEmbedder, evaluate: Evaluate
) -> None:
    rows = write_ytf(tmp_path / "ytf", people)
    first = [read_rgb(photos[0]) for photos in people]
    for i, own in enumerate(first):  # between two larger faces, in the middle
        beside = cv2.resize(first[i - 1], None, fx=1.5, fy=1.5)[60:310, 60:310]
        people[i][0] = tmp_path / "ytf" / "aligned_images_DB" / f"P{i}" / "0" / "aligned_detect_0.9.jpg"
        people[i][0].unlink()
        cv2.imwrite(str(people[i][0]), np.concatenate([beside, own, beside], 1)[..., ::-1])

    seen = list[NDArray[np.uint8]]()

    def by_pixels(crops: NDArray[np.uint8]) -> NDArray[np.float32]:
        seen.extend(crops)
        return l2_normalize(crops[:, ::16, ::16].reshape(len(crops), -1) - np.float32(128))

    same, folds = np.array([row[3] for row in rows]), np.array([row[0] for row in rows])
    for frames in (1, 2):  # one frame is the first one
        some = replace(videos, frames=frames, embed=by_pixels)
        vector = {
            f"P{i}/{video}": mean_vector(some, [read_rgb(file) for file in photos[2 * video :][:frames]])
            for i, photos in enumerate(people)
            for video in (0, 1)
        }
        similarities = np.array([vector[a] @ vector[b] for _, a, b, _ in rows])
        expected, found = verify_similarities(similarities, same, folds), evaluate_ytf(some, tmp_path / "ytf")
        assert found.accuracy == expected.accuracy
        assert (found.eer, found.auc) == pytest.approx((expected.eer, expected.auc))
        own, others = np.split(np.stack(seen).astype(int), 2)  # crops of the photos above, and of the frames
        assert np.abs(own - others).mean((1, 2, 3)).max() < 3
        seen.clear()
    printed = evaluate("--ytf", "ytf")
    assert f"YouTube Faces accuracy │ {evaluate_ytf(videos, tmp_path / 'ytf').accuracy.mean:.2%} ±" in printed
    assert "YouTube Faces videos without a face │ 0" in printed


def test_missing_parts_of_youtube_faces_are_named(tmp_path: Path, videos: VideoEmbedder) -> None:
    (tmp_path / "splits.txt").write_text("header\n1, A/0, A/1, 1\n1, A/0, B/0, 0\n")
    with pytest.raises(ConfigError, match=r"aligned_images_DB lacks 3 videos that splits\.txt names, first A/0"):
        evaluate_ytf(videos, tmp_path)


def write_video(path: Path, photos: list[Path]) -> None:
    """Write photos of 250x250 pixels as MP4, each for four frames."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), 25, (250, 250))
    for photo in photos:
        for _ in range(4):
            writer.write(np.ascontiguousarray(read_rgb(photo)[..., ::-1]))
    writer.release()


def write_iqiyi(root: Path, people: list[list[Path]]) -> None:
    """Write two parts: two training and two validation videos of each of four people, and two distractors."""
    for part in (1, 2):
        place = root / f"IQIYI_VID_DATA_Part{part}"
        train, validation = [], []
        for person in (2 * part - 1, 2 * part):
            photos = people[person - 1]
            names = [f"IQIYI_VID_{kind}_{person}{i}.mp4" for kind in ("TRAIN", "VAL") for i in (0, 1)]
            for name, photo in zip(names, photos, strict=True):
                write_video(place / ("IQIYI_VID_TRAIN" if "TRAIN" in name else "IQIYI_VID_VAL") / name, [photo])
            train += [f"{name} {person}" for name in names[:2]]
            validation.append(" ".join([str(person), *names[2:]]))
        write_video(place / "IQIYI_VID_VAL" / f"IQIYI_VID_VAL_{90 + part}.mp4", [people[3 + part][0]])
        (place / "train.txt").write_text("\n".join(train))
        (place / "val.txt").write_text("\n".join(validation))


def test_iqiyi_vid_by_the_command(
    people: list[list[Path]], tmp_path: Path, videos: VideoEmbedder, evaluate: Evaluate
) -> None:
    root = tmp_path / "iqiyi"
    write_iqiyi(root, people)
    # A video without a face is last, and the person's average precision counts it there.
    faceless = tmp_path / "black.png"
    cv2.imwrite(str(faceless), np.zeros((250, 250, 3), np.uint8))
    missed = root / "IQIYI_VID_DATA_Part1" / "IQIYI_VID_VAL" / "IQIYI_VID_VAL_11.mp4"
    write_video(missed, [faceless])
    lists = read_iqiyi(root)
    assert len(lists.train) == 8
    assert len(lists.validation) == 10
    vectors: dict[str, NDArray[np.float64]] = {}
    for name, file in {**lists.train, **lists.validation}.items():
        if file != missed:
            video = cv2.VideoCapture(str(file))
            frames = [np.asarray(video.read()[1][..., ::-1], np.uint8) for _ in range(4)]
            vectors[name] = mean_vector(videos, frames, largest=True)
    total = 0.0
    for person in range(1, 5):
        mean = sum(vectors[name] for name, who in lists.train_person.items() if who == person)
        order = sorted(lists.validation, key=lambda name: -float(mean @ vectors[name]) if name in vectors else np.inf)
        ranks = [rank for rank, name in enumerate(order, 1) if lists.validation_person.get(name) == person]
        total += float(np.mean([hit / rank for hit, rank in enumerate(ranks, 1)]))
    found = evaluate_iqiyi(videos, root)
    assert (found.people, found.videos, found.videos_without_face) == (4, 10, 1)
    assert found.mean_average_precision == pytest.approx(total / 4)
    assert found.mean_average_precision < 1
    assert f"iQIYI-VID MAP │ {total / 4:.2%} (4 people, 10 videos)" in evaluate("--iqiyi", "iqiyi")
    # A part alone, and the cleaned lists, which leave out a video.
    assert evaluate_iqiyi(videos, root / "IQIYI_VID_DATA_Part2").people == 2
    (root / "gt_v2").mkdir()
    for name in ("train", "val"):
        parts = [(root / f"IQIYI_VID_DATA_Part{part}" / f"{name}.txt").read_text() for part in (1, 2)]
        (root / "gt_v2" / f"{name}_v2.txt").write_text("\n".join(parts))
    (root / "gt_v2" / "IQIYI_VID.txt").write_text("\n".join(sorted(lists.validation.keys() - {missed.name})))
    assert evaluate_iqiyi(videos, root).videos == 9


def test_missing_and_malformed_lists_of_iqiyi_vid_are_named(tmp_path: Path, videos: VideoEmbedder) -> None:
    with pytest.raises(ConfigError, match=r"have no train\.txt and val\.txt"):
        evaluate_iqiyi(videos, tmp_path)
    (tmp_path / "train.txt").write_text("a.mp4 1\n")
    for text, problem in (
        ("2 b.mp4\n", "person 2 of the validation list has no training video"),
        ("x b.mp4\n", "'x' is not the number of a person"),
        ("1\n", r"val\.txt, line 1 has fewer than 2 fields"),
        ("1 b.mp4\n", r"lacks 1 listed videos, first a\.mp4"),
    ):
        (tmp_path / "val.txt").write_text(text)
        with pytest.raises(ConfigError, match=problem):
            evaluate_iqiyi(videos, tmp_path)
    for folder, name in (("IQIYI_VID_TRAIN", "a.mp4"), ("IQIYI_VID_VAL", "b.mp4")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(b"no video")
    with pytest.raises(ConfigError, match=r"a\.mp4 cannot be read as a video"):
        evaluate_iqiyi(videos, tmp_path)


def test_trillion_pairs_by_the_command(
    people: list[list[Path]], tmp_path: Path, detector: Detector, recognizer: Recognizer, evaluate: Evaluate
) -> None:
    root = tmp_path / "trillion"
    (root / "testdata").mkdir(parents=True)
    lines, vectors = [], []
    for i, file in enumerate(file for photos in people for file in photos):
        photo = read_rgb(file)
        points = detector.detect([photo])[0]
        landmarks = points.landmarks_xy[points.largest()].round(3)
        (root / "testdata" / f"{i}.jpg").symlink_to(file)
        lines.append((f"testdata/{i}.jpg", " ".join(f"{value:.3f}" for value in landmarks.ravel())))
        crops = align(photo, np.array([[f"{v:.3f}" for v in point] for point in landmarks], np.float64)[None])
        vectors.append(recognizer.embed(crops)[0])
    # The published list has no labels: the embeddings are written for DeepGlint.
    (root / "testdata_lmk.txt").write_text("".join(f"{path} {points}\n" for path, points in lines))
    with pytest.raises(ConfigError, match="has no labels, which DeepGlint keeps: write the embeddings with --features"):
        evaluate("--trillion-pairs", "trillion")
    printed = evaluate("--trillion-pairs", "trillion", "--features", "out/features.bin")
    assert "Trillion-Pairs embeddings │ out/features.bin" in printed
    written = (tmp_path / "out" / "features.bin").read_bytes()
    rows, columns, stride, kind = struct.unpack("<4i", written[:16])
    assert (rows, columns, stride, kind) == (24, recognizer.dimension, 4 * recognizer.dimension, 5)
    assert np.frombuffer(written[16:], "<f4").reshape(rows, columns) == pytest.approx(np.stack(vectors), abs=1e-5)

    # With labels: four people, and the photos of two others as distractors.
    labels = np.array([i // 4 if i < 16 else -1 for i in range(24)])
    (root / "testdata_lmk.txt").write_text(
        "".join(f"{path} {label} {points}\n" for (path, points), label in zip(lines, labels, strict=True))
    )
    printed, unit = evaluate("--trillion-pairs", "trillion"), np.stack(vectors).astype(np.float64)
    expected = trillion_pairs(unit[:16], labels[:16], unit[16:])
    assert f"Trillion-Pairs identification at FPR 1e-3 │ {expected.identification:.2%}" in printed
    assert f"Trillion-Pairs verification at FPR 1e-9 │ {expected.verification:.2%}" in printed


def test_malformed_lists_of_trillion_pairs_are_named(tmp_path: Path, evaluate: Evaluate) -> None:
    path, points = tmp_path / "testdata_lmk.txt", " ".join(f"{value:g}" for value in TEMPLATE_XY.ravel())
    for text, problem in (
        (None, "does not exist"),
        ("a.jpg 1 2\n", "line 1: each line needs a path"),
        (f"a.jpg {points}\na.jpg 1 {points}\n", "line 2: each line needs a path"),
        (f"a.jpg x {points}\n", "line 1: invalid literal"),
        ("", "lists no photo"),
        ("a.jpg" + " nan" * 10, "not finite"),
        (f"a.jpg 1 {points}\n", r"1 photos of .* are missing, first .*a\.jpg"),
    ):
        if text is not None:
            path.write_text(text)
        with pytest.raises(ConfigError, match=problem):
            evaluate("--trillion-pairs", tmp_path)
