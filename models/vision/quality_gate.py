"""Quality limits and liveness verdicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from models.vision.quality import Quality

LivenessVerdict = Literal["live", "not_live", "not_judged"]


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
