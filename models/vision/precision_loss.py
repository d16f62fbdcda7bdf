"""Differences between a network and its variant in another precision, on the same faces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from models.runtime.network import Float
from models.vision.detection import Detections, box_areas

MIN_CONFIDENT_SCORE: Final = 0.6
"""Score from which a face counts. Weaker candidates come and go with rounding."""


def cosine_loss(exact: Float, other: Float) -> dict[str, float]:
    """Return mean and worst cosine of (n, d) unit vectors of the same crops in both precisions."""
    cosines = np.einsum("nd,nd->n", exact, other, dtype=np.float64)
    return {"mean": float(cosines.mean()), "worst": float(cosines.min()), "crops": len(cosines)}


def detection_shift(exact: Sequence[Detections], other: Sequence[Detections]) -> dict[str, Any]:
    """Return how far landmarks and boxes of confident faces move, and how many faces are lost, in the same photos.

    A face is lost if no face of the other precision has its landmarks within one eye distance.
    """
    pixels, in_eye_distances, overlaps, lost = [], [], [], 0
    for before, after in zip(exact, other, strict=True):
        for row in np.flatnonzero(before.scores >= MIN_CONFIDENT_SCORE):
            points = before.landmarks_xy[row]
            eyes = float(np.linalg.norm(points[0] - points[1]))
            off = np.linalg.norm(after.landmarks_xy - points, axis=2).mean(1)
            if not len(off) or off.min() > eyes:
                lost += 1
                continue
            pixels.append(off.min())
            in_eye_distances.append(off.min() / eyes)
            overlaps.append(_overlap(before.boxes_xyxy[row], after.boxes_xyxy[int(off.argmin())]))
    if not pixels:
        return {"faces": lost, "lost": lost}
    return {
        "faces": len(pixels) + lost,
        "lost": lost,
        "pixels": _summary(pixels, 0.95),
        "eye_distances": _summary(in_eye_distances, 0.95),
        "box_iou": _summary(overlaps, 0.05),
    }


def _summary(values: Sequence[float], quantile: float) -> dict[str, float]:
    return {"median": float(np.median(values)), f"p{round(100 * quantile):02}": float(np.quantile(values, quantile))}


def _overlap(a: Float, b: Float) -> float:
    """Return the intersection over union of two (4,) boxes."""
    shared = np.concatenate([np.maximum(a[:2], b[:2]), np.minimum(a[2:], b[2:])])
    corner, one, other = box_areas(np.stack([shared, a, b]))
    # Boxes apart have a negative width and height, whose product would be positive.
    inside = corner if (shared[2:] > shared[:2]).all() else 0.0
    return float(inside / max(one + other - inside, 1e-9))
