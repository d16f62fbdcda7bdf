"""Calibration without names finds the FMR of labeled pairs."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from models.pack.unlabeled_photos import calibrate_faces
from models.risk.calibration import Calibration, histogram
from models.risk.unlabeled import separate
from tests.models.risk.test_albums import people


def true_fmr(vectors: NDArray[np.float32], who: NDArray[np.int64], threshold: float) -> float:
    impostors = (vectors @ vectors.T)[who[:, None] != who[None]]
    return float((impostors >= threshold).mean())


@pytest.mark.parametrize(("count", "photos"), [(900, 1), (300, 3)])
def test_thresholds_give_the_requested_fmr(count: int, photos: int) -> None:
    vectors, who = people(count, photos, seed=0)
    calibration = Calibration.from_document(calibrate_faces(vectors, np.arange(len(vectors))))
    for rate in (1e-2, 1e-3):
        found = calibration.curve.threshold_at_fmr(rate)
        assert true_fmr(vectors, who, found.value) == pytest.approx(rate, rel=0.25)
        assert found.low < found.value < found.high


def test_the_share_of_repeated_people_is_estimated() -> None:
    vectors, who = people(300, 3, seed=0)
    upper = np.triu_indices(len(vectors), 1)
    scores = separate(histogram((vectors @ vectors.T)[upper]), len(vectors))
    assert scores.repeated_share == pytest.approx(float((who[upper[0]] == who[upper[1]]).mean()), rel=0.3)


def test_one_person_twice_in_a_photo_is_a_mirror_or_collage() -> None:
    vectors, _ = people(400, 1, seed=0)
    photos = np.arange(len(vectors))
    plain = Calibration.from_document(calibrate_faces(vectors, photos))
    collage = np.concatenate([vectors, vectors[:1].repeat(40, 0)])
    repeated = Calibration.from_document(calibrate_faces(collage, np.concatenate([photos, np.zeros(40, np.int64)])))
    expected = plain.curve.threshold_at_fmr(1e-3).value
    assert repeated.curve.threshold_at_fmr(1e-3).value == pytest.approx(expected, abs=0.03)


def test_few_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        separate(histogram(np.zeros(100)), 15)
