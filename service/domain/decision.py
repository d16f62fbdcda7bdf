"""Decisions: thresholds for a risk target, and the outcome for scored candidates. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from models.risk.calibration import FmrCurve, Threshold, fmr_for_fpir, fpir_from_fmr
from models.vision.quality_gate import LivenessVerdict
from service.core.errors import RiskUncalibratedError

RejectionOutcome = Literal["rejected_quality", "rejected_liveness"]
IdentifyOutcome = Literal["identified", "uncertain", "unknown", "no_face", "rejected_quality", "rejected_liveness"]
VerifyOutcome = Literal["same", "uncertain", "different", "no_face", "rejected_quality", "rejected_liveness"]
CalibrationSource = Literal["pack", "gallery", "both"]
FaceChoice = Literal["only", "largest"]

REVIEW_FACTOR: Final = 10.0
"""Review risk as a multiple of the target risk. Between the two, the outcome is 'uncertain'."""
MAX_REVIEW_RISK: Final = 0.5
MIN_MARGIN: Final = 0.02
"""Smallest similarity difference between the best two subjects at which the best is identified."""
SIMILARITY_STEP: Final = 0.05
"""Rounding step of similarities for callers that may not export templates; applied to photos only.

Embeddings get thresholds only: an attacker could probe the step edges at no cost and recover a template
(bench/results/template_recovery.md)."""
UNCALIBRATED_REVIEW_THRESHOLD: Final = 0.3
"""Lowest threshold for these callers in galleries without calibration.

It exceeds three standard deviations of the similarity of random 128-dimensional vectors."""


@dataclass(frozen=True)
class RiskTarget:
    """Accepted risk: a false positive identification rate, a false match rate, or a fixed similarity."""

    kind: Literal["fpir", "fmr", "threshold"]
    value: float


@dataclass(frozen=True)
class ImpostorRisk:
    """Impostor score curve, and its source: the pack's calibration, the gallery's subjects, or both."""

    curve: FmrCurve
    source: CalibrationSource
    comparisons_per_subject: float = 1.0
    """Comparisons of the curve that one subject counts as."""
    mean_templates: float = 1.0
    """Mean number of templates of the subjects behind the curve."""

    def comparisons(self, subjects: int) -> int:
        return math.ceil(subjects * self.comparisons_per_subject)


@dataclass(frozen=True)
class Thresholds:
    """Similarities for a risk target: from ``accept`` a match, from ``review`` uncertain."""

    accept: float
    review: float
    source: CalibrationSource | Literal["explicit"]
    extrapolated: bool

    @property
    def out_of_reach(self) -> bool:
        """True if no similarity is high enough for the target risk."""
        return self.accept > 1

    def at_least(self, floor: float) -> Thresholds:
        """Return these thresholds, raised to ``floor`` where they are below it."""
        return replace(self, accept=max(self.accept, floor), review=max(self.review, floor))

    def coarse(self, similarity: float, photo: bool) -> float | None:
        """Return the similarity that a caller without export permission may see.

        Below the review threshold it is None. Above, it is the highest threshold reached; for photos it is the
        similarity rounded down to SIMILARITY_STEP, if that is higher. The decision stays the same.
        """
        if similarity < self.review:
            return None
        reached = self.accept if similarity >= self.accept else self.review
        return max(reached, math.floor(similarity / SIMILARITY_STEP) * SIMILARITY_STEP) if photo else reached


@dataclass(frozen=True)
class Candidate:
    """Subject, its fused similarity to the probe, and the probability that a stranger scores as high."""

    subject_pk: int
    similarity: float
    false_alarm_probability: float | None


@dataclass(frozen=True)
class Decision:
    outcome: IdentifyOutcome
    best: Candidate | None
    runner_up: Candidate | None

    @property
    def margin(self) -> float | None:
        return self.best.similarity - self.runner_up.similarity if self.best and self.runner_up else None


def thresholds_for(
    target: RiskTarget, known: ImpostorRisk | None, comparisons: int, review_factor: float = REVIEW_FACTOR
) -> Thresholds:
    """Return the thresholds that keep the ``target`` risk.

    Args:
        comparisons: Subjects in a search, or template pairs in a verification.

    Raises:
        RiskUncalibratedError: The target is a rate, and ``known`` is None.
    """
    if target.kind == "threshold":
        return Thresholds(target.value, target.value, "explicit", False)
    if known is None:
        raise RiskUncalibratedError(f"no threshold for {target.kind} {target.value:g}")

    def at(risk: float) -> Threshold:
        fmr = fmr_for_fpir(risk, known.comparisons(comparisons)) if target.kind == "fpir" else risk
        return known.curve.threshold_at_fmr(fmr)

    accept = at(target.value)
    review = at(max(target.value, min(MAX_REVIEW_RISK, target.value * review_factor)))
    return Thresholds(accept.similarity, review.similarity, known.source, accept.extrapolated)


def review_floor(own: RiskTarget, known: ImpostorRisk | None, comparisons: int, review_factor: float) -> float:
    """Return the review threshold of the gallery's risk, the lowest for callers that may not export templates."""
    if known is None and own.kind != "threshold":
        return UNCALIBRATED_REVIEW_THRESHOLD
    return thresholds_for(own, known, comparisons, review_factor).review


