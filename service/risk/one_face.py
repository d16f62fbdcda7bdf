"""One face per person: each subject is identified in at most one face of a photo. Pure functions.

The faces whose best subject reaches the threshold are assigned to different subjects, so that the sum of the calibrated
log odds is largest (linear assignment). A face may only have a subject that reaches its threshold. A face that is not
identified by itself never becomes identified, so the risk of a stranger does not rise (docs/decisions/0057).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from models.risk.impostor_evidence import rival_shift
from models.runtime.network import Float
from service.risk.decision import Candidate, Decision, Thresholds, decide, false_alarm_probabilities
from service.risk.search import Identification

ELSEWHERE: Final = "same_person_elsewhere"
"""Reason: another face of the photo has the face's best subject."""
TWICE: Final = "same_face_twice"
"""Reason: another face of the photo is the same picture, so that both are the person."""
SAME_PICTURE_FNMR: Final = 0.99
"""FNMR of the similarity from which two faces are one picture: different photos of a person rarely reach it."""
MAX_ASSIGNMENTS: Final = 1024
"""Assignments of connected faces that are compared. For more faces, only their best subjects count."""
TIE_WEIGHT: Final = 1e-3
"""Weight of the score: it decides between equal likelihood ratios, and where there is no calibration."""


@dataclass(frozen=True)
class _Claim:
    """Subjects that a face may have, with their weights: positive, higher for a more likely subject."""

    candidates: Mapping[int, Candidate]
    weights: Mapping[int, float]


def one_face_per_person(found: Sequence[Identification], probes: Float) -> list[Identification]:
    """Return the answers for the faces of one photo, each subject identified once.

    A face that loses its best subject becomes another subject that reaches the same threshold, or is uncertain.

    Args:
        found: answers of one search.
        probes: (n, d) unit vectors of the faces.
    """
    claims = {i: claim for i, answer in enumerate(found) if (claim := _claim(answer)) is not None}
    if len(found) < 2 or not claims:
        return list(found)
    groups = _same_pictures(found, list(claims), probes)
    wanted = [_merged([claims[i].weights for i in group]) for group in groups]
    group_of = {i: row for row, group in enumerate(groups) for i in group}
    holders: dict[int, int] = {}
    for group, subject in zip(groups, assign(wanted), strict=True):
        if subject is not None:
            holders[subject] = max(group, key=lambda i: (claims[i].weights.get(subject, 0.0), -i))
    answers = []
    for i, answer in enumerate(found):
        best = answer.decision.best
        holder = None if best is None or answer.decision.outcome == "unknown" else holders.get(best.subject_pk)
        if holder is None or holder == i:
            answers.append(answer)
        elif group_of.get(i) == group_of[holder]:
            answers.append(_with_reason(answer, TWICE, holder))
        else:
            own = next((subject for subject, face in holders.items() if group_of[face] == group_of.get(i)), None)
            answers.append(_with_reason(_without_best(answer, claims.get(i), own, holders), ELSEWHERE, holder))
    return answers


def assign(weights: Sequence[Mapping[int, float]]) -> list[int | None]:
    """Return the subject of each row, or None; no subject twice, and the sum of the positive weights largest.

    Exact unless more than MAX_ASSIGNMENTS assignments of connected rows are possible: then each subject gets the row
    that it is the best of and that has the largest weight. Of equal sums, the first rows get their best subjects.
    """
    chosen: list[int | None] = [None] * len(weights)
    for rows in _connected(weights):
        options = [[*sorted(weights[row], key=lambda subject: (-weights[row][subject], subject)), None] for row in rows]
        if math.prod(map(len, options)) > MAX_ASSIGNMENTS:
            _greedy(rows, options, weights, chosen)
            continue
        best_sum = -1.0
        for subjects in itertools.product(*options):
            taken = [subject for subject in subjects if subject is not None]
            if len(set(taken)) < len(taken):
                continue
            total = sum(
                weights[row][subject] for row, subject in zip(rows, subjects, strict=True) if subject is not None
            )
            if total > best_sum:
                best_sum = total
                for row, subject in zip(rows, subjects, strict=True):
                    chosen[row] = subject
    return chosen


def _greedy(
    rows: Sequence[int],
    options: Sequence[Sequence[int | None]],
    weights: Sequence[Mapping[int, float]],
    chosen: list[int | None],
) -> None:
    """Give each subject to the row with the largest weight among those that it is the best of."""
    holders: dict[int, int] = {}
    for row, (subject, *_) in zip(rows, options, strict=True):
        if subject is not None and (
            subject not in holders or weights[row][subject] > weights[holders[subject]][subject]
        ):
            holders[subject] = row
    for subject, row in holders.items():
        chosen[row] = subject


