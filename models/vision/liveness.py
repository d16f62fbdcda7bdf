"""Presentation attack detection (ISO/IEC 30107-3): live faces against photos and screens.

Crops follow ``insightface.addons.liveness``. They repeat the edge of the photo, and faces with too much of their crop
outside the photo are not judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from models.errors import PackError
from models.runtime.network import Float, Network
from models.vision.alignment import Alignment, align, similarity_transforms
from models.vision.pixels import to_planes
from models.vision.quality_gate import LivenessVerdict
from models.vision.specs import LivenessSpec


@dataclass(frozen=True)
class LivenessResult:
    """Liveness of one face.

    Args:
        score: confidence in [0, 1] that the presentation is bona fide; None if the crop is too far outside the photo.
        threshold: default threshold of the pack.
    """

    score: float | None
    threshold: float

    def verdict(self, threshold: float | None = None) -> LivenessVerdict:
        """Return the verdict at ``threshold``, by default the pack's."""
        if self.score is None:
            return "not_judged"
        return "live" if self.score >= (self.threshold if threshold is None else threshold) else "not_live"


class LivenessClassifier:
    """Liveness network of a pack.

    Raises:
        PackError: the network does not have exactly one output.
    """

    def __init__(self, network: Network, spec: LivenessSpec) -> None:
        self._network = network
        self.spec = spec
        if len(network.output_names) != 1:
            raise PackError("tasks.liveness.file", "a liveness network must have exactly one output")

    def scores(self, crops: NDArray[np.uint8]) -> Float:
        """Return (n,) float32 scores in 0..1.

        Args:
            crops: (n, size_px, size_px, 3) uint8 RGB, aligned with ``repeat_edge``; n may be 0.

        Raises:
            PackError: the network's output does not match the manifest.
        """
        if not len(crops):
            return np.empty(0, np.float32)
        side, live = self.spec.alignment.size_px, self.spec.live_class
        batch = to_planes(crops, self.spec.normalization, np.empty((len(crops), 3, side, side), np.float32))
        output = self._network.run(batch)[0].reshape(len(crops), -1)
        if live is None and output.shape[1] != 1:
            raise PackError("tasks.liveness.live_class", f"is required: the network returns {output.shape[1]} numbers")
        if live is not None and live >= output.shape[1]:
            raise PackError("tasks.liveness.live_class", f"is {live}, the network returns {output.shape[1]} classes")
        scores = output[:, 0] if live is None else _softmax(output)[:, live]
        if not ((scores >= 0) & (scores <= 1)).all():
            raise PackError(
                "tasks.liveness.file",
                "returns values that are not finite or outside [0, 1]: set live_class if these are logits",
            )
        return np.asarray(scores, np.float32)

    def score_each(self, crops: Sequence[NDArray[np.uint8]]) -> list[float]:
        """Return the scores of a list of (size_px, size_px, 3) crops, in one batch."""
        return [float(score) for score in self.scores(np.stack(crops))]


def cut_crops(
    image: NDArray[np.uint8], landmarks_xy: Float, alignment: Alignment, max_outside: float
) -> list[NDArray[np.uint8] | None]:
    """Return the (size_px, size_px, 3) crop of each face; None if a larger share than ``max_outside`` lies outside.

    Args:
        image: (H, W, 3) uint8 RGB.
        landmarks_xy: (n, 5, 2) image pixels.
        alignment: geometry of the crops.
        max_outside: share of a crop in [0, 1].
    """
    shares = outside_shares(landmarks_xy, alignment, image.shape[1], image.shape[0])
    crops = align(image, landmarks_xy, alignment, repeat_edge=True)
    return [crop if share <= max_outside else None for crop, share in zip(crops, shares, strict=True)]


def outside_shares(landmarks_xy: Float, alignment: Alignment, width: int, height: int) -> Float:
    """Return the (n,) shares in [0, 1] of the faces' crops that lie outside an image of this size."""
    shares = []
    photo = np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float32) - np.float32(0.5)
    side = alignment.size_px
    corners = np.array([[0, 0], [side, 0], [side, side], [0, side]], np.float32) - np.float32(0.5)
    for matrix in similarity_transforms(landmarks_xy, alignment):
        back = cv2.invertAffineTransform(matrix)
        crop = np.asarray(corners @ back[:, :2].T + back[:, 2], np.float32)
        area, _ = cv2.intersectConvexConvex(crop, photo)
        shares.append(1 - area * float(np.linalg.det(matrix[:, :2])) / side**2)
    return np.clip(np.array(shares, np.float32), 0, 1)


def _softmax(logits: Float) -> Float:
    with np.errstate(invalid="ignore"):  # infinite logits give undefined scores, which are rejected
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True), np.float32)
