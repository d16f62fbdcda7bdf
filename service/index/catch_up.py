"""Catch-up of indexes before a search. Waiting requests hold no thread, so a slow load delays no other gallery."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self
from weakref import WeakKeyDictionary

from service.core.errors import OverloadedError
from service.domain.gallery import Gallery
from service.index.follower import Follower

THREADS: Final = 4
MAX_LARGE_LOADS: Final = 2
"""Threads that may load large galleries at the same time. A load takes seconds to minutes."""
LARGE_TEMPLATES: Final = 20_000


@dataclass
class _Turns:
    """Catch-ups of one follower. ``begun``, ``ended``: number of the last one that began or ended."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    begun: int = 0
    ended: int = 0
    waiting: int = 0


class CatchUp:
    """Single-flight catch-up of each gallery.

    ``max_waiting``: requests that may wait for a gallery to be loaded. Use as an async context manager, on one event
    loop.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="following")
        self._loading = asyncio.Semaphore(MAX_LARGE_LOADS)
        self._turns: WeakKeyDictionary[Follower, _Turns] = WeakKeyDictionary()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown()

    async def of(self, follower: Follower, gallery: Gallery) -> None:
        """Apply every write that was acknowledged before ``gallery`` was read.

        Raises:
            OverloadedError: too many requests wait for the gallery to be loaded.
            StorageError, IndexUnavailableError: the change log cannot be read or applied.
        """
        if follower.is_at(gallery.version):
            return
        turns = self._turns.setdefault(follower, _Turns())
        if not follower.caught_up and turns.waiting >= self._max_waiting:
            raise OverloadedError(f"{turns.waiting} requests are waiting for the gallery to be loaded")
        arrived = turns.begun
        turns.waiting += 1
        try:
            async with turns.lock:
                if turns.ended > arrived:
                    return  # another catch-up began after this request, so it has applied all that this one needs
                turns.begun = begun = turns.begun + 1
                if follower.caught_up or gallery.templates < LARGE_TEMPLATES:
                    await self._in_thread(follower, gallery)
                else:
                    async with self._loading:
                        await self._in_thread(follower, gallery)
                turns.ended = begun
        finally:
            turns.waiting -= 1

    async def _in_thread(self, follower: Follower, gallery: Gallery) -> None:
        await asyncio.get_running_loop().run_in_executor(self._threads, follower.catch_up, gallery.version)
