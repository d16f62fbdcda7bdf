"""Computations over whole galleries are shared, take turns, and leave the threads of requests free."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx2 as httpx
import pytest

from service.core.errors import OverloadedError
from service.jobs.heavy_work import MAX_WAITING, HeavyWork
from service.risk.gallery_risks import GalleryRisks
from service.usecases import hygiene


class Computation:
    """Blocks until ``end`` is set. Counts its runs and how many ran at once."""

    def __init__(self) -> None:
        self.end = threading.Event()
        self.runs = self.most = self._running = 0

    def __call__(self) -> int:
        self.runs += 1
        self._running += 1
        self.most = max(self.most, self._running)
        assert self.end.wait(60)
        self._running -= 1
        return self.runs


def test_callers_of_one_key_share_a_run_and_keys_take_turns() -> None:
    async def ask() -> None:
        heavy, computation = HeavyWork(), Computation()
        first = [asyncio.create_task(heavy.run("a", computation)) for _ in range(5)]
        other = asyncio.create_task(heavy.run("b", computation))
        await asyncio.sleep(0)
        first[0].cancel()  # the others still get the result
        computation.end.set()
        assert await asyncio.gather(*first[1:]) == [1] * 4
        assert (await other, computation.most) == (2, 1)
        assert await heavy.run("a", computation) == 3, "a later caller gets a new run"

    asyncio.run(ask())


def test_errors_reach_each_caller_and_the_next_run_is_free() -> None:
    async def ask() -> None:
        heavy = HeavyWork()
        failed = await asyncio.gather(*(heavy.run("a", lambda: 1 // 0) for _ in range(2)), return_exceptions=True)
        assert [type(error) for error in failed] == [ZeroDivisionError] * 2
        assert await heavy.run("a", lambda: 7) == 7

    asyncio.run(ask())


def test_too_many_computations_are_rejected() -> None:
    async def ask() -> None:
        heavy, computation = HeavyWork(), Computation()
        waiting = [asyncio.create_task(heavy.run(n, computation)) for n in range(MAX_WAITING)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            await heavy.run("another", computation)
        computation.end.set()
        assert sorted(await asyncio.gather(*waiting)) == list(range(1, MAX_WAITING + 1))

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("method", "path", "of", "name"),
    [("GET", "hygiene", hygiene, "find_problems"), ("POST", "calibrate", GalleryRisks, "refresh")],
)
def test_photos_are_processed_during_heavy_work(
    server: str, gallery: str, monkeypatch: pytest.MonkeyPatch, method: str, path: str, of: Any, name: str
) -> None:
    """In the threads of requests, as many computations as there are threads would hold them all."""
    compute, threads = getattr(of, name), list[str]()

    def noted(*arguments: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        return compute(*arguments, **options)

    monkeypatch.setattr(of, name, noted)
    httpx.request(method, f"{server}/v1/galleries/{gallery}/{path}", timeout=300).raise_for_status()
    assert threads == ["heavy"]
