"""Alignment fits the least-squares similarity and places landmarks on the template."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray
from skimage.transform import SimilarityTransform

from models.vision.alignment import (
    STANDARD_ALIGNMENT,
    TEMPLATE_XY,
    Alignment,
    align,
    realign_crops,
    similarity_transforms,
    standard_alignment,
)
from models.vision.detection import Detector


@pytest.fixture
def tight_alignment() -> Alignment:
    """Alignment of 150 pixels a side that shows 94 pixels of a standard crop, from x 9 and y 24."""
    points = (TEMPLATE_XY + 0.5 - [9, 24]) * 150 / 94 - 0.5
    return Alignment(150, tuple((x, y) for x, y in points.tolist()))


def test_equals_an_independent_umeyama(tight_alignment: Alignment, rng: np.random.Generator) -> None:
    landmarks = TEMPLATE_XY * 3 + 100 + rng.normal(0, 8, (20, 5, 2))
    for alignment in (STANDARD_ALIGNMENT, tight_alignment):
        for points, matrix in zip(landmarks, similarity_transforms(landmarks, alignment), strict=True):
            theirs = SimilarityTransform.from_estimate(points, alignment.template_xy)
            assert np.allclose(matrix, theirs.params[:2], atol=1e-6)


@pytest.mark.parametrize(
    "landmarks",
    [np.zeros((1, 4, 2)), np.full((1, 5, 2), np.nan), np.ones((1, 5, 2))],
    ids=["four points", "not finite", "coincident"],
)
def test_invalid_landmarks_are_rejected(landmarks: NDArray[np.float64]) -> None:
    with pytest.raises(ValueError, match="landmark"):
        similarity_transforms(landmarks)


def test_only_a_scaled_template_is_standard(tight_alignment: Alignment) -> None:
    assert STANDARD_ALIGNMENT.is_standard
    assert standard_alignment(224).is_standard
    assert np.allclose(standard_alignment(224).template_xy, 2 * TEMPLATE_XY)
    assert not tight_alignment.is_standard


def test_realigned_crops_match_crops_of_the_photo(
    tight_alignment: Alignment, astronaut: NDArray[np.uint8], detector: Detector
) -> None:
    (faces,) = detector.detect([astronaut])
    photo = np.asarray(
        cv2.GaussianBlur(astronaut, (0, 0), 3), np.uint8
    )  # removes details that the two samplings would show differently
    straight = align(photo, faces.landmarks_xy[:1], tight_alignment)
    again = realign_crops(align(photo, faces.landmarks_xy[:1]), tight_alignment)
    assert straight.shape == again.shape == (1, 150, 150, 3)
    rows = slice(0, int((112 - 24) * 150 / 94))  # rows that the standard crop covers
    assert np.abs(straight[0, rows].astype(int) - again[0, rows]).mean() < 1.5
    shifted = np.roll(again[0, rows].astype(int), 3, axis=1)
    assert np.abs(straight[0, rows] - shifted)[:, 5:-5].mean() > 3  # a shift by three pixels is detected
    crops = align(astronaut, faces.landmarks_xy)
    assert realign_crops(crops, STANDARD_ALIGNMENT) is crops
