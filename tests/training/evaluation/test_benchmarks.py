"""Benchmarks read their lists, use the same crops for every network, and agree with plain loops."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain
from pathlib import Path

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from models.pack.manifest import ModelPack
from models.risk.search_rates import search_gallery
from models.vision.alignment import Alignment, standard_alignment
from models.vision.detection import Detector
from models.vision.recognition import Recognizer
from tests.training.mxnet_files import write_bin
from training.cli.commands import app
from training.config import ConfigError
from training.data.verification import VerificationSet
from training.evaluation import lfw as lfw_module
from training.evaluation.benchmarks import evaluate_bin, evaluate_ijb, read_ijb_pairs, tar_or_reason
from training.evaluation.embedding import Embedder, Embeddings, embed_crops
from training.evaluation.lfw import (
    DOUBTFUL_STRANGERS,
    PARTS,
    VIEW1,
    LfwCrops,
    embed_lfw,
    evaluate_lfw_embeddings,
    load_lfw_crops,
    read_open_set,
    read_pairs,
    verify,
)
from training.evaluation.metrics import best_threshold, fold_accuracy, measure_open_set
from training.evaluation.pack_evaluation import embed_pack

PEOPLE, STRANGERS = 40, 30


def number(person: str, i: int) -> str:
    return f"{person}/{person}_{i:04d}.jpg"


def write_lists(root: Path, rng: np.random.Generator) -> tuple[str, ...]:
    """Write LFW's lists for forty people with three photos and thirty strangers with one; return their files."""
    people, strangers = [f"P{i}" for i in range(PEOPLE)], sorted(DOUBTFUL_STRANGERS) + [f"S{i}" for i in range(25)]

    def pairs(count: int) -> str:
        same = [f"{p}\t1\t2" for p in rng.choice(people, count)]
        different = ["\t".join([a, "1", b, "3"]) for a, b in (rng.choice(people, 2, replace=False) for _ in same)]
        return "\n".join(same + different) + "\n"

    root.mkdir(exist_ok=True)
    (root / "pairsDevTrain.txt").write_text("30\n" + pairs(30))
    (root / "pairsDevTest.txt").write_text("25\n" + pairs(25))
    (root / "pairs.txt").write_text("10\t20\n" + "".join(pairs(20) for _ in range(10)))
    protocol = {
        "gallery": [number(p, 1) for p in people],
        "mated_probes": [number(p, i) for p in people for i in (2, 3)],
        "nonmated_probes": [number(s, 1) for s in strangers],
    }
    (root / "openset_protocol.json").write_text(json.dumps(protocol))
    return tuple(sorted(chain(*protocol.values())))


@pytest.fixture
def embeddings(tmp_path: Path, rng: np.random.Generator) -> Embeddings:
    """Return similar vectors for photos of one person; the fifth photo has no face."""
    files = write_lists(tmp_path, rng)
    center = {person: rng.normal(size=16) for person in sorted({file.split("/")[0] for file in files})}
    vectors = np.array([center[file.split("/")[0]] + rng.normal(size=16) for file in files])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    found = np.arange(len(files)) != 4
    return Embeddings(files, (vectors * found[:, None]).astype(np.float32), found)


def test_view_1_uses_the_threshold_of_its_training_pairs(embeddings: Embeddings, tmp_path: Path) -> None:
    lists = [read_pairs(tmp_path / f"pairsDev{kind}.txt") for kind in ("Train", "Test")]
    (train, train_same), (test, test_same) = ((embeddings.similarities(pairs), pairs.same) for pairs in lists)
    judgment = evaluate_lfw_embeddings(embeddings, tmp_path, ["view1"])
    assert (judgment.view2, judgment.open_set) == (None, None)
    assert judgment.view1 is not None
    threshold = best_threshold(train, train_same)
    assert judgment.view1.threshold == pytest.approx(threshold)
    assert judgment.view1.accuracy == np.mean((test >= threshold) == test_same)
    assert judgment.view1.accuracy < max(np.mean((test >= t) == test_same) for t in test)


def test_intervals_contain_their_figures(embeddings: Embeddings, tmp_path: Path) -> None:
    judgment = evaluate_lfw_embeddings(embeddings, tmp_path)
    view2, wide = judgment.view2, judgment.open_set
    assert view2 is not None
    assert wide is not None
    assert view2.photos_without_face == 1
    measured = {"accuracy": view2.accuracy.mean, "tar_at_far_1e3": view2.tar_at_far_1e3, "eer": view2.eer}
    for name, value in measured.items():
        low, high = view2.intervals[name]
        assert low < value < high < low + 0.5
    assert wide.rank1_interval[0] < wide.rank1 < wide.rank1_interval[1]
    assert wide.fnir_intervals[0.1][0] < wide.fnir[0.1] < wide.fnir_intervals[0.1][1]
    assert verify(embeddings, read_pairs(tmp_path / "pairsDevTest.txt")).intervals == {}
    assert json.loads(json.dumps(judgment.as_dict()))["open_set"]["fnir"]["0.1"] == wide.fnir[0.1]


