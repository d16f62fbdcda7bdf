"""Panel of a gallery: a sample of its subjects that recent probes and the gallery's own photos are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np

from models.risk.calibration import Ints
from models.risk.tails import Floats

PANEL_SUBJECTS: Final = 128
MIN_PANEL_SUBJECTS: Final = 30
MIN_PROBES: Final = 40
LEVELS: Final = (0.5, 0.98)


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
