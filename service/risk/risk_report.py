"""Risk report of a gallery: thresholds for FPIR targets, the FPIR curve, and a cross-check. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from kith.wire.common import RiskWarning
from kith.wire.risk import HoldoutCheckOut, PointOut, TargetOut, ThresholdOut
from kith.wire.status import BetterPackOut, MissesOut
from models.risk.calibration import EDGES, Calibration, FmrCurve, count_at_or_above, fmr_for_fpir, fpir_from_fmr
from models.risk.gallery_risk import GalleryRisk
from models.risk.impostor_evidence import ImpostorEvidence
from models.risk.miss_rate import is_one_sitting, promised_misses
from service.risk.threshold import ImpostorRisk

TARGETS: Final = (0.1, 0.01, 0.001, 0.0001)
GROWTH_FACTOR: Final = 10
"""Growth of the gallery for which the report forecasts thresholds."""
EXAMPLE_SUBJECTS: Final = 100
"""Size of the gallery for which a pack's misses are stated before there is one."""
CURVE_POINTS: Final = 61
CURVE_MAX_FPIR, CURVE_MIN_FPIR = 0.5, 1e-5
"""FPIR range of the curve."""
CHECKED_FPIR: Final = 0.1


def expected_misses(fpir: float, pack: Calibration, measured: Mapping[str, Calibration]) -> MissesOut:
    """Return what a pack misses in a new gallery of EXAMPLE_SUBJECTS, rounded to 4 decimals.

    Args:
        measured: calibrations of packs that could be used instead, by name.
    """
    fmr = fmr_for_fpir(fpir, EXAMPLE_SUBJECTS)

    def misses(calibration: Calibration) -> float:
        return calibration.fnmr(min(1.0, calibration.curve.threshold_at_fmr(fmr).value))

    own, others = misses(pack), {name: misses(calibration) for name, calibration in measured.items()}
    best = min(others, key=lambda name: others[name], default=None)
    better = None
    if best is not None and others[best] < own:
        better = BetterPackOut(model=best, fnir=round(others[best], 4))
    return MissesOut(fpir=fpir, subject_count=EXAMPLE_SUBJECTS, fnir=round(own, 4), better=better)


def fpir_curve(subjects: int, curve: FmrCurve) -> list[PointOut]:
    """Return the FPIR at CURVE_POINTS equally spaced similarities, from CURVE_MAX_FPIR down to CURVE_MIN_FPIR."""
    first, last = (
        min(1.0, curve.threshold_at_fmr(fmr_for_fpir(rate, subjects)).value)
        for rate in (CURVE_MAX_FPIR, CURVE_MIN_FPIR)
    )
    points = []
    for t in np.linspace(first, last, CURVE_POINTS).tolist():
        rate = curve.fmr(t)
        fpir, low, high = (fpir_from_fmr(value, subjects) for value in (rate.value, rate.low, rate.high))
        points.append(PointOut(similarity=t, fpir=fpir, low=low, high=high, extrapolated=rate.extrapolated))
    return points


def check_maxima(evidence: ImpostorEvidence, curve: FmrCurve) -> HoldoutCheckOut:
    """Return the expected and observed number of subjects that reach the threshold of CHECKED_FPIR among all others.

    A cross-check for users only. If the two differ strongly, comparisons depend on each other, or people are enrolled
    twice.
    """
    others = evidence.subjects - 1
    threshold = curve.threshold_at_fmr(fmr_for_fpir(CHECKED_FPIR, others)).value
    observed = round(float(np.interp(threshold, EDGES, count_at_or_above(evidence.best))))
    probes, expected = evidence.probes, CHECKED_FPIR * evidence.probes
    return HoldoutCheckOut(fpir=CHECKED_FPIR, probe_count=probes, expected=expected, observed_count=observed)


def warnings(risk: GalleryRisk | None) -> list[RiskWarning]:
    """Return what limits the report's promises."""
    if risk is None:
        return []
    found: list[RiskWarning] = ["photos_of_one_sitting"] if is_one_sitting(risk.evidence, risk.pack) else []
    if risk.is_unlike_pack():
        found.append("people_unlike_calibration")
    return found


def target_thresholds(
    targets: Sequence[float],
    subjects: int,
    model: ImpostorRisk,
    evidence: ImpostorEvidence | None,
    calibration: Calibration | None,
) -> list[TargetOut]:
    """Return the threshold of each target, and the FNIR there, at the current size and at GROWTH_FACTOR times it.

    They are rounded to 4 decimals.
    """

    def at(fpir: float, count: int) -> ThresholdOut:
        found = model.threshold_at_fpir(fpir, count)
        misses = promised_misses(evidence, calibration, found.value)
        fnir, low, high = (
            None if misses is None else round(getattr(misses, name), 4) for name in ("value", "low", "high")
        )
        return ThresholdOut(
            subject_count=count,
            threshold=round(found.value, 4),
            low=round(found.low, 4),
            high=round(found.high, 4),
            extrapolated=found.extrapolated,
            fnir=fnir,
            fnir_low=low,
            fnir_high=high,
        )

    return [
        TargetOut(fpir=fpir, today=at(fpir, subjects), grown=at(fpir, GROWTH_FACTOR * subjects)) for fpir in targets
    ]
