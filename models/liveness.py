"""Presentation attack detection: is it a person before the camera, or a picture of one? A network of the pack's says.

The crop is InsightFace's (``insightface.addons.liveness``): a similarity of the five landmarks, what lies outside of
the photo repeated from its edge, and no answer where too much of it does. Terms are those of ISO/IEC 30107-3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from models.alignment import Alignment, similarity_transforms
from models.errors import PackError
from models.gate import Verdict
from models.network import Float, Network
from models.pack import LivenessSpec
from models.pixels import to_planes


@dataclass(frozen=True)
class Judgement:
    """``score``: how surely a bona fide presentation, 0 to 1; None: too little of the photo surrounds the face to tell.
    ``threshold``: the pack's own."""

    score: float | None
    threshold: float

    def verdict(self, threshold: float | None = None) -> Verdict:
        """By the pack's threshold, or another."""
        if self.score is None:
            return "not_judged"
        return "live" if self.score >= (self.threshold if threshold is None else threshold) else "not_live"


class Liveness:
    """A pack's network, ready to run.

    Raises:
        PackError: it has not exactly one output.
    """

    def __init__(self, network: Network, spec: LivenessSpec) -> None:
        self._network = network
        self.spec = spec
        if len(network.output_names) != 1:
            raise PackError("tasks.liveness.file", "a network that tells people from pictures has exactly one output")

    def scores(self, crops: NDArray[np.uint8]) -> Float:
        """(n, size_px, size_px, 3) uint8 RGB crops, of :func:`cut`, to (n,) float32 in 0..1; n may be 0.

        Raises:
            PackError: the network's output is not what the manifest says.
        """
        if not len(crops):
            return np.empty(0, np.float32)
        side, live = self.spec.alignment.size_px, self.spec.live_class
        batch = to_planes(crops, self.spec.normalisation, np.empty((len(crops), 3, side, side), np.float32))
        given = self._network.run(batch)[0].reshape(len(crops), -1)
        if live is None and given.shape[1] != 1:
            raise PackError("tasks.liveness.live_class", f"is needed: the network gives {given.shape[1]} numbers")
        if live is not None and live >= given.shape[1]:
            raise PackError("tasks.liveness.live_class", f"is {live}, the network gives {given.shape[1]} classes")
        found = given[:, 0] if live is None else _softmax(given)[:, live]
        if not ((found >= 0) & (found <= 1)).all():
            raise PackError("tasks.liveness.file", "gives what is no probability: name live_class if these are logits")
        return np.asarray(found, np.float32)

    def score_each(self, crops: Sequence[NDArray[np.uint8]]) -> list[float]:
        """A list of (size_px, size_px, 3) crops to a list of scores, in one batch."""
        return [float(score) for score in self.scores(np.stack(crops))]


def cut(image: NDArray[np.uint8], landmarks_xy: Float, alignment: Alignment) -> NDArray[np.uint8]:
    """The crops of all faces of an (H, W, 3) image, (n, size_px, size_px, 3); the image's edge is repeated beyond it.
    ``landmarks_xy``: (n, 5, 2) pixels of the image."""
    matrices = similarity_transforms(landmarks_xy, alignment)
    size = (alignment.size_px, alignment.size_px)
    crops = np.empty((len(matrices), *size, 3), np.uint8)
    for matrix, crop in zip(matrices, crops, strict=True):
        cv2.warpAffine(image, matrix, size, dst=crop, flags=cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)
    return crops


def outside(landmarks_xy: Float, alignment: Alignment, width: int, height: int) -> Float:
    """(n,) shares, 0 to 1, of the faces' crops that lie outside of an image of this size."""
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
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True), np.float32)
