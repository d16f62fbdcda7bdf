"""Search for the faces of one photo: one look at the whole photo, or further looks at parts, sizes and orientations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from models.vision.detection import Detections, Detector, PreparedPhoto, RawOutputs, downscale
from models.vision.tiles import MIN_FACE_PX, Tile, lay_tiles, merge_levels

Detail = Literal["low", "medium", "high"]
"""Effort of a search.

- low: one look at the whole photo.
- medium: if no face is confident, looks at the other orientations and at half the size too.
- high: as medium, then looks at overlapping tiles of a large photo, and if still no face is confident, at those of the
  other orientations.
"""
VIEWS_PER_BATCH: Final = 8
"""Views that are prepared at once: a full batch of the service, 40 MB at 640x640."""
RGB_BYTES: Final = 3
FLOAT_BYTES: Final = 4
HALF_SIZE: Final = 4
"""Group of the view at half the size. Groups 0 to 3 are the orientations, in counterclockwise quarter turns."""
Image = NDArray[np.uint8]


@dataclass(frozen=True)
class _Look:
    """View of the whole photo, or of a ``tile``. Views of one ``group`` show the photo in one orientation."""

    group: int
    tile: Tile | None = None

    @property
    def turns(self) -> int:
        return 0 if self.group == HALF_SIZE else self.group


class FaceSearch:
    """Search for the faces of one photo. The caller runs the network.

    Run the whole photo and :meth:`take` its outputs. While :attr:`unfinished`, do the same with :meth:`next_views`.
    Then call :meth:`faces`. Call :meth:`next_views` and :meth:`faces` in a thread: they take milliseconds.

    Args:
        whole: the photo as :meth:`models.vision.detection.Detector.prepare` returns it.
        shrink: returns the photo at a scale in (0, 1] as (h, w, 3) uint8 RGB.
    """

    def __init__(
        self, detector: Detector, whole: PreparedPhoto, shrink: Callable[[float], Image], detail: Detail
    ) -> None:
        self._detector, self._whole, self._shrink, self._detail = detector, whole, shrink, detail
        levels = tiles_for(detector, whole.photo_height_px, whole.photo_width_px, detail)
        self._tiles = [tile for level in levels for tile in level]
        self._steps = self._plan()
        self._queue: list[_Look] = []
        self._running = [(_Look(0), whole)]
        self._unread: list[tuple[_Look, PreparedPhoto, RawOutputs]] = []
        self._found: dict[int, dict[float, list[Detections]]] = defaultdict(lambda: defaultdict(list))
        """Faces by group and by scale of the view."""
        self._best: dict[int, float] = {0: 0.0}
        self._scaled: tuple[float, Image] | None = None

    def _plan(self) -> Iterator[list[_Look]]:
        """Yield the looks of each further step. Each step depends on the scores of the earlier ones."""
        if self._detail == "low":
            return
        if not self._is_confident():
            yield [_Look(group) for group in (1, 2, 3, HALF_SIZE)]
        if self._tiles:
            chosen = self._chosen_group()
            # A false alarm may have chosen the orientation if all faces are small.
            groups = [chosen, 0] if chosen in (1, 2, 3) else [chosen]
            yield [_Look(group, tile) for group in groups for tile in self._tiles]
            if not self._is_confident():
                yield [_Look(turns, tile) for turns in (1, 2, 3) for tile in self._tiles]

    def _is_confident(self) -> bool:
        return max(self._best.values()) >= self._detector.confident_score

    def _chosen_group(self) -> int:
        """Return the group with the best score, or the photo as it is if none is confident.

        A weak face in another orientation or size is more often a false alarm than a face.
        """
        return max(self._best, key=lambda group: self._best[group]) if self._is_confident() else 0

    @property
    def min_face_px(self) -> float:
        """Width in pixels of the photo of the smallest face that the search usually finds."""
        return MIN_FACE_PX / (self._tiles[-1].scale if self._tiles else self._whole.canvas.scale)

    @property
    def unfinished(self) -> bool:
        """True if more views have to be run."""
        return bool(self._queue)

    def take(self, outputs: Sequence[RawOutputs]) -> None:
        """Take the network's outputs for the latest views, in their order."""
        for (look, view), each in zip(self._running, outputs, strict=True):
            self._unread.append((look, view, each))
            if self._detail != "low":
                self._best[look.group] = max(self._best.get(look.group, 0.0), self._detector.best_score(each))
        self._running = []
        if not self._queue:
            self._queue = next(self._steps, [])

    def next_views(self) -> list[PreparedPhoto]:
        """Prepare the next views to run, at most VIEWS_PER_BATCH."""
        self._read_outputs()
        looks, self._queue = self._queue[:VIEWS_PER_BATCH], self._queue[VIEWS_PER_BATCH:]
        self._running = [(look, self._prepare(look)) for look in looks]
        return [view for _, view in self._running]

    def faces(self) -> Detections:
        """Return the faces of the photo, in its pixels, best score first."""
        self._read_outputs()
        levels = self._found[self._chosen_group()]
        (scale, whole), *finer = ((scale, Detections.join(levels[scale])) for scale in sorted(levels))
        if not finer:
            return whole
        min_new_score = (self._detector.min_score + self._detector.confident_score) / 2
        return merge_levels(whole, scale, finer, min_new_score)

    def _prepare(self, look: _Look) -> PreparedPhoto:
        if look.tile is not None:
            view = self._cut(look.tile)
        else:
            view = self._detector.half_size(self._whole) if look.group == HALF_SIZE else self._whole
        return self._detector.rotated(view, look.turns) if look.turns else view

    def _cut(self, tile: Tile) -> PreparedPhoto:
        if self._scaled is None or self._scaled[0] != tile.scale:
            self._scaled = None  # free the former scale first
            self._scaled = (tile.scale, self._shrink(tile.scale))
        part = self._scaled[1][tile.top : tile.top + tile.height, tile.left : tile.left + tile.width]
        canvas = replace(self._detector.canvas(tile.height, tile.width), scale=tile.scale)
        height, width = (round(side / tile.scale) for side in (tile.height, tile.width))
        return self._detector.place_on_canvas(part, canvas, height, width)

    def _read_outputs(self) -> None:
        """Replace outputs by the faces in them, which need less memory."""
        for look, view, outputs in self._unread:
            faces = self._detector.decode_faces(view, outputs)
            placed = faces if look.tile is None else look.tile.place(faces)
            self._found[look.group][view.canvas.scale].append(placed)
        self._unread = []


