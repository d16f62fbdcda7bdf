"""A gallery that loads slowly delays only its own searches."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import httpx2 as httpx
import numpy as np
import pytest

from models.runtime.network import Float
from models.vision.recognition import l2_normalize
from service import wiring
from service.core.errors import StorageError
from service.domain.gallery import Gallery, GallerySettings, Hit, Snapshot
from service.index import follower
from service.index.follower import MAX_LARGE_LOADS, Follower, Followers
from service.security.sealing import Seal, new_key
from service.server import embedded
from service.settings import load_settings
from service.storage.repositories.change_log import ChangeLog
from tests.packs import BUNDLED_DIMENSION

QUEUE: Final = 40
TOO_MANY: Final = 10
SOON_S: Final = 60
GALLERIES: Final = [f"large{i}" for i in range(MAX_LARGE_LOADS + 1)]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Simulates slow reading of a large gallery until this event is set."""
    go, snapshot = threading.Event(), ChangeLog.snapshot

    def slow(log: ChangeLog, gallery: Gallery) -> Snapshot:
        if gallery.name in GALLERIES and not threading.current_thread().name.startswith("risk"):
            go.wait(60)
        return snapshot(log, gallery)

    monkeypatch.setattr(ChangeLog, "snapshot", slow)
    monkeypatch.setattr(follower, "LARGE_TEMPLATES", 2)
    yield go
    go.set()


def test_galleries_being_loaded_hold_up_no_others(
    tmp_path: Path, held: threading.Event, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wiring, "QUEUE_SIZE", QUEUE)
    settings = load_settings(data_dir=tmp_path, log_level="ERROR")
    vector, *more = l2_normalize(rng.normal(size=(3, BUNDLED_DIMENSION))).tolist()
    free: dict[str, Any] = {"embeddings": [vector], "allow_duplicate": True, "allow_inconsistent": True}
    probe: dict[str, Any] = {"embeddings": [vector], "risk": {"threshold": 0.9}}
    with (
        ThreadPoolExecutor(QUEUE + TOO_MANY + MAX_LARGE_LOADS) as callers,
        embedded(settings) as url,
        httpx.Client(base_url=url, timeout=60, limits=httpx.Limits(max_connections=None)) as http,
    ):
        for name in (*GALLERIES, "small"):
            assert http.post("/v1/galleries", json={"name": name}).status_code == 201
            assert http.post(f"/v1/galleries/{name}/subjects/a/templates", json=free).status_code == 201
        for name in GALLERIES:
            further = {**free, "embeddings": more}
            assert http.post(f"/v1/galleries/{name}/subjects/b/templates", json=further).status_code == 201
        asked = [GALLERIES[0]] * (QUEUE + TOO_MANY) + GALLERIES[1:]
        try:
            waiting = [callers.submit(http.post, f"/v1/galleries/{name}/identify", json=probe) for name in asked]
            end = time.monotonic() + SOON_S
            while sum(each.done() for each in waiting) < TOO_MANY and time.monotonic() < end:
                time.sleep(0.02)
            for method, path, body in (
                ("GET", "/readyz", None),
                ("POST", "/v1/galleries/small/identify", probe),
                ("GET", "/v1/galleries/small", None),
                ("POST", "/v1/galleries/small/subjects/a/templates", {"embeddings": [vector]}),
            ):
                assert http.request(method, path, json=body, timeout=SOON_S).is_success, path
            told = [each.result() for each in waiting if each.done()]
            assert [each.json()["code"] for each in told] == ["overloaded"] * TOO_MANY
        finally:
            held.set()
        answered = [each.result().status_code for each in waiting]
        assert answered.count(200) == len(asked) - TOO_MANY and answered.count(503) == TOO_MANY


class Counted(Follower):
    """A replica that records when it caught up, and fails on request."""

    def __init__(self, gallery: Gallery) -> None:
        super().__init__(gallery)
        self.began = 0
        self.go = threading.Event()
        self.failing = False

    def is_at(self, version: int) -> bool:
        return False

    def sequence(self) -> int | None:
        return None

    def catch_up(self, version: int | None = None) -> None:
        self.began += 1
        self.go.wait(SOON_S)
        if self.failing:
            raise StorageError("away")

    def search(self, probes: Float, k: int, among: Any = None) -> tuple[list[list[Hit]], int]:
        return [[] for _ in probes], 0

    def close(self) -> None:
        pass


def test_requests_that_come_meanwhile_are_served_by_the_next_catching_up() -> None:
    gallery = Gallery(1, "g", "f" * 32, 4, GallerySettings(), datetime.now(UTC), Seal(new_key()))

    async def ask() -> None:
        replica = Counted(gallery)
        with closing(Followers(lambda _: replica, max_waiting=QUEUE)) as followers:
            first = asyncio.create_task(followers.catch_up(gallery))
            while not replica.began:
                await asyncio.sleep(0.01)
            # Later searches must see writes made after the first one began.
            later = [asyncio.create_task(followers.catch_up(gallery)) for _ in range(QUEUE - 1)]
            await asyncio.sleep(0.05)
            assert replica.began == 1 and not first.done()
            replica.go.set()
            await asyncio.gather(first, *later)
            assert replica.began == 2 and followers.of(gallery).loaded
            replica.failing = True
            failing = [followers.catch_up(gallery) for _ in range(2)]
            told = await asyncio.gather(*failing, return_exceptions=True)
            assert [type(error) for error in told] == [StorageError] * 2
            replica.failing = False
            await followers.catch_up(gallery)
            assert replica.began == 5

    asyncio.run(ask())
