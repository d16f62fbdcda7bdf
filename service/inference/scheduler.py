"""Scheduling of queued items: round robin among callers, and a background lane. Not thread-safe."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

Item = TypeVar("Item")

BACKGROUND_EVERY: Final = 8
"""One batch in this many is led by background work while requests wait."""
TURN: Final = 8
"""Items of one turn of a caller, so that the faces of a small group are done at once (docs/decisions.md, 31)."""


@dataclass(eq=False, slots=True)
class QueuedItems(Generic[Item]):
    """Items of one caller with one batching key, and their ``rows`` in the call.

    ``came`` is the arrival time. ``since`` is the time since which the caller waits: its arrival here or its
    photo's admission; after a turn, the end of that turn.
    """

    owner: Any
    key: Hashable
    rows: Sequence[int]
    items: Sequence[Item]
    background: bool
    came: float
    since: float
    taken: int = 0

    @property
    def left(self) -> int:
        return len(self.items) - self.taken


class FairQueue(Generic[Item]):
    """Fair queue with a foreground and a background lane, by batching key.

    The callers of a lane take turns with TURN items each (round robin), over several batches if need be. So with R
    callers waiting, each is served within R · TURN batches, and a caller with a hundred items delays others by TURN
    items at a time. The lane that does not lead fills the free places of a batch with items of the same key.
    """

    def __init__(self) -> None:
        self._lanes = {background: _Lane[Item]() for background in (False, True)}

    def __bool__(self) -> bool:
        return any(lane.count for lane in self._lanes.values())

    def count(self, background: bool) -> int:
        """Return the number of queued items of a lane."""
        return self._lanes[background].count

    def add(self, part: QueuedItems[Item]) -> None:
        self._lanes[part.background].add(part)

    def drop(self, part: QueuedItems[Item]) -> None:
        """Remove the items that are still queued."""
        self._lanes[part.background].drop(part)

    def since(self, background: bool) -> float:
        """Return the time since which the next caller of a lane waits. The lane must not be empty."""
        return self._lanes[background].first().since

    def take(self, size: int, now: float, background: bool) -> list[tuple[QueuedItems[Item], int]]:
        """Take at most ``size`` items of the next key of a lane that is not empty, as (part, index of the item)."""
        key = self._lanes[background].first().key
        taken = self._lanes[background].take(key, size, now)
        return taken + self._lanes[not background].take(key, size - len(taken), now)


class LanePolicy:
    """Policy for the lane that leads the next batch of any network.

    Background work leads if nothing else waits, and once in :data:`BACKGROUND_EVERY` batches.
    """

    def __init__(self) -> None:
        self._passed_over = 0

    def background(self, urgent: bool, behind: bool) -> bool:
        """Return whether background work leads the next batch. At least one lane must have items."""
        leads = behind and (not urgent or self._passed_over >= BACKGROUND_EVERY - 1)
        self._passed_over = 0 if leads else self._passed_over + behind
        return leads


class _Lane(Generic[Item]):
    """Round-robin ring of callers for each key, in order of arrival or of their last turn."""

    def __init__(self) -> None:
        self._rings: defaultdict[Hashable, deque[QueuedItems[Item]]] = defaultdict(deque)
        self.count = 0

    def first(self) -> QueuedItems[Item]:
        return min((ring[0] for ring in self._rings.values() if ring), key=lambda part: part.since)

    def add(self, part: QueuedItems[Item]) -> None:
        self._rings[part.key].append(part)
        self.count += part.left

    def drop(self, part: QueuedItems[Item]) -> None:
        if part.left:
            self._rings[part.key].remove(part)
            self.count -= part.left

    def take(self, key: Hashable, size: int, now: float) -> list[tuple[QueuedItems[Item], int]]:
        ring, taken = self._rings[key], list[tuple[QueuedItems[Item], int]]()
        while ring and len(taken) < size:
            part = ring[0]
            taken.append((part, part.taken))
            part.taken += 1
            if part.taken % TURN == 0 or not part.left:
                part.since = now
                ring.popleft()
                if part.left:
                    ring.append(part)
        self.count -= len(taken)
        return taken
