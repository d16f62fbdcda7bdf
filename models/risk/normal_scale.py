"""False match rate as a normal tail on a Box-Cox scale of 1 - cosine (G. Box and D. Cox, 1964).

Similarities of different people cannot pass 1. Raw similarities near 1 therefore have a tail that falls faster and
faster, which no generalized Pareto tail follows. On the scale u(t) = (1 - (1 - t)^L) / L, scores of different people
are nearly normal, with L between 0 and 1.5 by recognizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

from models.risk.calibration import EDGES, MIN_RATE, MIN_SUPPORT, Floats, FmrCurve, count_at_or_above

LEVELS: Final = (0.1, 0.05, 0.02, 0.01, 5e-3, 2e-3, 1e-3, 5e-4, 2e-4, 1e-4, 5e-5, 2e-5, 1e-5)
"""Shares of pairs above the quantiles that choose the scale.

None is near the median: scores of different people are mixed of more and less similar groups, so that the middle and
the tail of one distribution have different powers (docs/decisions.md, 16).
"""
UPPER_LEVEL: Final = 0.02
POWERS: Final = np.linspace(-0.5, 2.0, 251)
POWER_PRIOR_STD: Final = 0.25
MIN_PROBIT_STD: Final = 0.02
PROBIT_STD: Final = 0.03
PROBIT_STD_PEOPLE: Final = 174
"""Standard deviation of a quantile's probit from the straight line: PROBIT_STD for PROBIT_STD_PEOPLE people."""
MIN_LEVEL_PAIRS: Final = 5.0
"""Pairs of a gallery above a quantile that make it known."""
MIN_PACK_PAIRS: Final = 50.0
"""The same of a pack, whose power is the prior of all galleries."""
MIN_LEVELS: Final = 4
PLACE_PRIOR_STD: Final = 0.5
"""Prior standard deviation of a gallery's mean from the pack's, in the pack's standard deviations."""
WIDTH_PRIOR_STD: Final = 0.1
"""Prior standard deviation of the logarithm of a gallery's width over the pack's."""
MIN_LOG_WIDTH: Final = math.log(0.6)
"""Bound for vectors that are not faces and hardly differ."""
MAX_LOG_WIDTH: Final = math.log(2.5)
TAIL_PAIRS: Final = 200
"""Independent pairs in the fitted tail; scores below it count as one class."""
TAIL_SHARES: Final = (0.003, 0.1)
"""Smallest and largest share of pairs in the fitted tail."""
DEPENDENCE_LEVEL: Final = 0.01
"""Share of pairs at which their dependence is measured."""
PRIOR_PEOPLE: Final = 2
"""Weight, in people, of the prior of the variance between people."""
MIN_INDEPENDENT_SHARE: Final = 0.02
SMALLEST_GAP: Final = 1e-6
"""Lower bound of 1 - cosine."""
MAX_VARIANCE: Final = 4.0
"""Largest variance of the logarithm of a rate that raises its expectation."""
NEWTON_STEPS: Final = 30
NORMAL: Final = NormalDist()
_UPPER_Z: Final = -NORMAL.inv_cdf(UPPER_LEVEL)


@dataclass(frozen=True, eq=False)
class ScorePrior:
    """Prior of a pack for the scores of its galleries: (2001,) FMR at EDGES, and the power of its scale."""

    rates: Floats
    power: float

    @classmethod
    def of(cls, rates: Floats, pairs: int) -> ScorePrior:
        """Return the prior from the rates of templates, of which ``pairs`` were seen."""
        known = [level for level in LEVELS if level * pairs >= MIN_PACK_PAIRS]
        power, _ = _choose_power(
            rates, known if len(known) >= MIN_LEVELS else LEVELS[:MIN_LEVELS], MIN_PROBIT_STD, None
        )
        return cls(rates, power)

    def similarity_at(self, rate: float) -> float:
        """Return the similarity that a share ``rate`` of strangers reaches."""
        return _quantile(self.rates, rate)


@dataclass(frozen=True, eq=False)
class NormalFit:
    """Fitted curve, and the share of its place and width that the scores, not the prior, determine."""

    curve: FmrCurve
    own_share: float


