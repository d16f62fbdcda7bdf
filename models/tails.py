"""The upper tail of impostor scores as a generalised Pareto distribution. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SHAPE_PRIOR: Final = 0.1
"""Standard deviation about 0 that a fit expects of the shape. Face similarities of strangers have a nearly exponential
tail; a few dozen exceedances alone would give shapes of half a unit either way."""
LARGEST_SHAPE: Final = 0.5


@dataclass(frozen=True)
class Tail:
    """A generalised Pareto fit of the impostor scores above ``start`` (J. Pickands, 1975).

    P(score >= t) = share * (1 + shape * (t - start) / scale)^(-1 / shape) for t >= start, and an exponential where
    shape is 0. ``share`` is the fraction of impostor pairs at or above ``start``.
    """

    start: float
    share: float
    shape: float
    scale: float

    def exceedance(self, t: float) -> float:
        return float(self.exceedances(np.array([t]))[0])

    def exceedances(self, t: Floats) -> Floats:
        """P(score >= t) for each t; ``share`` below ``start``."""
        x = np.maximum(0.0, t - self.start) / self.scale
        if abs(self.shape) < 1e-9:
            return np.asarray(self.share * np.exp(-x))
        # A negative shape has an end point, beyond which the fit knows of no impostor at all.
        with np.errstate(divide="ignore"):
            left = -np.log(np.maximum(0.0, 1 + self.shape * x)) / self.shape
        return np.asarray(self.share * np.exp(np.where(1 + self.shape * x > 0, left, -np.inf)))


def fit_tail(excesses: Floats, weights: Floats, start: float, share: float, least_shape: float = 0.0) -> Tail:
    """The most probable tail of scores ``start`` + ``excesses`` (all > 0), each counted ``weights`` times.

    Maximum likelihood with a normal prior on the shape, which is not taken below 0: a negative shape ends, and beyond
    its end promises that no stranger ever comes, which no finite evidence can (docs/decisions/0005).

    Raises:
        ValueError: there is no excess.
    """
    total = float(weights.sum())
    if total <= 0:
        raise ValueError("a tail needs scores beyond its start")
    from scipy import optimize  # 30 MB, which a service that fits nothing need not hold

    mean = float(weights @ excesses) / total

    def unlikelihood(parameters: Floats) -> float:
        shape, scale = float(parameters[0]), math.exp(float(parameters[1]))
        prior = 0.5 * (shape / SHAPE_PRIOR) ** 2
        if abs(shape) < 1e-6:
            return total * math.log(scale) + float(weights @ excesses) / scale + prior
        if 1 + shape * float(excesses.max()) / scale <= 0:
            return math.inf
        logs = np.log1p(shape * excesses / scale)
        return total * math.log(scale) + (1 + 1 / shape) * float(weights @ logs) + prior

    found = optimize.minimize(
        unlikelihood,
        np.array([0.02, math.log(mean)]),
        method="Nelder-Mead",
        bounds=[(least_shape, LARGEST_SHAPE), (math.log(mean) - 3, math.log(mean) + 3)],
    )
    shape, scale = float(found.x[0]), math.exp(float(found.x[1]))
    return Tail(start, share, 0.0 if abs(shape) < 1e-6 else shape, scale)
