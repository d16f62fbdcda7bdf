"""Annotated photos: which faces count, and how detections match them."""

from __future__ import annotations

import json
from pathlib import Path

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from models.vision.detection import Detections, Detector
from training.config import ConfigError
from training.detection.photos import MAX_PHOTO_SIDE_PX, AnnotatedPhoto, list_annotated, read_annotated
from training.evaluation.detection import evaluate_detector, match


def annotated(image: NDArray[np.uint8], boxes: NDArray[np.float32], doubtful: int = 0) -> AnnotatedPhoto:
    """The last ``doubtful`` boxes are those a second detector sees."""
    return AnnotatedPhoto(image, boxes, np.arange(len(boxes)) >= len(boxes) - doubtful)


def faces(boxes: list[list[float]], scores: list[float]) -> Detections:
    n = len(boxes)
    return Detections(
        np.array(boxes, np.float32).reshape(n, 4), np.zeros((n, 5, 2), np.float32), np.array(scores, np.float32)
    )


def test_doubtful_and_small_faces_are_ignored() -> None:
    image = np.zeros((200, 400, 3), np.uint8)
    boxes = np.array([[0, 0, 50, 50], [100, 0, 120, 20], [200, 0, 250, 50]], np.float32)  # counted, small, doubtful
    found = faces(
        [[0, 0, 50, 50], [2, 0, 50, 50], [100, 0, 120, 20], [200, 0, 250, 50], [300, 0, 350, 50], [380, 0, 390, 10]],
        [0.9, 0.8, 0.7, 0.6, 0.5, 0.4],
    )
    matches = match(found, annotated(image, boxes, doubtful=1), 32)
    assert matches.faces == 1
    # The face, its duplicate, and a large false positive count. The others are ignored.
    assert matches.scores == pytest.approx([0.9, 0.8, 0.5])
    assert matches.hits.tolist() == [True, False, False]
    none = match(faces([], []), annotated(image, boxes[:0]), 32)
    assert (none.faces, len(none.scores)) == (0, 0)


def test_recall_and_precision_of_a_real_photo(detector: Detector, group: NDArray[np.uint8]) -> None:
    (found,) = detector.detect([group])
    boxes = found.boxes_xyxy
    missing = np.array([[5, 700, 105, 800]], np.float32)
    perfect, one_missed, one_too_many = (
        evaluate_detector(detector, [annotated(group, b)]) for b in (boxes, np.concatenate([boxes, missing]), boxes[1:])
    )
    n = len(boxes)
    assert (perfect.faces, perfect.recall, perfect.precision) == (n, 1, 1)
    assert one_missed.recall == pytest.approx(n / (n + 1))
    assert one_too_many.precision == pytest.approx((n - 1) / n)
    # The best detection is a false positive: no threshold keeps precision.
    assert one_too_many.recall_at_precision_95 == 0
    assert perfect.recall_at_precision_95 == 1
    assert detector.min_score == 0.5


def test_intervals_are_over_photos(detector: Detector, group: NDArray[np.uint8], nobody: NDArray[np.uint8]) -> None:
    (found,) = detector.detect([group])
    hidden = np.array([[5, 5, 105, 105]], np.float32)
    photos = [annotated(group, found.boxes_xyxy), annotated(nobody, hidden)]
    result = evaluate_detector(detector, photos)
    low, high = result.intervals["recall"]
    assert low == 0
    assert high == 1
    assert low < result.recall < high


@pytest.fixture
def folder(tmp_path: Path, astronaut: NDArray[np.uint8]) -> Path:
    cv2.imwrite(str(tmp_path / "a.png"), cv2.resize(astronaut, (1000, 500)))
    return tmp_path


def annotate(folder: Path, *rows: dict[str, object]) -> None:
    plain = {"file": "a.png", "split": "val", "boxes_xyxy": [], "yunet": []}
    (folder / "annotations.jsonl").write_text("".join(json.dumps({**plain, **row}) + "\n" for row in rows))


def test_annotated_photos_are_scaled_and_other_detections_are_doubtful(folder: Path) -> None:
    seen = [{"box_xyxy": [100, 50, 598, 452]}, {"box_xyxy": [700, 300, 750, 350]}]
    annotate(folder, {"split": "train"}, {"boxes_xyxy": [[100, 50, 600, 450]], "yunet": seen}, {"file": "nowhere.png"})
    listed = list_annotated(folder)
    assert len(listed) == 2
    photo = next(read_annotated(folder, listed))  # photos are read when they are used
    scale = MAX_PHOTO_SIDE_PX / 1000
    assert photo.image.shape[:2] == (round(500 * scale), MAX_PHOTO_SIDE_PX)
    assert photo.boxes == pytest.approx(np.array([[100, 50, 600, 450], [700, 300, 750, 350]]) * scale)
    assert photo.doubtful.tolist() == [False, True]
    with pytest.raises(ConfigError, match="nowhere"):
        list(read_annotated(folder, listed))


def test_missing_and_damaged_annotations_are_rejected(folder: Path) -> None:
    with pytest.raises(ConfigError, match="Name a folder of annotated photos"):
        list_annotated(folder)
    (folder / "annotations.jsonl").write_text("{")
    with pytest.raises(ConfigError, match="not JSON lines"):
        list_annotated(folder)
