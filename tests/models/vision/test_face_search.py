"""Each detail finds the faces that the documentation promises, in photos made of real faces, with bounded work."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from models.pack.loading import BUNDLED_PACK, load_pack
from models.runtime.onnx_runtime import OnnxNetwork
from models.vision.alignment import rotate_points
from models.vision.detection import Detections, Detector, PreparedPhoto, RawOutputs, downscale, overlaps
from models.vision.face_search import VIEWS_PER_BATCH, Detail, FaceSearch, find_faces, search_bytes
from models.vision.tiles import MAX_TILES, lay_tiles

Image = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Portrait:
    """Photo of one face, and its ``box`` x0, y0, x1, y1 in pixels."""

    photo: Image
    box: NDArray[np.float32]

    def scaled(self, face_px: float) -> Portrait:
        """Return the portrait with a face of this width."""
        scale = face_px / float(self.box[2] - self.box[0])
        method = cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC
        photo = cv2.resize(self.photo, None, fx=scale, fy=scale, interpolation=method)
        return Portrait(np.asarray(photo, np.uint8), self.box * np.float32(scale))


def paste(canvas: Image, portrait: Portrait, left: int, top: int) -> NDArray[np.float32]:
    """Paste a portrait into the canvas and return the box of its face."""
    height, width = portrait.photo.shape[:2]
    canvas[top : top + height, left : left + width] = portrait.photo
    return portrait.box + np.array([left, top, left, top], np.float32)


def grain(height: int, width: int) -> Image:
    return np.random.default_rng(0).integers(90, 130, (height, width, 3), np.uint8)


class CountingDetector(Detector):
    """Detector that records the size of each batch."""

    def __init__(self) -> None:
        spec = load_pack(BUNDLED_PACK).detection
        super().__init__(OnnxNetwork(spec.path), spec)
        self.batches: list[int] = []

    def run(self, photos: Sequence[PreparedPhoto]) -> list[RawOutputs]:
        self.batches.append(len(photos))
        return super().run(photos)

    def runs(self, image: Image, detail: Detail) -> int:
        """Return the number of views that a search runs."""
        self.batches.clear()
        find_faces(self, image, detail)
        return sum(self.batches)


@pytest.fixture(scope="module")
def counting() -> CountingDetector:
    return CountingDetector()


@pytest.fixture(scope="module")
def portraits(detector: Detector, group: Image, astronaut: Image) -> list[Portrait]:
    """Seven people, each with the surroundings of the face."""
    found = []
    for photo in (group, astronaut):
        (faces,) = detector.detect([photo])
        for box in faces.boxes_xyxy:
            x0, y0, x1, y1 = (box + np.array([-1, -1, 1, 1]) * 0.35 * (box[2] - box[0])).clip(0).astype(int)
            found.append(Portrait(photo[y0:y1, x0:x1], box - np.array([x0, y0, x0, y0], np.float32)))
    assert len(found) == 7
    return found


def crowd(height: int, width: int, face_px: float, portraits: Sequence[Portrait]) -> tuple[Image, NDArray[np.float32]]:
    """Return a photo of 20 faces, each at a random place of its part of the photo, and their boxes."""
    rng, photo, boxes = np.random.default_rng(0), grain(height, width), []
    for number, (row, column) in enumerate(product(range(4), range(5))):
        portrait = portraits[number % len(portraits)].scaled(face_px)
        tall, wide = portrait.photo.shape[:2]
        top = row * height // 4 + int(rng.integers(height // 4 - tall))
        boxes.append(paste(photo, portrait, column * width // 5 + int(rng.integers(width // 5 - wide)), top))
    return photo, np.array(boxes)


def found_at(boxes: NDArray[np.float32], faces: Detections) -> list[int]:
    """Return how many faces were found at each box."""
    counts: list[int] = overlaps(boxes, faces.boxes_xyxy).sum(1).tolist()
    return counts


@pytest.mark.parametrize(
    ("width", "height", "face_px", "at_low"),
    [
        (12_000, 4000, 150, 8),
        (1920, 1080, 40, 18),
        (4000, 3000, 36, 5),  # nearly the smallest that is stated
    ],
)
def test_small_faces_in_large_photos_are_found_at_high(
    detector: Detector, portraits: list[Portrait], width: int, height: int, face_px: float, at_low: int
) -> None:
    photo, boxes = crowd(height, width, face_px, portraits)
    assert sum(found_at(boxes, find_faces(detector, photo, "low"))) <= at_low
    found = found_at(boxes, find_faces(detector, photo, "high"))
    assert sum(found) >= (16 if face_px < 40 else 18)
    assert max(found) == 1  # none twice


def test_faces_on_the_edges_of_tiles_are_found_once(detector: Detector, portraits: list[Portrait]) -> None:
    height, width = 3000, 4000
    photo = grain(height, width)
    (level,) = lay_tiles(height, width, 640)
    corners = sorted({(tile.left / tile.scale, tile.top / tile.scale) for tile in level if tile.left and tile.top})
    boxes = []
    for number, (left, top) in enumerate(corners):
        portrait = portraits[number % len(portraits)].scaled(70)
        tall, wide = portrait.photo.shape[:2]
        boxes.append(paste(photo, portrait, round(left) - wide // 2, round(top) - tall // 2))
    faces = find_faces(detector, photo, "high")
    assert len(boxes) == 12
    assert found_at(np.array(boxes), faces) == [1] * 12


@pytest.mark.parametrize("has_large_face", [False, True])
def test_a_large_photo_may_be_rotated(detector: Detector, portraits: list[Portrait], has_large_face: bool) -> None:
    """A large face tells the orientation of the whole photo, so that no other one is tried."""
    photo, boxes = crowd(1500, 2000, 60, portraits)
    if has_large_face:
        large = paste(photo, portraits[6].scaled(200), 0, 0)
        boxes = np.array([large, *(box for box in boxes if box[0] > 400 or box[1] > 400)])
    faces = find_faces(detector, np.rot90(photo).copy(), "high")
    corners = rotate_points(boxes.reshape(-1, 2, 2), 1, 2000, 1500)
    turned = np.concatenate([corners.min(1), corners.max(1)], 1)
    assert sum(found_at(turned, faces)) >= len(boxes) - 1


def test_a_photo_without_a_face_costs_one_look(counting: CountingDetector, nobody: Image, astronaut: Image) -> None:
    turned = np.rot90(astronaut).copy()
    for photo in (nobody, turned, np.zeros((3000, 4000, 3), np.uint8)):
        assert counting.runs(photo, "low") == 1
        assert counting.runs(photo, "medium") == 5
    assert counting.runs(astronaut, "low") == counting.runs(astronaut, "medium") == 1
    # A photo that the canvas holds gets no tiles.
    assert counting.runs(turned, "high") == 5


@pytest.mark.parametrize(("height", "width"), [(7000, 7000), (10, 60_000), (50_000, 1)])
def test_the_work_for_a_large_photo_is_bounded(
    height: int, width: int, counting: CountingDetector, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, known = Detector.run, dict[tuple[int, ...], RawOutputs]()

    def run_each_canvas_once(detector: Detector, photos: Sequence[PreparedPhoto]) -> list[RawOutputs]:
        for photo in photos:
            if photo.planes.shape not in known:
                (known[photo.planes.shape],) = run(detector, [photo])
        return [known[photo.planes.shape] for photo in photos]

    monkeypatch.setattr(Detector, "run", run_each_canvas_once)  # all views are black
    levels = lay_tiles(height, width, 640)
    tiles = sum(map(len, levels))
    assert 0 < tiles <= 1.35 * MAX_TILES  # the finest level, and coarser ones
    runs = counting.runs(np.zeros((height, width, 3), np.uint8), "high")
    assert runs == 5 + 4 * tiles
    assert max(counting.batches) <= VIEWS_PER_BATCH


@pytest.mark.parametrize(("height", "width"), [(3000, 4000), (1000, 6000)])
def test_the_memory_of_tiles_is_estimated(detector: Detector, height: int, width: int) -> None:
    photo = np.zeros((height, width, 3), np.uint8)
    whole = detector.prepare(photo)
    (outputs,) = detector.run([whole])
    turned = partial(np.rot90, k=2)  # a photo whose EXIF orientation needs a copy
    search = FaceSearch(detector, whole, lambda scale: np.ascontiguousarray(turned(downscale(photo, scale))), "high")
    tracemalloc.start()
    search.take([outputs])
    while search.unfinished:
        search.take([outputs] * len(search.next_views()))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    estimated = search_bytes(detector, height, width, "high")
    assert 0.6 * estimated < peak < 1.1 * estimated
    assert search_bytes(detector, height, width, "medium") == search_bytes(detector, 640, 640, "high") == 0


@pytest.mark.parametrize(
    ("width", "height", "low", "high"),
    [(640, 480, 20, 20), (4000, 3000, 125, 31), (12_000, 4000, 375, 37), (12_000, 9000, 375, 53)],
)
def test_the_smallest_face_is_stated(detector: Detector, width: int, height: int, low: float, high: float) -> None:
    photo = np.zeros((height, width, 3), np.uint8)
    whole = detector.prepare(photo)
    for detail, expected in (("low", low), ("medium", low), ("high", high)):
        search = FaceSearch(detector, whole, partial(downscale, photo), detail)  # type: ignore[arg-type]
        assert search.min_face_px == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_a_rotated_photo_has_the_faces_of_the_upright_one(detector: Detector, astronaut: Image, turns: int) -> None:
    photo = astronaut[:480, :448]  # a side that the canvas must fill with black
    (upright,), rotated = detector.detect([photo]), find_faces(detector, np.rot90(photo, turns).copy(), "medium")
    height, width = photo.shape[:2]
    assert len(rotated) == len(upright) == 1
    assert np.allclose(rotated.landmarks_xy, rotate_points(upright.landmarks_xy, turns, width, height), atol=0.01)
    assert np.allclose(rotated.scores, upright.scores, atol=1e-5)
    center = rotate_points(upright.boxes_xyxy.reshape(1, 2, 2).mean(1), turns, width, height)
    assert np.allclose(rotated.boxes_xyxy.reshape(1, 2, 2).mean(1), center, atol=0.01)
    assert (rotated.boxes_xyxy[:, :2] < rotated.boxes_xyxy[:, 2:]).all()


def test_a_face_that_fills_the_photo_is_found(detector: Detector, astronaut: Image) -> None:
    """At its size, the network sees no face."""
    (upright,) = detector.detect([astronaut])
    x0, y0, x1, y1 = upright.boxes_xyxy[0].astype(int)
    margin = 8
    part = astronaut[y0 - margin : y1 + margin, x0 - margin : x1 + margin]
    close = np.asarray(cv2.resize(part, (600, 640)), np.uint8)
    (first,), faces = detector.detect([close]), find_faces(detector, close, "medium")
    assert not len(first) or first.scores[0] < 0.72
    assert len(faces) == 1
    scale = np.array([600 / (x1 - x0 + 2 * margin), 640 / (y1 - y0 + 2 * margin)])
    expected = (upright.landmarks_xy[0] - (x0 - margin, y0 - margin)) * scale
    eyes = np.linalg.norm(expected[0] - expected[1])
    assert np.linalg.norm(faces.landmarks_xy[0] - expected, axis=1).max() < 0.2 * eyes
