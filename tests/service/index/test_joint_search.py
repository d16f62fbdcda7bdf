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
from service.server import embedded
from service.settings import load_settings
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


async def begin(joint: JointSearch, index: Index, threads: Threads) -> asyncio.Task[Found]:
    """Return a search that runs and waits for ``go``."""
    first = asyncio.create_task(joint.run(threads, index.search, PROBES[:1], 3))
    while not index.begun.is_set():
        await asyncio.sleep(0)
    return first


def test_probes_that_arrive_during_a_search_are_searched_together(threads: Threads) -> None:
    async def scenario() -> None:
        index = Index()
        joint = JointSearch()
        first = await begin(joint, index, threads)
        others = [asyncio.create_task(joint.run(threads, index.search, PROBES[i : i + 2], 3)) for i in range(10, 20, 2)]
        deeper = asyncio.create_task(joint.run(threads, index.search, PROBES[50:51], 5))
        await asyncio.sleep(0)
        index.go.set()
        assert await first == found(0, 1)
        assert await asyncio.gather(*others) == [found(i, 2) for i in range(10, 20, 2)]
        assert await deeper == found(50, 1)
        assert index.searches == [(1, 3), (10, 3), (1, 5)]

    asyncio.run(scenario())


def test_a_search_takes_a_limited_number_of_probes(threads: Threads) -> None:
    async def scenario() -> None:
        index = Index()
        joint = JointSearch()
        first = await begin(joint, index, threads)
        others = [
            asyncio.create_task(joint.run(threads, index.search, PROBES[i : i + 8], 3))
            for i in range(0, MAX_PROBES + 16, 8)
        ]
        await asyncio.sleep(0)
        index.go.set()
        await first
        assert await asyncio.gather(*others) == [found(i, 8) for i in range(0, MAX_PROBES + 16, 8)]
        assert index.searches == [(1, 3), (MAX_PROBES, 3), (16, 3)]

    asyncio.run(scenario())


def test_a_canceled_request_leaves_the_others_their_search(threads: Threads) -> None:
    async def scenario() -> None:
        index = Index()
        joint = JointSearch()
        first = await begin(joint, index, threads)
        gone, stays = (asyncio.create_task(joint.run(threads, index.search, PROBES[i : i + 1], 3)) for i in (8, 9))
        await asyncio.sleep(0)
        first.cancel()
        gone.cancel()
        await asyncio.sleep(0)
        assert first.cancelled() and gone.cancelled()
        index.go.set()
        assert await stays == found(9, 1)

    asyncio.run(scenario())


def test_a_failure_reaches_all_its_requests_and_no_later_one(threads: Threads) -> None:
    async def scenario() -> None:
        index = Index()
        joint = JointSearch()
        first = await begin(joint, index, threads)
        others = [asyncio.create_task(joint.run(threads, index.search, PROBES[i : i + 1], 3)) for i in (8, 9)]
        await asyncio.sleep(0)
        index.fails = True
        index.go.set()
        for search in (first, *others):
            with pytest.raises(MemoryError):
                await search
        index.fails = False
        assert await joint.run(threads, index.search, PROBES[4:5], 3) == found(4, 1)

    asyncio.run(scenario())


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with embedded(load_settings(data_dir=tmp_path_factory.mktemp("searches"), log_level="WARNING")) as url:
        with Kith(url) as kith:
            kith.create_gallery("staff", risk={"fpir": 0.01})
            enroll(kith, "staff", people(np.random.default_rng(5), 60))
            kith.calibrate("staff")
        yield url


@pytest.mark.parametrize(
    ("count", "floats", "may_be_behind", "thread"),
    [
        (1, MAX_INLINE_FLOATS, False, "kith-server"),
        (1, MAX_INLINE_FLOATS, True, "blocking"),
        (1, 0, False, "blocking"),
        (30, MAX_INLINE_FLOATS, False, "blocking"),
    ],
)
def test_only_a_short_search_in_memory_runs_on_the_event_loop(
    url: str, monkeypatch: pytest.MonkeyPatch, count: int, floats: int, may_be_behind: bool, thread: str
) -> None:
    """A follower that other nodes move, as Milvus's, waits for a server."""
    searched_in: list[str] = []
    search = MemoryFollower.search

    def recorded(self: MemoryFollower, probes: Float, k: int, among: Keys | None = None) -> Found:
        searched_in.append(threading.current_thread().name)
        return search(self, probes, k, among)

    monkeypatch.setattr(MemoryFollower, "search", recorded)
    monkeypatch.setattr("service.risk.search.MAX_INLINE_FLOATS", floats)
    if may_be_behind:
        monkeypatch.setattr(MemoryFollower, "is_at", lambda *_: False)
    rng = np.random.default_rng(6)
    with Kith(url) as kith:
        kith.identify("staff", embeddings=list(people(rng, 1)))  # reads the gallery and its risk
        searched_in.clear()
        kith.identify("staff", embeddings=list(people(rng, count)))
    assert [name.startswith(thread) for name in searched_in] == [True]
