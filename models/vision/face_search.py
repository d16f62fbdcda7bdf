"""Search for the faces of one photo: one look, or further looks at other orientations and half the size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from models.vision.detection import Detector, Faces, PreparedPhoto, RawOutputs

Detail = Literal["low", "medium"]
"""Effort of a search.

- low: one look at the whole photo.
- medium: if no face is confident, looks at the other orientations and at half the size too.
"""
TURNS: Final = (1, 2, 3)
Image = NDArray[np.uint8]


class FaceSearch:
    """Search for the faces of one photo. The caller runs the network.

    Run the whole photo and :meth:`take` its outputs. While :attr:`unfinished`, do the same with :meth:`next_views`.
    Then call :meth:`faces`. Call :meth:`next_views` and :meth:`faces` in a thread: they take milliseconds.

    Args:
        whole: the photo as :meth:`models.vision.detection.Detector.prepare` returns it.
    """

    def __init__(self, detector: Detector, whole: PreparedPhoto, detail: Detail) -> None:
        self._detector, self._detail = detector, detail
        self._views = [whole]
        self._outputs: list[RawOutputs] = []

    @property
    def unfinished(self) -> bool:
        """True if more views have to be run."""
        return self._detail != "low" and len(self._outputs) == 1 and not self._is_confident(self._outputs[0])

    def take(self, outputs: Sequence[RawOutputs]) -> None:
        """Take the network's outputs for the latest views, in their order."""
        self._outputs += outputs

    def next_views(self) -> list[PreparedPhoto]:
        """Prepare the next views to run."""
        whole = self._views[0]
        views = [*(self._detector.rotated(whole, turns) for turns in TURNS), self._detector.half_size(whole)]
        self._views += views
        return views

    def faces(self) -> Faces:
        """Return the faces of the view with the best score, or of the photo as it is if none is confident.

        A weak face in another orientation or size is more often a false alarm than a face.
        """
        best = 0
        if len(self._outputs) > 1:
            best = max(range(len(self._outputs)), key=lambda row: self._detector.best_score(self._outputs[row]))
        chosen = best if self._is_confident(self._outputs[best]) else 0
        return self._detector.decode_faces(self._views[chosen], self._outputs[chosen])

    def _is_confident(self, outputs: RawOutputs) -> bool:
        return self._detector.best_score(outputs) >= self._detector.confident_score


def find_faces(detector: Detector, image: Image, detail: Detail) -> Faces:
    """Return the faces of a (H, W, 3) uint8 RGB photo as the service does at this detail."""
    whole = detector.prepare(image)
    search = FaceSearch(detector, whole, detail)
    search.take(detector.run([whole]))
    while search.unfinished:
        search.take(detector.run(search.next_views()))
    return search.faces()
