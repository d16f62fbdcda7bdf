"""Who goes next, and with whom: the order in which waiting items leave. No threads, no clock of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

Item = TypeVar("Item")

BACKGROUND_EVERY: Final = 8
"""Where both wait, one batch in so many is the background's."""
LATELY: Final = 64
"""Batches."""


@dataclass(eq=False, slots=True)
class Part(Generic[Item]):
    """One caller's items of one key, and which of the caller's they are. ``came``, ``since``: when it came; when it was
    last served, or came."""

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


class Turns(Generic[Item]):
    """Parts that wait, in two lanes, by key.

    Callers of a lane take turns, an item each: of R that wait, any is served within R batches; within R / size, where
    all are of one key. So one with a hundred items delays the others by one item a batch. Whichever lane does not
    lead a batch fills what is left free of it, with items of its key.
    """

    def __init__(self) -> None:
        self._front = _Lane[Item]()
        self._behind = _Lane[Item]()

    def __bool__(self) -> bool:
        return bool(self._front or self._behind)

    @property
    def urgent(self) -> int:
        """Items that wait, the background's left out."""
        return self._front.count

    @property
    def behind(self) -> int:
        """The background's items."""
        return self._behind.count

    def add(self, part: Part[Item]) -> None:
        self._lane(part.background).add(part)

    def drop(self, part: Part[Item]) -> None:
        """Whatever of it still waits."""
        self._lane(part.background).drop(part)

    def since(self, background: bool) -> float:
        """How long who goes next of a lane has waited. Call only where somebody waits in it."""
        return self._lane(background).first().since

    def next_key(self, background: bool) -> tuple[Hashable, int]:
        """Whose turn it is in a lane, and how many items of that key wait in both. Call only where somebody waits."""
        key = self._lane(background).first().key
        return key, self._front.waiting(key) + self._behind.waiting(key)

    def take(self, size: int, now: float, background: bool) -> list[tuple[Part[Item], int]]:
        """At most ``size`` items of a lane's next key, as places in their parts."""
        lane = self._lane(background)
        key = lane.first().key
        taken = lane.take(key, size, now)
        return taken + self._lane(not background).take(key, size - len(taken), now)

    def _lane(self, background: bool) -> _Lane[Item]:
        return self._behind if background else self._front


class Lead:
    """Which lane leads a device's next batch, whichever network's: the background only where nothing else waits, and
    once in :data:`BACKGROUND_EVERY`."""

    def __init__(self) -> None:
        self._passed_over = 0
        self._without_urgent = LATELY

    @property
    def lately(self) -> bool:
        """Requests were among the latest batches, so that more of them are likely to come."""
        return self._without_urgent < LATELY

    def background(self, urgent: bool, behind: bool) -> bool:
        """Judge the next batch by what waits for any network: one at least."""
        leads = behind and (not urgent or self._passed_over >= BACKGROUND_EVERY - 1)
        if leads:
            self._passed_over = 0
        elif behind:
            self._passed_over += 1
        self._without_urgent = 0 if urgent else self._without_urgent + 1
        return leads


class _Lane(Generic[Item]):
    """A ring of parts for each key, who waits longest first."""

    def __init__(self) -> None:
        self._rings: dict[Hashable, deque[Part[Item]]] = {}
        self._waiting: dict[Hashable, int] = {}
        self.count = 0

    def __bool__(self) -> bool:
        return self.count > 0

    def waiting(self, key: Hashable) -> int:
        return self._waiting.get(key, 0)

    def first(self) -> Part[Item]:
        return min((ring[0] for ring in self._rings.values()), key=lambda part: part.since)

    def add(self, part: Part[Item]) -> None:
        self._rings.setdefault(part.key, deque()).append(part)
        self._less(part.key, -part.left)

    def drop(self, part: Part[Item]) -> None:
        if part.left:
            self._rings[part.key].remove(part)
            self._less(part.key, part.left)
            part.taken = len(part.items)

    def take(self, key: Hashable, size: int, now: float) -> list[tuple[Part[Item], int]]:
        size = min(size, self.waiting(key))
        if not size:
            return []
        ring, taken = self._rings[key], []
        for _ in range(size):
            part = ring.popleft()
            taken.append((part, part.taken))
            part.taken += 1
            part.since = now
            if part.left:
                ring.append(part)
        self._less(key, size)
        return taken

    def _less(self, key: Hashable, number: int) -> None:
        self.count -= number
        left = self._waiting.get(key, 0) - number
        if left:
            self._waiting[key] = left
        else:
            del self._rings[key]
            self._waiting.pop(key, None)
