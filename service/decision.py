"""Scores and a risk target to an outcome. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from models.gate import Verdict
from models.risk import FmrCurve, Threshold, fmr_for_fpir, fpir_from_fmr
from service.errors import RiskUncalibratedError

Refusal = Literal["rejected_quality", "rejected_liveness"]
IdentifyOutcome = Literal["identified", "uncertain", "unknown", "no_face", "rejected_quality", "rejected_liveness"]
VerifyOutcome = Literal["same", "uncertain", "different", "no_face", "rejected_quality", "rejected_liveness"]
Source = Literal["pack", "gallery", "both"]
FaceChoice = Literal["only", "largest"]

REVIEW_FACTOR: Final = 10.0
"""Of the asked risk: the review risk, between which and the asked one an answer is 'uncertain'."""
MAX_REVIEW_RISK: Final = 0.5
MIN_MARGIN: Final = 0.02
"""Two subjects closer than this are lookalikes: neither is named."""
SIMILARITY_STEP: Final = 0.05
"""Resolution of the similarities of photos in answers to callers that may not export templates. Embeddings get none:
the edges of steps above the threshold would cost nothing to probe (bench/results/template_recovery.md)."""
UNCALIBRATED_REVIEW: Final = 0.3
"""Lowest threshold of such callers where nothing is known of strangers and the gallery's risk has no threshold: more
than three standard deviations of the similarity of random vectors of 128 dimensions."""


@dataclass(frozen=True)
class RiskTarget:
    """What the caller accepts: a false positive identification rate, a false match rate, or a bare similarity."""

    kind: Literal["fpir", "fmr", "threshold"]
    value: float


@dataclass(frozen=True)
class KnownRisk:
    """How strangers score, and whose evidence says so: the pack's calibration, the gallery's own strangers, or both."""

    curve: FmrCurve
    source: Source
    per_subject: float = 1.0
    """Comparisons of the curve's kind that one subject stands for."""
    usual_templates: float = 1.0
    """Of those whose strangers the curve counts, the mean."""

    def comparisons(self, subjects: int) -> int:
        return math.ceil(subjects * self.per_subject)


@dataclass(frozen=True)
class Thresholds:
    """``accept`` and ``review`` similarities for a target, and where they come from."""

    accept: float
    review: float
    source: Source | Literal["explicit"]
    extrapolated: bool

    @property
    def out_of_reach(self) -> bool:
        """The asked risk is so small that no similarity keeps to it."""
        return self.accept > 1

    def at_least(self, floor: float) -> Thresholds:
        """Return these thresholds, raised to ``floor`` where they are below it."""
        return replace(self, accept=max(self.accept, floor), review=max(self.review, floor))

    def coarse(self, similarity: float, photo: bool) -> float | None:
        """Return what a caller that may not export templates gets: None below the review threshold, else the threshold
        that the similarity reaches, or of a photo the last step up to it, if that is more.

        The decision on the result is the decision on the similarity.
        """
        if similarity < self.review:
            return None
        reached = self.accept if similarity >= self.accept else self.review
        return max(reached, math.floor(similarity / SIMILARITY_STEP) * SIMILARITY_STEP) if photo else reached


@dataclass(frozen=True)
class Candidate:
    """A subject (by key) with its fused similarity to the probe, and the probability that a stranger scores so high."""

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
    target: RiskTarget, known: KnownRisk | None, comparisons: int, review_factor: float = REVIEW_FACTOR
) -> Thresholds:
    """Find the similarities that keep to ``target`` in a search of ``comparisons`` subjects, or a verification that
    compares as many pairs of templates.

    Raises:
        RiskUncalibratedError: a risk was asked where nothing is known of strangers.
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


def lowest_review(own: RiskTarget, known: KnownRisk | None, comparisons: int, review_factor: float) -> float:
    """Return the review threshold of the gallery's own risk: lower ones are for callers that may export templates."""
    if known is None and own.kind != "threshold":
        return UNCALIBRATED_REVIEW
    return thresholds_for(own, known, comparisons, review_factor).review


def coarse_candidates(
    candidates: Sequence[Candidate], thresholds: Thresholds, known: KnownRisk | None, comparisons: int, photo: bool
) -> list[Candidate]:
    """Return the candidates that reach the review threshold, each with its coarse similarity and the probability of
    that one."""
    return [
        Candidate(candidate.subject_pk, similarity, false_alarm_probability(similarity, known, comparisons))
        for candidate in candidates
        if (similarity := thresholds.coarse(candidate.similarity, photo)) is not None
    ]


def false_alarm_probability(similarity: float, known: KnownRisk | None, comparisons: int) -> float | None:
    """The probability that a stranger's best of ``comparisons`` reaches ``similarity``; None where nothing is known."""
    if known is None:
        return None
    return fpir_from_fmr(known.curve.fmr(similarity).value, known.comparisons(comparisons))


def false_alarm_probabilities(
    similarities: Sequence[float], known: KnownRisk | None, comparisons: int
) -> Sequence[float | None]:
    """:func:`false_alarm_probability` of each."""
    if known is None:
        return [None] * len(similarities)
    subjects = known.comparisons(comparisons)
    return [fpir_from_fmr(rate, subjects) for rate in known.curve.rates_at(np.asarray(similarities)).tolist()]


def gate(quality: Sequence[str], liveness: Verdict | None) -> tuple[Refusal | None, list[str]]:
    """What keeps a face from being searched for, or compared, and why: quality first, then liveness.

    Args:
        quality: the values out of bounds.
        liveness: of a presentation that must be live; None: nobody asks.
    """
    if quality:
        return "rejected_quality", list(quality)
    if liveness is None or liveness == "live":
        return None, []
    return "rejected_liveness", [liveness]


def decide(candidates: list[Candidate], thresholds: Thresholds, min_margin: float = MIN_MARGIN) -> Decision:
    """Name the best candidate, or say why not. ``candidates`` are distinct subjects, best first."""
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