def tiles_for(detector: Detector, height_px: int, width_px: int, detail: Detail) -> list[list[Tile]]:
    """Return the levels of tiles that a search at this detail looks at, coarsest first."""
    return lay_tiles(height_px, width_px, detector.largest_side_px) if detail == "high" else []


def finest_scale(detector: Detector, height_px: int, width_px: int, detail: Detail) -> float:
    """Return the largest scale, in (0, 1], at which a search at this detail looks at a photo of this size."""
    levels = tiles_for(detector, height_px, width_px, detail)
    return levels[-1][0].scale if levels else detector.canvas(height_px, width_px).scale


def search_bytes(detector: Detector, height_px: int, width_px: int, detail: Detail) -> int:
    """Return an estimate of the memory in bytes that a search needs for the tiles of a photo of this size."""
    levels = tiles_for(detector, height_px, width_px, detail)
    if not levels:
        return 0
    finest = levels[-1]
    scaled_bytes = RGB_BYTES * height_px * width_px * finest[0].scale ** 2
    view_bytes = FLOAT_BYTES * RGB_BYTES * detector.largest_side_px**2
    # The photo is scaled, and perhaps rotated into a copy.
    return round(2 * scaled_bytes) + min(len(finest), VIEWS_PER_BATCH) * view_bytes


def find_faces(detector: Detector, image: Image, detail: Detail) -> Detections:
    """Return the faces of a (H, W, 3) uint8 RGB photo as the service does at this detail."""
    whole = detector.prepare(image)
    search = FaceSearch(detector, whole, partial(downscale, image), detail)
    search.take(detector.run([whole]))
    while search.unfinished:
        search.take(detector.run(search.next_views()))
    return search.faces()
