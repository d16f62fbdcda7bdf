"""No result is lost, doubled or given to another; a bad item fails alone; a full queue says so at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.batching import Batcher
from service.errors import OverloadedError


def double(items: Sequence[int]) -> list[int]:
    if 13 in items:
        raise ValueError("thirteen")
    return [item * 2 for item in items]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.integers(0, 20), max_size=6), max_size=20), st.integers(1, 5))
def test_every_request_gets_its_own_results(requests: list[list[int]], max_batch: int) -> None:
    async def ask(batcher: Batcher[int, int], items: list[int]) -> list[int] | None:
        try:
            return await batcher.submit(items)
        except ValueError:
            return None

    async def run() -> list[list[int] | None]:
        async with Batcher("t", double, max_batch, 1000) as batcher:
            return await asyncio.gather(*(ask(batcher, items) for items in requests))

    for items, results in zip(requests, asyncio.run(run()), strict=True):
        assert results == (None if 13 in items else [item * 2 for item in items])


def test_background_work_fills_what_requests_leave_free() -> None:
    batches: list[list[int]] = []
    gate = threading.Event()

    def slow(items: Sequence[int]) -> list[int]:
        gate.wait(10)
        batches.append(list(items))
        return list(items)

    async def run() -> None:
        async with Batcher("t", slow, 3, 2) as batcher:
            tasks = [asyncio.create_task(batcher.submit([0]))]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            tasks.append(asyncio.create_task(batcher.submit([10, 11, 12, 13], background=True)))
            await asyncio.sleep(0)
            tasks += [asyncio.create_task(batcher.submit([i])) for i in (1, 2)]
            await asyncio.sleep(0)
            gate.set()
            await asyncio.gather(*tasks)

    asyncio.run(run())
    assert batches == [[0], [1, 2, 10], [11, 12, 13]]


def test_what_waits_leaves_together() -> None:
    sizes: list[int] = []
    gate = threading.Event()

    def slow(items: Sequence[int]) -> list[int]:
        gate.wait(10)
        sizes.append(len(items))
        return list(items)

    async def run() -> None:
        async with Batcher("t", slow, 8, 100) as batcher:
            first = asyncio.create_task(batcher.submit([0]))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            rest = [asyncio.create_task(batcher.submit([i])) for i in range(1, 7)]
            await asyncio.sleep(0)
            gate.set()
            await asyncio.gather(first, *rest)

    asyncio.run(run())
    assert sizes == [1, 6]


def test_a_full_queue_refuses_at_once_and_cancelled_work_is_not_done() -> None:
    gate = threading.Event()
    done: list[int] = []

    def slow(items: Sequence[int]) -> list[int]:
        gate.wait(10)
        done.extend(items)
        return list(items)

    async def run() -> None:
        async with Batcher("t", slow, 1, 2) as batcher:
            running = asyncio.create_task(batcher.submit([0]))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            waiting = asyncio.create_task(batcher.submit([1, 2]))
            await asyncio.sleep(0)
            with pytest.raises(OverloadedError):
                await batcher.submit([3])
            waiting.cancel()
            gate.set()
            assert await running == [0]

    asyncio.run(run())
    assert done == [0]


def test_closing_answers_what_was_accepted() -> None:
    async def run() -> list[int]:
        async with Batcher("t", double, 2, 100) as batcher:
            task = asyncio.create_task(batcher.submit([1, 2, 3, 4, 5]))
            await asyncio.sleep(0)
        return await task

    assert asyncio.run(run()) == [2, 4, 6, 8, 10]
