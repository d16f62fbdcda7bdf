"""Scores to error rates and back. Pure: no files, no networks.

Terms are ISO/IEC 19795-1's. FMR(t) is the share of comparisons of two different people with similarity >= t; FNMR(t)
the share of same-person comparisons below t; FPIR(N, t) the share of searches by people not enrolled that return
anyone at >= t from N comparisons, 1 - (1 - FMR(t))^N if comparisons were independent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from models.errors import PackError

BIN_WIDTH: Final = 0.001
BIN_COUNT: Final = 2000
"""Bins of cosine similarity over [-1, 1]; bin i begins at -1 + i * 0.001."""
UNREACHABLE: Final = 1.01
"""Beyond every cosine, rounding included."""
MIN_SUPPORT: Final = 30
"""Fewer pairs than this above a threshold cannot support its rate: the answer is marked extrapolated."""


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
        x = max(0.0, t - self.start) / self.scale
        if abs(self.shape) < 1e-9:
            return self.share * math.exp(-x)
        base = 1 + self.shape * x
        # A negative shape has an end point, beyond which the fit knows of no impostor at all.
        return self.share * float(math.pow(base, -1 / self.shape)) if base > 0 else 0.0


@dataclass(frozen=True)
class Rate:
    """An error rate and whether it lies beyond what the evidence supports."""

    value: float
    extrapolated: bool


@dataclass(frozen=True)
class Threshold:
    """A similarity and whether its error rate lies beyond what the evidence supports."""

    similarity: float
    extrapolated: bool


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

    Raises:
        ValueError: wrong shape, a negative count, or no pair.
    """

    def __init__(self, impostor: NDArray[np.int64], genuine: NDArray[np.int64], tail: Tail) -> None:
        for name, counts in (("impostor", impostor), ("genuine", genuine)):
            if counts.shape != (BIN_COUNT,) or (counts < 0).any() or not counts.sum():
                raise ValueError(f"{name} needs {BIN_COUNT} counts, none negative, not all zero")
        self.tail = tail
        self.impostor_pairs = int(impostor.sum())
        self.genuine_pairs = int(genuine.sum())
        # Entry i: pairs at or above the lower edge of bin i; one entry more for the upper end.
        self._impostor_above = np.concatenate([impostor[::-1].cumsum()[::-1], [0]])
        self._genuine_above = np.concatenate([genuine[::-1].cumsum()[::-1], [0]])
        # The largest bin edge with enough impostor pairs at or above it, and what counting and the fit say there.
        rows = np.flatnonzero(self._impostor_above >= MIN_SUPPORT)
        row = int(rows[-1]) if len(rows) else 0
        self._last_counted = -1.0 + BIN_WIDTH * row
        self._rate_at_last_counted = float(self._impostor_above[row]) / self.impostor_pairs
        self._tail_at_last_counted = tail.exceedance(self._last_counted)

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
            return cls(histograms["impostor"], histograms["genuine"], tail)
        except (KeyError, TypeError, ValueError) as error:
            raise PackError("calibration", f"{error}") from error

    def fmr(self, t: float) -> Rate:
        """FMR(t): counted where at least 30 pairs lie above t, from the fitted tail beyond. Monotone in t."""
        # The fit takes over where counting ends and is scaled to meet it there, or the rate would jump.
        if t <= self._last_counted:
            return Rate(self._interpolated(self._impostor_above, t) / self.impostor_pairs, False)
        ratio = self.tail.exceedance(t) / self._tail_at_last_counted if self._tail_at_last_counted > 0 else 0.0
        return Rate(self._rate_at_last_counted * min(1.0, ratio), True)

    def threshold_at_fmr(self, rate: float) -> Threshold:
        """The smallest similarity whose FMR is at most ``rate``, in (0, 1]; found by bisection on :meth:`fmr`. Where
        even identical vectors cannot be told from strangers at that rate, a similarity that none reaches."""
        if not 0 < rate <= 1:
            raise ValueError(f"a false match rate lies in (0, 1], not {rate}")
        if self.fmr(1.0).value > rate:
            return Threshold(UNREACHABLE, True)
        low, high = -1.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self.fmr(middle).value > rate else (low, middle)
        return Threshold(high, self.fmr(high).extrapolated)

    def fnmr(self, t: float) -> float:
        """FNMR(t), counted."""
        return 1.0 - self._interpolated(self._genuine_above, t) / self.genuine_pairs

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
        """The largest similarity that at most ``rate`` of the same-person pairs fall below."""
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

    @staticmethod
    def _interpolated(above: NDArray[np.int64], t: float) -> float:
        position = min(max((t + 1) / BIN_WIDTH, 0.0), float(BIN_COUNT))
        row = min(int(position), BIN_COUNT - 1)
        share = position - row
        return float(above[row]) * (1 - share) + float(above[row + 1]) * share


def fpir_from_fmr(fmr: float, comparisons: int) -> float:
    """1 - (1 - FMR)^N, exact for tiny rates."""
    if fmr >= 1:
        return 1.0 if comparisons else 0.0
    return -math.expm1(comparisons * math.log1p(-fmr))


def fmr_for_fpir(fpir: float, comparisons: int) -> float:
    """The FMR that gives this FPIR over N independent comparisons: 1 - (1 - FPIR)^(1/N)."""
    if not 0 < fpir < 1:
        raise ValueError(f"a false positive identification rate lies in (0, 1), not {fpir}")
    return -math.expm1(math.log1p(-fpir) / max(1, comparisons))


def histogram(similarities: NDArray[np.floating]) -> NDArray[np.int64]:
    """Count similarities into the calibration's bins."""
    rows = np.clip(((np.asarray(similarities, np.float64) + 1) / BIN_WIDTH).astype(np.int64), 0, BIN_COUNT - 1)
    return np.bincount(rows.ravel(), minlength=BIN_COUNT).astype(np.int64)
