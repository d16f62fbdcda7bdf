"""Embeddings have unit length and are closer for the same person."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from models.vision.alignment import align
from models.vision.detection import Detector
from models.vision.recognition import Recognizer, l2_normalize


def test_vectors_have_unit_length(recognizer: Recognizer, rng: np.random.Generator) -> None:
    crops = rng.integers(0, 255, (5, 112, 112, 3), dtype=np.uint8)
    vectors = recognizer.embed(crops)
    assert vectors.shape == (5, recognizer.dimension)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert recognizer.embed(crops[:0]).shape == (0, recognizer.dimension)


def test_the_same_person_is_closer_than_another(
    detector: Detector, recognizer: Recognizer, astronaut: NDArray[np.uint8], actor: NDArray[np.uint8]
) -> None:
    darker = (astronaut[:, ::-1] * 0.7).astype(np.uint8)
    crops = []
    for photo in (astronaut, darker, actor):
        (faces,) = detector.detect([photo])
        crops.append(align(photo, faces.landmarks_xy[faces.largest()][None])[0])
    first, second, third = recognizer.embed(np.stack(crops))
    same, other = float(first @ second), float(first @ third)
    assert same > 0.85 > other + 0.5


@pytest.mark.parametrize("vectors", [np.zeros((1, 4)), np.array([[1.0, np.nan, 0, 0]]), np.array([[np.inf, 0, 0, 0]])])
def test_zero_and_non_finite_vectors_are_rejected(vectors: NDArray[np.float64]) -> None:
    with pytest.raises(ValueError, match="embedding"):
        l2_normalize(vectors)


def test_crops_of_another_size_are_rejected(recognizer: Recognizer) -> None:
    with pytest.raises(ValueError, match=r"\(n, 112, 112, 3\), not \(1, 150, 150, 3\)"):
        recognizer.embed(np.zeros((1, 150, 150, 3), np.uint8))
