"""Thresholds that decide: from a curve, an accepted risk, the number of people, and the rival.

No other module makes them. Pure functions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, Literal

from kith.wire.common import Source
from models.risk.calibration import (
    UNREACHABLE_SIMILARITY,
    Calibration,
    Estimate,
    FmrCurve,
    fmr_for_fpir,
    fpir_from_fmr,
)
from models.risk.impostor_evidence import MIN_ADJUSTED_SUBJECTS, Levels
from service.core.errors import RiskUncalibratedError
from service.domain.outcomes import REVIEW_FACTOR, RiskTarget

MAX_REVIEW_RISK: Final = 0.5
MEDIAN_FPIR: Final = 0.5
SIMILARITY_STEP: Final = 0.05
"""Rounding step of similarities for callers without the scope vectors."""


@dataclass(frozen=True)
class SearchRisk:
    """Curve of the scores of searches (:mod:`models.risk.impostor_evidence`).

    ``rival`` is the median of the best similarities, less levels, of non-mated searches among ``subjects``.
    """

    curve: FmrCurve
    rival: float
    subjects: int
    levels: Levels | None = None


@dataclass(frozen=True)
class ImpostorRisk:
    """Impostor score curve, and its source: the pack's calibration, the gallery's subjects, or both.

    ``curve`` is for single comparisons, ``search`` for searches of several subjects.
    """

    curve: FmrCurve
    source: Source
    comparisons_per_subject: float = 1.0
    """Comparisons of the curve that one subject counts as."""
    mean_templates: float = 1.0
    """Mean number of templates of the subjects behind the curve."""
    search: SearchRisk | None = None
    min_fmr: float = 0.0
    """Smallest FMR that the pairs behind the curve support. Smaller ones are not shown."""
    pack: Calibration | None = None
    """Calibration of the recognizer, which has the similarities of one person."""

    def comparisons_among(self, subjects: int) -> int:
        """Return the number of comparisons of the curve that a search of ``subjects`` makes."""
        return math.ceil(subjects * self.comparisons_per_subject)

    def against(self, templates: float) -> ImpostorRisk:
        """Return the risk against subjects with so many templates: strangers score higher against more of them."""
        return replace(self, comparisons_per_subject=max(1.0, templates / self.mean_templates))

    def rival_of(self, subjects: int) -> float | None:
        """Return the rival of a search of ``subjects``; None if its similarities are not adjusted.

        More subjects have a more similar rival: it moves as the median on the curve of single comparisons.
        """
        if self.search is None or subjects < MIN_ADJUSTED_SUBJECTS:
            return None
        of_evidence, of_search = (
            self.curve.threshold_at_fmr(fmr_for_fpir(MEDIAN_FPIR, count)).value
            for count in (self.search.subjects, subjects)
        )
        return self.search.rival + of_search - of_evidence

    def curve_of(self, subjects: int) -> FmrCurve:
        """Return the curve for a search of ``subjects``."""
        return self.curve if self.search is None or subjects < MIN_ADJUSTED_SUBJECTS else self.search.curve

    def threshold_at_fpir(self, fpir: float, subjects: int) -> Estimate:
        """Return the threshold for an FPIR of searches of ``subjects``."""
        return self.curve_of(subjects).threshold_at_fmr(fmr_for_fpir(fpir, self.comparisons_among(subjects)))


@dataclass(frozen=True)
class Candidate:
    """Subject, its fused similarity to the probe, and its score among the others that were found."""

    subject_pk: int
    similarity: float
    score: float


@dataclass(frozen=True)
class Thresholds:
    """Scores for a risk target: from ``accept`` a match, from ``review`` uncertain.

    ``of_scores``: they are compared with scores; otherwise with similarities.
    """

    accept: float
    review: float
    source: Source | Literal["explicit"]
    extrapolated: bool
    of_scores: bool = False

    @property
    def out_of_reach(self) -> bool:
        """True if no similarity is high enough for the target risk."""
        return self.accept > 1

    def compared(self, candidate: Candidate) -> float:
        """Return what is compared with the thresholds."""
        return candidate.score if self.of_scores else candidate.similarity

    def of_similarity(self, best: Candidate | None) -> Thresholds:
        """Return the thresholds that apply to the similarity of the best candidate of a search."""
        if not self.of_scores or best is None or self.out_of_reach:
            return replace(self, of_scores=False)
        moved = best.similarity - best.score
        accept = min(self.accept + moved, UNREACHABLE_SIMILARITY)
        return replace(self, accept=accept, review=min(self.review + moved, accept), of_scores=False)

    def coarse(self, similarity: float) -> float | None:
        """Return the score that a caller without the scope vectors may see.

        Below the review threshold it is None. Above, it is the similarity rounded down to SIMILARITY_STEP, or the
        highest threshold reached if that is higher. The decision stays the same.
        """
        if similarity < self.review:
            return None
        reached = self.accept if similarity >= self.accept else self.review
        return max(reached, math.floor(similarity / SIMILARITY_STEP) * SIMILARITY_STEP)


def thresholds_for(
    target: RiskTarget, model: ImpostorRisk | None, subjects: int, review_factor: float = REVIEW_FACTOR
) -> Thresholds:
    """Return the thresholds that keep the ``target`` risk.

    Args:
        subjects: Subjects in a search, or template pairs in a verification.

    Raises:
        RiskUncalibratedError: The target is a rate, and ``model`` is None.
    """
    if target.kind == "threshold":
        return Thresholds(target.value, target.value, "explicit", False)
    if model is None:
        raise RiskUncalibratedError(f"no threshold for {target.kind} {target.value:g}")

    def at(risk: float) -> Estimate:
        return model.curve.threshold_at_fmr(risk) if target.kind == "fmr" else model.threshold_at_fpir(risk, subjects)

    accept = at(target.value)
    review = at(max(target.value, min(MAX_REVIEW_RISK, target.value * review_factor)))
    of_scores = target.kind == "fpir" and model.rival_of(subjects) is not None
    return Thresholds(accept.value, review.value, model.source, accept.extrapolated, of_scores)


def false_alarm_probability(
    score: float, model: ImpostorRisk | None, subjects: int, of_search: bool = False
) -> tuple[float | None, bool | None]:
    """Return the probability that a stranger's best of ``subjects`` reaches ``score``, and whether it is a bound.

    It is not smaller than the pairs behind the curve support. None if uncalibrated.

    Args:
        of_search: the score is that of a search, not a similarity.
    """
    if model is None:
        return None, None
    curve, count = model.curve_of(subjects) if of_search else model.curve, model.comparisons_among(subjects)
    chance, least = (fpir_from_fmr(min(1.0, rate), count) for rate in (curve.fmr(score).value, model.min_fmr))
    return max(chance, least), chance < least
