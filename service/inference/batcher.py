"""Dynamic batching across requests: items queue while devices are busy, and form a batch when one is free.

There is no batching timer. An idle device takes a single item at once; a busy one finds a full batch afterwards.
service.inference.scheduler decides the order.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Self, TypeVar

from models.runtime.onnx_runtime import choose_bucket
from service.core import deadlines
from service.core.errors import KithError, OverloadedError
from service.inference.scheduler import FairQueue, LanePolicy, QueuedItems
from service.observability.metrics import Metrics

Item = TypeVar("Item")
Result = TypeVar("Result")

RISE_WEIGHT: Final = 0.1
"""Weight of the newest batch in the moving average of batch duration, if it took longer."""
FALL_WEIGHT: Final = 0.5
"""Weight of a faster batch. It is larger, because the cause of the slower batches is gone."""
FAILED_BATCHES: Final = 3
"""Consecutive batches without any result after which a device is reported as failing."""
log = logging.getLogger(__name__)


class DevicePool:
    """One thread for each of ``count`` devices, shared by all batchers.

    A device runs one batch at a time, from the batcher whose next item has waited longest. Background batches run as
    service.inference.scheduler.LanePolicy decides. Use as a context manager that encloses those of the batchers.
    """

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self.changed = threading.Condition()
        """Guards the queues of all batchers."""
        self._batchers: list[Batcher[Any, Any]] = []
        self._failed = [0] * count
        self._lead = LanePolicy()
        self._closing = False
        self._threads = [threading.Thread(target=self._work, args=(n,), name=f"device-{n}") for n in range(count)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
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

    def record(self, device: int, has_results: bool) -> None:
        """Record whether a batch had results. Call in the thread of the device."""
        self._failed[device] = 0 if has_results else self._failed[device] + 1

    def failing(self) -> list[int]:
        """Return devices whose last FAILED_BATCHES batches had no results."""
        return [device for device, batches in enumerate(self._failed) if batches >= FAILED_BATCHES]

    def queued_seconds(self) -> float:
        """Estimate the duration of all queued items without background work, in seconds."""
        return sum(batcher.waiting * batcher.seconds_per_item / len(batcher.functions) for batcher in self._batchers)

    @property
    def alive(self) -> bool:
        """True if all device threads run."""
        return all(thread.is_alive() for thread in self._threads)

    def _work(self, device: int) -> None:
        while True:
            with self.changed:
                while not (waiting := [b for b in self._batchers if b.queue and device < len(b.functions)]):
                    if self._closing:
                        return
                    self.changed.wait()
                batcher, background = self._next(waiting)
                batch = batcher.take(background)
            try:
                batcher.run(device, batch)
            except Exception:  # the batcher's event loop is closed; other batchers may have another loop
                log.exception("%s could not deliver results", batcher.name)

    def _next(self, waiting: Sequence[Batcher[Any, Any]]) -> tuple[Batcher[Any, Any], bool]:
        """Return the batcher whose batch runs next, and whether background work leads it."""
        lanes = {lane: [b for b in waiting if b.queue.count(lane)] for lane in (False, True)}
        background = self._lead.background(bool(lanes[False]), bool(lanes[True]))
        return min(lanes[background], key=lambda each: each.queue.since(background)), background


@dataclass(eq=False, slots=True)
class _Call(Generic[Item, Result]):
    """Call of submit: ``results`` by row, of which ``missing`` are pending."""

    future: asyncio.Future[list[Result]]
    results: list[Any]
    missing: int
    parts: list[QueuedItems[Item]] = field(default_factory=list)


@dataclass(frozen=True, eq=False, slots=True)
class _Batch(Generic[Item, Result]):
    key: Hashable
    items: list[Item]
    places: list[tuple[_Call[Item, Result], int]]
    waited_s: list[float]


class Batcher(Generic[Item, Result]):
    """Batcher that runs ``functions``, one per device, on queued items.

    A function takes a list and returns one result per item, in order. If it raises, both halves are retried, so that
    only the bad item fails. Use as an async context manager; its exit waits for all accepted items.

    Args:
        functions: One function for each device that is used; at most ``devices.count``.
        sizes: Bucket sizes, ascending from 1; batches are padded to the next bucket.
        max_queue: Limit of queued items, background items excluded.
        shape_of: Batching key; only items with equal keys share a batch.
        metrics: Batch metrics and trace collector; default: metrics that are not exported.
    """

    def __init__(
        self,
        name: str,
        devices: DevicePool,
        functions: Sequence[Callable[[list[Item]], Sequence[Result]]],
        sizes: Sequence[int],
        max_queue: int,
        shape_of: Callable[[Item], Hashable] | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.name = name
        self.queue = FairQueue[Item]()
        self.seconds_per_item = 0.0
        """Moving average of the duration per item on one device."""
        metrics = Metrics() if metrics is None else metrics
        self.metrics = metrics.of_batches(name)
        self._devices = devices
        self.functions = functions
        self._sizes = tuple(sizes)
        self._background_size = max((size for size in sizes if 2 * size <= sizes[-1]), default=1)
        self._compiled: set[tuple[int, Hashable, int]] = set()
        self._max_queue = max_queue
        self._shape_of = shape_of or (lambda _: None)
        self._closing = False
        self._calls: set[_Call[Item, Result]] = set()
        self._begun = 0
        self._delivered = 0
        self._idle = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._devices.attach(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing = True
        while self._calls or self._begun > self._delivered:
            self._idle.clear()
            await self._idle.wait()
        self._devices.detach(self)

    @property
    def waiting(self) -> int:
        """Number of queued items, background items excluded."""
        return self.queue.count(background=False)

    def admit(self, count: int, coming: int = 0) -> None:
        """Check whether the queue accepts ``count`` more items, if ``coming`` others will be submitted soon.

        Raises:
            OverloadedError: The queue is full, or takes longer than the deadline of the request.
            DeadlineExceededError, ClientGoneError: The request has ended.
        """
        deadlines.check()
        ahead = self.waiting + coming
        seconds = self._devices.queued_seconds() + coming * self.seconds_per_item / len(self.functions)
        if self._closing or (ahead and ahead + count > self._max_queue):
            self.metrics.count_refused(count)
            raise OverloadedError(f"{ahead} items are waiting", seconds)
        if seconds > deadlines.remaining_s():
            self.metrics.count_refused(count)
            raise OverloadedError(f"{ahead} items are waiting, for longer than this request may", seconds)

    async def submit(
        self,
        items: Sequence[Item],
        background: bool = False,
        admitted: float | None = None,
    ) -> list[Result]:
        """Return the results of ``items``, in order. ``background`` items yield to all others, and have no deadline.

        ``admitted`` is the monotonic time at which the photo of the items was admitted. A full queue does not reject
        them, and a device that chooses between networks counts their waiting from then.

        Raises:
            OverloadedError, DeadlineExceededError, ClientGoneError: As :meth:`admit`; nothing was queued. Background
                and admitted items are rejected only while closing, since their producers limit themselves.
            DeadlineExceededError, ClientGoneError: The request ended while items were queued; these are dropped.
        """
        if not items:
            return []
        if not background and admitted is None:
            self.admit(len(items))
        elif self._closing:
            raise OverloadedError("the service is closing")
        call = _Call[Item, Result](self._loop.create_future(), [None] * len(items), len(items))
        self._calls.add(call)
        try:
            async with nullcontext() if background else deadlines.in_time():
                self._queue(call, items, background, admitted)
                return await call.future
        except BaseException as error:
            self._drop(call, error)
            raise
        finally:
            self._calls.discard(call)
            self._idle.set()

    def _queue(
        self, call: _Call[Item, Result], items: Sequence[Item], background: bool, admitted: float | None
    ) -> None:
        now = time.monotonic()
        since = now if admitted is None else admitted
        call.parts = [
            QueuedItems(call, key, rows, [items[row] for row in rows], background, now, since)
            for key, rows in self._by_shape(items)
        ]
        with self._devices.changed:
            for part in call.parts:
                self.queue.add(part)
            self._devices.changed.notify_all()

    def _by_shape(self, items: Sequence[Item]) -> Iterable[tuple[Hashable, Sequence[int]]]:
        rows: dict[Hashable, list[int]] = {}
        for row, item in enumerate(items):
            rows.setdefault(self._shape_of(item), []).append(row)
        return rows.items()

    def _drop(self, call: _Call[Item, Result], error: BaseException) -> None:
        """Drop the queued items of a canceled or failed call."""
        failed = error.code if isinstance(error, KithError) else "internal_error"
        reason = "canceled" if isinstance(error, asyncio.CancelledError) else failed
        with self._devices.changed:
            for part in call.parts:
                self.metrics.count_dropped(reason, part.left)
                self.queue.drop(part)

    def take(self, background: bool) -> _Batch[Item, Result]:
        """Take the next batch for a device. Call with ``DevicePool.changed`` held, if the leading lane has items.

        A background batch is smaller, because requests that arrive meanwhile wait for its end.
        """
        now = time.monotonic()
        taken = self.queue.take(self._background_size if background else self._sizes[-1], now, background)
        self._begun += 1
        return _Batch(
            taken[0][0].key,
            [part.items[place] for part, place in taken],
            [(part.owner, part.rows[place]) for part, place in taken],
            [now - part.came for part, _ in taken],
        )

    def run(self, device: int, batch: _Batch[Item, Result]) -> None:
        """Run a batch in the device's thread. One callback of the event loop delivers all results."""
        start = time.monotonic()
        outcomes = _run_isolating_failures(self.functions[device], batch.items)
        self._devices.record(device, not all(isinstance(outcome, Exception) for outcome in outcomes))
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
        finally:
            self._delivered += 1
            self._idle.set()

    def _learn(self, device: int, batch: _Batch[Item, Result], ran_s: float) -> None:
        count = len(batch.items)
        bucket = choose_bucket(count, self._sizes)
        kind = (device, batch.key, bucket)
        if kind in self._compiled:  # the first batch of a kind may include the compilation of the network
            now, before = ran_s / count, self.seconds_per_item or ran_s / count
            self.seconds_per_item = before + (RISE_WEIGHT if now > before else FALL_WEIGHT) * (now - before)
        self._compiled.add(kind)
        self.metrics.observe_batch(count, bucket, ran_s, batch.waited_s)


def _run_isolating_failures(
    function: Callable[[list[Item]], Sequence[Result]], items: list[Item]
) -> list[Result | Exception]:
    try:
        results = function(items)
        if len(results) != len(items):
            raise RuntimeError(f"{len(results)} results of {len(items)} items")
        return list(results)
    except BaseException as error:  # the thread must survive any error, because other calls wait for it
        if len(items) == 1:
            return [_raisable(error)]
        half = len(items) // 2
        return _run_isolating_failures(function, items[:half]) + _run_isolating_failures(function, items[half:])


def _raisable(error: BaseException) -> Exception:
    """Return the error, wrapped if a future cannot raise it: StopIteration, or a BaseException that ends the loop."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    wrapped = RuntimeError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
