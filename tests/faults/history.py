"""Can what several processes did at once, and saw, be put in one order? Pure: linearisability, template by template.

Each template is a register that names its subject, or nobody. Herlihy and Wing (1990): a history of several objects is
linearisable if and only if each object's is, so that each is searched for an order of its own, as Wing and Gong (1993)
do. What was never answered may have happened at any time after it was asked, or never.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

NEVER = math.inf
Kind = Literal["enrol", "move", "delete", "delete subject", "read"]
State = tuple[frozenset[int], str | None]
"""Which operations are still to be put in order, and whose the template is before them."""


@dataclass(frozen=True)
class Operation:
    """On one template. ``began``, ``ended``: seconds of a clock that all processes share; NEVER: no answer came.
    ``subject``: where it was found, or is enrolled; ``to``: where it is moved."""

    kind: Kind
    began: float
    ended: float
    subject: str | None
    to: str | None = None

    def after(self, value: str | None) -> tuple[bool, str | None]:
        """Whether it can have happened where the template is ``value``'s, and whose it is then."""
        match self.kind:
            case "enrol":
                return value is None, self.subject
            case "move":
                return value == self.subject, self.to
            case "delete":
                return value == self.subject, None
            case "delete subject":
                return True, None if value == self.subject else value
            case "read":
                return value == self.subject, value


def has_an_order(operations: Iterable[Operation]) -> bool:
    """Whether some order of them explains every answer and puts none before what was answered before it was asked."""
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
            return [(left - {i}, value)]  # it changes nothing, and so may as well come first
        if possible:
            found.append((left - {i}, then))
    return found
