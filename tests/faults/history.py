"""Steps of concurrent writers, and the check that their answers agree with each other.

Each template has one writer, which waits for each answer. So the writes of a template have an order, and only a search
may run at the same time as they do.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

NEVER = math.inf
Kind = Literal["enroll", "move", "delete", "delete subject", "read"]


@dataclass(frozen=True)
class Step:
    """Step of a process, which reports it before it begins, without an answer, and again when it has one.

    ``seen``: subjects of templates, None for deleted ones, that a write makes or a search found. ``began``, ``ended``:
    seconds of a clock shared by all processes; NEVER: no answer arrived.
    """

    number: int
    kind: Kind
    began: float
    seen: Mapping[str, str | None]
    ended: float = NEVER


History = Sequence[Step]


def contradictions(histories: Sequence[History]) -> Iterator[str]:
    """Yield answers that do not agree. The last history is of a process that reads all templates after all writers.

    A write without an answer happened at any time after its request, or never, but not in part.
    """
    steps = [list({step.number: step for step in history}.values()) for history in histories]
    writes = defaultdict[str, list[Step]](list)
    for step in (step for own in steps for step in own if step.kind != "read"):
        for template in step.seen:
            writes[template].append(step)
    for read in (step for own in steps for step in own if step.kind == "read" and step.ended < NEVER):
        for template, subject in read.seen.items():
            possible: set[str | None] = {None}
            for write in writes[template]:
                if write.ended < read.began:
                    possible.clear()
                if write.began < read.ended:
                    possible.add(write.seen[template])
            if subject not in possible:
                yield f"{read} found {subject} for {template}, not one of {possible}"
    (last,) = steps[-1]
    for lost in (own[-1] for own in steps if own and own[-1].ended == NEVER):
        if len({last.seen[template] == subject for template, subject in lost.seen.items()}) > 1:
            yield f"{lost} happened in part"
