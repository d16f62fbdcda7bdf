"""A gallery that loads slowly delays only its own searches."""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

import pytest

from models.runtime.network import Float
from service.core.errors import OverloadedError, StorageError
from service.domain.gallery import Gallery, GallerySettings, Hit
from service.index.follower import LARGE_TEMPLATES, MAX_LARGE_LOADS, THREADS, Follower, Followers
from service.security.sealing import Seal, new_key

QUEUE: Final = 40
SOON_S: Final = 60
GALLERY: Final = Gallery(1, "g", "f" * 32, 4, GallerySettings(), datetime.now(UTC), Seal(new_key()))


class Counted(Follower):
    """A replica that records when it caught up, and fails on request."""

    def __init__(self, gallery: Gallery) -> None:
        super().__init__(gallery)
        self.began = 0
        self.go = threading.Event()
        self.failing = self.caught_up = False

    def is_at(self, version: int) -> bool:
        return False

    def sequence(self) -> int | None:
        return 1 if self.caught_up else None

    def catch_up(self, version: int | None = None) -> None:
        self.began += 1
        self.go.wait(SOON_S)
        if self.failing:
            raise StorageError("away")
        self.caught_up = True

    def search(self, probes: Float, k: int, among: Any = None) -> tuple[list[list[Hit]], int]:
        return [[] for _ in probes], 0

    def close(self) -> None:
        pass


async def begun(*replicas: Counted, count: int) -> None:
    async with asyncio.timeout(SOON_S):
        while sum(each.began for each in replicas) < count:
            await asyncio.sleep(0.01)


def test_galleries_being_loaded_hold_up_no_others() -> None:
    """Few large ones load at once, and few requests wait for each."""
    large = [replace(GALLERY, pk=pk, templates=LARGE_TEMPLATES) for pk in range(THREADS)]
    small = replace(GALLERY, pk=THREADS)
    replicas = {gallery.pk: Counted(gallery) for gallery in (*large, small)}
    replicas[small.pk].go.set()

    async def ask() -> None:
        with closing(Followers(lambda gallery: replicas[gallery.pk], max_waiting=QUEUE)) as followers:
            first = [asyncio.create_task(followers.catch_up(large[0])) for _ in range(QUEUE)]
            others = [asyncio.create_task(followers.catch_up(each)) for each in large[1:]]
            await begun(*replicas.values(), count=MAX_LARGE_LOADS)
            with pytest.raises(OverloadedError):
                await followers.catch_up(large[0])
            async with asyncio.timeout(SOON_S):
                await followers.catch_up(small)
            assert sum(replicas[each.pk].began for each in large) == MAX_LARGE_LOADS
            assert not any(task.done() for task in (*first, *others))
            for each in replicas.values():
                each.go.set()
            await asyncio.gather(*first, *others)
            assert all(followers.of(each).loaded for each in large)

    asyncio.run(ask())


def test_requests_that_come_meanwhile_are_served_by_the_next_catching_up() -> None:
    async def ask() -> None:
        replica = Counted(GALLERY)
        with closing(Followers(lambda _: replica, max_waiting=QUEUE)) as followers:
            first = asyncio.create_task(followers.catch_up(GALLERY))
            await begun(replica, count=1)
            # Later searches must see writes made after the first one began.
            later = [asyncio.create_task(followers.catch_up(GALLERY)) for _ in range(QUEUE - 1)]
            await asyncio.sleep(0.05)
            assert replica.began == 1 and not first.done()
            replica.go.set()
            await asyncio.gather(first, *later)
            assert replica.began == 2 and followers.of(GALLERY).loaded
            replica.failing = True
            failing = [followers.catch_up(GALLERY) for _ in range(2)]
            told = await asyncio.gather(*failing, return_exceptions=True)
            assert [type(error) for error in told] == [StorageError] * 2
            replica.failing = False
            await followers.catch_up(GALLERY)
            assert replica.began == 4  # one for both that failed

    asyncio.run(ask())
