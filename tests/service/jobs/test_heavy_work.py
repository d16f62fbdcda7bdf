"""Computations over whole galleries take turns, and leave the threads of requests free."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial
from typing import Any

import httpx2 as httpx
import pytest

from service.core.actor import Actor, acting_as, current_actor
from service.jobs.heavy_work import HeavyWork
from service.risk.gallery_risks import GalleryRisks
from service.usecases import hygiene


def test_computations_take_turns_and_an_error_is_its_callers_alone() -> None:
    turn = threading.Lock()

    def compute(number: int) -> tuple[str, int]:
        assert turn.acquire(blocking=False), "two at once"
        time.sleep(0.01)
        turn.release()
        return current_actor().name, 12 // number

    async def ask() -> list[object]:
        heavy = HeavyWork()
        with acting_as(Actor("key:a")):
            runs = [heavy.run(partial(compute, number)) for number in (1, 0, 3)]
            return await asyncio.gather(*runs, return_exceptions=True)

    first, failed, last = asyncio.run(ask())
    assert (first, type(failed), last) == (("key:a", 12), ZeroDivisionError, ("key:a", 4))


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
