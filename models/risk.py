"""Scores to error rates and back. Pure: no files, no networks.

Terms are ISO/IEC 19795-1's. FMR(t) is the share of comparisons of two different people with similarity >= t; FNMR(t)
the share of same-person comparisons below t; FPIR(N, t) the share of searches by people not enrolled that return
anyone at >= t from N subjects, 1 - (1 - FMR(t))^N if comparisons are independent. On LFW they nearly are, as long as
FMR is that of the gallery itself; how it is found from the pack's and the gallery's own strangers is
:mod:`models.gallery_risk`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from models.errors import PackError
from models.tails import Floats, Tail

Ints = NDArray[np.int64]
BIN_WIDTH: Final = 0.001
BIN_COUNT: Final = 2000
"""Bins of cosine similarity over [-1, 1]; bin i begins at -1 + i * 0.001."""
EDGES: Final = np.linspace(-1.0, 1.0, BIN_COUNT + 1)
UNREACHABLE: Final = 1.01
"""Beyond every cosine, rounding included."""
MIN_SUPPORT: Final = 30
"""Fewer pairs than this above a threshold cannot support its rate: the answer is marked extrapolated."""
CONFIDENCE_Z: Final = 1.96
"""Intervals hold the truth 95 times in 100."""
THRESHOLDS_KEPT: Final = 64
"""Of a curve: as many risks are asked of it at once, at the gallery's present size."""
NO_RATE: Final = 1e-300
"""Stands for an impossible rate where logarithms are taken."""


@dataclass(frozen=True)
class Rate:
    """An error rate with its 95 % interval, and whether it lies beyond what the evidence supports by counting."""

    value: float
    extrapolated: bool
    low: float = math.nan
    high: float = math.nan


@dataclass(frozen=True)
class Threshold:
    """A similarity with its 95 % interval, and whether its error rate lies beyond what counting supports."""

    similarity: float
    extrapolated: bool
    low: float = math.nan
    high: float = math.nan


class FmrCurve:
    """FMR(t) at the edges of all bins, never rising, exponential in between.

    Args:
        rates: (2001,) FMR at EDGES.
        variances: (2001,) of the natural logarithms of ``rates``.
        counted_to: the last similarity whose rate is counted, not extrapolated.
    """

    def __init__(self, rates: Floats, variances: Floats, counted_to: float) -> None:
        self.rates = np.minimum.accumulate(np.clip(rates, NO_RATE, 1.0))
        self.variances = np.maximum(variances, 0.0)
        self.counted_to = counted_to
        spread = CONFIDENCE_Z * np.sqrt(self.variances)
        self._logs = np.log(self.rates)
        # A curve that never rises is nowhere above a bound further left, nor below one further right.
        self._low_logs = np.maximum.accumulate((self._logs - spread)[::-1])[::-1]
        self._high_logs = np.minimum(0.0, np.minimum.accumulate(self._logs + spread))
        self._thresholds = lru_cache(THRESHOLDS_KEPT)(self._threshold_at_fmr)

    def rates_at(self, similarities: Floats) -> Floats:
        """FMR at each of (n,) similarities, as :meth:`fmr` without its interval."""
        return np.asarray(np.exp(np.interp(similarities, EDGES, self._logs)))

    def fmr(self, t: float) -> Rate:
        """FMR(t), monotone in t."""
        return Rate(_at(self._logs, t), t > self.counted_to, _at(self._low_logs, t), _at(self._high_logs, t))

    def threshold_at_fmr(self, rate: float) -> Threshold:
        """The smallest similarity whose FMR is at most ``rate``, in (0, 1]. Where even identical vectors cannot be told
        from strangers at that rate, a similarity that none reaches. Raises ValueError: ``rate`` lies elsewhere."""
        if not 0 < rate <= 1:
            raise ValueError(f"a false match rate lies in (0, 1], not {rate}")
        return self._thresholds(rate)

    def _threshold_at_fmr(self, rate: float) -> Threshold:
        similarity = _where(self._logs, rate)
        extrapolated = similarity > self.counted_to
        return Threshold(similarity, extrapolated, _where(self._low_logs, rate), _where(self._high_logs, rate))


def _at(logs: Floats, t: float) -> float:
    return float(np.exp(np.interp(t, EDGES, logs)))


def _where(logs: Floats, rate: float) -> float:
    """The smallest t with exp(logs(t)) <= rate, by what :func:`_at` gives; ``logs`` never rise."""
    if _at(logs, 1.0) > rate:
        return UNREACHABLE
    wanted = math.log(rate)
    row = int(np.searchsorted(-logs, -wanted))
    if row == 0:
        return -1.0
    if row == len(logs):  # by the logarithm's rounding alone
        return 1.0
    before, after = float(logs[row - 1]), float(logs[row])
    t = float(EDGES[row - 1] + (before - wanted) / (before - after) * (EDGES[row] - EDGES[row - 1]))
    step = math.ulp(1.0)
    while _at(logs, t) > rate:  # by roundings, which a flat curve makes more of
        t, step = t + step, 2 * step
    return min(t, 1.0)


@dataclass(frozen=True)
class Mated:
    """Same-person similarities at or above a threshold: their mean and standard deviation."""

    mean: float
    deviation: float


