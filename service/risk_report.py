"""What a gallery's risk looks like: thresholds for targets, the curve between them, and what both rest on. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from models.gallery_risk import ImpostorEvidence
from models.risk import EDGES, Calibration, FmrCurve, above, fmr_for_fpir, fpir_from_fmr

TARGETS: Final = (0.1, 0.01, 0.001, 0.0001)
GROWTH: Final = 10
"""Times today's size, for the threshold of tomorrow."""
CURVE_POINTS: Final = 61
CURVE_FROM, CURVE_TO = 0.5, 1e-5
"""The rates between which the curve is drawn."""
CHECKED_FPIR: Final = 0.1


@dataclass(frozen=True)
class TargetThreshold:
    """The similarity that keeps an FPIR among ``subjects``, with its 95 % interval; ``fnmr``: the share of a person's
    own probes that it turns away, by the pack's genuine pairs."""

    fpir: float
    subjects: int
    threshold: float
    low: float
    high: float
    extrapolated: bool
    fnmr: float | None


@dataclass(frozen=True)
class Point:
    """FPIR at a similarity, with its 95 % interval."""

    similarity: float
    fpir: float
    low: float
    high: float
    extrapolated: bool


@dataclass(frozen=True)
class Check:
    """Of the subjects searched for among all others, how many reach the threshold of an FPIR of 10 %, and how many
    should. It is not used; far apart, the comparisons depend on each other, or people are enrolled twice."""

    fpir: float
    probes: int
    expected: float
    observed: int


def target_threshold(fpir: float, subjects: int, curve: FmrCurve, calibration: Calibration | None) -> TargetThreshold:
    found = curve.threshold_at_fmr(fmr_for_fpir(fpir, subjects))
    fnmr = None if calibration is None else calibration.fnmr(found.similarity)
    return TargetThreshold(fpir, subjects, found.similarity, found.low, found.high, found.extrapolated, fnmr)


def fpir_curve(subjects: int, curve: FmrCurve) -> list[Point]:
    """Equally spaced similarities over the range that matters: FPIR from a half down to 1e-5."""
    first, last = (
        min(1.0, curve.threshold_at_fmr(fmr_for_fpir(rate, subjects)).similarity) for rate in (CURVE_FROM, CURVE_TO)
    )
    points = []
    for t in np.linspace(first, last, CURVE_POINTS).tolist():
        rate = curve.fmr(t)
        fpir, low, high = (fpir_from_fmr(value, subjects) for value in (rate.value, rate.low, rate.high))
        points.append(Point(t, fpir, low, high, rate.extrapolated))
    return points


def check_maxima(evidence: ImpostorEvidence, curve: FmrCurve) -> Check:
    """By leaving one subject out."""
    others = evidence.subjects - 1
    threshold = curve.threshold_at_fmr(fmr_for_fpir(CHECKED_FPIR, others)).similarity
    observed = round(float(np.interp(threshold, EDGES, above(evidence.best))))
    return Check(CHECKED_FPIR, evidence.probes, CHECKED_FPIR * evidence.probes, observed)


def thresholds(
    targets: Sequence[float], subjects: int, curve: FmrCurve, calibration: Calibration | None
) -> list[tuple[TargetThreshold, TargetThreshold]]:
    """Each target's threshold today, and at ten times today's size."""
    today, grown = (
        [target_threshold(fpir, size, curve, calibration) for fpir in targets] for size in (subjects, GROWTH * subjects)
    )
    return list(zip(today, grown, strict=True))
