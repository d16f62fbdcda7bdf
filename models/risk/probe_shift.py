"""Thresholds for recent probes that are more similar to strangers than the gallery's own photos are.

Each probe is compared with a panel, a sample of the gallery's subjects. The panel's most similar subject may be the
probe's own, so it is left out. The median and an upper quantile of the other similarities are compared with those of
the gallery's own photos. On the scale of :mod:`models.risk.normal_scale`, the line through both quantiles maps
thresholds. They only rise. Lower ones would let in strangers whose similarities vary more than those of the panel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np

from models.risk.calibration import Floats, Ints
from models.risk.normal_scale import from_scale, to_scale

PANEL_SUBJECTS: Final = 128
MIN_PANEL_SUBJECTS: Final = 30
MIN_PROBES: Final = 40
LEVELS: Final = (0.5, 0.98)
CERTAIN_Z: Final = 3.0
"""Standard errors that are subtracted from the difference, so that probes like the gallery change nothing."""
SLOPES: Final = (0.5, 2.0)
MIN_SPREAD: Final = 1e-6


@dataclass(frozen=True)
class RowLevels:
    """Means of :func:`row_levels` over probes, and their standard errors."""

    means: tuple[float, float]
    errors: tuple[float, float]

    @classmethod
    def of(cls, levels: Floats) -> Self:
        """Summarize the (n, 2) levels of independent probes."""
        lower, upper = levels.mean(0).tolist()
        errors = (levels.std(0) / np.sqrt(len(levels))).tolist()
        return cls((lower, upper), (errors[0], errors[1]))


@dataclass(frozen=True, eq=False)
class Panel:
    """Ascending keys of the sampled subjects, and the levels of the gallery's own photos among the other subjects."""

    subjects: Ints
    levels: RowLevels

    def document(self) -> dict[str, Any]:
        """Return a JSON document."""
        return {"subjects": self.subjects.tolist(), "means": self.levels.means, "errors": self.levels.errors}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Parse the result of :meth:`document`."""
        (lower, upper), (lower_error, upper_error) = document["means"], document["errors"]
        levels = RowLevels((float(lower), float(upper)), (float(lower_error), float(upper_error)))
        return cls(np.asarray(document["subjects"], np.int64), levels)


def row_levels(similarities: Floats) -> Floats:
    """Return the (q, 2) quantiles at LEVELS of (q, p) similarities, without the largest of each row."""
    return np.asarray(np.quantile(np.sort(similarities, axis=1)[:, :-1], LEVELS, axis=1).T, np.float64)


@dataclass(frozen=True)
class ProbeShift:
    """Increasing map of scores, from photos like the gallery's to those like the recent probes.

    It raises a score at most halfway to 1, and never lowers it.

    Args:
        power: power of the gallery's scale.
        gallery, probes: upper level of each, on the scale.
        slope: slope of the line.
    """

    power: float
    gallery: float
    probes: float
    slope: float

    @classmethod
    def between(cls, power: float, gallery: RowLevels, probes: RowLevels) -> Self | None:
        """Return the map for the difference that chance does not explain; None if there is none."""
        own, found = np.array(gallery.means), np.array(probes.means)
        chance = CERTAIN_Z * np.hypot(gallery.errors, probes.errors)
        certain = np.sign(found - own) * np.maximum(0.0, np.abs(found - own) - chance)
        if not certain.any():
            return None
        before, after = to_scale(own, power), to_scale(np.minimum(own + certain, 1.0), power)
        slope = float(np.clip(np.diff(after) / max(float(np.diff(before)[0]), MIN_SPREAD), *SLOPES)[0])
        return cls(power, float(before[1]), float(after[1]), slope)

    def raised(self, score: float) -> float:
        """Return the score that is as rare among the recent probes, at least ``score``."""
        if score >= 1:
            return score
        u = self.probes + self.slope * (float(to_scale(np.array(score), self.power)) - self.gallery)
        return max(score, min(float(from_scale(np.array(u), self.power)), (1 + score) / 2))

    def original(self, scores: Floats) -> Floats:
        """Return the inverse of :meth:`raised`."""
        u = self.gallery + (to_scale(scores, self.power) - self.probes) / self.slope
        return np.asarray(np.minimum(scores, np.maximum(from_scale(u, self.power), 2 * scores - 1)))
