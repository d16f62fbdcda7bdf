"""Scheduling of queued items: round robin among callers, and a background lane. Not thread-safe."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

Item = TypeVar("Item")

BACKGROUND_EVERY: Final = 8
"""One batch in this many is led by background work while requests wait."""
RECENT_BATCHES: Final = 64
"""Number of batches for which requests count as recent."""
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
        self._foreground = _Lane[Item]()
        self._background = _Lane[Item]()

    def __bool__(self) -> bool:
        return bool(self._foreground or self._background)

    @property
    def foreground_count(self) -> int:
        """Number of queued foreground items."""
        return self._foreground.count

    @property
    def background_count(self) -> int:
        """Number of queued background items."""
        return self._background.count

    def add(self, part: QueuedItems[Item]) -> None:
        self._lane(part.background).add(part)

    def drop(self, part: QueuedItems[Item]) -> None:
        """Remove the items that are still queued."""
        self._lane(part.background).drop(part)

    def since(self, background: bool) -> float:
        """Return the time since which the next caller of a lane waits. The lane must not be empty."""
        return self._lane(background).first().since

    def next_key(self, background: bool) -> tuple[Hashable, int]:
        """Return the next key of a lane, and the number of its items in both lanes. The lane must not be empty."""
        key = self._lane(background).first().key
        return key, self._foreground.waiting(key) + self._background.waiting(key)

    def take(self, size: int, now: float, background: bool) -> list[tuple[QueuedItems[Item], int]]:
        """Take at most ``size`` items of a lane's next key, as (part, index of the item)."""
        lane = self._lane(background)
        key = lane.first().key
        taken = lane.take(key, size, now)
        return taken + self._lane(not background).take(key, size - len(taken), now)

    def _lane(self, background: bool) -> _Lane[Item]:
        return self._background if background else self._foreground


class LanePolicy:
    """Policy for the lane that leads the next batch of any network.

    Background work leads if nothing else waits, and once in :data:`BACKGROUND_EVERY` batches.
    """

    def __init__(self) -> None:
        self._passed_over = 0
        self._without_urgent = RECENT_BATCHES

    @property
    def requests_recent(self) -> bool:
        """True if the last RECENT_BATCHES batches had requests, so that more are likely."""
        return self._without_urgent < RECENT_BATCHES

    def background(self, urgent: bool, behind: bool) -> bool:
        """Return whether background work leads the next batch. At least one lane must have items."""
        leads = behind and (not urgent or self._passed_over >= BACKGROUND_EVERY - 1)
        if leads:
            self._passed_over = 0
        elif behind:
            self._passed_over += 1
        self._without_urgent = 0 if urgent else self._without_urgent + 1
        return leads


class _Lane(Generic[Item]):
    """Round-robin ring of callers for each key, in order of arrival or of their last turn."""

    def __init__(self) -> None:
        self._rings: dict[Hashable, deque[QueuedItems[Item]]] = {}
        self._waiting: dict[Hashable, int] = {}
        self.count = 0

    def __bool__(self) -> bool:
        return self.count > 0

    def waiting(self, key: Hashable) -> int:
        return self._waiting.get(key, 0)

    def first(self) -> QueuedItems[Item]:
        return min((ring[0] for ring in self._rings.values()), key=lambda part: part.since)

    def add(self, part: QueuedItems[Item]) -> None:
        self._rings.setdefault(part.key, deque()).append(part)
        self._change(part.key, part.left)

    def drop(self, part: QueuedItems[Item]) -> None:
        if part.left:
            self._rings[part.key].remove(part)
            self._change(part.key, -part.left)
            part.taken = len(part.items)

    def take(self, key: Hashable, size: int, now: float) -> list[tuple[QueuedItems[Item], int]]:
        size = min(size, self.waiting(key))
        if not size:
            return []
        ring = self._rings[key]
        taken: list[tuple[QueuedItems[Item], int]] = []
        while len(taken) < size:
            part = ring[0]
            taken.append((part, part.taken))
            part.taken += 1
            if part.taken % TURN == 0 or not part.left:
                part.since = now
                ring.popleft()
                if part.left:
                    ring.append(part)
        self._change(key, -size)
        return taken

    def _change(self, key: Hashable, number: int) -> None:
        """Add ``number`` to the items that wait, and forget the key of none."""
        self.count += number
        left = self._waiting.get(key, 0) + number
        if left:
            self._waiting[key] = left
        else:
            del self._rings[key]
            self._waiting.pop(key, None)
