"""Every request gets its own results, a bad item fails alone, a full queue rejects at once, and abandoned items are
dropped."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.core.deadlines import Deadline
from service.core.errors import ClientGoneError, DeadlineExceededError, OverloadedError
from service.inference.batcher import FAILED_BATCHES, Batcher, DevicePool
from service.inference.scheduler import BACKGROUND_EVERY, TURN, FairQueue, LanePolicy, QueuedItems

BAD = 13
SIZES = (1, 2, 4, 8)


def double(items: Sequence[int]) -> list[int]:
    if BAD in items:
        raise ValueError("thirteen")
    return [item * 2 for item in items]


class Held:
    """A function that notes its batches, and waits in each until it is let go."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.begun = threading.Semaphore(0)
        self._gate = threading.Event()

    def __call__(self, items: list[int]) -> list[int]:
        self.batches.append(list(items))
        self.begun.release()
        assert self._gate.wait(60)
        return double(items)

    def let_go(self) -> None:
        self._gate.set()


@asynccontextmanager
async def batcher_of(
    *functions: Callable[[list[int]], list[int]],
    sizes: Sequence[int] = SIZES,
    max_queue: int = 100,
    shape_of: Callable[[int], int] | None = None,
) -> AsyncIterator[Batcher[int, int]]:
    with DevicePool(len(functions)) as devices:
        async with Batcher("t", devices, functions, sizes, max_queue, shape_of) as batcher:
            yield batcher


@asynccontextmanager
async def busy(held: Held, **options: object) -> AsyncIterator[tuple[Batcher[int, int], asyncio.TaskGroup]]:
    """A batcher whose device has begun with item 0, and a group for what is submitted meanwhile."""
    async with batcher_of(held, **options) as batcher, asyncio.TaskGroup() as group:  # type: ignore[arg-type]
        group.create_task(batcher.submit([0]))
        await asyncio.to_thread(held.begun.acquire)
        try:
            yield batcher, group
        finally:
            held.let_go()


@dataclass(frozen=True)
class Ask:
    """One request of a schedule. ``after``: turns of the loop before it comes; ``leaves``: turns after which it ends as
    ``how`` says, if it did not before."""

    after: int
    items: list[int]
    background: bool
    leaves: int | None
    how: Literal["canceled", "gone", "late"]


Numbered = tuple[int, int, int]
"""Request, row, value."""
Stage = Batcher[Numbered, Numbered]
ASKS = st.builds(
    Ask,
    st.integers(0, 12),
    st.lists(st.integers(0, 40), min_size=1, max_size=10),
    st.booleans(),
    st.none() | st.integers(0, 12),
    st.sampled_from(("canceled", "gone", "late")),
)