def _connected(weights: Sequence[Mapping[int, float]]) -> list[list[int]]:
    """Return the rows in sets that share no subject."""
    sets: list[tuple[list[int], set[int]]] = []
    for row, subjects in enumerate(weights):
        joined, others = ([row], set(subjects)), []
        for rows, theirs in sets:
            if theirs.isdisjoint(subjects):
                others.append((rows, theirs))
            else:
                joined = (rows + joined[0], theirs | joined[1])
        sets = [*others, joined]
    return [sorted(rows) for rows, _ in sets]


def _claim(answer: Identification) -> _Claim | None:
    """Return what a face may have; None if no subject reaches its threshold."""
    best = answer.decision.best
    if best is None or answer.decision.outcome == "unknown" or best.score < answer.thresholds.accept:
        return None
    candidates = [one for one in (best, *at_own_threshold(answer)) if one.score >= answer.thresholds.accept]
    odds = _log_odds(answer, [one.score for one in candidates])
    weights = {
        one.subject_pk: max(0.0, value) + TIE_WEIGHT * (2 + one.score)
        for one, value in zip(candidates, odds, strict=True)
        if one is best or value >= 0
    }
    return _Claim({one.subject_pk: one for one in candidates}, weights)


def at_own_threshold(answer: Identification) -> list[Candidate]:
    """Return the other candidates, with scores and probabilities at the threshold of the best.

    The best is then another person's face, and no rival. The runner-up still adjusts the score, as it did for the best:
    no threshold and no probability gets smaller.
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


def _log_odds(answer: Identification, scores: Sequence[float]) -> Sequence[float]:
    """Return the log odds that a face is the subject, not a stranger. Without a calibration they are 0.

    The prior takes every subject as equally likely, and a stranger as likely as all of them together. Without it, a
    chance resemblance to another person would let a weaker face take a person over.
    """
    ratios = None if answer.model is None else answer.model.log_ratios(scores, answer.subjects)
    if ratios is None:
        return [0.0] * len(scores)
    prior = math.log(max(1, answer.subjects))
    return [ratio - prior for ratio in ratios]


def _same_pictures(found: Sequence[Identification], faces: Sequence[int], probes: Float) -> list[list[int]]:
    """Return the faces in groups of one picture, pasted or mirrored, and of one best subject."""
    model = found[0].model
    if model is None or model.pack is None:
        return [[i] for i in faces]
    similarity = model.pack.threshold_at_fnmr(SAME_PICTURE_FNMR)
    groups: list[list[int]] = []
    for i in faces:
        same = (g for g in groups if _best(found, g[0]) == _best(found, i) and probes[g[0]] @ probes[i] >= similarity)
        group = next(same, None)
        if group is None:
            groups.append([i])
        else:
            group.append(i)
    return groups


def _best(found: Sequence[Identification], i: int) -> int | None:
    best = found[i].decision.best
    return None if best is None else best.subject_pk


def _merged(weights: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return the largest weight of each subject."""
    merged: dict[int, float] = {}
    for subject, weight in itertools.chain.from_iterable(each.items() for each in weights):
        merged[subject] = max(weight, merged.get(subject, 0.0))
    return merged


def _without_best(
    answer: Identification, claim: _Claim | None, own: int | None, holders: Mapping[int, int]
) -> Identification:
    """Return the answer of a face whose best subject is another face: ``own``, or uncertain with its former numbers."""
    before = answer.decision
    if claim is None or own is None or own not in claim.candidates or before.outcome != "identified":
        return replace(answer, decision=replace(before, outcome="uncertain"))
    best = claim.candidates[own]
    others = [one for one in answer.ranked if one.subject_pk != own and one.subject_pk not in holders]
    rest = [best, *(rivaled(one, best, answer.thresholds) for one in others)]
    decision = decide(rest, answer.thresholds)
    return replace(
        answer,
        decision=Decision(decision.outcome, best, decision.runner_up),
        candidates=[best if one.subject_pk == own else one for one in answer.candidates],
        reference=before.runner_up,
    )


def rivaled(candidate: Candidate, best: Candidate, thresholds: Thresholds) -> Candidate:
    """Return a candidate with its score adjusted by another best."""
    if thresholds.rival is None:
        return candidate
    return replace(candidate, score=min(1.0, candidate.similarity - rival_shift(best.similarity, thresholds.rival)))


def _with_reason(answer: Identification, reason: str, face: int) -> Identification:
    return replace(answer, reasons=(*answer.reasons, reason), other_face=face)
