"""Quality values move the way their names say."""

from __future__ import annotations

import cv2
import numpy as np
from numpy.typing import NDArray

from models.alignment import TEMPLATE_XY, align
from models.detection import Detector
from models.quality import QualityGate, measure


def test_a_good_photo_passes(detector: Detector, astronaut: NDArray[np.uint8]) -> None:
    (faces,) = detector.detect([astronaut])
    (crop,) = align(astronaut, faces.landmarks_xy[:1])
    assert QualityGate().reasons(measure(crop, faces.landmarks_xy[0])) == []


def test_blur_darkness_and_flatness_are_seen(detector: Detector, astronaut: NDArray[np.uint8]) -> None:
    (faces,) = detector.detect([astronaut])
    (crop,) = align(astronaut, faces.landmarks_xy[:1])
    points = faces.landmarks_xy[0]
    gate = QualityGate()
    assert "sharpness" in gate.reasons(measure(np.asarray(cv2.GaussianBlur(crop, (0, 0), 6), np.uint8), points))
    assert "brightness" in gate.reasons(measure((crop * 0.1).astype(np.uint8), points))
    assert "contrast" in gate.reasons(measure((crop * 0.05 + 120).astype(np.uint8), points))


def test_pose_comes_from_the_landmarks() -> None:
    crop = np.full((112, 112, 3), 128, np.uint8)
    frontal = measure(crop, TEMPLATE_XY)
    assert abs(frontal.yaw) < 0.05
    assert abs(frontal.pitch) < 0.05
    assert abs(frontal.roll_deg) < 1
    turned = TEMPLATE_XY.copy()
    turned[2, 0] += 15
    assert measure(crop, turned).yaw > 0.5
    tilt = np.radians(20)
    rolled = (TEMPLATE_XY - 56) @ np.array([[np.cos(tilt), np.sin(tilt)], [-np.sin(tilt), np.cos(tilt)]]) + 56
    measured = measure(crop, rolled)
    assert abs(measured.roll_deg - 20) < 1
    assert abs(measured.yaw) < 0.05


def test_small_faces_are_refused() -> None:
    measured = measure(np.full((112, 112, 3), 128, np.uint8), TEMPLATE_XY / 6)
    assert "eye_distance_px" in QualityGate().reasons(measured)
