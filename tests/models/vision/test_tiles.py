"""Tiles cover the photo and hold every face that a coarser level may miss. Their faces are merged."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.vision.detection import Detections
from models.vision.tiles import (
    EDGE_PX,
    FINEST_SCALE,
    MAX_SCALE_RATIO,
    MAX_TILES,
    OVERLAP_PX,
    SURE_FACE_PX,
    Tile,
    lay_tiles,
    merge_levels,
)


def faces(*rows: tuple[float, float, float, float, float]) -> Detections:
    """Faces from x0, y0, x1, y1 and score."""
    table = np.array(rows, np.float32).reshape(-1, 5)
    return Detections(table[:, :4], np.repeat(table[:, None, :2], 5, 1), table[:, 4])


@given(st.integers(1, 60_000), st.integers(1, 60_000), st.sampled_from([320, 640]))
def test_tiles_cover_the_photo_and_overlap(height: int, width: int, side: int) -> None:
    tallest = 1.25 * SURE_FACE_PX * MAX_SCALE_RATIO  # of the faces that the coarser level may miss
    assert tallest + 2 * EDGE_PX <= OVERLAP_PX, "is whole on one of the tiles"
    levels = lay_tiles(height, width, side)
    assert bool(levels) == (max(height, width) * FINEST_SCALE > side and max(height, width) > side)
    before = side / max(height, width)
    for level in levels:
        scale = level[0].scale
        assert before < scale <= before * MAX_SCALE_RATIO * 1.001
        assert len(level) <= MAX_TILES
        before = scale
        for length, starts, sizes in (
            (round(width * scale), {tile.left for tile in level}, {tile.width for tile in level}),
            (round(height * scale), {tile.top for tile in level}, {tile.height for tile in level}),
        ):
            (size,) = sizes
            ordered = sorted(starts)
            assert size <= side
            assert (ordered[0], ordered[-1] + size) == (0, max(1, length))
            assert all(after - start <= size - OVERLAP_PX for start, after in pairwise(ordered))


def test_a_face_that_a_tile_cuts_is_left_to_its_neighbor() -> None:
    tile = Tile(100, 0, 640, 640, 0.5, (True, False, True, True))
    cut_left, whole, cut_right = (1, 10, 60, 90, 0.9), (100, 0, 160, 80, 0.8), (1200, 100, 1280, 200, 0.7)
    found = faces(cut_left, whole, cut_right, (900, 1270, 960, 1279, 0.6))
    placed = tile.place(found)
    assert placed.scores.tolist() == found.scores[1:2].tolist()
    assert placed.boxes_xyxy.tolist() == [[300, 0, 360, 80]]
    assert placed.landmarks_xy[0, 0].tolist() == [300, 0]


def test_the_views_of_one_face_are_merged() -> None:
    """The whole photo showed the first face with an inaccurate box, and a face where the tiles show none."""
    whole = faces((980, 970, 1120, 1160, 0.6), (5000, 50, 5300, 400, 0.9), (2000, 2000, 2100, 2130, 0.7))
    tiles = faces((1004, 1002, 1101, 1129, 0.8), (1002, 1001, 1099, 1131, 0.85), (3000, 30, 3040, 80, 0.7))
    found = merge_levels(whole, 0.16, [(0.5, tiles)], 0.6)
    assert found.scores.tolist() == pytest.approx([0.9, 0.85, 0.7])


def test_a_large_object_on_a_tile_is_no_face_unless_the_whole_photo_showed_it() -> None:
    false_alarm, face = (100, 100, 350, 400, 0.95), (2000, 100, 2250, 400, 0.6)
    tiles = faces(false_alarm, (2002, 98, 2251, 398, 0.9))
    assert merge_levels(faces(face), 0.16, [(0.5, tiles)], 0.6).scores.tolist() == pytest.approx([0.9])
    assert len(merge_levels(faces(), 0.16, [(0.5, tiles)], 0.6)) == 0


def test_a_weak_face_on_a_tile_counts_only_if_a_coarser_level_found_it() -> None:
    tiles = faces((100, 100, 140, 150, 0.55), (500, 100, 540, 150, 0.55), (900, 100, 940, 150, 0.65))
    coarser = faces((502, 102, 542, 152, 0.62))
    found = merge_levels(faces(), 0.1, [(0.3, coarser), (0.6, tiles)], 0.6)
    assert found.boxes_xyxy[:, 0].tolist() == [900, 500]
