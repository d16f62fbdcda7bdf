"""Generalized Pareto fit of the upper tail of impostor scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SHAPE_PRIOR: Final = 0.1
"""Standard deviation of the normal prior on the shape, with mean 0.

Impostor similarities have a nearly exponential tail. A few dozen exceedances alone would give shapes of +-0.5.
"""
MAX_SHAPE: Final = 0.5
MIN_ABS_SHAPE: Final = 1e-5
"""Shapes nearer to zero are taken as the exponential distribution."""
SCALE_RANGE: Final = 3.0
"""Half width of the searched scales, in natural logarithms around the mean excess."""
BISECTIONS: Final = 40
SHAPE_TOLERANCE: Final = 1e-5


@dataclass(frozen=True)
class Tail:
    """Generalized Pareto fit of impostor scores above ``start`` (J. Pickands, 1975).

    P(score >= t) = share * (1 + shape * (t - start) / scale)^(-1 / shape) for t >= start, exponential for shape 0.
    ``share`` is the fraction of impostor pairs at or above ``start``.
    """

    start: float
    share: float
    shape: float
    scale: float

    def exceedances(self, t: Floats) -> Floats:
        """Return P(score >= t) for each t; ``share`` for t below ``start``."""
        x = np.maximum(0.0, t - self.start) / self.scale
        if abs(self.shape) < 1e-9:
            return np.asarray(self.share * np.exp(-x))
        # A tail with negative shape ends: beyond its end point the probability is 0.
        with np.errstate(divide="ignore"):
            left = -np.log(np.maximum(0.0, 1 + self.shape * x)) / self.shape
        return np.asarray(self.share * np.exp(np.where(1 + self.shape * x > 0, left, -np.inf)))


def fit_tail(excesses: Floats, weights: Floats, start: float, share: float, min_shape: float = 0.0) -> Tail:
    """Fit a tail by maximum a posteriori estimation with a normal prior on the shape.

    The default excludes negative shapes: they claim that no impostor scores above an end point, which finite data
    cannot show (docs/decisions/0016).

    Args:
        excesses: (n,) scores minus ``start``, all positive.
        weights: (n,) counts of the excesses.
        start: beginning of the tail.
        share: fraction of pairs at or above ``start``.
        min_shape: lower bound of the shape.

    Raises:
        ValueError: the sum of the weights is not positive.
    """
    total = float(weights.sum())
    if total <= 0:
        raise ValueError("no scores above the start of the tail")
    mean, largest = float(weights @ excesses) / total, float(excesses.max())

    def best_scale(shape: float) -> float:
        """Return the most probable scale for a shape: the root of the derivative, which decreases in the scale."""
        # A negative shape ends at -scale / shape, which must lie beyond the largest excess.
        low = max(mean * math.exp(-SCALE_RANGE), -shape * largest * (1 + 1e-6))
        high = max(mean * math.exp(SCALE_RANGE), 2 * low)
        for _ in range(BISECTIONS):
            scale = math.sqrt(low * high)
            relative = excesses / scale
            if (1 + shape) * float(weights @ (relative / (1 + shape * relative))) > total:
                low = scale
            else:
                high = scale
        return math.sqrt(low * high)

    def negative_log_posterior(shape: float) -> float:
        scale, prior = best_scale(shape), 0.5 * (shape / SHAPE_PRIOR) ** 2
        if abs(shape) < MIN_ABS_SHAPE:
            return total * math.log(scale) + total * mean / scale + prior
        logs = np.log1p(shape * excesses / scale)
        return total * math.log(scale) + (1 + 1 / shape) * float(weights @ logs) + prior

    shape = _golden_section(negative_log_posterior, min_shape, MAX_SHAPE)
    return Tail(start, share, 0.0 if abs(shape) < MIN_ABS_SHAPE else shape, best_scale(shape))


def _golden_section(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the minimum of a unimodal function in an interval, to ``SHAPE_TOLERANCE`` (J. Kiefer, 1953)."""
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = function(left), function(right)
    while high - low > SHAPE_TOLERANCE:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = function(right)
    return (low + high) / 2