class Calibration:
    """What a recogniser's scores mean, from histograms of impostor and genuine pairs and a fitted tail.

    Args:
        impostor: (2000,) counts of different-person similarities.
        genuine: (2000,) counts of same-person similarities.
        tail: fit of the largest impostor scores.
        variances: (2001,) of the logarithm of FMR at EDGES, as people, not pairs, are independent; None: unknown, and
            pairs are taken for independent, which makes intervals too narrow.

    Raises:
        ValueError: wrong shape, a negative count, or no pair.
    """

    def __init__(self, impostor: Ints, genuine: Ints, tail: Tail, variances: Floats | None = None) -> None:
        for name, counts in (("impostor", impostor), ("genuine", genuine)):
            if counts.shape != (BIN_COUNT,) or (counts < 0).any() or not counts.sum():
                raise ValueError(f"{name} needs {BIN_COUNT} counts, none negative, not all zero")
        self.tail = tail
        self.impostor_pairs = int(impostor.sum())
        self.genuine_pairs = int(genuine.sum())
        self.genuine = genuine
        self.impostor_above = above(impostor)
        self._genuine_above = above(genuine)
        self.curve = _counted_then_fitted(self.impostor_above, tail, variances)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Calibration:
        """Read calibration.json.

        Raises:
            PackError: a field is missing or malformed; the error names it.
        """
        try:
            histograms = {name: np.asarray(document["histograms"][name], np.int64) for name in ("impostor", "genuine")}
            tail = Tail(**{name: float(document["tail"][name]) for name in ("start", "share", "shape", "scale")})
            if not (0 < tail.share <= 1 and tail.scale > 0):
                raise ValueError("tail.share must lie in (0, 1] and tail.scale be positive")
            variances = None
            if "variances" in document:
                at, known = (np.asarray(column, np.float64) for column in document["variances"])
                variances = np.asarray(np.interp(EDGES, at, known))
            return cls(histograms["impostor"], histograms["genuine"], tail, variances)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise PackError("calibration", f"{error}") from error

    def fmr(self, t: float) -> Rate:
        """FMR(t): counted where at least 30 pairs lie above t, from the fitted tail beyond. Monotone in t."""
        return self.curve.fmr(t)

    def threshold_at_fmr(self, rate: float) -> Threshold:
        """As of :meth:`FmrCurve.threshold_at_fmr`."""
        return self.curve.threshold_at_fmr(rate)

    def fnmr(self, t: float) -> float:
        """FNMR(t), counted."""
        return 1.0 - float(np.interp(t, EDGES, self._genuine_above)) / self.genuine_pairs

    def mated_above(self, t: float) -> Mated | None:
        """What same-person similarities at or above ``t`` are like, to a bin's width; None where fewer than 30 pairs
        are so similar."""
        row = max(0, math.ceil((min(t, 1.0) + 1) / BIN_WIDTH - 1e-6))
        counts = -np.diff(self._genuine_above[row:])
        if counts.sum() < MIN_SUPPORT:
            return None
        centres = -1 + BIN_WIDTH * (np.arange(row, BIN_COUNT) + 0.5)
        mean = float(np.average(centres, weights=counts))
        return Mated(mean, float(np.average((centres - mean) ** 2, weights=counts)) ** 0.5)

    def threshold_at_fnmr(self, rate: float) -> float:
        """The largest similarity that at most ``rate``, in (0, 1), of the same-person pairs fall below.

        Raises:
            ValueError: ``rate`` lies elsewhere.
        """
        if not 0 < rate < 1:
            raise ValueError(f"a false non-match rate lies in (0, 1), not {rate}")
        low, high = -1.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (low, middle) if self.fnmr(middle) > rate else (middle, high)
        return low

    def equal_error_threshold(self) -> float:
        """The similarity at which FMR and FNMR are equal."""
        low, high = -1.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self.fmr(middle).value > self.fnmr(middle) else (low, middle)
        return high


def _counted_then_fitted(pairs_above: Floats, tail: Tail, variances: Floats | None) -> FmrCurve:
    total = pairs_above[0]
    # The largest bin edge with enough pairs at or above it, where the fit takes over: scaled to meet the counts there,
    # or the rate would jump.
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
    """What the fitted scale and shape add to the variance of the logarithm of an extrapolated rate, by the delta method
    about an exponential tail: x^2 / k + x^4 / 4 / (k + 100), x scales beyond ``start`` with k independent scores beyond
    it (R. Smith, 1987, and the fit's prior on the shape, which is worth 100 of them)."""
    x = np.maximum(0.0, t - start) / scale
    return np.asarray(x**2 / exceeding + x**4 / 4 / (exceeding + 100))


def above(counts: NDArray[Any]) -> Floats:
    """(2001,) how many lie at or above each of EDGES."""
    return np.concatenate([np.asarray(counts, np.float64)[::-1].cumsum()[::-1], [0.0]])


def fpir_from_fmr(fmr: float, subjects: int) -> float:
    """1 - (1 - FMR)^N, exact for tiny rates."""
    if fmr >= 1:
        return 1.0 if subjects else 0.0
    return -math.expm1(subjects * math.log1p(-fmr))


def fmr_for_fpir(fpir: float, subjects: int) -> float:
    """The FMR that gives this FPIR, in (0, 1), over N independent comparisons: 1 - (1 - FPIR)^(1/N).

    Raises:
        ValueError: ``fpir`` lies elsewhere.
    """
    if not 0 < fpir < 1:
        raise ValueError(f"a false positive identification rate lies in (0, 1), not {fpir}")
    return -math.expm1(math.log1p(-fpir) / max(1, subjects))


def histogram(similarities: NDArray[np.floating]) -> Ints:
    """Count similarities into the calibration's bins."""
    return np.bincount(bins(similarities).ravel(), minlength=BIN_COUNT).astype(np.int64)


def bins(similarities: NDArray[np.floating]) -> Ints:
    """The bin of each similarity."""
    rows = ((np.asarray(similarities, np.float64) + 1) / BIN_WIDTH).astype(np.int64)
    return np.clip(rows, 0, BIN_COUNT - 1)
