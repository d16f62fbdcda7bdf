"""Batches across requests: items wait while the devices work, and leave together when one is free.

No timer: an idle device takes a lone item at once, a busy one finds a full batch when it returns. Who goes next says
service.turns.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

from service import patience
from service.errors import KithError, OverloadedError
from service.measures import SECONDS, SHARES, Histogram, Spans
from service.turns import Lead, Part, Turns

Item = TypeVar("Item")
Result = TypeVar("Result")

STEP: Final = 0.1
"""How much a batch changes what batches are taken to take."""
STEP_DOWN: Final = 0.5
"""The same of one that took less: what was in the way of the slower ones is gone."""
FAILING: Final = 3
"""Batches without a single result, one after the other, from which on a device counts as lost."""
log = logging.getLogger(__name__)


class Devices:
    """A thread for each of ``count`` devices, shared by batchers: a device runs one batch at a time, of whichever
    batcher's next item waits longest; one of the background's only as service.turns says, whichever batcher's it is.
    Use as a context manager, around the batchers'."""

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self.changed = threading.Condition()
        """Guards what waits."""
        self._batchers: list[Batcher[Any, Any]] = []
        self._failed = [0] * count
        self._lead = Lead()
        self._closing = False
        self._threads = [threading.Thread(target=self._work, args=(n,), name=f"device-{n}") for n in range(count)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.changed:
            self._closing = True
            self.changed.notify_all()
        for thread in self._threads:
            thread.join()

    def attach(self, batcher: Batcher[Any, Any]) -> None:
        with self.changed:
            self._batchers.append(batcher)

    def detach(self, batcher: Batcher[Any, Any]) -> None:
        with self.changed:
            self._batchers.remove(batcher)

    def note(self, device: int, has_results: bool) -> None:
        """How a batch went; call in the device's thread."""
        self._failed[device] = 0 if has_results else self._failed[device] + 1

    def failing(self) -> list[int]:
        """Devices that gave nothing lately, each until it gives something again."""
        return [device for device, batches in enumerate(self._failed) if batches >= FAILING]

    def seconds_ahead(self) -> float:
        """How long all that waits, the background left out, will take at the pace measured."""
        return sum(batcher.waiting * batcher.pace_s / len(batcher.functions) for batcher in self._batchers)

    @property
    def alive(self) -> bool:
        """None of the threads has ended by an error."""
        return all(thread.is_alive() for thread in self._threads)

    def _work(self, device: int) -> None:
        while True:
            with self.changed:
                while not (waiting := [b for b in self._batchers if b.turns and device < len(b.functions)]):
                    if self._closing:
                        return
                    self.changed.wait()
                batcher, background = self._next(waiting)
                batch = batcher.take(background, alone=not self._lead.lately)
                if len(waiting) > 1 or batcher.turns:
                    self.changed.notify_all()  # others may be idle
            try:
                batcher.run(device, batch)
            except Exception:  # its loop is closed: others' may not be
                log.exception("%s could not answer", batcher.name)

    def _next(self, waiting: Sequence[Batcher[Any, Any]]) -> tuple[Batcher[Any, Any], bool]:
        """Whose batch is next, and whether the background leads it."""
        lanes = {False: [b for b in waiting if b.turns.urgent], True: [b for b in waiting if b.turns.behind]}
        background = self._lead.background(bool(lanes[False]), bool(lanes[True]))
        return min(lanes[background], key=lambda each: each.turns.since(background)), background


class Tally:
    """What a batcher did since it began. ``fill``: items of a batch beside those that it would have cost as much with;
    ``refused``: items not let in; ``dropped``: those that left undone, by the error's code."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.batch_items = Histogram(sizes)
        self.fill = Histogram(SHARES)
        self.wait_s = Histogram(SECONDS)
        self.run_s = Histogram(SECONDS)
        self.refused = 0
        self.dropped = Counter[str]()


class Costs:
    """Seconds that a batch takes, by key and bucket, as measured lately; a device's first of each is left out, for it
    may have waited for its network to be compiled."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = tuple(sizes)
        self._seconds: dict[tuple[Hashable, int], float] = {}
        self._begun: set[tuple[int, Hashable, int]] = set()

    def add(self, device: int, key: Hashable, count: int, seconds: float) -> bool:
        """Whether it counts."""
        bucket = self.bucket(count)
        if (device, key, bucket) not in self._begun:
            self._begun.add((device, key, bucket))
            return False
        self._seconds[key, bucket] = _nearer(self._seconds.get((key, bucket), seconds), seconds)
        return True

    def fitting(self, key: Hashable, waiting: int) -> int:
        """How many to take of those waiting: the largest bucket that they fill, where it and the rest after it cost
        less than all in one bucket filled up; else as many as fit."""
        waiting = min(waiting, self._sizes[-1])
        full = max(size for size in self._sizes if size <= waiting)
        parts = [self._seconds.get((key, self.bucket(count))) for count in (full, waiting - full, waiting) if count]
        if full == waiting or None in parts:
            return waiting
        first, rest, whole = (part for part in parts if part is not None)
        return full if first + rest < whole else waiting

    def bucket(self, count: int) -> int:
        """Items that a batch of so many is filled up to."""
        return self._sizes[bisect_left(self._sizes, count)]


@dataclass(eq=False, slots=True)
class _Call(Generic[Item, Result]):
    """One submit: ``results`` by row, of which ``missing`` are not there yet."""

    future: asyncio.Future[list[Result]]
    results: list[Any]
    missing: int
    span: object | None = None
    parts: list[Part[Item]] = field(default_factory=list)


@dataclass(frozen=True, eq=False, slots=True)
class _Batch(Generic[Item, Result]):
    key: Hashable
    items: list[Item]
    places: list[tuple[_Call[Item, Result], int]]
    waited_s: list[float]


class Batcher(Generic[Item, Result]):
    """Run ``functions`` on batches of items that wait: one for each device, or for the first of them.

    A function takes a list and returns one result per item, in order; if it raises, the halves are tried again, so that
    one bad item fails alone. Use as an async context manager; leaving it answers what was accepted.

    Args:
        sizes: sizes of batches that cost what they say, ascending, 1 first; others are filled up to the next one.
        max_queue: items that may wait, the background's left out.
        shape_of: only items for which it gives the same leave together.
        spans: where traces are collected.
    """

    def __init__(
        self,
        name: str,
        devices: Devices,
        functions: Sequence[Callable[[list[Item]], Sequence[Result]]],
        sizes: Sequence[int],
        max_queue: int,
        shape_of: Callable[[Item], Hashable] | None = None,
        spans: Spans | None = None,
    ) -> None:
        if not 0 < len(functions) <= devices.count:
            raise ValueError(f"{len(functions)} functions for {devices.count} devices")
        self.name = name
        self.turns = Turns[Item]()
        self.pace_s = 0.0
        """Of a device, an item, as measured lately."""
        self.tally = Tally(sizes)
        self._devices = devices
        self.functions = functions
        self._costs = Costs(sizes)
        self._beside_requests = max((size for size in sizes if 2 * size <= sizes[-1]), default=1)
        self._max_queue = max_queue
        self._shape_of = shape_of
        self._spans = spans
        self._closing = False
        self._calls: set[_Call[Item, Result]] = set()
        self._begun = 0
        self._delivered = 0
        self._idle = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._devices.attach(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        while self._calls or self._begun > self._delivered:
            self._idle.clear()
            await self._idle.wait()
        self._devices.detach(self)

    @property
    def waiting(self) -> int:
        """Items, the background's left out."""
        return self.turns.urgent

    @property
    def alive(self) -> bool:
        """Its devices' threads are there."""
        return self._devices.alive

    def admit(self, count: int, coming: int = 0) -> None:
        """Judge whether ``count`` items more may wait, where ``coming`` others will be submitted soon.

        Raises:
            OverloadedError: there are too many, or those ahead take longer than whoever asks will wait.
            DeadlineExceededError, ClientGoneError: nobody waits any more.
        """
        asking = patience.current()
        if asking is not None:
            asking.check()
        ahead = self.waiting + coming
        seconds = self._devices.seconds_ahead() + coming * self.pace_s / len(self.functions)
        if self._closing or (ahead and ahead + count > self._max_queue):
            self.tally.refused += count
            raise OverloadedError(f"{ahead} items are waiting", seconds)
        if asking is not None and seconds > asking.left_s:
            self.tally.refused += count
            raise OverloadedError(f"{ahead} items are waiting, for longer than this request may", seconds)

    async def submit(self, items: Sequence[Item], background: bool = False) -> list[Result]:
        """Return the results of ``items``, in order; ``background``: behind all that is asked for otherwise. Whoever
        asks (service.patience) is answered by their deadline at the latest; the background has none.

        Raises:
            OverloadedError, DeadlineExceededError, ClientGoneError: at once, as :meth:`admit` says; nothing is queued
                then. Background work, which bounds itself, is only refused when closing.
            DeadlineExceededError, ClientGoneError: while they waited; what was not begun is not computed.
        """
        if not items:
            return []
        if not background:
            self.admit(len(items))
        elif self._closing:
            raise OverloadedError("the service is closing")
        span = None if self._spans is None else self._spans.here()
        call = _Call[Item, Result](self._loop.create_future(), [None] * len(items), len(items), span)
        if not background and (asking := patience.current()) is not None:
            asking.hold(call.future)
        self._calls.add(call)
        try:
            self._queue(call, items, background)
            return await call.future
        finally:
            self._forget(call)

    def _queue(self, call: _Call[Item, Result], items: Sequence[Item], background: bool) -> None:
        now = time.monotonic()
        call.parts = [
            Part(call, key, rows, [items[row] for row in rows], background, now, now)
            for key, rows in self._by_shape(items)
        ]
        with self._devices.changed:
            for part in call.parts:
                self.turns.add(part)
            self._devices.changed.notify_all()

    def _by_shape(self, items: Sequence[Item]) -> Iterable[tuple[Hashable, Sequence[int]]]:
        if self._shape_of is None:
            return [(None, range(len(items)))]
        rows: dict[Hashable, list[int]] = {}
        for row, item in enumerate(items):
            rows.setdefault(self._shape_of(item), []).append(row)
        return rows.items()

    def _forget(self, call: _Call[Item, Result]) -> None:
        """A cancelled or failed call's other items need not be computed."""
        if call.missing:
            reason = _reason(call.future)
            with self._devices.changed:
                for part in call.parts:
                    self.tally.dropped[reason] += part.left
                    self.turns.drop(part)
        self._calls.discard(call)
        self._idle.set()

    def take(self, background: bool, alone: bool = True) -> _Batch[Item, Result]:
        """The next batch, for a device; call only where items wait in the lane that leads, and hold what guards them.
        Where the background leads but is not ``alone``, its batch is smaller: who comes meanwhile waits for its end."""
        now = time.monotonic()
        key, waiting = self.turns.next_key(background)
        if background and not alone:
            waiting = min(waiting, self._beside_requests)
        taken = self.turns.take(self._costs.fitting(key, waiting), now, background)
        self._begun += 1
        return _Batch(
            key,
            [part.items[place] for part, place in taken],
            [(part.owner, part.rows[place]) for part, place in taken],
            [now - part.came for part, _ in taken],
        )

    def run(self, device: int, batch: _Batch[Item, Result]) -> None:
        """In the device's thread. One wake-up of the loop delivers the whole batch."""
        start = time.monotonic()
        outcomes = _outcomes(self.functions[device], batch.items)
        self._devices.note(device, not all(isinstance(outcome, Exception) for outcome in outcomes))
        self._loop.call_soon_threadsafe(self._deliver, device, batch, outcomes, time.monotonic() - start)

    def _deliver(
        self, device: int, batch: _Batch[Item, Result], outcomes: list[Result | Exception], ran_s: float
    ) -> None:
        try:
            for (call, row), outcome in zip(batch.places, outcomes, strict=True):
                if call.future.done():
                    continue
                if isinstance(outcome, Exception):
                    call.future.set_exception(outcome)
                    continue
                call.results[row] = outcome
                call.missing -= 1
                if not call.missing:
                    call.future.set_result(call.results)
            if not any(isinstance(outcome, Exception) for outcome in outcomes):
                self._learn(device, batch, ran_s)
            if self._spans is not None:
                waited = zip((call.span for call, _ in batch.places), batch.waited_s, strict=True)
                self._spans.batch(self.name, len(batch.items), {s: t for s, t in waited if s is not None}, ran_s)
        finally:
            self._delivered += 1
            self._idle.set()

    def _learn(self, device: int, batch: _Batch[Item, Result], ran_s: float) -> None:
        count = len(batch.items)
        if self._costs.add(device, batch.key, count, ran_s):
            self.pace_s = _nearer(self.pace_s or ran_s / count, ran_s / count)
        self.tally.batch_items.add(count)
        self.tally.fill.add(count / self._costs.bucket(count))
        self.tally.run_s.add(ran_s)
        for waited_s in batch.waited_s:
            self.tally.wait_s.add(waited_s)


def _nearer(before: float, now: float) -> float:
    return before + (STEP if now > before else STEP_DOWN) * (now - before)


def _outcomes(function: Callable[[list[Item]], Sequence[Result]], items: list[Item]) -> list[Result | Exception]:
    try:
        results = function(items)
        if len(results) != len(items):
            raise RuntimeError(f"{len(results)} results of {len(items)} items")
        return list(results)
    except BaseException as error:  # whatever it is, others wait for this thread
        if len(items) == 1:
            return [_tellable(error)]
        half = len(items) // 2
        return _outcomes(function, items[:half]) + _outcomes(function, items[half:])


def _tellable(error: BaseException) -> Exception:
    """As a future may raise it: StopIteration it cannot, and what is no Exception would end the loop."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    told = RuntimeError(f"{type(error).__name__}: {error}")
    told.__cause__ = error
    return told


def _reason(future: asyncio.Future[Any]) -> str:
    """Why a call's items leave undone."""
    if future.cancel() or future.cancelled():
        return "cancelled"
    error = future.exception()
    return error.code if isinstance(error, KithError) else "internal_error"
