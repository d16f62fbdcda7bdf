"""Before a search its gallery's index catches up with the log. Requests that wait for that hold no thread, so that a
gallery that is being loaded keeps nobody else waiting."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self
from weakref import WeakKeyDictionary

from service.errors import OverloadedError
from service.gallery.follower import Follower
from service.gallery.subjects import Gallery

THREADS: Final = 4
LOADING: Final = 2
"""Of the threads, how many may be taken by large galleries that nobody searched yet: those take seconds to minutes."""
LARGE: Final = 20_000
"""Templates."""


@dataclass
class _Turns:
    """One follower's. ``begun``, ``ended``: numbers of the last catching up that did so."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    begun: int = 0
    ended: int = 0
    waiting: int = 0


class CatchingUp:
    """One thread at most for each gallery, which works for all requests that wait. ``most_waiting``: for a gallery that
    nobody searched yet. Use as an async context manager, from one event loop."""

    def __init__(self, most_waiting: int) -> None:
        self._most_waiting = most_waiting
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="following")
        self._loading = asyncio.Semaphore(LOADING)
        self._turns: WeakKeyDictionary[Follower, _Turns] = WeakKeyDictionary()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown()

    async def of(self, follower: Follower, gallery: Gallery) -> None:
        """Every write that was acknowledged before ``gallery`` was read is seen by a search after this.

        Raises:
            OverloadedError: too many wait for it to be loaded.
            StorageError, IndexUnavailableError: it cannot be followed.
        """
        if follower.is_at(gallery.version):
            return
        turns = self._turns.setdefault(follower, _Turns())
        if not follower.caught_up and turns.waiting >= self._most_waiting:
            raise OverloadedError(f"{turns.waiting} requests are waiting for the gallery to be loaded")
        arrived = turns.begun
        turns.waiting += 1
        try:
            async with turns.lock:
                if turns.ended > arrived:
                    return  # one that began after this request came did see all that this one must
                turns.begun = begun = turns.begun + 1
                if follower.caught_up or gallery.templates < LARGE:
                    await self._in_thread(follower, gallery)
                else:
                    async with self._loading:
                        await self._in_thread(follower, gallery)
                turns.ended = begun
        finally:
            turns.waiting -= 1

    async def _in_thread(self, follower: Follower, gallery: Gallery) -> None:
        await asyncio.get_running_loop().run_in_executor(self._threads, follower.catch_up, gallery.version)
