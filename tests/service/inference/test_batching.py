"""Every request gets its own results, a bad item fails alone, a full queue rejects at once, and abandoned items are
dropped."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.core.deadlines import Deadline
from service.core.errors import ClientGoneError, DeadlineExceededError, OverloadedError
from service.inference.batcher import FAILED_BATCHES, BatchCosts, Batcher, DevicePool
from service.inference.scheduler import BACKGROUND_EVERY, RECENT_BATCHES, TURN, FairQueue, LanePolicy, QueuedItems

BAD = 13
SIZES = (1, 2, 4, 8)


def double(items: Sequence[int]) -> list[int]:
    if BAD in items:
        raise ValueError("thirteen")
    return [item * 2 for item in items]


def test_a_device_that_gives_nothing_is_noted_until_it_gives_something() -> None:
    async def run() -> None:
        with DevicePool(1) as devices:
            async with Batcher("t", devices, [double], SIZES, 100) as batcher:
                for _ in range(FAILED_BATCHES):
                    assert devices.failing() == []
                    with pytest.raises(ValueError, match="thirteen"):
                        await batcher.submit([BAD, BAD])
                assert devices.failing() == [0]
                with pytest.raises(ValueError, match="thirteen"):
                    await batcher.submit([1, BAD])
                assert devices.failing() == [], "the other item had a result"

    asyncio.run(run())


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


@contextmanager
def within(seconds: float) -> Iterator[Deadline]:
    with Deadline(seconds) as deadline:
        yield deadline


def test_idle_devices_share_what_waits() -> None:
    held = [Held(), Held()]

    async def run() -> list[int]:
        async with batcher_of(*held) as batcher:
            task = asyncio.create_task(batcher.submit(list(range(7))))
            for each in held:
                await asyncio.to_thread(each.begun.acquire)
            for each in held:
                each.let_go()
            return await task

    assert asyncio.run(run()) == [2 * item for item in range(7)]
    assert sorted(len(each.batches[0]) for each in held) == [3, 4]


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

        with within(0.0005 if ask.leaves is not None and ask.how == "late" else 60) as deadline:
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
                return list(await asyncio.gather(*asked))

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
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 2)), min_size=1, max_size=12), st.integers(1, 8), st.data()
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
    while coming or turns.foreground_count:
        while coming and (not turns.foreground_count or data.draw(st.booleans())):
            clock += 1
            part = coming.pop()
            part.came = part.since = clock
            here.append(part)
            unserved[part.owner] = TURN * len(here)
            turns.add(part)
        clock += 1
        taken = turns.take(size, clock, lead.background(turns.foreground_count > 0, turns.background_count > 0))
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


def test_a_batch_of_the_background_alone_is_as_large_as_can_be() -> None:
    lead = LanePolicy()
    assert lead.background(False, True) and not lead.requests_recent
    assert not lead.background(True, True) and lead.requests_recent
    for _ in range(RECENT_BATCHES):
        assert lead.background(False, True)
    assert not lead.requests_recent


def test_what_waits_leaves_together_and_only_with_its_like() -> None:
    async def run(held: Held) -> None:
        async with busy(held, shape_of=lambda item: item % 2) as (batcher, group):
            for items in ([1], [3, 2], [4], [5]):
                group.create_task(batcher.submit(items))
            await asyncio.sleep(0)

    held = Held()
    asyncio.run(run(held))
    assert held.batches == [[0], [1, 3, 5], [2, 4]]


def test_a_batch_is_cut_where_filling_it_up_costs_more() -> None:
    costs = BatchCosts((1, 2, 4, 8))
    assert [costs.fitting("k", waiting) for waiting in (1, 3, 5, 9)] == [1, 3, 5, 8]
    for count in (1, 2, 4, 8):
        assert not costs.add(0, "k", count, 100)  # it was compiled
        assert costs.add(0, "k", count, 0.1 + count)  # a processor's: a photo costs a photo
        costs.add(0, "flat", count, 100)
        costs.add(0, "flat", count, 1.0)  # a large GPU's
        assert not costs.add(1, "flat", count, 100)
    assert [costs.fitting("k", waiting) for waiting in (3, 5, 6, 7, 8)] == [2, 4, 4, 7, 8]
    assert [costs.fitting("flat", waiting) for waiting in (3, 5, 6, 7, 8)] == [3, 5, 6, 7, 8]


def test_an_older_photo_that_comes_from_another_network_goes_first() -> None:
    held, order = Held(), list[str]()

    async def run() -> None:
        def noting(name: str) -> Callable[[list[int]], list[int]]:
            def note(items: list[int]) -> list[int]:
                order.append(name)
                return double(items)

            return note

        with DevicePool() as devices:
            async with (
                Batcher("holding", devices, [held], SIZES, 100) as holding,
                Batcher("detector", devices, [noting("detector")], SIZES, 100) as detector,
                Batcher("recognizer", devices, [noting("recognizer")], SIZES, 100) as recognizer,
                asyncio.TaskGroup() as group,
            ):
                began = time.monotonic()
                group.create_task(holding.submit([0]))
                await asyncio.to_thread(held.begun.acquire)
                group.create_task(detector.submit([1]))
                await asyncio.sleep(0)
                group.create_task(recognizer.submit([2], admitted=began))
                await asyncio.sleep(0)
                held.let_go()

    asyncio.run(run())
    assert order == ["recognizer", "detector"]


def test_a_network_of_one_device_runs_there_beside_another_of_all() -> None:
    ran: list[str] = []

    def note(items: list[int]) -> list[int]:
        ran.append(threading.current_thread().name)
        return double(items)

    async def run() -> None:
        with DevicePool(3) as devices:
            async with (
                Batcher("everywhere", devices, [double] * 3, SIZES, 100) as first,
                Batcher("first only", devices, [note], SIZES, 100) as second,
            ):
                for item in range(10):
                    here, there = await asyncio.gather(first.submit([item + 20]), second.submit([item + 20]))
                    assert here == there == [2 * item + 40]

    asyncio.run(run())
    assert set(ran) == {"device-0"}


def test_a_full_queue_refuses_at_once_and_cancelled_work_is_not_done() -> None:
    async def run(held: Held) -> None:
        async with busy(held, max_queue=2) as (batcher, group):
            waiting = group.create_task(batcher.submit([1, 2]))
            await asyncio.sleep(0)
            with pytest.raises(OverloadedError):
                await batcher.submit([3])
            crops_of_a_photo = group.create_task(batcher.submit([7, 8], admitted=time.monotonic()))
            await asyncio.sleep(0)
            assert batcher.waiting == 4
            group.create_task(batcher.submit([4], background=True))
            waiting.cancel()
            crops_of_a_photo.cancel()
            await asyncio.sleep(0)
            assert batcher.waiting == 0
            group.create_task(batcher.submit([5, 6]))
            await asyncio.sleep(0)

    held = Held()
    asyncio.run(run(held))
    assert held.batches == [[0], [5, 6, 4]]


def test_who_would_wait_for_too_long_is_refused_at_once_and_told_how_long() -> None:
    async def run(held: Held) -> None:
        async with busy(held) as (batcher, group):
            batcher.seconds_per_item = 2.0
            group.create_task(batcher.submit([1, 2, 3]))
            await asyncio.sleep(0)
            with within(5), pytest.raises(OverloadedError) as refused:
                await batcher.submit([4])
            assert refused.value.headers == {"Retry-After": "6"}
            with within(7):
                group.create_task(batcher.submit([5]))
                await asyncio.sleep(0)
            assert batcher.metrics.refused == 1

    held = Held()
    asyncio.run(run(held))
    assert held.batches == [[0], [1, 2, 3, 5]]


def test_what_nobody_waits_for_any_more_is_not_done() -> None:
    async def run(held: Held) -> None:
        async with busy(held) as (batcher, group):
            with within(60) as deadline:
                gone = asyncio.create_task(batcher.submit([1]))
                kept = group.create_task(batcher.submit([2], background=True))
                await asyncio.sleep(0)
                deadline.disconnect()
            with within(0.001), pytest.raises(DeadlineExceededError):
                await batcher.submit([3])
            with pytest.raises(ClientGoneError):
                await gone
            assert batcher.metrics.dropped == {"client_gone": 1, "deadline_exceeded": 1}
            held.let_go()
            assert await kept == [4]

    held = Held()
    asyncio.run(run(held))
    assert held.batches == [[0], [2]]


def test_a_bad_item_fails_alone_though_few_runs_are_spent_on_it() -> None:
    runs: list[int] = []

    def counted(items: list[int]) -> list[int]:
        runs.append(len(items))
        return double(items)

    async def run() -> list[list[int] | BaseException]:
        async with batcher_of(counted, shape_of=lambda item: item >= 0) as batcher:
            asks = [asyncio.create_task(batcher.submit([item])) for item in (0, 1, 2, 3, 4, BAD, 6, 7)]
            return list(await asyncio.gather(*asks, return_exceptions=True))

    *before, bad, _, last = asyncio.run(run())
    assert before == [[0], [2], [4], [6], [8]] and last == [14]
    assert isinstance(bad, ValueError)
    assert len(runs) <= 8 + 1  # at most: all alone


class PanicError(BaseException):
    """Error that is not an Exception, as native libraries raise."""


@pytest.mark.parametrize("error", [StopIteration, PanicError, asyncio.CancelledError])
def test_whatever_a_network_raises_its_item_fails_alone_and_the_device_goes_on(error: type[BaseException]) -> None:
    def failing(items: list[int]) -> list[int]:
        if BAD in items:
            raise error("thirteen")
        return double(items)

    async def run() -> None:
        async with batcher_of(failing) as batcher, asyncio.timeout(60):
            asks = [asyncio.create_task(batcher.submit([item])) for item in (1, BAD, 2)]
            one, bad, two = await asyncio.gather(*asks, return_exceptions=True)
            assert (one, two) == ([2], [4])
            assert isinstance(bad, RuntimeError) and "thirteen" in str(bad)
            assert await batcher.submit([3]) == [6]
            assert batcher._devices.alive
        assert not batcher._devices.alive

    asyncio.run(run())


def test_what_a_networks_error_leaves_undone_is_counted_as_such() -> None:
    async def run() -> Counter[str]:
        async with batcher_of(double, sizes=(1,)) as batcher:
            with pytest.raises(ValueError, match="thirteen"):
                await batcher.submit([BAD, *range(10_000)])
            return batcher.metrics.dropped

    assert set(asyncio.run(run())) == {"internal_error"}


def test_items_without_a_shape_are_refused_and_closing_does_not_wait_for_them() -> None:
    def shapeless(item: int) -> int:
        raise ValueError("no shape")

    async def run() -> None:
        async with asyncio.timeout(60), batcher_of(double, shape_of=shapeless) as batcher:
            with within(60), pytest.raises(ValueError, match="no shape"):
                await batcher.submit([1])

    asyncio.run(run())


def test_a_first_batch_which_may_have_been_compiled_is_no_pace() -> None:
    async def run() -> None:
        async with batcher_of(double) as batcher:
            await batcher.submit([1])
            assert batcher.seconds_per_item == 0
            assert batcher.metrics.batches > 0
            await batcher.submit([2])
            assert batcher.seconds_per_item > 0

    asyncio.run(run())


def test_a_function_that_gives_too_few_results_fails_its_items() -> None:
    async def run() -> None:
        async with batcher_of(lambda items: items[1:]) as batcher:
            with pytest.raises(RuntimeError, match="0 results of 1 items"):
                await batcher.submit([1, 2])

    asyncio.run(run())
