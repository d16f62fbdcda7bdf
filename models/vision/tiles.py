"""Overlapping tiles of a large photo at several scales, and the faces of the photo from those of its tiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from models.runtime.network import Float
from models.vision.detection import Detections, overlaps, suppress_overlaps

MIN_FACE_PX: Final = 20.0
"""Width on the network's canvas of the smallest face that detectors usually find: four of five or more."""
SURE_FACE_PX: Final = 24.0
"""Width on the canvas from which detectors find almost every face."""
FINEST_SCALE: Final = 0.64
"""Largest scale of tiles. MIN_FACE_PX are then 31 pixels of the photo, with eyes 15 pixels apart. Smaller faces hardly
pass the default quality gate, and larger scales cost more."""
MAX_TILES: Final = 64
"""Maximum number of tiles of the finest level. A photo that needs more gets a smaller scale."""
MAX_SCALE_RATIO: Final = 4.0
"""Largest ratio of the scales of two levels."""
OVERLAP_PX: Final = 128
"""Overlap of tiles: the height of a face of SURE_FACE_PX at the next coarser level. Every smaller face is whole on one
of the tiles."""
EDGE_PX: Final = 2.0
"""Distance of a box from an edge of its tile below which the face may continue on the next tile."""


@dataclass(frozen=True)
class Tile:
    """Rectangle of the photo scaled by ``scale``, in pixels of the scaled photo.

    ``inner_edges``: which of left, top, right and bottom are not edges of the photo.
    """

    left: int
    top: int
    width: int
    height: int
    scale: float
    inner_edges: tuple[bool, bool, bool, bool]

    def place(self, faces: Detections) -> Detections:
        """Return the faces in pixels of the photo, without those that an inner edge of the tile may cut.

        ``faces``: in pixels of the photo, from the corner of the tile.
        """
        limits = np.array([self.width, self.height], np.float32) / self.scale
        distances = np.concatenate([faces.boxes_xyxy[:, :2], limits - faces.boxes_xyxy[:, 2:]], 1)
        cut = ((distances * self.scale < EDGE_PX) & np.array(self.inner_edges)).any(1)
        whole = faces[np.flatnonzero(~cut)]
        corner = np.array([self.left, self.top], np.float32) / np.float32(self.scale)
        return Detections(whole.boxes_xyxy + np.tile(corner, 2), whole.landmarks_xy + corner, whole.scores)


def lay_tiles(height_px: int, width_px: int, side_px: int) -> list[list[Tile]]:
    """Return the levels of tiles of a photo, coarsest first; none if the whole photo shows faces as large.

    Args:
        height_px, width_px: size of the photo.
        side_px: side of the network's largest canvas.
    """
    whole, scale = side_px / max(height_px, width_px), FINEST_SCALE
    while (count := _count_tiles(height_px, width_px, scale, side_px)) > MAX_TILES:
        scale *= max(0.5, min(0.99, math.sqrt(MAX_TILES / count)))
    count = max(0, math.ceil(math.log(scale / whole, MAX_SCALE_RATIO)))
    scales = (whole * (scale / whole) ** (step / count) for step in range(1, count + 1))
    return [_lay_level(height_px, width_px, each, side_px) for each in scales]


def merge_levels(
    whole: Detections, whole_scale: float, levels: Sequence[tuple[float, Detections]], min_new_score: float
) -> Detections:
    """Return the distinct faces of a photo, best score first. All are in pixels of the photo.

    Each level decides on the faces that are too small for the coarser level to find almost always. Those from a coarser
    level have inaccurate boxes there. Larger faces on a tile count only if a coarser level found them too: a tile shows
    too little of a large object. A face that no coarser level found needs a higher score, since many tiles give many
    false alarms.

    Args:
        whole: faces that the whole photo showed at ``whole_scale``.
        levels: scale and faces of each level of tiles, coarsest first.
        min_new_score: minimum score of a face that no coarser level found.
    """
    found, coarser = _distinct(whole), whole_scale
    for scale, faces in levels:
        new = _distinct(faces)
        small, was_small = (_widths(each) * coarser < SURE_FACE_PX for each in (new, found))
        known = overlaps(new.boxes_xyxy, found.boxes_xyxy).any(1)
        kept = known | (small & (new.scores >= min_new_score))
        found = _distinct(Detections.join([found[np.flatnonzero(~was_small)], new[np.flatnonzero(kept)]]))
        coarser = scale
    return found


def _widths(faces: Detections) -> Float:
    return np.asarray(faces.boxes_xyxy[:, 2] - faces.boxes_xyxy[:, 0])


def _distinct(faces: Detections) -> Detections:
    return faces[suppress_overlaps(faces.boxes_xyxy, faces.scores)]


def _lay_level(height_px: int, width_px: int, scale: float, side_px: int) -> list[Tile]:
    """Return tiles of equal size that cover the scaled photo, row by row."""
    height, width = _scaled(height_px, scale), _scaled(width_px, scale)
    tile_height, tile_width = min(height, side_px), min(width, side_px)
    return [
        Tile(
            left,
            top,
            tile_width,
            tile_height,
            scale,
            (left > 0, top > 0, left + tile_width < width, top + tile_height < height),
        )
        for top in _starts(height, side_px)
        for left in _starts(width, side_px)
    ]


def _starts(length_px: int, side_px: int) -> list[int]:
    """Return the starts of evenly spaced tiles along one side."""
    last = max(0, length_px - side_px)
    return [round(place) for place in np.linspace(0, last, _count_along(length_px, side_px))]


def _count_tiles(height_px: int, width_px: int, scale: float, side_px: int) -> int:
    return _count_along(_scaled(height_px, scale), side_px) * _count_along(_scaled(width_px, scale), side_px)


def _count_along(length_px: int, side_px: int) -> int:
    overlap = min(OVERLAP_PX, side_px // 2)
    return max(1, math.ceil((length_px - overlap) / (side_px - overlap)))


def _scaled(side_px: int, scale: float) -> int:
    return max(1, round(side_px * scale))
