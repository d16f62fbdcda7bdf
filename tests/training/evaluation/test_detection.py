"""Detections match each box once; doubtful faces are ignored; false alarms are counted."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from models.pack.manifest import ModelPack
from models.runtime.onnx_runtime import OnnxNetwork
from models.vision.detection import Detections, Detector
from training.detection.photos import AnnotatedPhoto
from training.evaluation import detection
from training.evaluation.detection import (
    FACE_SIZES_PX,
    SCALED_CANVAS_PX,
    UPSIDE_DOWN_INTERVAL,
    evaluate_detector,
    evaluate_false_alarms,
    evaluate_sizes,
    match,
    noise,
    read_reference_faces,
    textures,
)


def annotated(image: NDArray[np.uint8], boxes: NDArray[np.float32], doubtful: int = 0) -> AnnotatedPhoto:
    """The last ``doubtful`` boxes are those a second detector sees."""
    points = np.full((len(boxes), 5, 2), np.nan, np.float32)
    return AnnotatedPhoto(image, boxes, points, np.arange(len(boxes)) >= len(boxes) - doubtful)


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


def test_synthetic_images_are_reproducible(tmp_path: Path, astronaut: NDArray[np.uint8]) -> None:
    first, second = (list(noise(2, np.random.default_rng(0))) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    photo = tmp_path / "photo.png"
    cv2.imwrite(str(photo), cv2.cvtColor(astronaut, cv2.COLOR_RGB2BGR))
    scrambled, shuffled = textures([photo], np.random.default_rng(1))
    assert scrambled.shape == astronaut.shape
    assert scrambled.mean() == pytest.approx(astronaut.mean(), abs=8)
    kept = astronaut[: len(shuffled), : shuffled.shape[1]]
    assert np.array_equal(np.sort(shuffled.ravel()), np.sort(kept.ravel()))
    assert not np.array_equal(shuffled, kept)


@pytest.fixture
def listed(tmp_path: Path, detector: Detector, astronaut: NDArray[np.uint8]) -> Path:
    """A list of one person's photo, many times."""
    (found,) = detector.detect([astronaut])
    box, points = found.boxes_xyxy[0], found.landmarks_xy[0]
    (tmp_path / "A").mkdir()
    cv2.imwrite(str(tmp_path / "A" / "A.png"), cv2.cvtColor(astronaut, cv2.COLOR_RGB2BGR))
    names = ["file", "score", "x0", "y0", "x1", "y1", *(f"l{axis}{i}" for i in range(1, 6) for axis in "xy")]
    row = ["A/A.png", "0.9", *(f"{v:.2f}" for v in (*box, *points.ravel()))]
    (tmp_path / "list.csv").write_text("\n".join([",".join(names), *[",".join(row)] * UPSIDE_DOWN_INTERVAL]) + "\n")
    return tmp_path / "list.csv"


def test_sizes_and_false_alarms(
    detector: Detector, pack: ModelPack, listed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detection, "SCALED_PHOTOS", 2)
    assert len(read_reference_faces(listed)) == UPSIDE_DOWN_INTERVAL
    sizes = evaluate_sizes(detector, listed, listed.parent)
    assert list(sizes) == [str(size) for size in FACE_SIZES_PX]
    assert sizes["128"] == sizes["256"] == 1
    assert max(FACE_SIZES_PX) <= SCALED_CANVAS_PX
    never, always = (Detector(OnnxNetwork(pack.detection.path), pack.detection, score) for score in (1.0, 1e-4))
    assert evaluate_false_alarms(never, listed, listed.parent, made=2).noise == 0
    everywhere = evaluate_false_alarms(always, listed, listed.parent, made=2)
    assert (everywhere.upside_down, everywhere.upside_down_photos) == (1, 1)
    assert everywhere.noise == everywhere.noise_pictures == 4
    assert everywhere.textures == everywhere.texture_pictures == 4
