"""The detector's training crops: faces are where the labels say, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from models.vision.detection import Detector
from training.detection.data import texture, training_crop
from training.detection.fit import DetectorLoopConfig, load_batches
from training.detection.photos import AnnotatedPhoto, TrainingPhotos


@pytest.fixture
def photo(astronaut: NDArray[np.uint8], detector: Detector) -> AnnotatedPhoto:
    (found,) = detector.detect([astronaut])
    return AnnotatedPhoto(astronaut, found.boxes_xyxy[:1], found.landmarks_xy[:1], np.zeros(1, bool))


@pytest.fixture
def scenes(photo: AnnotatedPhoto) -> TrainingPhotos:
    return TrainingPhotos([photo], [], [])


def test_crops_carry_their_faces(scenes: TrainingPhotos, detector: Detector) -> None:
    rng = np.random.default_rng(4)
    checked, mosaics = 0, 0
    for _ in range(30):
        image, faces = training_crop(scenes, 256, (24.0, 200.0), rng)
        assert image.shape == (256, 256, 3)
        assert len(faces.boxes) == len(faces.points) == len(faces.has_points) == len(faces.ignore)
        mosaics += len(faces.boxes) > 1
        found = detector.detect([image])[0]
        for box, points, ignore in zip(faces.boxes.numpy(), faces.points.numpy(), faces.ignore, strict=True):
            side = float(box[2] - box[0])
            if ignore or side < 30 or not len(found) or (box[:2] <= 0).any() or (box[2:] >= 256).any():
                continue
            near = np.abs(found.boxes_xyxy - box).max(1).argmin()
            if np.abs(found.boxes_xyxy[near] - box).max() < 0.25 * side:
                assert np.abs(found.landmarks_xy[near] - points).max() < 0.25 * side
                checked += 1
    assert checked >= 8
    assert mosaics >= 3


def test_a_mosaics_faces_stay_in_their_piece(scenes: TrainingPhotos) -> None:
    rng = np.random.default_rng(5)
    for _ in range(20):
        _, faces = training_crop(scenes, 256, (16.0, 20.0), rng)
        for box in faces.boxes.numpy() if len(faces.boxes) > 1 else ():
            assert box.min() >= 0
            assert box.max() <= 256
            for start, end in ((box[0], box[2]), (box[1], box[3])):
                assert end <= 128 or start >= 128


def test_textures_have_the_photos_colors_and_no_face(photo: AnnotatedPhoto, detector: Detector) -> None:
    """The detector finds the face in the photo, and almost none in its textures."""
    (face,) = photo.boxes
    found = 0
    for seed in range(12):
        out = texture(photo.image, float(face[2] - face[0]), np.random.default_rng(seed))
        assert out.shape == photo.image.shape
        assert out.dtype == np.uint8
        assert out.std() > 3
        found += len(detector.detect([out])[0]) > 0
    assert found <= 4


def test_photos_with_faces_smaller_than_tiles_are_not_shuffled() -> None:
    """All pixels of the image are distinct, so shuffled tiles would keep them."""
    image = np.arange(64 * 64 * 3, dtype=np.uint32).astype(np.uint8).reshape(64, 64, 3)
    whole = np.sort(image.reshape(-1, 3), axis=0)

    def kept(seed: int, smallest_face_px: float) -> bool:
        out = texture(image, smallest_face_px, np.random.default_rng(seed))
        return np.array_equal(np.sort(out.reshape(-1, 3), axis=0), whole)

    assert any(kept(seed, np.inf) for seed in range(12))
    assert not any(kept(seed, 20.0) for seed in range(12))


def test_batches_of_all_sizes_have_equal_pixels(scenes: TrainingPhotos) -> None:
    config = DetectorLoopConfig(steps=6, batch_size=8)
    shapes = [tuple(images.shape) for images, _ in load_batches(scenes, config, 0)]
    assert [shape[0] for shape in shapes] == [8, 8, 4, 8, 8, 2]
    assert [shape[2] for shape in shapes] == list(config.crop_sizes_px)


def test_crops_without_faces_come_from_backgrounds(scenes: TrainingPhotos, nobody: NDArray[np.uint8]) -> None:
    empty = AnnotatedPhoto(nobody, np.zeros((0, 4), np.float32), np.zeros((0, 5, 2), np.float32), np.zeros(0, bool))
    only = TrainingPhotos([], [], [empty])
    rng = np.random.default_rng(2)
    assert all(len(training_crop(only, 128, (10.0, 100.0), rng)[1].boxes) == 0 for _ in range(5))
    every_kind = TrainingPhotos(scenes.scenes, scenes.scenes, [empty])
    counts = [len(training_crop(every_kind, 256, (10.0, 60.0), rng)[1].boxes) for _ in range(60)]
    assert 0 in counts  # a background
    assert max(counts) > 4  # a page: mosaics have four faces at most
