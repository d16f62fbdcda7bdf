"""What makes a face photo usable: size, sharpness, exposure and pose, each a number with a unit, and one score."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import cv2
import numpy as np
from numpy.typing import NDArray

# Where a photo keeps half of its similarity to another photo of its person, everything else being good: measured on
# damaged copies of LFW View 1 (bench/quality.py). Yaw's is a choice, since LFW has hardly any profiles
# (docs/decisions/0014).
HALF_EYE_DISTANCE_PX: Final = 3.6
HALF_SHARPNESS: Final = 1.6
HALF_BRIGHTNESS: Final = 28.0
HALF_BELOW_WHITE: Final = 39.0
HALF_CONTRAST: Final = 8.0
HALF_YAW: Final = 1.0
STEEPNESS: Final = 3.0
"""How fast similarity is lost about these values; the same for all."""
WHITE: Final = 255.0


@dataclass(frozen=True)
class Quality:
    """Measured on one face.

    eye_distance_px: between the eyes in the photo; sharpness: standard deviation of the Laplacian of the crop's
    brightness (grey levels, about 3 blurred to 40 crisp); brightness: mean grey level 0..255; contrast: its standard
    deviation; yaw: -1..1, how far the nose tip lies from the middle of the eyes, in eye distances (0 frontal); pitch:
    the nose's place between eyes and mouth, less a frontal face's; roll_deg: the eyes' slope in degrees.
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
        """How usable the face is for recognition, in [0, 1]: roughly the share of its similarity to a good photo of the
        same person that this photo keeps. A product of what size, sharpness, brightness, contrast and yaw leave, each
        1 / (1 + (half / value)^3): a fault in one is not made good by the others. Pitch and roll do not enter: what
        landmarks tell of pitch says nothing about errors, and alignment undoes roll.
        """
        left = (
            (self.eye_distance_px, HALF_EYE_DISTANCE_PX),
            (self.sharpness, HALF_SHARPNESS),
            (self.brightness, HALF_BRIGHTNESS),
            (WHITE - self.brightness, HALF_BELOW_WHITE),
            (self.contrast, HALF_CONTRAST),
            # The smaller the better.
            (HALF_YAW, abs(self.yaw)),
        )
        return float(math.prod(value**STEEPNESS / (value**STEEPNESS + half**STEEPNESS) for value, half in left))

    def as_dict(self) -> dict[str, float]:
        """JSON-ready: every value, and the score."""
        return {name: round(value, 3) for name, value in {**vars(self), "score": self.score}.items()}


# Where a frontal face's nose tip lies between the line of the eyes (0) and the line of the mouth (1): the template's.
FRONTAL_NOSE = 0.494


def measure(crop: NDArray[np.uint8], landmarks_xy: NDArray[np.floating]) -> Quality:
    """Measure one face from its aligned (112, 112, 3) RGB crop and its (5, 2) landmarks in the photo."""
    grey = cv2.cvtColor(crop, cv2.COLOR_RGB2GRAY)
    left_eye, right_eye, nose, left_mouth, right_mouth = np.asarray(landmarks_xy, np.float64)
    across = right_eye - left_eye
    distance = float(np.linalg.norm(across))
    eyes, mouth = (left_eye + right_eye) / 2, (left_mouth + right_mouth) / 2
    axis = across / max(distance, 1e-6)
    down = np.array([-axis[1], axis[0]])
    height = float((mouth - eyes) @ down)
    (mean, deviation), (_, edges) = cv2.meanStdDev(grey), cv2.meanStdDev(cv2.Laplacian(grey, cv2.CV_16S))
    return Quality(
        eye_distance_px=distance,
        sharpness=float(edges[0, 0]),
        brightness=float(mean[0, 0]),
        contrast=float(deviation[0, 0]),
        yaw=float(np.clip(2 * ((nose - eyes) @ axis) / max(distance, 1e-6), -1, 1)),
        pitch=float(np.clip((nose - eyes) @ down / height - FRONTAL_NOSE if height > 1e-6 else 1.0, -1, 1)),
        roll_deg=float(np.degrees(np.arctan2(across[1], across[0]))),
    )