def coarse_candidates(
    candidates: Sequence[Candidate], thresholds: Thresholds, known: ImpostorRisk | None, comparisons: int, photo: bool
) -> list[Candidate]:
    """Return the candidates from the review threshold up, with coarse similarities and their probabilities."""
    return [
        Candidate(candidate.subject_pk, similarity, false_alarm_probability(similarity, known, comparisons))
        for candidate in candidates
        if (similarity := thresholds.coarse(candidate.similarity, photo)) is not None
    ]


def false_alarm_probability(similarity: float, known: ImpostorRisk | None, comparisons: int) -> float | None:
    """Return the probability that a stranger's best of ``comparisons`` reaches ``similarity``, None if uncalibrated."""
    if known is None:
        return None
    return fpir_from_fmr(known.curve.fmr(similarity).value, known.comparisons(comparisons))


def false_alarm_probabilities(
    similarities: Sequence[float], known: ImpostorRisk | None, comparisons: int
) -> Sequence[float | None]:
    """Return :func:`false_alarm_probability` for each similarity."""
    if known is None:
        return [None] * len(similarities)
    subjects = known.comparisons(comparisons)
    return [fpir_from_fmr(rate, subjects) for rate in known.curve.rates_at(np.asarray(similarities)).tolist()]


def check_presentation(
    quality: Sequence[str], liveness: LivenessVerdict | None
) -> tuple[RejectionOutcome | None, list[str]]:
    """Return the rejection outcome of a face, or None, and its reasons. Quality is checked before liveness.

    Args:
        quality: Names of the quality values out of bounds.
        liveness: Verdict of the liveness check, or None if it is not required.
    """
    if quality:
        return "rejected_quality", list(quality)
    if liveness is None or liveness == "live":
        return None, []
    return "rejected_liveness", [liveness]


def decide(candidates: list[Candidate], thresholds: Thresholds, min_margin: float = MIN_MARGIN) -> Decision:
    """Decide on a search. ``candidates`` are distinct subjects, best first."""
    best = candidates[0] if candidates else None
    runner_up = candidates[1] if len(candidates) > 1 else None
    if best is None or best.similarity < thresholds.review:
        return Decision("unknown", best, runner_up)
    if best.similarity < thresholds.accept:
        return Decision("uncertain", best, runner_up)
    lookalike = runner_up is not None and best.similarity - runner_up.similarity < min_margin
    return Decision("uncertain" if lookalike else "identified", best, runner_up)


def decide_pair(similarity: float, thresholds: Thresholds) -> VerifyOutcome:
    if similarity >= thresholds.accept:
        return "same"
    return "uncertain" if similarity >= thresholds.review else "different"
