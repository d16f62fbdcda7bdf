"""Conversion between similarity thresholds and error rates (terms of ISO/IEC 19795-1).

- FMR(t): share of comparisons of different people with similarity >= t.
- FNMR(t): share of same-person comparisons with similarity < t.
- FPIR(N, t): share of non-mated searches of N subjects that return a candidate with similarity >= t. It is
  1 - (1 - FMR(t))^N for independent comparisons. On LFW this nearly holds with the FMR of the gallery itself, which
  :mod:`models.risk.gallery_risk` estimates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from statistics import NormalDist
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from models.errors import PackError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
BIN_WIDTH: Final = 0.001
BIN_COUNT: Final = 2000
"""Number of histogram bins over [-1, 1]; bin i begins at -1 + i * BIN_WIDTH."""
EDGES: Final = np.linspace(-1.0, 1.0, BIN_COUNT + 1)
UNREACHABLE_SIMILARITY: Final = 1.01
"""Threshold above every cosine similarity, rounding included."""
MIN_SUPPORT: Final = 30
"""Minimum pairs above a threshold; with fewer pairs its rate is marked as extrapolated."""
CONFIDENCE_Z: Final = 1.96
"""Normal quantile of 95 % confidence intervals."""
THRESHOLD_CACHE_SIZE: Final = 64
MIN_RATE: Final = 1e-300
"""Lower bound of rates, so that their logarithms are finite."""
SMALLEST_TAIL: Final = 1e-15
"""Distance of a rate from 1, so that its normal quantile is finite."""
NORMAL: Final = NormalDist()
KNOTS: Final = np.linspace(-3.0, 6.0, 19)
"""Normal quantiles where the scale of a curve takes its rates."""
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
class Estimate:
    """Error rate, or threshold in the scores of its curve, with its 95 % interval.

    ``extrapolated``: too few pairs support the rate by counting.
    """

    value: float
    low: float
    high: float
    extrapolated: bool = False


class FmrCurve:
    """Non-increasing FMR(t), given at EDGES and interpolated exponentially.

    Args:
        rates: (2001,) FMR at EDGES.
        variances: (2001,) variances of the natural logarithms of ``rates``.
        last_counted: largest similarity whose rate is counted, not extrapolated.
    """

    def __init__(self, rates: Floats, variances: Floats, last_counted: float) -> None:
        self.rates = np.minimum.accumulate(np.clip(rates, MIN_RATE, 1.0))
        self.variances = np.maximum(variances, 0.0)
        self.last_counted = last_counted
        spread = CONFIDENCE_Z * np.sqrt(self.variances)
        self._logs = np.log(self.rates)
        # For a non-increasing curve, each bound can be tightened by the bounds at other similarities.
        self._low_logs = np.maximum.accumulate((self._logs - spread)[::-1])[::-1]
        self._high_logs = np.minimum(0.0, np.minimum.accumulate(self._logs + spread))
        self._thresholds = lru_cache(THRESHOLD_CACHE_SIZE)(self._threshold_at_fmr)

    @cached_property
    def scale(self) -> Floats:
        """(2001,) normal quantiles of 1 - FMR at EDGES: lines between KNOTS, so that no count's noise is in them.

        The first and the last line go on to the ends, the last from the last knot with counted rates.
        """
        counted = max(float(np.interp(self.last_counted, EDGES, self.rates)), float(survival(KNOTS[-1:])[0]))
        knots = KNOTS[max(-NORMAL.inv_cdf(min(counted, 0.5)), 0.0) >= KNOTS]
        at = np.interp(-survival(knots), -self.rates, EDGES)
        slopes = np.diff(knots) / np.maximum(np.diff(at), BIN_WIDTH)
        inside = np.interp(EDGES, at, knots)
        low, high = np.minimum(EDGES - at[0], 0.0), np.maximum(EDGES - at[-1], 0.0)
        return np.asarray(inside + slopes[0] * low + slopes[-1] * high)

    def fmr(self, t: float) -> Estimate:
        """Return FMR(t), non-increasing in t: counted if at least MIN_SUPPORT pairs are above t, else extrapolated."""
        return Estimate(_at(self._logs, t), _at(self._low_logs, t), _at(self._high_logs, t), t > self.last_counted)

    def threshold_at_fmr(self, rate: float) -> Estimate:
        """Return the smallest similarity with an FMR of at most ``rate``, in (0, 1].

        The result is UNREACHABLE_SIMILARITY if the FMR of identical vectors already exceeds ``rate``.
        """
        return self._thresholds(rate)

    def _threshold_at_fmr(self, rate: float) -> Estimate:
        similarity, low, high = (_invert(logs, rate) for logs in (self._logs, self._low_logs, self._high_logs))
        return Estimate(similarity, low, high, similarity > self.last_counted)


def _at(logs: Floats, t: float) -> float:
    """Return the rate at similarity ``t``."""
    return float(np.exp(np.interp(t, EDGES, logs)))


def _invert(logs: Floats, rate: float) -> float:
    """Return the smallest t with a rate of at most ``rate`` as computed by :func:`_at`."""
    if _at(logs, 1.0) > rate:
        return UNREACHABLE_SIMILARITY
    target = math.log(rate)
    row = int(np.searchsorted(-logs, -target))
    if row == 0:
        return -1.0
    if row == len(logs):  # only by rounding of the logarithm
        return 1.0
    before, after = float(logs[row - 1]), float(logs[row])
    t = float(EDGES[row - 1] + (before - target) / (before - after) * (EDGES[row] - EDGES[row - 1]))
    step = math.ulp(1.0)
    while _at(logs, t) > rate:  # rounding errors, which flat curves amplify
        t, step = t + step, 2 * step
    return min(t, 1.0)


@dataclass(frozen=True)
class GenuineMoments:
    """Mean and standard deviation of the same-person similarities at or above a threshold."""

    mean: float
    deviation: float


class Calibration:
    """Error rates of a recognizer, from histograms of impostor and genuine pairs and a fitted tail.

    Args:
        impostor: (2000,) counts of different-person similarities.
        genuine: (2000,) counts of same-person similarities.
        tail: fit of the largest impostor scores.
        variances: (2001,) variances of log FMR at EDGES, for independent people. None assumes independent pairs, which
            makes the intervals too narrow.

    Raises:
        ValueError: a histogram has another shape, a negative count or no pairs.
    """

    def __init__(self, impostor: Ints, genuine: Ints, tail: Tail, variances: Floats | None = None) -> None:
        for name, counts in (("impostor", impostor), ("genuine", genuine)):
            if counts.shape != (BIN_COUNT,) or (counts < 0).any() or not counts.sum():
                raise ValueError(f"{name} needs {BIN_COUNT} counts, none negative, not all zero")
        self.impostor_pairs = int(impostor.sum())
        self.genuine_pairs = int(genuine.sum())
        self.genuine = genuine
        self._genuine_above = count_at_or_above(genuine)
        self.mean_genuine = max(0.0, float(np.average(EDGES[:-1] + BIN_WIDTH / 2, weights=genuine)))
        """Mean similarity of two photos of a person, at least 0."""
        self.curve = _join_counts_and_tail(count_at_or_above(impostor), tail, variances)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Calibration:
        """Parse calibration.json.

        Raises:
            PackError: a field is missing or invalid.
        """
        try:
            histograms = {name: np.asarray(document["histograms"][name], np.int64) for name in ("impostor", "genuine")}
            tail = Tail(**{name: float(document["tail"][name]) for name in ("start", "share", "shape", "scale")})
            if not (0 < tail.share <= 1 and tail.scale > 0):
                raise ValueError("tail.share must be in (0, 1] and tail.scale positive")
            variances = None
            if "variances" in document:
                at, known = (np.asarray(column, np.float64) for column in document["variances"])
                variances = np.asarray(np.interp(EDGES, at, known))
            return cls(histograms["impostor"], histograms["genuine"], tail, variances)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise PackError("calibration", f"{error}") from error

    def fnmr(self, t: float) -> float:
        """Return FNMR(t) by counting."""
        return 1.0 - float(np.interp(t, EDGES, self._genuine_above)) / self.genuine_pairs

    def genuine_at_or_above(self, t: float) -> GenuineMoments | None:
        """Return statistics of genuine similarities of at least ``t``; None for fewer than MIN_SUPPORT pairs."""
        row = max(0, math.ceil((min(t, 1.0) + 1) / BIN_WIDTH - 1e-6))
        counts = -np.diff(self._genuine_above[row:])
        if counts.sum() < MIN_SUPPORT:
            return None
        centers = -1 + BIN_WIDTH * (np.arange(row, BIN_COUNT) + 0.5)
        mean = float(np.average(centers, weights=counts))
        return GenuineMoments(mean, float(np.average((centers - mean) ** 2, weights=counts)) ** 0.5)

    def threshold_at_fnmr(self, rate: float) -> float:
        """Return the largest similarity with an FNMR of at most ``rate``, in (0, 1)."""
        return _bisect(lambda t: self.fnmr(t) <= rate)[0]

    def equal_error_threshold(self) -> float:
        """Return the similarity at which FMR and FNMR are equal."""
        return _bisect(lambda t: self.curve.fmr(t).value > self.fnmr(t))[1]


def _bisect(is_below: Callable[[float], bool]) -> tuple[float, float]:
    """Return an interval around the similarity where ``is_below`` turns false."""
    low, high = -1.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return low, high


def _join_counts_and_tail(pairs_above: Floats, tail: Tail, variances: Floats | None) -> FmrCurve:
    """Return counted rates up to the last edge with MIN_SUPPORT pairs, and the tail, scaled to meet them, beyond."""
    total = pairs_above[0]
    rows = np.flatnonzero(pairs_above >= MIN_SUPPORT)
    row = int(rows[-1]) if len(rows) else 0
    fitted = tail.exceedances(EDGES)
    ratio = np.minimum(1.0, fitted / fitted[row]) if fitted[row] > 0 else np.zeros(len(EDGES))
    rates = np.where(np.arange(len(EDGES)) <= row, pairs_above, pairs_above[row] * ratio) / total
    if variances is None:
        variances = 1 / np.maximum(pairs_above, MIN_SUPPORT)
    exceeding = 1 / max(float(variances[row]), 1e-12)
    beyond = variances[row] + tail_variance(EDGES, EDGES[row], tail.scale, exceeding)
    return FmrCurve(rates, np.where(np.arange(len(EDGES)) <= row, variances, beyond), float(EDGES[row]))


def tail_variance(t: Floats, start: float, scale: float, exceeding: float) -> Floats:
    """Return the variance of the logarithm of an extrapolated rate that stems from the fitted scale and shape.

    Delta method about an exponential tail (R. Smith, 1987): x^2 / k + x^4 / 4 / (k + 100), with x = (t - start) / scale
    and k = ``exceeding`` independent scores above ``start``. The prior on the shape is worth 100 scores.
    """
    x = np.maximum(0.0, t - start) / scale
    return np.asarray(x**2 / exceeding + x**4 / 4 / (exceeding + 100))


def survival(x: Floats) -> Floats:
    """Return the standard normal P(X >= x)."""
    return np.array([0.5 * math.erfc(v) for v in (x * math.sqrt(0.5)).tolist()])


def count_at_or_above(counts: NDArray[Any]) -> Floats:
    """Return the (2001,) counts at or above each of EDGES."""
    return np.concatenate([np.asarray(counts, np.float64)[::-1].cumsum()[::-1], [0.0]])


def fpir_from_fmr(fmr: float, subjects: int) -> float:
    """Return 1 - (1 - FMR)^N for N subjects, exact for tiny rates."""
    if fmr >= 1:
        return 1.0 if subjects else 0.0
    return -math.expm1(subjects * math.log1p(-fmr))


def fmr_for_fpir(fpir: float, subjects: int) -> float:
    """Return 1 - (1 - FPIR)^(1/N), the FMR that gives this FPIR, in (0, 1), over N independent comparisons."""
    return -math.expm1(math.log1p(-fpir) / max(1, subjects))


def mean_growth(templates: NDArray[Any] | float, similarity: float) -> Floats:
    """Return g(n): the similarity to a mean of n templates over that to one of them."""
    n = np.asarray(templates, np.float64)
    return np.asarray(np.sqrt(n / (1 + (n - 1) * similarity)))


def histogram(similarities: NDArray[np.floating]) -> Ints:
    """Count similarities by bin."""
    return np.bincount(bin_indices(similarities).ravel(), minlength=BIN_COUNT).astype(np.int64)


def bin_indices(similarities: NDArray[np.floating]) -> Ints:
    """Return the bin index of each similarity."""
    rows = ((np.asarray(similarities, np.float64) + 1) / BIN_WIDTH).astype(np.int64)
    return np.clip(rows, 0, BIN_COUNT - 1)


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


def fit_tail(excesses: Floats, weights: Floats, start: float, share: float) -> Tail:
    """Fit a tail by maximum a posteriori estimation with a normal prior on the shape.

    Negative shapes are excluded: they claim that no impostor scores above an end point, which finite data cannot show
    (docs/decisions.md, 16).

    Args:
        excesses: (n,) scores minus ``start``, all positive.
        weights: (n,) counts of the excesses.
        start: beginning of the tail.
        share: fraction of pairs at or above ``start``.

    Raises:
        ValueError: the sum of the weights is not positive.
    """
    total = float(weights.sum())
    if total <= 0:
        raise ValueError("no scores above the start of the tail")
    mean = float(weights @ excesses) / total

    def best_scale(shape: float) -> float:
        """Return the most probable scale for a shape: the root of the derivative, which decreases in the scale."""
        low, high = mean * math.exp(-SCALE_RANGE), mean * math.exp(SCALE_RANGE)
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

    shape = _golden_section(negative_log_posterior, 0.0, MAX_SHAPE)
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
