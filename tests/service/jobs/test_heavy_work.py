"""Computations over whole galleries are shared, take turns, and leave the threads of requests free."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from kith import Kith
from models.vision.recognition import l2_normalize
from service.core.errors import OverloadedError
from service.domain.gallery_items import vector_bytes
from service.jobs.heavy_work import MAX_WAITING, HeavyWork
from service.server import embedded
from service.settings import load_settings
from service.storage.transfer.ndjson import lines_of
from tests.conftest import jpeg

PEOPLE = 4000
"""Hygiene of so many templates takes a second or more."""


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


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("heavy")
    with embedded(load_settings(data_dir=folder, log_level="ERROR")) as address:
        yield address


@pytest.fixture(scope="module")
def large(url: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Gallery of PEOPLE with two templates each."""
    file = tmp_path_factory.mktemp("import") / "people.ndjson"
    with Kith(url, timeout_s=300) as kith:
        model = kith.model()
        people = l2_normalize(np.random.default_rng(5).normal(size=(PEOPLE, model.dimension)) + 0.6)
        items = [
            {"subject": f"s{i}", "embedding": vector_bytes(each)}
            for i, vector in enumerate(people)
            for each in (vector, l2_normalize(vector + 0.01))
        ]
        file.write_bytes(lines_of(items))
        kith.create_gallery("large")
        kith.import_gallery("large", file, recognizer=model.recognizer)
    return "large"


@pytest.mark.parametrize(
    ("method", "path"), [pytest.param("GET", "hygiene", marks=pytest.mark.long), ("POST", "calibrate")]
)
def test_photos_are_processed_during_heavy_work(
    url: str, large: str, method: str, path: str, astronaut: NDArray[np.uint8]
) -> None:
    """As many requests as there are threads would hold them all."""

    def ask(_: int) -> Any:
        return httpx.request(method, f"{url}/v1/galleries/{large}/{path}", timeout=300).raise_for_status().json()

    photo = jpeg(astronaut)
    with ThreadPoolExecutor(12) as threads, Kith(url) as kith:
        new = np.eye(kith.model().dimension, dtype=np.float32)[0]
        kith.enroll(large, f"before {path}", embeddings=[new], allow_duplicate=True)  # so that there is work to do
        kith.detect(photo)
        asked = [threads.submit(ask, n) for n in range(12)]
        assert kith.detect(photo).images
        assert not any(each.done() for each in asked), "photos waited for a computation"
        first, *others = (each.result() for each in asked)
        # Each cursor has a new seal.
        assert all({**other, "next": None} == {**first, "next": None} for other in others)
