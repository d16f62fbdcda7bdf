"""Stored crops suffice for any alignment."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from models.pack import open_model_zoo
from models.vision.alignment import STANDARD_ALIGNMENT, Alignment, align, standard_alignment
from models.vision.detection import Detector
from models.vision.recognition import Recognizer
from service.domain.gallery import Crop
from service.inference import crops
from tests.service.inference.image_files import encode

Photo = NDArray[np.uint8]


def of(detector: Detector, photo: Photo) -> tuple[Crop, NDArray[np.float32]]:
    (faces,) = detector.detect([photo])
    row = faces.largest()
    return crops.cut_crop(photo, faces.boxes_xyxy[row], faces.landmarks_xy[row]), faces.landmarks_xy[row][None]


@pytest.mark.parametrize("scale", [1, 3])
@pytest.mark.parametrize("turned", [0, 40])
def test_a_crop_is_embedded_like_its_photo(
    detector: Detector, recognizer: Recognizer, astronaut: Photo, scale: int, turned: int
) -> None:
    about = cv2.getRotationMatrix2D((astronaut.shape[1] / 2, astronaut.shape[0] / 3), turned, 1)
    photo = np.asarray(cv2.warpAffine(astronaut, about, astronaut.shape[1::-1]), np.uint8)
    photo = np.asarray(cv2.resize(photo, None, fx=scale, fy=scale, interpolation=cv2.INTER_CUBIC), np.uint8)
    crop, landmarks = of(detector, photo)
    image, points = crops.decode_crop(crop)
    assert max(image.shape) <= crops.MAX_SIDE_PX
    ((first, second),) = [recognizer.embed(np.concatenate([align(photo, landmarks), align(image, points[None])]))]
    assert float(first @ second) > 0.99


def test_it_shows_what_other_alignments_want(detector: Detector, astronaut: Photo) -> None:
    wider = Alignment(
        150, tuple((0.65 * x * 150 / 112 + 28, 0.65 * y * 150 / 112 + 26) for x, y in STANDARD_ALIGNMENT.template)
    )
    crop, landmarks = of(detector, astronaut)
    image, points = crops.decode_crop(crop)
    for alignment in (wider, open_model_zoo.ALIGNMENT, standard_alignment(224)):
        direct, again = align(astronaut, landmarks, alignment), align(image, points[None], alignment)
        difference = cv2.GaussianBlur(direct[0], (5, 5), 0).astype(int) - cv2.GaussianBlur(again[0], (5, 5), 0)
        assert np.abs(difference).mean() < 3
        assert (again[0].max(2) == 0).mean() <= (direct[0].max(2) == 0).mean() + 0.001  # nothing is missing


def test_at_the_border_nothing_is_made_up(detector: Detector, astronaut: Photo) -> None:
    (faces,) = detector.detect([astronaut])
    x0, y0, *_ = faces.boxes_xyxy[0].astype(int)
    crop, landmarks = of(detector, np.ascontiguousarray(astronaut[y0:, x0:]))
    _, points = crops.decode_crop(crop)
    assert points == pytest.approx(landmarks[0], abs=0.01)


def test_damaged_and_huge_crops_are_refused() -> None:
    points = ((0.0, 0.0),) * 5
    with pytest.raises(OSError):
        crops.decode_crop(Crop(b"RIFF....WEBP", points))
    with pytest.raises(ValueError, match="1025 x 8"):
        crops.decode_crop(Crop(encode(Image.new("RGB", (crops.MAX_STORED_SIDE_PX + 1, 8)), "WEBP"), points))
