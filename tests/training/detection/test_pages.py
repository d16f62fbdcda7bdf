"""Composed pages: every pasted face is where its box says, and visible."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from models.vision.detection import Detector
from training.detection.pages import MAX_COVERED, background_crop, compose_page, cut_portrait
from training.detection.photos import AnnotatedPhoto, iou_matrix


@pytest.fixture
def portrait(astronaut: NDArray[np.uint8], detector: Detector) -> AnnotatedPhoto:
    (found,) = detector.detect([astronaut])
    return AnnotatedPhoto(astronaut, found.boxes_xyxy[:1], found.landmarks_xy[:1], np.zeros(1, bool))


@pytest.mark.parametrize("shape", [(40, 300, 3), (300, 40, 3), (500, 700, 3)])
def test_backgrounds_fill_the_square_at_any_shape(shape: tuple[int, int, int]) -> None:
    image = np.random.default_rng(0).integers(1, 255, shape).astype(np.uint8)
    empty = AnnotatedPhoto(image, np.zeros((0, 4), np.float32), np.zeros((0, 5, 2), np.float32), np.zeros(0, bool))
    for seed in range(10):
        crop = background_crop([empty], 256, np.random.default_rng(seed))
        assert crop.shape == (256, 256, 3)
        assert crop.min() > 0  # no black border


def test_a_cut_portrait_has_the_wanted_face(portrait: AnnotatedPhoto, detector: Detector) -> None:
    for seed in range(8):
        patch, faces = cut_portrait(portrait, 90.0, 2.0, np.inf, np.random.default_rng(seed))
        box = faces.boxes.numpy()[0]
        assert np.sqrt((box[2:] - box[:2]).prod()) == pytest.approx(90, rel=0.05)
        (found,) = detector.detect([np.ascontiguousarray(patch)])
        assert iou_matrix(box[None], found.boxes_xyxy).max() > 0.7
        nearest = np.abs(found.landmarks_xy - faces.points.numpy()).mean((1, 2)).min()
        assert nearest < 9  # a tenth of the face: mirrored landmarks would be 20 away


def test_faces_of_a_page_are_found_where_their_boxes_are(portrait: AnnotatedPhoto, detector: Detector) -> None:
    labeled = found_again = 0
    for seed in range(25):
        rng = np.random.default_rng(seed)
        page, faces = compose_page([portrait], np.full((384, 384, 3), 90, np.uint8), 60.0, rng)
        (found,) = detector.detect([page])
        boxes = faces.boxes.numpy()[~faces.ignore.numpy()]
        labeled += len(boxes)
        if len(boxes) and len(found):
            found_again += int((iou_matrix(boxes, found.boxes_xyxy).max(1) > 0.5).sum())
    assert labeled > 50
    assert found_again > 0.8 * labeled


def test_labeled_faces_are_visible_in_ovals_too() -> None:
    """The photo is white, the paper black: a labeled face's center is white. The corners of ovals are transparent."""
    boxes = np.array([[40, 40, 160, 160], [2, 2, 22, 22]], np.float32)
    points = np.full((2, 5, 2), np.nan, np.float32)
    photo = AnnotatedPhoto(np.full((200, 200, 3), 255, np.uint8), boxes, points, np.zeros(2, bool))
    labeled = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        page, faces = compose_page([photo], np.zeros((384, 384, 3), np.uint8), 120.0, rng)
        centers = ((faces.boxes[:, :2] + faces.boxes[:, 2:]) / 2)[~faces.ignore].numpy().astype(int)
        inside = ((centers >= 0) & (centers < 384)).all(1)
        labeled += int(inside.sum())
        assert (page[centers[inside, 1], centers[inside, 0]] > 127).all(), seed
    assert labeled > 60


def test_scattered_portraits_leave_earlier_faces_visible(portrait: AnnotatedPhoto) -> None:
    """Two boxes overlap by little more than the rule: a later portrait covers at most that share of a face."""
    for seed in range(25):
        _, faces = compose_page([portrait], np.zeros((384, 384, 3), np.uint8), 50.0, np.random.default_rng(seed))
        overlaps = iou_matrix(faces.boxes.numpy(), faces.boxes.numpy()) - np.eye(len(faces.boxes))
        assert overlaps.max(initial=0) <= MAX_COVERED + 0.01
