"""One face per person: each subject is identified in at most one face of a photo. Pure functions.

Of the faces whose best subject is one and the same, the most similar keeps the name (docs/decisions.md, 57). A face
that is not identified by itself never becomes identified, so the risk of a stranger does not rise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from service.risk.search import Identification

ELSEWHERE: Final = "same_person_elsewhere"
"""Reason: another face of the photo has the face's best subject."""


def one_face_per_person(found: Sequence[Identification]) -> list[Identification]:
    """Return the answers for the faces of one photo, each subject identified once.

    The face with the highest score at or above the threshold keeps its best subject, even if it is uncertain itself.
    The others are uncertain: they get no other subject.
    """
    holders: dict[int, tuple[float, int]] = {}
    for i, answer in enumerate(found):
        best = answer.decision.best
        if best is None or answer.decision.outcome == "unknown":
            continue
        score = answer.thresholds.compared(best)
        if score >= answer.thresholds.accept and score > holders.get(best.subject_pk, (-1.0, 0))[0]:
            holders[best.subject_pk] = score, i
    answers = []
    for i, answer in enumerate(found):
        best = answer.decision.best
        _, holder = (0.0, i) if best is None else holders.get(best.subject_pk, (0.0, i))
        if holder != i and answer.decision.outcome != "unknown":
            demoted, reasons = replace(answer.decision, outcome="uncertain"), (*answer.reasons, ELSEWHERE)
            answer = replace(answer, decision=demoted, reasons=reasons, other_face=holder)
        answers.append(answer)
    return answers
