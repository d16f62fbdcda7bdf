"""Searches of one index that wait for each other run as one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kith import Kith
from models.runtime.network import Float
from service.core.actor import Threads
from service.domain.gallery import Hit, Keys
from service.index.follower import MemoryFollower
from service.index.joint_search import MAX_PROBES, Found, JointSearch
from service.risk.search import MAX_INLINE_FLOATS
from tests.service.risk.test_gallery_risks import enroll, people

PROBES = np.arange(200, dtype=np.float32)[:, None]


class Index:
    """Finds a probe's own number. The first search waits for ``go``."""

    def __init__(self) -> None:
        self.searches: list[tuple[int, int]] = []
        self.begun, self.go = threading.Event(), threading.Event()
        self.fails = False

    def search(self, probes: Float, k: int) -> Found:
        self.searches.append((len(probes), k))
        self.begun.set()
        assert self.go.wait(10)
        if self.fails:
            raise MemoryError
        return [[Hit(int(probe[0]), 1.0)] for probe in probes], 7


@pytest.fixture
def threads() -> Iterator[Threads]:
    with Threads(2, "blocking") as threads:
        yield threads


def found(start: int, count: int) -> Found:
    return [[Hit(number, 1.0)] for number in range(start, start + count)], 7


def test_probes_that_arrive_during_a_search_are_searched_together(threads: Threads) -> None:
    async def scenario() -> None:
        index, joint = Index(), JointSearch()

        def ask(start: int, count: int = 1, k: int = 3) -> asyncio.Task[Found]:
            return asyncio.create_task(joint.run(threads, index.search, PROBES[start : start + count], k))

        async def begin() -> asyncio.Task[Found]:
            """Return a search that runs and waits for ``go``."""
            index.begun.clear()
            index.go.clear()
            first = ask(0)
            while not index.begun.is_set():
                await asyncio.sleep(0)
            return first

        first = await begin()
        others = [ask(start, 8) for start in range(0, MAX_PROBES + 16, 8)]
        deeper = ask(50, k=5)
        await asyncio.sleep(0)
        index.go.set()
        assert await first == found(0, 1)
        assert await asyncio.gather(*others) == [found(start, 8) for start in range(0, MAX_PROBES + 16, 8)]
        assert await deeper == found(50, 1)
        assert sorted(index.searches) == [(1, 3), (1, 5), (16, 3), (MAX_PROBES, 3)]

        # A canceled request leaves the others their search.
        first, gone, stays = await begin(), ask(8), ask(9)
        await asyncio.sleep(0)
        first.cancel()
        gone.cancel()
        await asyncio.sleep(0)
        assert first.cancelled() and gone.cancelled()
        index.go.set()
        assert await stays == found(9, 1)

        # A failure reaches all its requests and no later one.
        failing = [await begin(), ask(8), ask(9)]
        await asyncio.sleep(0)
        index.fails = True
        index.go.set()
        for search in failing:
            with pytest.raises(MemoryError):
                await search
        index.fails = False
        assert await ask(4) == found(4, 1)

    asyncio.run(scenario())


def test_only_a_short_search_in_memory_runs_on_the_event_loop(
    kith: Kith, gallery: str, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """A follower that other nodes move, as Milvus's, waits for a server."""
    searched_in: list[str] = []
    search = MemoryFollower.search

    def recorded(self: MemoryFollower, probes: Float, k: int, among: Keys | None = None) -> Found:
        searched_in.append(threading.current_thread().name)
        return search(self, probes, k, among)

    monkeypatch.setattr(MemoryFollower, "search", recorded)
    enroll(kith, gallery, people(rng, 12))
    kith.calibrate(gallery)
    kith.identify(gallery, embeddings=list(people(rng, 1)))  # reads the gallery and its risk
    for count, floats, may_be_behind, thread in (
        (1, MAX_INLINE_FLOATS, False, "kith-server"),
        (1, MAX_INLINE_FLOATS, True, "blocking"),
        (1, 0, False, "blocking"),
        (30, MAX_INLINE_FLOATS, False, "blocking"),
    ):
        searched_in.clear()
        with monkeypatch.context() as patch:
            patch.setattr("service.risk.search.MAX_INLINE_FLOATS", floats)
            if may_be_behind:
                patch.setattr(MemoryFollower, "is_at", lambda *_: False)
            kith.identify(gallery, embeddings=list(people(rng, count)))
        assert [name.startswith(thread) for name in searched_in] == [True]
