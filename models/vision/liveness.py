"""Presentation attack detection (ISO/IEC 30107-3): live faces against photos and screens.

Aligned crops follow ``insightface.addons.liveness``: they repeat the edge of the photo, and faces with too much of
their crop outside the photo are not judged. Crops around boxes are moved into the photo.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import cv2
import numpy as np
from numpy.typing import NDArray

from models.errors import PackError
from models.runtime.network import Float, Network
from models.vision.alignment import Alignment, align, crop_scales, similarity_transforms
from models.vision.pixels import to_planes
from models.vision.specs import BoxCrops, LivenessSpec

LivenessVerdict = Literal["live", "not_live", "not_judged"]


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
            crops: (n, *spec.shape, 3) uint8 RGB of `cut_crops`; n may be 0.

        Raises:
            PackError: the network's output does not match the manifest.
        """
        if not len(crops):
            return np.empty(0, np.float32)
        live = self.spec.live_class
        batch = to_planes(crops, self.spec.normalization, np.empty((len(crops), 3, *self.spec.shape), np.float32))
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
        """Return the scores of a list of crops, in one batch."""
        return [float(score) for score in self.scores(np.stack(crops))]


def cut_crops(
    image: NDArray[np.uint8],
    boxes_xyxy: Float,
    landmarks_xy: Float,
    crop: Alignment | BoxCrops,
    max_outside: float,
) -> list[NDArray[np.uint8] | None]:
    """Return the crop of each face; None if a larger share of an aligned crop than ``max_outside`` lies outside.

    Args:
        image: (H, W, 3) uint8 RGB.
        boxes_xyxy: (n, 4) image pixels.
        landmarks_xy: (n, 5, 2) image pixels.
        crop: geometry of the crops.
        max_outside: share in [0, 1].
    """
    if isinstance(crop, BoxCrops):
        return [_cut_around(image, box, crop) for box in boxes_xyxy]
    shares = outside_shares(landmarks_xy, crop, image.shape[1], image.shape[0])
    aligned = align(image, landmarks_xy, crop, repeat_edge=True)
    return [cut if share <= max_outside else None for cut, share in zip(aligned, shares, strict=True)]


def largest_scale(boxes_xyxy: Float, landmarks_xy: Float, crop: Alignment | BoxCrops) -> float:
    """Return the largest number of crop pixels per photo pixel; 0 without faces."""
    if not isinstance(crop, BoxCrops):
        return float(crop_scales(landmarks_xy, crop).max(initial=0))
    sides = (boxes_xyxy[:, 2:] - boxes_xyxy[:, :2]).min(axis=1) * min(crop.face_sizes)
    return float((crop.size_px / np.maximum(sides, 1)).max(initial=0))


def _cut_around(image: NDArray[np.uint8], box: Float, crops: BoxCrops) -> NDArray[np.uint8]:
    """Return the crops around a box side by side.

    As in ``generate_patches.py`` of Minivision's Silent-Face-Anti-Spoofing: crops have the shape of the box before they
    are resized to squares, are moved into the photo, and are smaller where the photo is.
    """
    height, width = image.shape[:2]
    box, last = box.astype(np.float64), np.array([width - 1, height - 1])
    sides = np.maximum(box[2:] - box[:2], 1)
    cut = []
    for face_size in crops.face_sizes:
        half = sides * min(face_size, *(last / sides)) / 2
        low, high = box[:2] + sides / 2 - half, box[:2] + sides / 2 + half
        before, after = np.minimum(low, 0), np.maximum(high - last, 0)
        (left, top), (right, bottom) = (low - before - after).astype(int), (high - before - after).astype(int)
        part = image[max(0, top) : bottom + 1, max(0, left) : right + 1]
        cut.append(cv2.resize(part, (crops.size_px, crops.size_px)))
    return np.concatenate(cut, axis=1).astype(np.uint8)


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
