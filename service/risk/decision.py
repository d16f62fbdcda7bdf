"""Decisions: the outcome of a search or of a pair. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from kith.wire.common import IdentifyOutcome, VerifyOutcome
from models.risk.impostor_evidence import search_scores
from models.runtime.network import Float
from models.vision.liveness import LivenessVerdict
from service.domain.fusion import fuse_similarities
from service.domain.gallery import Hit, SubjectFaces
from service.domain.outcomes import RejectionOutcome
from service.risk.threshold import Candidate, ImpostorRisk, Thresholds

KNOWN_STRANGER: Final = "known_stranger"
"""Reason: the face is more similar to an outsider who was mistaken for the subject than to the subject."""


@dataclass(frozen=True)
class Decision:
    outcome: IdentifyOutcome
    best: Candidate | None
    runner_up: Candidate | None

    @property
    def margin(self) -> float | None:
        return self.best.similarity - self.runner_up.similarity if self.best and self.runner_up else None


def score_candidates(
    hits: Sequence[tuple[int, float]], thresholds: Thresholds, model: ImpostorRisk | None, subjects: int
) -> list[Candidate]:
    """Return the candidates of one search among ``subjects``, from (subject key, similarity), best first."""
    leveled = [similarity for _, similarity in hits]
    rival = None if model is None else model.rival_of(subjects)
    if rival is not None and model is not None and model.search is not None and model.search.levels is not None:
        levels = model.search.levels.of([subject_pk for subject_pk, _ in hits])
        leveled = [similarity - level for similarity, level in zip(leveled, levels, strict=True)]
    scores = search_scores(leveled, rival)
    candidates = [Candidate(*hit, score) for hit, score in zip(hits, scores, strict=True)]
    return sorted(candidates, key=thresholds.compared, reverse=True)


def coarse_candidates(candidates: Sequence[Candidate], thresholds: Thresholds) -> list[Candidate]:
    """Return the candidates from the review threshold up, with coarse scores as similarities.

    Exact thresholds of the search would reveal the similarity of the runner-up.
    """
    coarse = [thresholds.coarse(thresholds.compared(candidate)) for candidate in candidates]
    return [
        Candidate(candidate.subject_pk, score, score)
        for candidate, score in zip(candidates, coarse, strict=True)
        if score is not None
    ]


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
    if best is None or thresholds.compared(best) < thresholds.review:
        return Decision("unknown", best, runner_up)
    if thresholds.compared(best) < thresholds.accept:
        return Decision("uncertain", best, runner_up)
    if runner_up is None:
        return Decision("identified", best, None)
    score = runner_up.score
    if not thresholds.of_scores:
        score, _ = sorted(search_scores([best.similarity, runner_up.similarity], thresholds.accept))
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


@dataclass(frozen=True)
class PairSimilarity:
    """Similarity of two sides, and the ``model`` of the risk.

    ``decoy``: the highest similarity of a face to a decoy of the subject; -1 without decoys.
    """

    similarity: float
    model: ImpostorRisk | None
    decoy: float = -1.0


def compare_faces(a: Float, b: Float, pack_risk: ImpostorRisk | None) -> PairSimilarity:
    """Compare the (d,) vectors of two faces, with the pack's calibration."""
    return PairSimilarity(float(np.dot(a, b)), pack_risk)


def compare_with_subject(probe: Float, subject: SubjectFaces, model: ImpostorRisk | None) -> PairSimilarity:
    """Compare the (d,) vector of a face with a subject that has templates, as a search of one subject does.

    ``model``: risk of its gallery.
    """
    count = len(subject.vectors)
    (fused,) = fuse_similarities(probe[None], subject.vectors, np.zeros(count, np.int64), subject.qualities)[0]
    # In a search the subjects' template counts average out; against a single subject its own count matters.
    model = None if model is None else model.against(count)
    decoy = -1.0 if subject.decoys is None else float((subject.decoys @ probe).max(initial=-1))
    return PairSimilarity(float(fused), model, decoy)


def decide_pair(similarity: float, thresholds: Thresholds, decoy: float = -1.0) -> tuple[VerifyOutcome, list[str]]:
    """Return the outcome of a pair, and its reasons.

    A face more similar to a ``decoy`` of the subject than to the subject is not the subject.
    """
    if similarity < thresholds.review:
        return "different", []
    if decoy > similarity:
        return "different", [KNOWN_STRANGER]
    return ("same" if similarity >= thresholds.accept else "uncertain"), []
