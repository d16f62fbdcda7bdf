"""The detector's training crops: faces of the drawn sizes, pages, textures, and what is no face."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from models.vision.detection import Detector
from training.config import ConfigError
from training.detection.crops import (
    MAX_SIDE_PX,
    Photo,
    Photos,
    background_crop,
    compose_page,
    cut_portrait,
    draw_crop,
    load_photos,
    sort_photos,
    texture,
)

Pixels = NDArray[np.uint8]
NONE = np.zeros((0, 4), np.float32)


@pytest.fixture
def photo(astronaut: Pixels, detector: Detector) -> Photo:
    return Photo(astronaut, detector.detect([astronaut])[0].boxes_xyxy[:1])


@pytest.fixture
def nothing() -> Photo:
    return Photo(np.full((200, 300, 3), (90, 120, 60), np.uint8), NONE)


def test_photos_are_read_and_sorted_by_their_largest_face(
    tmp_path: Path, astronaut: Pixels, detector: Detector
) -> None:
    (box,) = detector.detect([astronaut])[0].boxes_xyxy[:1].astype(int)
    close = astronaut[max(0, box[1] - 20) : box[3] + 20, max(0, box[0] - 20) : box[2] + 20]
    large = Image.fromarray(astronaut).resize((2000, 2000))
    for name, image in (
        ("close.png", Image.fromarray(close)),
        ("wide.png", large),
        ("none.png", Image.new("RGB", (80, 80))),
    ):
        image.save(tmp_path / name)
    photos = load_photos([tmp_path], detector)
    assert photos.counts() == {"scenes": 1, "portraits": 1, "backgrounds": 1}
    assert max(photos.scenes[0].image.shape) == MAX_SIDE_PX
    assert photos.scenes[0].boxes.max() <= MAX_SIDE_PX
    excluded = frozenset({tmp_path / "close.png", tmp_path / "wide.png"})
    with pytest.raises(ConfigError, match="no photo has a face"):
        load_photos([tmp_path], detector, excluded)


def test_the_face_of_a_scene_gets_the_drawn_size(photo: Photo, detector: Detector) -> None:
    rng, sizes = np.random.default_rng(4), []
    for _ in range(30):
        image = draw_crop(Photos([photo], [], []), 256, rng)
        assert image.shape == (256, 256, 3)
        assert image.dtype == np.uint8
        sizes += [float(box[2] - box[0]) for box in detector.detect([image])[0].boxes_xyxy]
    assert len(sizes) >= 15
    assert min(sizes) < 40
    assert max(sizes) > 100


@pytest.mark.parametrize("kinds", ["portraits", "backgrounds"])
def test_one_kind_of_photos_is_enough(photo: Photo, nothing: Photo, kinds: str) -> None:
    photos = Photos([], [photo], []) if kinds == "portraits" else Photos([], [], [nothing])
    crops = [draw_crop(photos, 128, np.random.default_rng(row)) for row in range(20)]
    assert {crop.shape for crop in crops} == {(128, 128, 3)}


def test_a_crop_depends_on_its_generator_alone(photo: Photo, nothing: Photo) -> None:
    photos = Photos([photo], [photo], [nothing])
    first, second = ([draw_crop(photos, 96, np.random.default_rng(row)) for row in range(10)] for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_page_shows_portraits_on_its_background(photo: Photo, nothing: Photo, detector: Detector) -> None:
    found = []
    for row in range(10):
        rng = np.random.default_rng(row)
        page = compose_page([photo], background_crop([nothing], 320, rng), 70.0, rng)
        found.append(len(detector.detect([page])[0]))
    assert sum(found) >= 10
    assert max(found) >= 3


def test_a_portrait_has_the_wanted_size(photo: Photo) -> None:
    rng = np.random.default_rng(0)
    assert max(cut_portrait(photo, 40.0, 2.0, rng).shape) == pytest.approx(80, abs=3)
    assert max(cut_portrait(photo, 40.0, 2.0, rng, largest_px=60.0).shape) == pytest.approx(60, abs=3)


def test_a_background_fills_the_crop_at_every_size(nothing: Photo) -> None:
    for row in range(20):
        assert background_crop([nothing], 320, np.random.default_rng(row)).shape == (320, 320, 3)


def test_textures_have_the_photos_colors_and_no_face(photo: Photo, detector: Detector) -> None:
    image = photo.image[:256, 100:356]
    made = [texture(image, np.random.default_rng(row)) for row in range(30)]
    assert sum(len(detector.detect([each])[0]) > 0 for each in made) <= 6
    close = [abs(float(each.mean()) - float(image.mean())) < 12 for each in made]
    assert sum(close) >= 12


def test_photos_without_faces_are_backgrounds(photo: Photo, nothing: Photo) -> None:
    assert sort_photos([photo, nothing, nothing]).counts() == {"scenes": 1, "portraits": 0, "backgrounds": 2}
