"""The quality score predicts failed comparisons of damaged photos better than chance."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.quality import DEGRADED_PAIRS, SCORE, degraded_copies, evidence, of_the_network, others_than_view1
from models.pack.manifest import ModelPack
from training.evaluation.lfw import people_of, read_pairs

pytestmark = pytest.mark.long

REJECTED = 0.1


def test_evaluated_people_are_not_in_the_tuning_set(data: Path) -> None:
    chosen_on = read_pairs(data / "lfw" / "pairsDevTrain.txt")
    known = set(people_of((*chosen_on.first, *chosen_on.second)).tolist())
    assert known.isdisjoint(people_of(others_than_view1(data / "lfw")).tolist())


def test_what_the_network_tells_by_itself_is_of_the_same_photos(data: Path, pack: ModelPack, tmp_path: Path) -> None:
    files = others_than_view1(data / "lfw")[:12]
    beside = of_the_network(pack, data / "lfw", files, tmp_path)
    likeness, length = beside.values()
    assert len(likeness) == len(length) == len(evidence(pack, data / "lfw", files, tmp_path).measures[SCORE])
    assert 0.5 < likeness.min() < likeness.max() < 1
    assert length.min() > 0


def test_rejecting_damaged_photos_lowers_fnmr(data: Path, pack: ModelPack, tmp_path: Path) -> None:
    _, judged = degraded_copies(pack, data / "lfw", tmp_path)
    none, by_score = judged.fnmr(judged.measures[SCORE], (0, REJECTED))
    by_chance = judged.by_chance((REJECTED,), 200)[:, 0]
    assert len(judged.pairs) == DEGRADED_PAIRS
    assert by_chance.mean() == pytest.approx(none, abs=0.005)
    assert by_score < by_chance.mean() - 0.01
