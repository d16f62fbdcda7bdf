"""Risk report of a gallery: thresholds for FPIR targets, the FPIR curve, and a cross-check. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kith.wire.common import RiskWarning
from models.risk.calibration import EDGES, Calibration, FmrCurve, count_at_or_above, fmr_for_fpir, fpir_from_fmr
from models.risk.gallery_risk import GalleryRisk
from models.risk.impostor_evidence import ImpostorEvidence
from models.risk.miss_rate import MissRate, is_one_sitting, promised_misses
from models.risk.panel import RowLevels
from service.domain.outcomes import RiskTarget
from service.risk.decision import ImpostorRisk, Thresholds, thresholds_for

TARGETS: Final = (0.1, 0.01, 0.001, 0.0001)
GROWTH_FACTOR: Final = 10
"""Growth of the gallery for which the report forecasts thresholds."""
EXAMPLE_SUBJECTS: Final = 100
"""Size of the gallery for which a pack's misses are stated before there is one."""
CURVE_POINTS: Final = 61
CURVE_MAX_FPIR, CURVE_MIN_FPIR = 0.5, 1e-5
"""FPIR range of the curve."""
CHECKED_FPIR: Final = 0.1


@dataclass(frozen=True)
class TargetThreshold:
    """Threshold for an FPIR in a gallery of ``subjects``, with its 95 % interval.

    ``misses`` is the FNIR at the threshold for photos like those enrolled.
    """

    fpir: float
    subjects: int
    threshold: float
    low: float
    high: float
    extrapolated: bool
    misses: MissRate | None


@dataclass(frozen=True)
class ExpectedMisses:
    """Share of enrolled people's searches that do not identify them, in a gallery of ``subjects`` with one photo each.

    ``better`` is the measured pack that misses fewest, with its share; None if no pack misses fewer.
    """

    fpir: float
    subjects: int
    fnir: float
    better: tuple[str, float] | None


@dataclass(frozen=True)
class FpirPoint:
    """FPIR at a similarity, with its 95 % interval."""

    similarity: float
    fpir: float
    low: float
    high: float
    extrapolated: bool


@dataclass(frozen=True)
class MaximaCheck:
    """Expected and observed number of subjects that reach the threshold of an FPIR of 10 % among all others.

    A cross-check for users only. If the two differ strongly, comparisons depend on each other, or people are enrolled
    twice.
    """

    fpir: float
    probes: int
    expected: float
    observed: int


def target_threshold(
    fpir: float, subjects: int, curve: FmrCurve, evidence: ImpostorEvidence | None, calibration: Calibration | None
) -> TargetThreshold:
    found = curve.threshold_at_fmr(fmr_for_fpir(fpir, subjects))
    misses = promised_misses(evidence, calibration, found.score)
    return TargetThreshold(fpir, subjects, found.score, found.low, found.high, found.extrapolated, misses)


def expected_misses(fpir: float, pack: Calibration, measured: Mapping[str, Calibration]) -> ExpectedMisses:
    """Return what a pack misses in a new gallery of EXAMPLE_SUBJECTS.

    Args:
        measured: calibrations of packs that could be used instead, by name.
    """
    fmr = fmr_for_fpir(fpir, EXAMPLE_SUBJECTS)

    def misses(calibration: Calibration) -> float:
        return calibration.fnmr(min(1.0, calibration.threshold_at_fmr(fmr).score))

    own, others = misses(pack), {name: misses(calibration) for name, calibration in measured.items()}
    best = min(others, key=lambda name: others[name], default=None)
    better = None if best is None or others[best] >= own else (best, others[best])
    return ExpectedMisses(fpir, EXAMPLE_SUBJECTS, own, better)


def fpir_curve(subjects: int, curve: FmrCurve) -> list[FpirPoint]:
    """Return the FPIR at CURVE_POINTS equally spaced similarities, from CURVE_MAX_FPIR down to CURVE_MIN_FPIR."""
    first, last = (
        min(1.0, curve.threshold_at_fmr(fmr_for_fpir(rate, subjects)).score)
        for rate in (CURVE_MAX_FPIR, CURVE_MIN_FPIR)
    )
    points = []
    for t in np.linspace(first, last, CURVE_POINTS).tolist():
        rate = curve.fmr(t)
        fpir, low, high = (fpir_from_fmr(value, subjects) for value in (rate.value, rate.low, rate.high))
        points.append(FpirPoint(t, fpir, low, high, rate.extrapolated))
    return points


def check_maxima(evidence: ImpostorEvidence, curve: FmrCurve) -> MaximaCheck:
    """Compare the observed maxima with the curve (leave-one-out)."""
    others = evidence.subjects - 1
    threshold = curve.threshold_at_fmr(fmr_for_fpir(CHECKED_FPIR, others)).score
    observed = round(float(np.interp(threshold, EDGES, count_at_or_above((evidence.adjusted or evidence.raw).best))))
    return MaximaCheck(CHECKED_FPIR, evidence.probes, CHECKED_FPIR * evidence.probes, observed)


def thresholds_of_probes(
    target: RiskTarget, model: ImpostorRisk, subjects: int, callers: Sequence[RowLevels]
) -> Thresholds | None:
    """Return the highest thresholds of the callers with recent probes; None if no probes raise them."""
    usual = thresholds_for(target, model, subjects)
    found = max(
        (thresholds_for(target, model.for_probes(levels), subjects) for levels in callers),
        key=lambda thresholds: thresholds.accept,
        default=usual,
    )
    return found if found.accept > usual.accept else None


def warnings(risk: GalleryRisk | None, probes: Thresholds | None) -> list[RiskWarning]:
    """Return what limits the report's promises. ``probes``: result of :func:`thresholds_of_probes`."""
    if risk is None:
        return []
    found: list[RiskWarning] = ["photos_of_one_sitting"] if is_one_sitting(risk.evidence, risk.pack) else []
    if risk.is_unlike_pack():
        found.append("people_unlike_calibration")
    return [*found, "probes_unlike_gallery"] if probes is not None and probes.unlike_gallery else found


def target_thresholds(
    targets: Sequence[float],
    subjects: int,
    curve: FmrCurve,
    evidence: ImpostorEvidence | None,
    calibration: Calibration | None,
) -> list[tuple[TargetThreshold, TargetThreshold]]:
    """Return the threshold of each target at the current size, and at GROWTH_FACTOR times that size."""
    today, grown = (
        [target_threshold(fpir, size, curve, evidence, calibration) for fpir in targets]
        for size in (subjects, GROWTH_FACTOR * subjects)
    )
    return list(zip(today, grown, strict=True))
