"""Decisions: thresholds for a risk target, and the outcome of a search or of a pair. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from kith.wire.common import IdentifyOutcome, Source, VerifyOutcome
from models.risk.calibration import (
    UNREACHABLE_SIMILARITY,
    Calibration,
    FmrCurve,
    Threshold,
    fmr_for_fpir,
    fpir_from_fmr,
)
from models.risk.impostor_evidence import MIN_ADJUSTED_SUBJECTS, rival_adjusted, rival_shift
from models.runtime.network import Float
from models.vision.quality_gate import LivenessVerdict
from service.core.errors import RiskUncalibratedError
from service.domain.fusion import fuse_similarities
from service.domain.gallery import Hit
from service.domain.outcomes import REVIEW_FACTOR, RejectionOutcome, RiskTarget

MAX_REVIEW_RISK: Final = 0.5
MEDIAN_FPIR: Final = 0.5
KNOWN_STRANGER: Final = "known_stranger"
"""Reason: the face is more similar to an outsider who was mistaken for the subject than to the subject."""
SIMILARITY_STEP: Final = 0.05
"""Rounding step of similarities for callers without the scope vectors."""


@dataclass(frozen=True)
class RivalRisk:
    """Score curve of rival-adjusted similarities (:mod:`models.risk.impostor_evidence`).

    ``rival`` is the median of the best similarities of non-mated searches among ``subjects``.
    """

    curve: FmrCurve
    rival: float
    subjects: int


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
    search: RivalRisk | None = None
    min_fmr: float = 0.0
    """Smallest FMR that the pairs behind the curve support. Smaller ones are not shown."""
    pack: Calibration | None = None
    """Calibration of the recognizer, which has the similarities of one person."""

    def comparisons_among(self, subjects: int) -> int:
        """Return the number of comparisons of the curve that a search of ``subjects`` makes."""
        return math.ceil(subjects * self.comparisons_per_subject)

    def rival_of(self, subjects: int) -> float | None:
        """Return the rival of a search of ``subjects``; None if its similarities are not adjusted.

        More subjects have a more similar rival: it moves as the median on the curve of single comparisons.
        """
        if self.search is None or subjects < MIN_ADJUSTED_SUBJECTS:
            return None
        of_evidence, of_search = (
            self.curve.threshold_at_fmr(fmr_for_fpir(MEDIAN_FPIR, count)).score
            for count in (self.search.subjects, subjects)
        )
        return self.search.rival + of_search - of_evidence

    def curve_of(self, subjects: int) -> FmrCurve:
        """Return the curve for a search of ``subjects``."""
        return self.curve if self.search is None or subjects < MIN_ADJUSTED_SUBJECTS else self.search.curve


@dataclass(frozen=True)
class Thresholds:
    """Scores for a risk target: from ``accept`` a match, from ``review`` uncertain.

    ``rival``: the scores are similarities adjusted to this rival; None: they are similarities.
    """

    accept: float
    review: float
    source: Source | Literal["explicit"]
    extrapolated: bool
    rival: float | None = None

    @property
    def out_of_reach(self) -> bool:
        """True if no similarity is high enough for the target risk."""
        return self.accept > 1

    def of_search(self, runner_up: float | None) -> Thresholds:
        """Return the thresholds that apply to the best similarity of a search with this runner-up."""
        if self.rival is None or runner_up is None or self.out_of_reach:
            return replace(self, rival=None)
        moved = rival_shift(runner_up, self.rival)
        accept = min(self.accept + moved, UNREACHABLE_SIMILARITY)
        return replace(self, accept=accept, review=min(self.review + moved, accept), rival=None)

    def coarse(self, similarity: float) -> float | None:
        """Return the score that a caller without the scope vectors may see.

        Below the review threshold it is None. Above, it is the similarity rounded down to SIMILARITY_STEP, or the
        highest threshold reached if that is higher. The decision stays the same.
        """
        if similarity < self.review:
            return None
        reached = self.accept if similarity >= self.accept else self.review
        return max(reached, math.floor(similarity / SIMILARITY_STEP) * SIMILARITY_STEP)


@dataclass(frozen=True)
class Candidate:
    """Subject, its fused similarity to the probe, and the probability that a stranger scores as high.

    ``score`` is compared with the thresholds: the similarity, or the rival-adjusted similarity.
    """

    subject_pk: int
    similarity: float
    false_alarm_probability: float | None
    score: float


@dataclass(frozen=True)
class Decision:
    outcome: IdentifyOutcome
    best: Candidate | None
    runner_up: Candidate | None

    @property
    def margin(self) -> float | None:
        return self.best.similarity - self.runner_up.similarity if self.best and self.runner_up else None


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

    curve = model.curve if target.kind == "fmr" else model.curve_of(subjects)

    def at(risk: float) -> Threshold:
        fmr = risk if target.kind == "fmr" else fmr_for_fpir(risk, model.comparisons_among(subjects))
        return curve.threshold_at_fmr(fmr)

    accept = at(target.value)
    review = at(max(target.value, min(MAX_REVIEW_RISK, target.value * review_factor)))
    rival = model.rival_of(subjects) if target.kind == "fpir" else None
    return Thresholds(accept.score, review.score, model.source, accept.extrapolated, rival)


def score_candidates(
    hits: Sequence[tuple[int, float]], thresholds: Thresholds, model: ImpostorRisk | None, subjects: int
) -> list[Candidate]:
    """Return the candidates of one search, from (subject key, similarity), best first."""
    similarities = [similarity for _, similarity in hits]
    adjusted = rival_adjusted(similarities, None if model is None else model.rival_of(subjects))
    chances = false_alarm_probabilities(adjusted, model, subjects, adjusted=True)
    scores = rival_adjusted(similarities, thresholds.rival)
    rows = zip(hits, chances, scores, strict=True)
    return [Candidate(subject_pk, similarity, chance, score) for (subject_pk, similarity), chance, score in rows]


def coarse_candidates(
    candidates: Sequence[Candidate], thresholds: Thresholds, model: ImpostorRisk | None, subjects: int
) -> list[Candidate]:
    """Return the candidates from the review threshold up, with coarse scores as similarities.

    Exact thresholds of the search would reveal the similarity of the runner-up.
    """
    coarse = [thresholds.coarse(candidate.score) for candidate in candidates]
    adjusted = thresholds.rival is not None
    return [
        Candidate(candidate.subject_pk, score, false_alarm_probability(score, model, subjects, adjusted), score)
        for candidate, score in zip(candidates, coarse, strict=True)
        if score is not None
    ]


def false_alarm_probability(
    score: float, model: ImpostorRisk | None, subjects: int, adjusted: bool = False
) -> float | None:
    """Return the probability that a stranger's best of ``subjects`` reaches ``score``, None if uncalibrated.

    ``adjusted``: the score is rival-adjusted, unless the search has too few subjects.
    """
    return false_alarm_probabilities([score], model, subjects, adjusted)[0]


def false_alarm_probabilities(
    scores: Sequence[float], model: ImpostorRisk | None, subjects: int, adjusted: bool = False
) -> Sequence[float | None]:
    """Return :func:`false_alarm_probability` for each score."""
    if model is None:
        return [None] * len(scores)
    curve = model.curve_of(subjects) if adjusted else model.curve
    comparisons, places = model.comparisons_among(subjects), np.asarray(scores, np.float64)
    return [fpir_from_fmr(rate, comparisons) for rate in curve.rates_at(places).tolist()]


def shown_probability(
    chance: float | None, model: ImpostorRisk | None, subjects: int
) -> tuple[float | None, bool | None]:
    """Return a false alarm probability for a response: not smaller than the pairs behind the curve support, and whether
    it is that bound."""
    if chance is None:
        return None, None
    if model is None:
        return chance, False
    least = fpir_from_fmr(min(1.0, model.min_fmr), model.comparisons_among(subjects))
    return max(chance, least), chance < least


def refuse_presentation(
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


def decide(candidates: list[Candidate], thresholds: Thresholds) -> Decision:
    """Decide on a search. ``candidates`` are distinct subjects, best first.

    The outcome is 'uncertain' if the runner-up, adjusted by the best, reaches the threshold too: both subjects then
    resemble the probe more than the accepted risk allows by chance.
    """
    best = candidates[0] if candidates else None
    runner_up = candidates[1] if len(candidates) > 1 else None
    if best is None or best.score < thresholds.review:
        return Decision("unknown", best, runner_up)
    if best.score < thresholds.accept:
        return Decision("uncertain", best, runner_up)
    if runner_up is None:
        return Decision("identified", best, None)
    score = runner_up.score
    if thresholds.rival is None:
        _, score = rival_adjusted([best.score, score], thresholds.accept)
    return Decision("uncertain" if score >= thresholds.accept else "identified", best, runner_up)


def without_known_stranger(
    decision: Decision, hits: Sequence[Hit], outsiders: Mapping[int, int]
) -> tuple[Decision, tuple[str, ...]]:
    """Return the decision on a face, `unknown` if an outsider beats the subject that it was mistaken for, and reasons.

    The decision keeps its numbers. Other subjects are decided as if there were no outsiders, because one of them may be
    the outsider, enrolled since (docs/decisions.md, 59).

    Args:
        decision: among the others.
        hits: of the search, with outsiders.
        outsiders: keys of outsiders, and of the subjects that they were mistaken for.
    """
    best = decision.best
    if best is None or decision.outcome == "unknown":
        return decision, ()
    own = (hit.similarity for hit in hits if outsiders.get(hit.subject_pk) == best.subject_pk)
    if max(own, default=-1.0) <= best.similarity:
        return decision, ()
    return replace(decision, outcome="unknown"), (KNOWN_STRANGER,)


@dataclass(frozen=True, eq=False)
class EnrolledSubject:
    """Subject with (n, d) template vectors and (n,) qualities, n >= 1, and the decision rules of its gallery.

    ``decoys``: (m, d) vectors of outsiders who were mistaken for it; None: there are none.
    """

    vectors: Float
    qualities: Float
    model: ImpostorRisk | None
    review_factor: float = REVIEW_FACTOR
    decoys: Float | None = None


@dataclass(frozen=True)
class PairSimilarity:
    """Similarity of two sides, in [-1, 1], and the ``model`` of the risk.

    ``decoy``: the highest similarity of a face to a decoy of the subject; -1 without decoys.
    """

    similarity: float
    model: ImpostorRisk | None
    review_factor: float = REVIEW_FACTOR
    decoy: float = -1.0


def compare_faces(a: Float, b: Float, pack_risk: ImpostorRisk | None) -> PairSimilarity:
    """Compare the (d,) vectors of two faces, with the pack's calibration."""
    return PairSimilarity(_cosine(np.dot(a, b)), pack_risk)


