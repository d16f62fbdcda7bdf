"""Each detail finds the faces that the documentation promises, with bounded work."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image as PillowImage

from models.pack.loading import BUNDLED_PACK, load_pack
from models.runtime.onnx_runtime import OnnxNetwork
from models.vision.alignment import rotate_points
from models.vision.detection import Detector, PreparedPhoto, RawOutputs
from models.vision.face_search import Detail, find_faces
from tests.conftest import photo_array
from tests.models.vision.test_detection import yunet_detector

Image = NDArray[np.uint8]


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


def test_a_photo_without_a_face_costs_one_look(counting: CountingDetector, nobody: Image, astronaut: Image) -> None:
    for photo in (nobody, np.rot90(astronaut).copy(), np.zeros((3000, 4000, 3), np.uint8)):
        assert counting.runs(photo, "low") == 1
        assert counting.runs(photo, "medium") == 5
    assert counting.runs(astronaut, "low") == counting.runs(astronaut, "medium") == 1


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


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_a_rotated_group_photo_shows_six_people(detector: Detector, group: Image, turns: int) -> None:
    """The photo is downscaled; upside down, five faces are found with wrong landmarks."""
    (upright,), rotated = detector.detect([group]), find_faces(detector, np.rot90(group, turns).copy(), "medium")
    height, width = np.rot90(group, turns).shape[:2]
    back = rotate_points(rotated.landmarks_xy, -turns, width, height)
    distances = np.abs(back[:, None] - upright.landmarks_xy[None]).max((2, 3))
    assert distances.shape == (6, 6)
    assert (distances.min(1) < 3).all()


def test_a_photo_without_a_face_has_none_in_four_orientations(detector: Detector, nobody: Image) -> None:
    for photo in (nobody, photo_array("skimage", "data", "brick.png")):
        assert len(find_faces(detector, photo, "medium")) == 0


def agreeing_share(detector: Detector, data: Path, turns: int) -> float:
    """Return the share of 24 photos of LFW, rotated, whose landmarks are those of the upright photo."""
    with (data / "lfw" / "landmarks_yunet.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))[::500]
    agreeing = 0
    for row in rows:
        with PillowImage.open(data / "lfw" / "images" / row["file"]) as image:
            photo = np.asarray(image.convert("RGB"))
        (upright,), found = detector.detect([photo]), find_faces(detector, np.rot90(photo, turns).copy(), "medium")
        back = rotate_points(found.landmarks_xy, -turns, *photo.shape[:2])  # LFW's photos are square
        agreeing += bool(len(found) and np.abs(back[0] - upright.landmarks_xy[0]).max() < 1)
    return agreeing / len(rows)


@pytest.mark.parametrize(("turns", "bundled", "by_yunet"), [(1, 0.9, 0.9), (2, 0.5, 0.8), (3, 0.9, 0.9)])
def test_most_rotated_photos_of_lfw_have_right_landmarks(
    detector: Detector, reference: Path, data: Path, turns: int, bundled: float, by_yunet: float
) -> None:
    assert agreeing_share(detector, data, turns) >= bundled
    assert agreeing_share(yunet_detector(reference), data, turns) >= by_yunet