def fit_normal(
    counts: Floats, variance: Floats, people: int, prior: ScorePrior | None, intervals: bool = True
) -> NormalFit:
    """Fit the FMR curve of a gallery.

    Args:
        counts: (2000,) weighted numbers of pairs of different people by score.
        variance: (2001,) variances of the shares of pairs at or above EDGES.
        people: number of people behind the pairs.
        prior: the pack's scores; None uses the gallery's own quantiles.
        intervals: include the uncertainty of the power, which takes two more fits.
    """
    total = float(counts.sum())
    above = count_at_or_above(counts)
    shares = above / total
    independent = _independent_share(shares, variance, total, people)
    known = [level for level in LEVELS if level * total >= MIN_LEVEL_PAIRS]
    usual = unknown_power(shares) if prior is None else prior.power
    power, power_std = usual, POWER_PRIOR_STD
    if len(known) >= MIN_LEVELS:
        power, power_std = _choose_power(shares, known, _probit_std(people), usual)
    places = shares if prior is None else prior.rates

    def fit(at: float) -> tuple[Floats, Floats, float]:
        return _fit_tail(_standard_scale(places, at), counts, shares, independent * total, prior is not None)

    logs, variances, own_share = fit(power)
    if intervals:
        low, high = (fit(float(np.clip(power + std, POWERS[0], POWERS[-1])))[0] for std in (-power_std, power_std))
        variances = variances + ((high - low) / 2) ** 2
    supported = np.flatnonzero(above >= MIN_SUPPORT)
    last = float(EDGES[supported[-1]]) if len(supported) else -1.0
    # The expected rate, not the most probable one: an error of the fit upwards outweighs one downwards.
    expected = np.exp(np.minimum(0.0, logs + np.minimum(variances, MAX_VARIANCE) / 2))
    return NormalFit(FmrCurve(expected, variances, last, np.exp(logs)), own_share)


def unknown_power(shares: Floats) -> float:
    """Return the usual power of recognizers whose different people have such a median similarity."""
    return float(np.clip(1.5 - 2.5 * (_quantile(shares, 0.5) - 0.1), 0.25, 1.5))


def _independent_share(shares: Floats, variance: Floats, pairs: float, people: int) -> float:
    """Return the number of independent pairs with the same variance over that of pairs, at DEPENDENCE_LEVEL.

    Few people do not show the variance between people. The prior counts only disjoint pairs as independent.
    """
    at = _quantile(shares, DEPENDENCE_LEVEL)
    p, seen = (float(np.interp(at, EDGES, values)) for values in (shares, variance))
    disjoint = p * (1 - p) * 2 / people
    seen = (people * seen + PRIOR_PEOPLE * disjoint) / (people + PRIOR_PEOPLE)
    if not 0 < p < 1 or seen <= 0:
        return 1.0
    return min(1.0, max(MIN_INDEPENDENT_SHARE, p * (1 - p) / pairs / seen))


def _quantile(shares: Floats, level: float) -> float:
    """Return the similarity at which the non-increasing ``shares`` at EDGES fall to ``level``."""
    return float(np.interp(-level, -shares, EDGES))


def to_scale(similarities: Floats, power: NDArray[np.float64] | float) -> Floats:
    """Return u(t), broadcast over ``similarities`` and ``power``."""
    logs = np.log(np.maximum(1 - similarities, SMALLEST_GAP))
    safe = np.where(np.abs(power) < 1e-9, 1e-9, power)
    return np.asarray(-np.expm1(safe * logs) / safe)


def fit_line(shares: Floats, levels: Sequence[float], people: int, usual: float) -> Floats:
    """Return the (2001,) FMR at EDGES that is normal on the best scale through the quantiles at ``levels``."""
    power, _ = _choose_power(shares, levels, _probit_std(people), usual)
    similarities, probits = _probits(shares, levels)
    u = to_scale(similarities, power)
    slope = float(np.cov(u, probits)[0, 1] / max(float(np.var(u, ddof=1)), 1e-12))
    return np.maximum(survival(probits.mean() + slope * (to_scale(EDGES, power) - u.mean())), MIN_RATE)


def _probit_std(people: int) -> float:
    return max(MIN_PROBIT_STD, PROBIT_STD * math.sqrt(PROBIT_STD_PEOPLE / people))


def _probits(shares: Floats, levels: Sequence[float]) -> tuple[Floats, Floats]:
    """Return the similarities at which ``shares`` fall to ``levels``, and their normal quantiles."""
    return np.interp(-np.array(levels), -shares, EDGES), np.array([-NORMAL.inv_cdf(level) for level in levels])


def _choose_power(
    shares: Floats, levels: Sequence[float], probit_std: float, usual: float | None
) -> tuple[float, float]:
    """Return the power on whose scale the quantiles at ``levels`` are most normal, and its standard deviation."""
    similarities, probits = _probits(shares, levels)
    u = to_scale(similarities[None], POWERS[:, None])
    x, y = u - u.mean(1, keepdims=True), probits - probits.mean()
    spread = (x**2).sum(1)
    residuals = (y**2).sum() - np.where(spread > 0, (x @ y) ** 2 / np.maximum(spread, 1e-300), 0.0)
    loss = residuals / (2 * probit_std**2)
    if usual is not None:
        loss = loss + (POWERS - usual) ** 2 / (2 * POWER_PRIOR_STD**2)
    best = int(loss.argmin())
    weights = np.exp(loss[best] - loss)
    return float(POWERS[best]), float(np.sqrt(np.average((POWERS - POWERS[best]) ** 2, weights=weights)))


