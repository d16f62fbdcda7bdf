"""Quality values follow the defects of a photo."""

from __future__ import annotations

from dataclasses import replace

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from models.vision.alignment import TEMPLATE_XY, align
from models.vision.detection import Detector
from models.vision.quality import HALF_EYE_DISTANCE_PX, HALF_YAW, Quality, QualityGate, measure_quality


def test_the_gate_names_each_defect_and_passes_a_good_photo(detector: Detector, astronaut: NDArray[np.uint8]) -> None:
    (faces,) = detector.detect([astronaut])
    (crop,) = align(astronaut, faces.landmarks_xy[:1])
    points, gate = faces.landmarks_xy[0], QualityGate()
    sound = measure_quality(crop, points)
    assert gate.reasons(sound) == []
    assert sound.as_dict()["score"] == round(sound.score, 3) > 0.9
    for reason, altered, scale in (
        ("sharpness", np.asarray(cv2.GaussianBlur(crop, (0, 0), 6), np.uint8), 1.0),
        ("brightness", (crop * 0.1).astype(np.uint8), 1.0),
        ("contrast", (crop * 0.05 + 120).astype(np.uint8), 1.0),
        ("eye_distance_px", crop, 0.1),
    ):
        assert reason in gate.reasons(measure_quality(altered, points * scale))


def test_pose_comes_from_the_landmarks() -> None:
    crop = np.full((112, 112, 3), 128, np.uint8)
    frontal = measure_quality(crop, TEMPLATE_XY)
    assert abs(frontal.yaw) < 0.05
    assert abs(frontal.pitch) < 0.05
    assert abs(frontal.roll_deg) < 1
    turned = TEMPLATE_XY.copy()
    turned[2, 0] += 15
    assert measure_quality(crop, turned).yaw > 0.5
    tilt = np.radians(20)
    rolled = (TEMPLATE_XY - 56) @ np.array([[np.cos(tilt), np.sin(tilt)], [-np.sin(tilt), np.cos(tilt)]]) + 56
    measured = measure_quality(crop, rolled)
    assert abs(measured.roll_deg - 20) < 1
    assert abs(measured.yaw) < 0.05


GOOD = Quality(60.0, 15.0, 125.0, 55.0, 0.0, 0.0, 0.0)


def test_the_score_is_the_product_of_all_factors() -> None:
    assert 0.95 < GOOD.score <= 1
    small, turned = replace(GOOD, eye_distance_px=HALF_EYE_DISTANCE_PX), replace(GOOD, yaw=-HALF_YAW)
    assert small.score == pytest.approx(GOOD.score / 2, rel=1e-3)
    assert turned.score == pytest.approx(GOOD.score / 2, rel=1e-3)
    assert turned.score == replace(GOOD, yaw=HALF_YAW).score
    both = replace(small, yaw=HALF_YAW)
    assert both.score == pytest.approx(GOOD.score / 4, rel=1e-3)
    for name, values in {
        "eye_distance_px": (1, 4, 12, 60),
        "sharpness": (0.5, 1.5, 4, 15),
        "brightness": (0, 20, 50, 125),
        "contrast": (0, 5, 15, 55),
        "yaw": (1, 0.7, 0.3, 0),
    }.items():
        scores = [replace(GOOD, **{name: float(value)}).score for value in values]
        assert scores == sorted(scores), name
        assert all(0 <= score <= 1 for score in scores), name
    assert replace(GOOD, brightness=255.0).score == 0
    assert replace(GOOD, pitch=1.0, roll_deg=90.0).score == GOOD.score