@settings(max_examples=120)
@given(st.lists(ASKS, max_size=25), st.integers(1, 3), st.integers(1, 12), st.booleans())
def test_whatever_happens_every_request_ends_and_nobody_gets_another_ones_results(
    asks: list[Ask], devices: int, max_queue: int, close_early: bool
) -> None:
    """Two batchers share the devices, the second working on the first one's results, as a request's do; some items
    fail, some requests are canceled, time out, are refused, or come while all is closing."""
    lock, done, shapes, waiting = threading.Lock(), Counter[Numbered](), list[set[int]](), list[int]()

    def first(items: list[Numbered]) -> list[Numbered]:
        if any(value == BAD for _, _, value in items):
            raise ValueError("thirteen")
        with lock:
            done.update(items)
            shapes.append({value % 3 for _, _, value in items})
        return [(request, row, value * 2) for request, row, value in items]

    def second(items: list[Numbered]) -> list[Numbered]:
        waiting.append(len(items))
        return [(request, row, value + 1) for request, row, value in items]

    async def one(number: int, ask: Ask, first: Stage, second: Stage) -> object:
        for _ in range(ask.after):
            await asyncio.sleep(0)

        async def work() -> object:
            items = [(number, row, value) for row, value in enumerate(ask.items)]
            between = await first.submit(items, ask.background)
            waiting.append(first.waiting)
            return await second.submit(between, ask.background)

        async def leave(task: asyncio.Task[object], deadline: Deadline) -> None:
            for _ in range(ask.leaves or 0):
                await asyncio.sleep(0)
            if ask.how == "canceled":
                task.cancel()
            elif ask.how == "gone":
                deadline.disconnect()

        with Deadline(0.0005 if ask.leaves is not None and ask.how == "late" else 60) as deadline:
            task = asyncio.create_task(work())
            if ask.leaves is not None:
                await leave(task, deadline)
            (outcome,) = await asyncio.gather(task, return_exceptions=True)
            return outcome

    async def run() -> list[object]:
        async with asyncio.timeout(60):
            with DevicePool(devices) as shared:
                async with (
                    Batcher("second", shared, [second] * devices, SIZES, max_queue) as behind,
                    Batcher("first", shared, [first] * devices, SIZES, max_queue, lambda item: item[2] % 3) as ahead,
                ):
                    asked = [asyncio.create_task(one(n, ask, ahead, behind)) for n, ask in enumerate(asks)]
                    for _ in range(6 if close_early else 0):
                        await asyncio.sleep(0)
                    if not close_early:
                        await asyncio.gather(*asked)
                assert not ahead.queue and not behind.queue
                assert ahead.waiting == behind.waiting == 0
                outcomes = await asyncio.gather(*asked)
            assert not any(thread.is_alive() for thread in shared._threads)
            return outcomes

    for number, (ask, outcome) in enumerate(zip(asks, asyncio.run(run()), strict=True)):
        how = None if ask.leaves is None else ask.how
        match outcome:
            case ValueError():
                assert BAD in ask.items
            case asyncio.CancelledError():
                assert how == "canceled"
            case ClientGoneError():
                assert how == "gone" and not ask.background
            case DeadlineExceededError():
                assert how == "late" and not ask.background
            case OverloadedError():
                assert close_early or not ask.background
            case _:
                assert outcome == [(number, row, value * 2 + 1) for row, value in enumerate(ask.items)]
    assert all(len(each) == 1 for each in shapes)
    assert max(done.values(), default=1) == 1
    assert max(waiting, default=0) <= max(max_queue, 10)


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 2)), min_size=1, max_size=12), st.integers(1, 8), st.data()
)
def test_of_many_that_wait_each_is_served_within_a_turn_of_the_others(
    callers: list[tuple[int, int]], size: int, data: st.DataObject
) -> None:
    """Later and larger callers delay earlier ones by a turn at most; background work leads one batch in eight."""
    turns, lead = FairQueue[int](), LanePolicy()
    turns.add(QueuedItems("background", 0, range(10_000), range(10_000), True, 0.0, 0.0))
    coming = [
        QueuedItems(n, key, range(count), range(count), False, 0.0, 0.0) for n, (count, key) in enumerate(callers)
    ]
    here: list[QueuedItems[int]] = []
    unserved: dict[int, int] = {}
    clock = led = 0
    while coming or turns.count(False):
        while coming and (not turns.count(False) or data.draw(st.booleans())):
            clock += 1
            part = coming.pop()
            part.came = part.since = clock
            here.append(part)
            unserved[part.owner] = TURN * len(here)
            turns.add(part)
        clock += 1
        taken = turns.take(size, clock, lead.background(turns.count(False) > 0, turns.count(True) > 0))
        assert 0 < len(taken) <= size
        assert len({part.key for part, _ in taken}) == 1
        led = 0 if taken[0][0].background else led + 1
        assert led < BACKGROUND_EVERY
        served = {part.owner for part, _ in taken}
        unserved = {owner: left - (led > 0) for owner, left in unserved.items() if owner not in served}
        assert all(unserved.values())
        here = [part for part in here if part.left]


def test_background_work_fills_what_requests_leave_free_and_is_not_starved() -> None:
    async def run(held: Held) -> None:
        async with busy(held, sizes=(1, 2)) as (batcher, group):
            group.create_task(batcher.submit([10, 11, 12, 14, 15], background=True))
            await asyncio.sleep(0)
            for single in range(20, 37):
                group.create_task(batcher.submit([single]))
            await asyncio.sleep(0)

    held = Held()
    asyncio.run(run(held))
    assert held.batches[1:8] == [[20 + 2 * n, 21 + 2 * n] for n in range(7)]
    # The background's own batches are halved, for who comes meanwhile waits for their end.
    assert held.batches[8:] == [[10], [34, 35], [36, 11], [12], [14], [15]]


def test_a_network_of_one_device_stays_there_and_the_others_take_what_is_left() -> None:
    held, ran = [Held(), Held()], set[str]()

    def note(items: list[int]) -> list[int]:
        ran.add(threading.current_thread().name)
        return double(items)

    async def run() -> None:
        async with (
            batcher_of(*held) as batcher,
            Batcher("first only", batcher._devices, [note], SIZES, 100) as other,
            asyncio.TaskGroup() as group,
        ):
            group.create_task(batcher.submit([0] * 17))
            for each in held:
                assert await asyncio.to_thread(each.begun.acquire, timeout=10)
            for each in held:
                each.let_go()
            for item in range(10):
                await asyncio.gather(batcher.submit([item]), other.submit([item]))

    asyncio.run(run())
    assert ran == {"device-0"}