def _standard_scale(shares: Floats, power: float) -> Floats:
    """Return z at EDGES: 0 at the median of ``shares``, the normal quantile at UPPER_LEVEL."""
    u = to_scale(EDGES, power)
    at = np.array([_quantile(shares, level) for level in (0.5, UPPER_LEVEL)])
    middle, upper = to_scale(at, power).tolist()
    return np.asarray((u - middle) * _UPPER_Z / max(upper - middle, 1e-6))


def _fit_tail(
    z: Floats, counts: Floats, shares: Floats, independent_pairs: float, placed: bool
) -> tuple[Floats, Floats, float]:
    """Fit place and width of the normal tail to the scores, censored below the tail.

    Args:
        z: (2001,) scale at EDGES.
        placed: a pack gives the place of the scale, with a prior.

    Returns:
        (2001,) logarithms of FMR at EDGES, their variances, and the share of the estimate that the prior did not give.
    """
    level = float(np.clip(TAIL_PAIRS / independent_pairs, *TAIL_SHARES))
    row = int(np.searchsorted(-shares, -level, "right")) - 1
    row = min(max(row, 1), len(EDGES) - 2)
    filled = row + np.flatnonzero(counts[row:])
    weight = independent_pairs / float(counts.sum())
    below, tail = weight * float(counts[:row].sum()), weight * counts[filled]

    def loss(m: float, log_width: float) -> float:
        width = math.exp(log_width)
        edges = (np.concatenate([z[filled], z[filled + 1]]) - m) / width
        upper = survival(edges)
        between = np.maximum(upper[: len(filled)] - upper[len(filled) :], MIN_RATE)
        under = max(_survival_at(-(z[row] - m) / width), MIN_RATE)
        value = -below * math.log(under) - float(tail @ np.log(between))
        value += (log_width / WIDTH_PRIOR_STD) ** 2 / 2
        return value + ((m / PLACE_PRIOR_STD) ** 2 / 2 if placed else 0.0)

    (m, log_width), covariance = _minimize(loss)
    x = (z - m) / math.exp(log_width)
    rates = np.maximum(survival(x), MIN_RATE)
    hazard = np.where(rates > MIN_RATE, np.exp(-0.5 * np.minimum(x**2, 1400)) / math.sqrt(2 * math.pi) / rates, x)
    gradient = np.stack([hazard / math.exp(log_width), hazard * x])
    variances = np.einsum("in,ij,jn->n", gradient, covariance, gradient)
    priors = np.array([PLACE_PRIOR_STD if placed else np.inf, WIDTH_PRIOR_STD]) ** 2
    own_share = 1 - float(np.clip(np.diag(covariance) / priors, 0, 1).mean())
    return np.log(rates), np.maximum(variances, 0.0), own_share


def survival(x: Floats) -> Floats:
    """Return the standard normal P(X >= x)."""
    return np.array([0.5 * math.erfc(v) for v in (x * math.sqrt(0.5)).tolist()])


def _survival_at(x: float) -> float:
    return 0.5 * math.erfc(x * math.sqrt(0.5))


def _minimize(loss: Callable[[float, float], float]) -> tuple[tuple[float, float], Floats]:
    """Minimize over place and log width by damped Newton steps; return the minimum and the inverse Hessian."""
    h, at, value = 1e-3, np.zeros(2), loss(0.0, 0.0)
    hessian = np.eye(2)
    for _ in range(NEWTON_STEPS):
        ahead, behind = ([loss(*(at + sign * h * step)) for step in np.eye(2)] for sign in (1, -1))
        crossed = loss(*(at + h)) + loss(*(at - h))
        gradient = (np.array(ahead) - behind) / (2 * h)
        diagonal = (np.array(ahead) + behind - 2 * value) / h**2
        across = (crossed - sum(ahead) - sum(behind) + 2 * value) / (2 * h**2)
        hessian = np.array([[diagonal[0], across], [across, diagonal[1]]])
        curvatures, axes = np.linalg.eigh(hessian)
        hessian = axes * np.maximum(np.abs(curvatures), 1e-3) @ axes.T  # a step of Newton must descend
        step = np.linalg.solve(hessian, -gradient)
        step /= max(1.0, 2 * float(np.abs(step).max()))
        for _ in range(20):
            new = at + step
            new[1] = min(max(new[1], MIN_LOG_WIDTH), MAX_LOG_WIDTH)
            if (found := loss(*new)) <= value:
                break
            step = step / 2
        else:
            break
        moved, at, value = float(np.abs(new - at).max()), new, found
        if moved < 1e-5:
            break
    return (float(at[0]), float(at[1])), np.asarray(np.linalg.inv(hessian), np.float64)
