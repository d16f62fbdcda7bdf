"""Embeddings that cannot have unit length are rejected."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from models.vision.recognition import Recognizer, l2_normalize


@pytest.mark.parametrize("vectors", [np.zeros((1, 4)), np.array([[1.0, np.nan, 0, 0]]), np.array([[np.inf, 0, 0, 0]])])
def test_zero_and_non_finite_vectors_are_rejected(vectors: NDArray[np.float64]) -> None:
    with pytest.raises(ValueError, match="embedding"):
        l2_normalize(vectors)


def test_crops_of_another_size_are_rejected(recognizer: Recognizer) -> None:
    assert recognizer.embed(np.zeros((0, 112, 112, 3), np.uint8)).shape == (0, recognizer.dimension)
    with pytest.raises(ValueError, match=r"\(n, 112, 112, 3\), not \(1, 150, 150, 3\)"):
        recognizer.embed(np.zeros((1, 150, 150, 3), np.uint8))