def compare_with_subject(probe: Float, subject: EnrolledSubject) -> PairSimilarity:
    """Compare the (d,) vector of a face with a subject, as a search of one subject does."""
    count = len(subject.vectors)
    (fused,) = fuse_similarities(probe[None], subject.vectors, np.zeros(count, np.int64), subject.qualities)[0]
    model = subject.model
    if model is not None:
        # Strangers score higher against a subject with more templates. In a search the subjects' template counts
        # average out; against a single subject its own count matters.
        model = replace(model, comparisons_per_subject=max(1.0, count / model.mean_templates))
    decoy = -1.0 if subject.decoys is None else _cosine((subject.decoys @ probe).max(initial=-1))
    return PairSimilarity(_cosine(fused), model, subject.review_factor, decoy)


def _cosine(similarity: float) -> float:
    return float(np.clip(similarity, -1, 1))


def decide_pair(similarity: float, thresholds: Thresholds, decoy: float = -1.0) -> tuple[VerifyOutcome, list[str]]:
    """Return the outcome of a pair, and its reasons.

    A face more similar to a ``decoy`` of the subject than to the subject is not the subject.
    """
    if similarity < thresholds.review:
        return "different", []
    if decoy > similarity:
        return "different", [KNOWN_STRANGER]
    return ("same" if similarity >= thresholds.accept else "uncertain"), []
