"""Histories of concurrent writers, and the check that some order explains them: linearizability.

Each template is a register that holds its subject or nothing. Linearizability is local (Herlihy and Wing, 1990): a
history of several objects is linearizable if and only if the history of each object is. So each template is searched
separately, as Wing and Gong (1993) do. An operation without an answer may have happened at any time after its
request, or never.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

NEVER = math.inf
Kind = Literal["enroll", "move", "delete", "delete subject", "read"]
State = tuple[frozenset[int], str | None]
"""Operations not yet ordered, and the template's subject before them."""


@dataclass(frozen=True)
class Asked:
    """Record written before an operation: ``templates`` by name, or ``subject`` for all its templates."""

    number: int
    kind: Kind
    began: float
    templates: tuple[str, ...]
    subject: str | None
    to: str | None = None


@dataclass(frozen=True)
class Answered:
    """Record written after an operation. ``number``: of the request. ``found``: subject by template that a search
    saw; None: the request was rejected and changed nothing.
    """

    number: int
    ended: float
    found: dict[str, str | None] | None


History = Sequence[Asked | Answered]


@dataclass(frozen=True)
class Operation:
    """Operation on one template. ``began``, ``ended``: seconds of a clock shared by all processes; NEVER: no answer
    arrived. ``subject``: subject that a search found or an enrollment names; ``to``: target of a move.
    """

    kind: Kind
    began: float
    ended: float
    subject: str | None
    to: str | None = None

    def after(self, value: str | None) -> tuple[bool, str | None]:
        """Return whether the operation is possible when the template belongs to ``value``, and the subject
        afterwards.
        """
        match self.kind:
            case "enroll":
                return value is None, self.subject
            case "move":
                return value == self.subject, self.to
            case "delete":
                return value in (self.subject, None), None  # a repeated deletion answers the first receipt
            case "delete subject":
                return True, None if value == self.subject else value
            case "read":
                return value == self.subject, value


def has_an_order(operations: Iterable[Operation]) -> bool:
    """Return whether some order explains every answer and respects real time."""
    ordered = sorted(operations, key=lambda operation: operation.began)
    waiting: list[State] = [(frozenset(range(len(ordered))), None)]
    seen: set[State] = set()
    while waiting:
        left, value = waiting.pop()
        if all(ordered[i].ended == NEVER for i in left):
            return True
        if (left, value) in seen:
            continue
        seen.add((left, value))
        waiting += _next(ordered, left, value)
    return False


def _next(ordered: Sequence[Operation], left: frozenset[int], value: str | None) -> list[State]:
    first_answer = min(ordered[i].ended for i in left)
    found = []
    for i in sorted(left):
        if ordered[i].began > first_answer:
            break
        possible, then = ordered[i].after(value)
        if possible and ordered[i].kind == "read":
            return [(left - {i}, value)]  # it changes nothing, so trying it first loses no order
        if possible:
            found.append((left - {i}, then))
    return found


def without_an_order(histories: Iterable[History]) -> dict[str, list[Operation]]:
    """Return the operations of each template whose history is not linearizable. Unanswered writes may have happened;
    rejected operations and unanswered searches are ignored.
    """
    by_template: dict[str, list[Operation]] = {}
    subjects_deleted: list[Operation] = []
    for history in histories:
        answers = {line.number: line for line in history if isinstance(line, Answered)}
        for asked in (line for line in history if isinstance(line, Asked)):
            answer = answers.get(asked.number, Answered(asked.number, NEVER, {}))
            if answer.found is None or (asked.kind == "read" and answer.ended == NEVER):
                continue
            if asked.kind == "delete subject":
                subjects_deleted.append(Operation(asked.kind, asked.began, answer.ended, asked.subject))
            for template in asked.templates:
                if asked.kind == "read" and template not in answer.found:
                    continue
                subject = answer.found[template] if asked.kind == "read" else asked.subject
                operation = Operation(asked.kind, asked.began, answer.ended, subject, asked.to)
                by_template.setdefault(template, []).append(operation)
    for operations in by_template.values():
        homes = {o.subject for o in operations} | {o.to for o in operations}
        operations += [deletion for deletion in subjects_deleted if deletion.subject in homes]
    return {template: found for template, found in by_template.items() if not has_an_order(found)}


def halves(histories: Sequence[History], present: Iterable[str]) -> list[tuple[str, ...]]:
    """Return the unanswered enrollments that are stored partially, although no request deleted the rest."""
    there = set(present)
    asked = [line for history in histories for line in history if isinstance(line, Asked)]
    deleted = {template for line in asked if line.kind == "delete" for template in line.templates}
    emptied = {line.subject for line in asked if line.kind == "delete subject"}
    moved_to = {template: line.to for line in asked if line.kind == "move" for template in line.templates}
    broken = []
    for history in histories:
        answered = {line.number for line in history if isinstance(line, Answered) and line.ended != NEVER}
        for line in history:
            if not isinstance(line, Asked) or line.kind != "enroll" or line.number in answered:
                continue
            homes = {line.subject} | {moved_to.get(template) for template in line.templates}
            if homes & emptied or deleted & set(line.templates):
                continue
            if sum(template in there for template in line.templates) not in (0, len(line.templates)):
                broken.append(line.templates)
    return broken
