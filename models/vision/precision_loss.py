"""Differences between a network and its variant in another precision, on the same faces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from models.runtime.network import Float
from models.vision.detection import Detections

MIN_CONFIDENT_SCORE: Final = 0.6
"""Score from which a face counts. Weaker candidates come and go with rounding."""


def cosine_loss(exact: Float, other: Float) -> dict[str, float]:
    """Return mean and worst cosine of (n, d) unit vectors of the same crops in both precisions."""
    cosines = np.einsum("nd,nd->n", exact, other, dtype=np.float64)
    return {"mean": float(cosines.mean()), "worst": float(cosines.min()), "crops": len(cosines)}


def detection_shift(exact: Sequence[Detections], other: Sequence[Detections]) -> dict[str, Any]:
    """Return how far landmarks of confident faces move, and how many faces are lost, in the same photos.

    A face is lost if no face of the other precision has its landmarks within one eye distance.
    """
    moved, lost = list[float](), 0
    for before, after in zip(exact, other, strict=True):
        for row in np.flatnonzero(before.scores >= MIN_CONFIDENT_SCORE):
            points = before.landmarks_xy[row]
            eyes = float(np.linalg.norm(points[0] - points[1]))
            off = np.linalg.norm(after.landmarks_xy - points, axis=2).mean(1)
            if not len(off) or off.min() > eyes:
                lost += 1
                continue
            moved.append(float(off.min()) / eyes)
    found: dict[str, Any] = {"faces": len(moved) + lost, "lost": lost}
    if moved:
        found["eye_distances"] = {"median": float(np.median(moved)), "p95": float(np.quantile(moved, 0.95))}
    return found
