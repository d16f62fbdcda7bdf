"""Planted duplicates and mislabeled templates are found among real people, and little else is reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.hygiene import Photos, judge, others_than_view1, photos_of, plant, several
from models.pack.loading import load_pack
from models.pack.manifest import ModelPack
from training.evaluation.lfw import people_of, read_pairs

pytestmark = pytest.mark.long

PEOPLE, PLANTED, OF_STRANGERS = 70, 15, 5
MAX_PHOTOS = 3
CALIBRATED_ON = 250
SEEDS = range(100, 110)


@pytest.fixture(scope="module")
def photos(data: Path, reference: Path, pack: ModelPack) -> Photos:
    """Embed a few photos of people outside the calibration set with the reference recognizer."""
    files = [file for file in several(others_than_view1(data / "lfw")) if int(file[-8:-4]) <= MAX_PHOTOS]
    drawn = np.random.default_rng(0).permutation(np.unique(people_of(several(files))))[: PEOPLE + OF_STRANGERS]
    chosen = [file for file in files if file.split("/")[0] in set(drawn.tolist())]
    judge_pack = replace(pack, recognition=load_pack(reference).recognition, calibration=None)
    return photos_of(judge_pack, data / "lfw", None, chosen, CALIBRATED_ON)


def test_enrolled_people_are_not_in_the_calibration_set(photos: Photos, data: Path) -> None:
    pairs = read_pairs(data / "lfw" / "pairsDevTrain.txt")
    assert set(people_of((*pairs.first, *pairs.second)).tolist()).isdisjoint(people_of(photos.files.tolist()).tolist())


def test_planted_errors_are_as_described(photos: Photos) -> None:
    planted = plant(photos, 1, PEOPLE, PLANTED, OF_STRANGERS)
    owner = people_of(photos.files.tolist())
    wrong = {
        int(row)
        for row, key in zip(planted.snapshot.template_pks, planted.snapshot.subject_pks, strict=True)
        if owner[row] != planted.ids[key].removesuffix(" (2)")
    }
    assert wrong == planted.mislabeled.keys()
    assert len(wrong) == len(planted.duplicates) == PLANTED
    assert sum(home is None for home in planted.mislabeled.values()) == OF_STRANGERS
    assert len(set(planted.snapshot.template_pks.tolist())) == len(planted.snapshot.template_pks)


@pytest.mark.parametrize("kind", ["duplicates", "mislabeled"])
def test_precision_and_recall(photos: Photos, kind: str) -> None:
    draws = [judge(photos, plant(photos, seed, PEOPLE, PLANTED, OF_STRANGERS)) for seed in SEEDS]
    right, wrong = sum(d[kind] for d in draws), sum(len(d[f"wrong {kind}"]) for d in draws)
    assert right / (PLANTED * len(SEEDS)) >= 0.9
    assert right / (right + wrong) >= 0.9
