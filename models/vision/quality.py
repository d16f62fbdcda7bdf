"""Face image quality: size, sharpness, exposure and pose, a combined score, and limits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import cv2
import numpy as np
from numpy.typing import NDArray

# Values at which a photo keeps half of its similarity to another photo of the person, all else being good. Measured
# on degraded copies of LFW View 1; yaw is chosen, since LFW has few profiles (docs/decisions.md, 14).
HALF_EYE_DISTANCE_PX: Final = 3.6
HALF_SHARPNESS: Final = 1.6
HALF_BRIGHTNESS: Final = 28.0
HALF_BELOW_WHITE: Final = 39.0
HALF_CONTRAST: Final = 8.0
HALF_YAW: Final = 1.0
STEEPNESS: Final = 3.0
"""Exponent of the quality curves."""
WHITE: Final = 255.0
FRONTAL_NOSE: Final = 0.494
"""Nose position of the standard template, from the eye line (0) to the mouth line (1)."""


@dataclass(frozen=True)
class Quality:
    """Quality of one face.

    Args:
        eye_distance_px: distance between the eyes in photo pixels.
        sharpness: standard deviation of the Laplacian of the gray crop, about 3 (blurred) to 40 (sharp).
        brightness: mean gray level in 0..255.
        contrast: standard deviation of the gray levels.
        yaw: twice the offset of the nose tip from the center of the eyes, in eye distances, -1..1; 0 is frontal.
        pitch: nose position between eyes and mouth, relative to a frontal face, -1..1.
        roll_deg: slope of the eye line in degrees.
    """

    eye_distance_px: float
    sharpness: float
    brightness: float
    contrast: float
    yaw: float
    pitch: float
    roll_deg: float

    @property
    def score(self) -> float:
        """Usability for recognition in [0, 1]: approximate share of the similarity to a good photo that is kept.

        Product of 1 / (1 + (half / value)^3) over size, sharpness, brightness, contrast and yaw. Pitch from landmarks
        does not predict errors, and alignment removes roll, so neither counts.
        """
        factors = (
            (self.eye_distance_px, HALF_EYE_DISTANCE_PX),
            (self.sharpness, HALF_SHARPNESS),
            (self.brightness, HALF_BRIGHTNESS),
            (WHITE - self.brightness, HALF_BELOW_WHITE),
            (self.contrast, HALF_CONTRAST),
            (HALF_YAW, abs(self.yaw)),  # swapped, since smaller is better
        )
        return float(math.prod(value**STEEPNESS / (value**STEEPNESS + half**STEEPNESS) for value, half in factors))

    def as_dict(self) -> dict[str, float]:
        """Return all values and the score, rounded for JSON."""
        return {name: round(value, 3) for name, value in {**vars(self), "score": self.score}.items()}


@dataclass(frozen=True)
class QualityGate:
    """Limits of face quality."""

    min_eye_distance_px: float = 12.0
    min_sharpness: float = 2.0
    min_brightness: float = 25.0
    max_brightness: float = 235.0
    min_contrast: float = 10.0
    max_abs_yaw: float = 0.75

    def reasons(self, quality: Quality) -> list[str]:
        """Return the names of the values outside the limits."""
        checks = {
            "eye_distance_px": quality.eye_distance_px >= self.min_eye_distance_px,
            "sharpness": quality.sharpness >= self.min_sharpness,
            "brightness": self.min_brightness <= quality.brightness <= self.max_brightness,
            "contrast": quality.contrast >= self.min_contrast,
            "yaw": abs(quality.yaw) <= self.max_abs_yaw,
        }
        return [name for name, passed in checks.items() if not passed]


def measure_quality(crop: NDArray[np.uint8], landmarks_xy: NDArray[np.floating]) -> Quality:
    """Measure a face from its aligned (112, 112, 3) RGB crop and its (5, 2) landmarks in photo pixels."""
    gray = cv2.cvtColor(crop, cv2.COLOR_RGB2GRAY)
    left_eye, right_eye, nose, left_mouth, right_mouth = np.asarray(landmarks_xy, np.float64)
    across = right_eye - left_eye
    distance = float(np.linalg.norm(across))
    eyes, mouth = (left_eye + right_eye) / 2, (left_mouth + right_mouth) / 2
    axis = across / max(distance, 1e-6)
    down = np.array([-axis[1], axis[0]])
    height = float((mouth - eyes) @ down)
    (mean, deviation), (_, edges) = cv2.meanStdDev(gray), cv2.meanStdDev(cv2.Laplacian(gray, cv2.CV_16S))
    return Quality(
        eye_distance_px=distance,
        sharpness=float(edges[0, 0]),
        brightness=float(mean[0, 0]),
        contrast=float(deviation[0, 0]),
        yaw=float(np.clip(2 * ((nose - eyes) @ axis) / max(distance, 1e-6), -1, 1)),
        pitch=float(np.clip((nose - eyes) @ down / height - FRONTAL_NOSE if height > 1e-6 else 1.0, -1, 1)),
        roll_deg=float(np.degrees(np.arctan2(across[1], across[0]))),
    )
