"""Linearizability checker for concurrent histories, template by template.

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
