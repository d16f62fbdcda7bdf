"""Benchmark protocols equal their definitions, written as loops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from models.vision.alignment import TEMPLATE_XY, align
from models.vision.detection import Detector
from training.config import ConfigError, DataConfig
from training.data.identities import list_identities
from training.evaluation.benchmarks import evaluate_ijb, read_ijb_pairs
from training.evaluation.cfp import read_cfp_pairs
from training.evaluation.lfw import read_open_set, read_pairs
from training.evaluation.protocols import (
    mean_average_precision,
    read_video_pairs,
    search_templates,
    trillion_pairs,
)


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (read_pairs, "ten\t1\nA\t1\t2\nA\t1\tB\t1\n", "is not a list of pairs: invalid literal.*'ten'"),
        (read_pairs, "1\nA 1 2\nA 1 B 1\n", "is not a list of pairs.*separated by tabs"),
        (read_pairs, "1\nA\t1\t2\nA\tone\tB\t1\n", "is not a list of pairs.*'one'"),
        (read_pairs, "2\nA\t1\t2\nA\t1\tB\t1\n", "2 pairs, and the header says 4"),
        (read_open_set, "{", "is not JSON"),
        (read_open_set, "[]", "gallery is not a list"),
        (read_open_set, '{"gallery": ["A/1.jpg"], "mated_probes": ["A/2.jpg"]}', "nonmated_probes is not a list"),
        (read_open_set, '{"gallery": ["A/1.jpg"], "mated_probes": [2], "nonmated_probes": []}', "mated_probes is not"),
        (read_open_set, '{"gallery": ["A/1"], "mated_probes": ["B/2"], "nonmated_probes": []}', "first B/2"),
        (read_cfp_pairs, "fold,same,file_a\n1,1,a\n", "malformed"),
        (read_cfp_pairs, "fold,same,file_a,file_b\n1,x,a,b\n", "malformed"),
        (read_cfp_pairs, "fold,same,file_a,file_b\n1,1,a,b\n", "needs same-person and different-person pairs"),
        (read_video_pairs, "one line\nx, y\n", "is not a list of pairs"),
        (read_video_pairs, "one line\n1, A/0, A/1, 2\n", "is not a list of pairs"),
        (read_video_pairs, "one line\n1, A/0, 1\n", "is not a list of pairs"),
        (read_video_pairs, "one line\n1, A/0, A/1, 1\n", "needs pairs"),
        (read_ijb_pairs, "1 20\n", "list.txt"),
        (read_ijb_pairs, "1 x 0\n", "list.txt"),
        (read_ijb_pairs, "1 20 2\n", "labels must be 0 or 1"),
    ],
)
def test_a_missing_or_malformed_list_is_an_error(
    read: Callable[[Path], object], text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"list\.txt does not exist"):
        read(tmp_path / "list.txt")
    (tmp_path / "list.txt").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path / "list.txt")


def test_names_of_pairs_may_have_spaces(tmp_path: Path) -> None:
    (tmp_path / "pairs.txt").write_text("1\r\nAda L\t1\t2\r\nAda L\t1\tBo\t1\r\n", newline="")
    pairs = read_pairs(tmp_path / "pairs.txt")
    assert pairs.second == ("Ada L/Ada L_0002.jpg", "Bo/Bo_0001.jpg")


def unit(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(values / np.linalg.norm(values, axis=1, keepdims=True))


def test_trillion_pairs(rng: np.random.Generator) -> None:
    people = np.repeat(np.arange(6), 3)
    centers = rng.normal(size=(6, 8))
    probes, distractors = unit(centers[people] + 0.6 * rng.normal(size=(18, 8))), unit(rng.normal(size=(50, 8)))
    found = trillion_pairs(probes, people, distractors, 0.5, 0.01)
    nearest = [max(float(p @ d) for d in distractors) for p in probes]
    # At most half of 18 probes: nine of them may have a distractor at the threshold.
    limit = sorted(nearest, reverse=True)[9]
    every = sorted((float(p @ d) for p in probes for d in distractors), reverse=True)
    identified, verified, pairs = 0, 0, 0
    for i in range(18):
        for j in range(18):
            if i != j and people[i] == people[j]:
                similarity = float(probes[i] @ probes[j])
                pairs += 1
                identified += similarity > limit and similarity > nearest[i]
                verified += similarity > every[9]
    assert 0 < identified < pairs
    assert found.identification == pytest.approx(identified / pairs)
    assert found.verification == pytest.approx(verified / pairs)


def test_mean_average_precision(rng: np.random.Generator) -> None:
    similarity, relevant = rng.normal(size=(5, 40)), rng.random((5, 40)) < 0.2
    relevant[:, 0] = True
    total = 0.0
    for scores, truth in zip(similarity, relevant, strict=True):
        hits, precisions = 0, 0.0
        for rank, video in enumerate(sorted(range(40), key=lambda v: -scores[v])[:15], start=1):
            if truth[video]:
                hits += 1
                precisions += hits / rank
        total += precisions / truth.sum()
    assert mean_average_precision(similarity, relevant, 15) == pytest.approx(total / 5)
    assert mean_average_precision(relevant.astype(float), relevant) == pytest.approx(1.0)


def test_templates_are_searched(rng: np.random.Generator) -> None:
    gallery = unit(rng.normal(size=(20, 8)))
    people = np.arange(100, 120)
    probe_people = np.concatenate([people, np.arange(40)])
    probes = unit(np.concatenate([gallery + 0.3 * rng.normal(size=(20, 8)), rng.normal(size=(40, 8))]))
    found = search_templates(gallery, people, probes, probe_people, (0.1,))
    scores = probes @ gallery.T
    places = [int((scores[i] > scores[i, i]).sum()) for i in range(20)]
    assert found.rank1 == pytest.approx(np.mean([place == 0 for place in places]))
    limit = sorted(scores[20:].max(1), reverse=True)[4]
    assert found.tpir[0.1] == pytest.approx(np.mean([places[i] == 0 and scores[i, i] > limit for i in range(20)]))
    assert search_templates(gallery, people, gallery, people).tpir == {}
    assert search_templates(np.repeat(gallery[:1], 2, 0), people[:2], gallery[:1], people[:1]).rank1 == 0  # a tie
    with pytest.raises(ConfigError, match="none of the 60 probes"):
        search_templates(gallery, people, probes, probe_people + 200)


def test_video_pairs_are_read_with_and_without_further_columns(tmp_path: Path) -> None:
    path = tmp_path / "splits.txt"
    for lines in ("1, A/0, A/1, , 1, 1\n2, A/0, B/0, , 0, 0\n", "1, 1, A/0, A/1, 1\n2, 1, A/0, B/0, 0\n"):
        path.write_text(f"split number, first name, second name, is same\n{lines}")
        pairs = read_video_pairs(path)
        assert (pairs.first, pairs.second) == (("A/0", "A/0"), ("A/1", "B/0"))
        assert (pairs.same.tolist(), pairs.folds.tolist()) == ([True, False], [1, 2])


def test_a_refined_list_excludes_photos(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a/1.jpg", "a/2.jpg", "b/1.jpg", "c/1.jpg"):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "photos" / name).write_bytes(b"")
    (tmp_path / "noisy.txt").write_text("a/2.jpg\nc/1.jpg\n")
    config = DataConfig(tmp_path / "photos", None, min_images=1, exclude=tmp_path / "noisy.txt")
    listed = list_identities(config)
    assert listed.names == ("a", "b")
    assert [Path(listed.name(i)).name for i in range(len(listed))] == ["1.jpg", "1.jpg"]
    # As InsightFace's lists: comments, and names of photos in any folder.
    (tmp_path / "noisy.txt").write_text("# refined\n2.jpg\n")
    listed = list_identities(config)
    assert [Path(listed.name(i)).parent.name for i in range(len(listed))] == ["a", "b", "c"]
    # As its list for MegaFace, whose second field is the path.
    (tmp_path / "noisy.txt").write_text("# noisy\n17\ta/2.jpg\r\n18\tc/1.jpg\tx\n")
    assert list_identities(config).names == ("a", "b")
    (tmp_path / "noisy.txt").write_text("a/7.jpg\n")
    with caplog.at_level("WARNING"):
        assert len(list_identities(config)) == 4
    assert "names no photo" in caplog.text
    with pytest.raises(ConfigError, match=r"data\.exclude"):
        DataConfig(tmp_path / "photos", None, exclude=tmp_path / "nowhere.txt")


def test_distractors_may_lie_as_megafaces_do(tmp_path: Path) -> None:
    for name in ("a1/x/1.jpg", "a1/x/2.jpg", "a1/y/1.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ConfigError, match="fewer than two people"):
        list_identities(DataConfig(tmp_path, None, min_images=1))
    listed = list_identities(DataConfig(tmp_path, None, min_images=1, person_folders=2))
    assert (listed.names, listed.labels.tolist()) == (("a1/x", "a1/y"), [0, 0, 1])


def test_ijb_with_given_landmarks_mirrors_norms_and_search(
    tmp_path: Path, detector: Detector, rng: np.random.Generator
) -> None:
    meta, photos = tmp_path / "meta", tmp_path / "loose_crop"
    meta.mkdir()
    photos.mkdir()
    images = rng.integers(0, 255, (12, 130, 130, 3), dtype=np.uint8)
    # Pairs of templates share the first photo, of one person half of it: the scores tell which photo counts.
    images[2] = images[0] // 2 + images[2] // 2
    images[[6, 10]] = images[[4, 8]]
    scores, offset = np.where(np.isin(np.arange(12), (0, 2, 5, 7, 9, 11)), 1.0, 0.2), 3 * (np.arange(12) % 2)
    media, points = [], []
    for i in range(12):
        cv2.imwrite(str(photos / f"{i}.png"), images[i][..., ::-1])
        media.append(f"{i}.png {i // 2} {i}")
        landmarks = " ".join(f"{v:g}" for v in (TEMPLATE_XY + offset[i]).ravel())
        points.append(f"{i}.png {landmarks} {scores[i]:.6f}")
    (meta / "x_face_tid_mid.txt").write_text("\n".join(media))
    (meta / "x_name_5pts_score.txt").write_text("\n".join(points))
    (meta / "x_template_pair_label.txt").write_text("0 1 1\n2 3 0\n4 5 0\n")
    (meta / "x_1N_gallery_G1.csv").write_text("TEMPLATE_ID,SUBJECT_ID\n0,7\n1,8\n")
    (meta / "x_1N_probe_mixed.csv").write_text("TEMPLATE_ID,SUBJECT_ID\n2,7\n3,8\n4,9\n5,9\n")

    def embed(crops: NDArray[np.uint8]) -> NDArray[np.float32]:
        return crops[:, :60:4, :50:5].reshape(len(crops), -1).astype(np.float32) - 100

    result = evaluate_ijb(embed, detector, tmp_path, flip=True)
    vectors = []
    for i in range(12):
        crop = align(images[i], (TEMPLATE_XY + offset[i])[None])
        vectors.append((embed(crop)[0] + embed(crop[:, :, ::-1])[0]) * scores[i])
    templates = unit(np.array([vectors[2 * i] + vectors[2 * i + 1] for i in range(6)], np.float64))
    search = templates[2:] @ templates[:2].T
    assert result.photos_without_face == 0
    assert result.search is not None
    assert result.search.rank1 == pytest.approx(np.mean([search[0].argmax() == 0, search[1].argmax() == 1]))
    same, others = templates[0] @ templates[1], [templates[2] @ templates[3], templates[4] @ templates[5]]
    assert result.tar_at_far[1e-1] == float(same > max(others)) == 1.0
    (meta / "x_1N_probe_mixed.csv").write_text("TEMPLATE_ID,SUBJECT_ID\n99,7\n")
    with pytest.raises(ConfigError, match="template 99 has no photo"):
        evaluate_ijb(embed, detector, tmp_path)