def test_a_photo_that_waited_longer_in_another_network_goes_first() -> None:
    held, order = Held(), list[int]()

    def note(items: list[int]) -> list[int]:
        order.extend(items)
        return double(items)

    async def run() -> None:
        async with (
            busy(held) as (batcher, group),
            Batcher("detector", batcher._devices, [note], SIZES, 100) as detector,
            Batcher("recognizer", batcher._devices, [note], SIZES, 100) as recognizer,
        ):
            group.create_task(detector.submit([1]))
            await asyncio.sleep(0)
            group.create_task(recognizer.submit([2], admitted=time.monotonic() - 1))
            await asyncio.sleep(0)
            held.let_go()

    asyncio.run(run())
    assert order == [2, 1]


def test_a_busy_device_takes_what_can_be_done_and_does_nothing_in_vain() -> None:
    async def run(held: Held) -> None:
        async with busy(held, max_queue=4, shape_of=lambda item: item % 2) as (batcher, group):

            async def begin(items: list[int], **options: Any) -> asyncio.Task[list[int]]:
                task = group.create_task(batcher.submit(items, **options))
                await asyncio.sleep(0)
                return task

            for items in ([11, 13, 15, 17, 19], [11, 13, 15, 17]):  # alone, a request has room
                canceled = await begin(items)
                with pytest.raises(OverloadedError):
                    await batcher.submit([27])
                crops_of_a_photo = await begin([21, 23], admitted=time.monotonic())
                assert batcher.waiting == len(items) + 2
                canceled.cancel()
                crops_of_a_photo.cancel()
                await asyncio.sleep(0)
                assert batcher.waiting == 0
            await begin([1, 2], background=True)
            batcher.seconds_per_item = 2.0
            await begin([4, 3])
            with Deadline(3), pytest.raises(OverloadedError) as refused:
                await batcher.submit([5])
            assert refused.value.headers == {"Retry-After": "4"}
            with Deadline(7):
                await begin([5])
            with Deadline(60) as deadline:
                gone = asyncio.create_task(batcher.submit([25]))
                await asyncio.sleep(0)
                deadline.disconnect()
            with pytest.raises(ClientGoneError):
                await gone
            batcher.seconds_per_item = 0.0
            with Deadline(0.001), pytest.raises(DeadlineExceededError):
                await batcher.submit([27])
            assert batcher.metrics.refused == 3
            assert batcher.metrics.dropped == {"canceled": 13, "client_gone": 1, "deadline_exceeded": 1}

    held = Held()
    asyncio.run(run(held))
    assert held.batches == [[0], [4, 2], [3, 5, 1]]


class PanicError(BaseException):
    """Error that is not an Exception, as native libraries raise."""


@pytest.mark.parametrize("error", [ValueError, StopIteration, PanicError, asyncio.CancelledError])
def test_a_bad_item_fails_alone_in_few_runs_whatever_the_network_raises(error: type[BaseException]) -> None:
    runs: list[int] = []

    def failing(items: list[int]) -> list[int]:
        runs.append(len(items))
        if BAD in items:
            raise error("thirteen")
        return double(items)

    async def run() -> None:
        async with batcher_of(failing) as batcher, asyncio.timeout(60):
            asks = [asyncio.create_task(batcher.submit([item])) for item in (0, 1, 2, 3, 4, BAD, 6, 7)]
            *before, bad, _, last = await asyncio.gather(*asks, return_exceptions=True)
            assert before == [[0], [2], [4], [6], [8]] and last == [14]
            assert isinstance(bad, RuntimeError | ValueError) and "thirteen" in str(bad)
            assert len(runs) <= 8 + 1  # at most: all alone
            assert batcher._devices.alive and batcher._devices.failing() == []
            for _ in range(FAILED_BATCHES):
                assert batcher._devices.failing() == []
                with pytest.raises((RuntimeError, ValueError), match="thirteen"):
                    await batcher.submit([BAD])
            assert batcher._devices.failing() == [0], "it gives nothing"
            assert await batcher.submit([3]) == [6]
            assert batcher._devices.failing() == []
        assert not batcher._devices.alive

    asyncio.run(run())


def test_wrong_functions_fail_their_items_alone_and_hold_up_no_closing() -> None:
    def shape_of(item: int) -> int:
        if item < 0:
            raise ValueError("no shape")
        return 0

    async def run() -> None:
        async with (
            asyncio.timeout(60),
            batcher_of(lambda items: double(items)[1:] if 1 in items else double(items), shape_of=shape_of) as batcher,
        ):
            assert await batcher.submit([3]) == [6]
            assert batcher.seconds_per_item == 0, "a first batch may have compiled the network"
            with pytest.raises(RuntimeError, match="0 results of 1 items"):
                await batcher.submit([1, 2])
            with pytest.raises(ValueError, match="no shape"):
                await batcher.submit([-1])
            with pytest.raises(ValueError, match="thirteen"):
                await batcher.submit([BAD, *range(2, 10_000)])
            assert set(batcher.metrics.dropped) == {"internal_error"}
            assert await batcher.submit([4]) == [8]
            assert batcher.seconds_per_item > 0

    asyncio.run(run())
