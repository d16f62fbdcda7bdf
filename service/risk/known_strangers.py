"""Known strangers: faces that resemble a decoy of a subject more than the subject. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from models.risk.impostor_evidence import rival_shift
from service.risk.decision import KNOWN_STRANGER, Candidate, Decision, Thresholds, decide, false_alarm_probabilities
from service.risk.search import Identification

RANKS: Final = ("unknown", "uncertain", "identified")
"""Outcomes of a search, from the least to the most."""


def without_known_stranger(found: Identification, decoys: Mapping[int, float]) -> Identification:
    """Return the answer for a face that may be a decoy of the subjects found.

    A decoy rules its subject out if the face is more similar to the decoy than to the subject. If the best subject is
    ruled out, the answer is decided again among the other subjects, at the thresholds of the first decision. The
    runner-up still adjusts the scores, so no score and no probability gets better. The outcome is the lower one of both
    decisions: `uncertain` never becomes `identified`, and `unknown` never changes. An answer that is `unknown` by this
    rule keeps the numbers of the subject that was ruled out.

    So every face that is identified was identified without decoys too, and the risk of a stranger does not rise.

    Args:
        found: the answer without decoys.
        decoys: highest similarity of the face to a decoy, by subject.
    """
    first, thresholds = found.decision, found.thresholds
    ruled_out = {one.subject_pk for one in found.ranked if decoys.get(one.subject_pk, -1.0) > one.similarity}
    if first.best is None or first.outcome == "unknown" or not ruled_out:
        return found
    if first.best.subject_pk not in ruled_out:
        return replace(found, ranked=[one for one in found.ranked if one.subject_pk not in ruled_out])
    rest = [one for one in _at_own_threshold(found) if one.subject_pk not in ruled_out]
    second = decide([*rest[:1], *(_rivaled(one, rest[0], thresholds) for one in rest[1:])], thresholds)
    if second.best is None or second.outcome == "unknown":
        decision, shown = replace(first, outcome="unknown"), found.candidates
    else:
        outcome = min(first.outcome, second.outcome, key=RANKS.index)
        decision = Decision(outcome, second.best, second.runner_up)
        shown = [second.best if one.subject_pk == second.best.subject_pk else one for one in found.candidates]
    return replace(
        found,
        decision=decision,
        candidates=shown,
        ranked=rest,
        reference=first.runner_up,
        reasons=(*found.reasons, KNOWN_STRANGER),
    )


def _at_own_threshold(answer: Identification) -> list[Candidate]:
    """Return the candidates but the best, with scores and probabilities at the threshold of the best.

    The best is then no rival. The runner-up still adjusts the score, as it did for the best: no threshold and no
    probability gets smaller.
    """
    rival, others, runner_up = answer.thresholds.rival, answer.ranked[1:], answer.decision.runner_up
    if rival is None or runner_up is None:
        return list(others)
    scores = [min(1.0, one.similarity - rival_shift(runner_up.similarity, rival)) for one in others]
    chances = false_alarm_probabilities(scores, answer.model, answer.subjects, adjusted=True)
    return [
        replace(one, score=score, false_alarm_probability=chance)
        for one, score, chance in zip(others, scores, chances, strict=True)
    ]


def _rivaled(candidate: Candidate, best: Candidate, thresholds: Thresholds) -> Candidate:
    """Return a candidate with its score adjusted by another best."""
    if thresholds.rival is None:
        return candidate
    return replace(candidate, score=min(1.0, candidate.similarity - rival_shift(best.similarity, thresholds.rival)))