def test_fnir_is_also_reported_without_doubtful_strangers(embeddings: Embeddings, tmp_path: Path) -> None:
    protocol = read_open_set(tmp_path / "openset_protocol.json")
    # Doubtful strangers are gallery people: same vectors.
    vectors = embeddings.vectors.copy()
    vectors[embeddings.rows(protocol.strangers[:5])] = vectors[embeddings.rows(protocol.gallery[5:10])]
    wide = evaluate_lfw_embeddings(replace(embeddings, vectors=vectors), tmp_path, ["open_set"]).open_set
    assert wide is not None
    gallery, mated, sure = (
        vectors[embeddings.rows(files)].astype(np.float64)
        for files in (protocol.gallery, protocol.mated, protocol.strangers[5:])
    )
    assert wide.fnir_without_doubtful == measure_open_set(*search_gallery(gallery, mated, protocol.mates(), sure)).fnir
    assert wide.fnir[0.1] > wide.fnir_without_doubtful[0.1]


def mean_colors(crops_NHWC: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Embed crops as mean colors of the left half, which a mirror changes, and of the whole."""
    wide = crops_NHWC.astype(np.float64) + 1
    vectors = np.concatenate([wide[:, :, :20].mean((1, 2)), wide.mean((1, 2))], 1)
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), np.float32)


def test_parts_use_their_own_photos_and_mirrors_count(tmp_path: Path, rng: np.random.Generator) -> None:
    files = write_lists(tmp_path, rng)
    crops = rng.integers(0, 255, (len(files), 112, 112, 3), dtype=np.uint8)
    crops[:, ::2] //= rng.integers(1, 9, (len(files), 1, 1, 3), dtype=np.uint8)
    lfw = LfwCrops(tmp_path, PARTS, files, crops, np.arange(len(files)) != 4)
    some = embed_lfw(mean_colors, lfw, parts=["view1"])
    lists = [read_pairs(tmp_path / f"pairsDev{kind}.txt") for kind in ("Train", "Test")]
    assert set(some.files) == {file for pairs in lists for file in (*pairs.first, *pairs.second)}
    everything = embed_lfw(mean_colors, lfw)
    assert np.array_equal(everything.vectors[everything.rows(some.files)], some.vectors)
    assert not everything.vectors[4].any()
    mirrored = np.stack([cv2.flip(crop, 1) for crop in crops]).astype(np.uint8)  # more than one batch
    expected = mean_colors(crops) + mean_colors(mirrored)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert embed_crops(mean_colors, crops, flip=True) == pytest.approx(expected, abs=1e-6)
    assert np.array_equal(embed_crops(mean_colors, crops), mean_colors(crops))


def test_a_bin_set_has_ten_contiguous_folds(rng: np.random.Generator) -> None:
    crops = rng.integers(0, 255, (2 * 57, 112, 112, 3), dtype=np.uint8)
    crops[:, ::2] //= rng.integers(1, 9, (2 * 57, 1, 1, 3), dtype=np.uint8)
    same = rng.random(57) < 0.5
    result = evaluate_bin(mean_colors, VerificationSet(crops, same))
    vectors = mean_colors(crops).astype(np.float64)
    similarities = np.array([vectors[2 * p] @ vectors[2 * p + 1] for p in range(57)])
    folds = np.repeat(np.arange(10), [6] * 7 + [5] * 3)
    assert result.accuracy == fold_accuracy(similarities, same, folds)
    assert result.intervals == {}
    with pytest.raises(ConfigError, match="different-person pairs"):
        evaluate_bin(mean_colors, VerificationSet(crops[:4], np.array([True, True])))
    assert tar_or_reason(0.5, 1e-3, 1000) == "50.00%"
    assert tar_or_reason(0.5, 1e-3, 999) == "too small: needs 1,000 pairs of different people, not 999"


@pytest.fixture
def small_lfw(data: Path, tmp_path: Path) -> Path:
    """Create View 1 with twelve pairs per list and one photo without a face, linking the real photos."""
    root = tmp_path / "lfw"
    for kind in ("Train", "Test"):
        lines = (data / "lfw" / f"pairsDev{kind}.txt").read_text().splitlines()[1:]
        half = len(lines) // 2
        (root / "images").mkdir(parents=True, exist_ok=True)
        (root / f"pairsDev{kind}.txt").write_text("\n".join(["12", *lines[:12], *lines[half : half + 12]]) + "\n")
        pairs = read_pairs(root / f"pairsDev{kind}.txt")
        for file in {*pairs.first, *pairs.second}:
            (root / "images" / file).parent.mkdir(exist_ok=True)
            (root / "images" / file).symlink_to(data / "lfw" / "images" / file)
    faceless = root / "images" / pairs.first[-1]
    faceless.unlink()
    cv2.imwrite(str(faceless), np.zeros((250, 250, 3), np.uint8))
    return root


def test_cached_crops_give_the_packs_own_figures(
    small_lfw: Path, pack: ModelPack, recognizer: Recognizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crops = load_lfw_crops(small_lfw, pack.detection, tmp_path / "cache", ["view1"])
    assert crops.found.sum() == len(crops.files) - 1
    pairs = read_pairs(small_lfw / "pairsDevTest.txt")
    files = sorted({*pairs.first, *pairs.second})
    direct = verify(Embeddings(tuple(files), *Embedder(pack).embed([small_lfw / "images" / f for f in files])), pairs)
    assert verify(embed_lfw(recognizer.embed, crops), pairs) == direct
    assert verify(embed_pack(pack, small_lfw, tmp_path / "cache", VIEW1, VIEW1), pairs) == direct
    assert direct.photos_without_face == 1

    # The second call uses the cache.
    def refuse(detector: Detector, files: object, alignment: Alignment) -> None:
        raise AssertionError("aligned again")

    monkeypatch.setattr(lfw_module, "central_crops", refuse)
    again = load_lfw_crops(small_lfw, pack.detection, tmp_path / "cache", ["view1"])
    assert np.array_equal(again.crops_NHWC, crops.crops_NHWC)
    assert np.array_equal(again.found, crops.found)
    # Other photos or alignments do not use the cache.
    with pytest.raises(AssertionError, match="aligned again"):
        load_lfw_crops(small_lfw, pack.detection, tmp_path / "cache", ["view1"], standard_alignment(150))
    changed = small_lfw / "images" / pairs.first[-1]
    changed.write_bytes(changed.read_bytes() + b"\0")
    with pytest.raises(AssertionError, match="aligned again"):
        load_lfw_crops(small_lfw, pack.detection, tmp_path / "cache", ["view1"])


def test_missing_photos_are_named(tmp_path: Path, rng: np.random.Generator, pack: ModelPack) -> None:
    write_lists(tmp_path, rng)
    with pytest.raises(ConfigError, match=r"missing, first .*Carlos_Ruckauf_0001\.jpg"):
        load_lfw_crops(tmp_path, pack.detection, tmp_path / "cache")


def test_lists_of_ijb(tmp_path: Path, detector: Detector) -> None:
    (tmp_path / "pairs.txt").write_text("1 20 1\n")  # one pair is a list, too
    assert read_ijb_pairs(tmp_path / "pairs.txt")["templates"].tolist() == [[1, 20]]
    with pytest.raises(ConfigError, match="must contain exactly one file"):
        evaluate_ijb(mean_colors, detector, tmp_path)


def test_ijb_and_distractors_from_the_command_line(
    data: Path,
    pack: ModelPack,
    detector: Detector,
    recognizer: Recognizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Six people of LFW as templates of two photos, searched among six others."""
    people = sorted(p for p in (data / "lfw" / "images").iterdir() if len(list(p.iterdir())) >= 4)[:12]
    folder = tmp_path / "ijb"
    (folder / "loose_crop").mkdir(parents=True)
    (folder / "meta").mkdir()
    media, pairs = [], []
    for i, person in enumerate(people[:6]):
        for j, photo in enumerate(sorted(person.iterdir())[:4]):
            (folder / "loose_crop" / photo.name).symlink_to(photo)
            media.append(f"{photo.name} {2 * i + j // 2} {j}")
        pairs += [f"{2 * i} {2 * k + 1} {int(i == k)}" for k in range(6)]
    (folder / "meta" / "ijbx_face_tid_mid.txt").write_text("\n".join(media))
    (folder / "meta" / "ijbx_template_pair_label.txt").write_text("\n".join(pairs))
    for name, chosen in (("probes", people[:6]), ("distractors", people[6:])):
        (tmp_path / name).mkdir()
        for person in chosen:
            (tmp_path / name / person.name).symlink_to(person)
    a, b = [p.read_bytes() for p in sorted((data / "celeba" / "crops" / "00001").iterdir())[:2]]
    c = next((data / "celeba" / "crops" / "00002").iterdir()).read_bytes()
    write_bin(tmp_path / "twins.bin", [a, b, a, c] * 10, [True, False] * 10)
    options = ["--ijb", folder, "--probes", tmp_path / "probes", "--distractors", tmp_path / "distractors"]
    monkeypatch.chdir(tmp_path)
    app(["evaluate", str(pack.directory), *map(str, options), "--bin", "twins.bin"], standalone_mode=False)
    printed = capsys.readouterr().out
    result = evaluate_ijb(recognizer.embed, detector, folder)
    assert f"TAR at FAR 0.1 │ {result.tar_at_far[1e-1]:.2%}" in " ".join(printed.split())
    assert "Rank-1 among 10 distractors" in printed
    assert "twins accuracy" in printed
    assert "too small" in printed
