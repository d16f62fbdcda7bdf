"""False match rates of scores alone, as a normal tail on a Box-Cox scale of 1 - cosine (G. Box and D. Cox, 1964).

Similarities of different people cannot pass 1. Raw similarities near 1 therefore have a tail that falls faster and
faster, which no generalized Pareto tail follows. On the scale u(t) = (1 - (1 - t)^L) / L, scores of different people
are nearly normal, with L between 0 and 1.5 by recognizer. It serves where no labeled pairs give the scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from models.risk.calibration import EDGES, MIN_RATE, NORMAL, Floats, survival

LEVELS: Final = (0.1, 0.05, 0.02, 0.01, 5e-3, 2e-3, 1e-3, 5e-4, 2e-4, 1e-4, 5e-5, 2e-5, 1e-5)
"""Shares of pairs above the quantiles that choose the scale.

None is near the median: scores of different people are mixed of more and less similar groups, so that the middle and
the tail of one distribution have different powers (docs/decisions.md, 16).
"""
POWERS: Final = np.linspace(-0.5, 2.0, 251)
POWER_PRIOR_STD: Final = 0.25
MIN_PROBIT_STD: Final = 0.02
PROBIT_STD: Final = 0.03
PROBIT_STD_PEOPLE: Final = 174
"""Standard deviation of a quantile's probit from the straight line: PROBIT_STD for PROBIT_STD_PEOPLE people."""
MIN_LEVEL_PAIRS: Final = 5.0
"""Pairs of a gallery above a quantile that make it known."""
SMALLEST_GAP: Final = 1e-6
"""Lower bound of 1 - cosine."""


def rates_of(shares: Floats, pairs: float, people: int) -> Floats:
    """Return the (2001,) FMR at EDGES of a gallery without a pack, from the shares of its pairs at or above EDGES."""
    known = [level for level in LEVELS if level * pairs >= MIN_LEVEL_PAIRS]
    return fit_line(shares, known if len(known) > 2 else LEVELS[:3], people, unknown_power(shares))


def fit_line(shares: Floats, levels: Sequence[float], people: int, usual: float) -> Floats:
    """Return the (2001,) FMR at EDGES that is normal on the best scale through the quantiles at ``levels``."""
    probit_std = max(MIN_PROBIT_STD, PROBIT_STD * math.sqrt(PROBIT_STD_PEOPLE / people))
    power = _choose_power(shares, levels, probit_std, usual)
    similarities, probits = _probits(shares, levels)
    u = to_scale(similarities, power)
    slope = float(np.cov(u, probits)[0, 1] / max(float(np.var(u, ddof=1)), 1e-12))
    return np.maximum(survival(probits.mean() + slope * (to_scale(EDGES, power) - u.mean())), MIN_RATE)


def unknown_power(shares: Floats) -> float:
    """Return the usual power of recognizers whose different people have such a median similarity."""
    return float(np.clip(1.5 - 2.5 * (float(np.interp(-0.5, -shares, EDGES)) - 0.1), 0.25, 1.5))


def to_scale(similarities: Floats, power: NDArray[np.float64] | float) -> Floats:
    """Return u(t), broadcast over ``similarities`` and ``power``."""
    logs = np.log(np.maximum(1 - similarities, SMALLEST_GAP))
    safe = np.where(np.abs(power) < 1e-9, 1e-9, power)
    return np.asarray(-np.expm1(safe * logs) / safe)


def _choose_power(shares: Floats, levels: Sequence[float], probit_std: float, usual: float) -> float:
    """Return the power on whose scale the quantiles at ``levels`` are most normal."""
    similarities, probits = _probits(shares, levels)
    u = to_scale(similarities[None], POWERS[:, None])
    x, y = u - u.mean(1, keepdims=True), probits - probits.mean()
    spread = (x**2).sum(1)
    residuals = (y**2).sum() - np.where(spread > 0, (x @ y) ** 2 / np.maximum(spread, 1e-300), 0.0)
    loss = residuals / (2 * probit_std**2) + (POWERS - usual) ** 2 / (2 * POWER_PRIOR_STD**2)
    return float(POWERS[loss.argmin()])


def _probits(shares: Floats, levels: Sequence[float]) -> tuple[Floats, Floats]:
    """Return the similarities at which ``shares`` fall to ``levels``, and their normal quantiles."""
    return np.interp(-np.array(levels), -shares, EDGES), np.array([-NORMAL.inv_cdf(level) for level in levels])
