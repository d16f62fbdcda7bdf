"""Followers: searchable replicas of galleries, which apply the change log before a search."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol

from models.runtime.network import Float
from service.core.errors import OverloadedError
from service.domain.gallery import Gallery, GallerySettings, Hit, Keys
from service.index.protocol import IndexStats

BYTES_PER_GALLERY: Final = 10_000
BYTES_PER_DIMENSION: Final = 5
"""Four bytes of the vector, and overhead."""
THREADS: Final = 4
MAX_LARGE_LOADS: Final = 2
"""Threads that may load large galleries at the same time. A load takes seconds to minutes."""
LARGE_TEMPLATES: Final = 20_000
MAX_WAITING: Final = 256
"""Requests that may wait for a gallery to be loaded."""


class Replica(Protocol):
    """Searchable copy of one gallery. Safe to share between threads."""

    def catch_up(self, version: int | None = None) -> None:
        """Apply all writes committed before this call, by any process.

        ``version``: current version of the gallery; a replica that has reached it returns at once.
        """

    def is_at(self, version: int) -> bool:
        """Return whether the replica has reached this version of the gallery."""

    def search(self, probes: Float, k: int, among: Keys | None) -> tuple[list[list[Hit]], int]:
        """Search for (q, d) probes.

        Args:
            among: ascending keys of the subjects to search; None: all.

        Returns:
            The ``k`` best subjects of each probe by the gallery's fusion, best first, and the number of subjects
            compared. Subjects without templates do not count.
        """

    def stats(self) -> IndexStats:
        """Return the current state of the index."""

    def sequence(self) -> int | None:
        """Return the last applied line of the change log, without I/O; None: not loaded."""

    def close(self) -> None:
        """Stop without waiting. Work in progress may still finish."""


class Follower:
    """Replica of one gallery, and the turns of the requests that wait for it. Safe to share between threads.

    ``loaded``: True after the first catch-up; later ones are short.
    """

    def __init__(self, gallery: Gallery, replica: Replica) -> None:
        self.name = gallery.name
        self.settings = gallery.settings
        self.loaded = False
        self.turn = asyncio.Lock()
        self.begun = self.ended = self.waiting = 0
        self._replica = replica

    def catch_up(self, version: int | None = None) -> None:
        """Catch up as :meth:`Replica.catch_up`. The first call loads the gallery, which can take minutes."""
        self._replica.catch_up(version)
        self.loaded = True

    def is_at(self, version: int) -> bool:
        """Return whether the replica has reached this version of the gallery."""
        return self._replica.is_at(version)

    def search(self, probes: Float, k: int, among: Keys | None = None) -> tuple[list[list[Hit]], int]:
        """Search as :meth:`Replica.search`, as of the last catch-up."""
        return self._replica.search(probes, k, among)

    def stats(self) -> IndexStats:
        """Return the state of the index, as of the last catch-up."""
        return self._replica.stats()

    def sequence(self) -> int | None:
        """Return the last applied line of the change log; None: not loaded."""
        return self._replica.sequence() if self.loaded else None

    def close(self) -> None:
        """Stop the replica without waiting."""
        self._replica.close()


class Followers:
    """LRU cache of followers, one per gallery and generation.

    A follower is replaced when an index setting of its gallery changes. ``memory``: limit in bytes for all vectors;
    None: no limit. ``max_waiting``: requests that may wait for a gallery to be loaded.
    """

    def __init__(
        self,
        make_replica: Callable[[Gallery], Replica],
        memory: int | None = None,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._make_replica = make_replica
        self._max_waiting = max_waiting
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="following")
        self._loading = asyncio.Semaphore(MAX_LARGE_LOADS)
        self._memory = memory
        self._followers: OrderedDict[tuple[int, int], Follower] = OrderedDict()
        self._held: dict[tuple[int, int], int] = {}
        self._total = 0
        self._lock = threading.Lock()

    def of(self, gallery: Gallery) -> Follower:
        """Return the follower of a gallery as read for this request."""
        key = (gallery.pk, gallery.generation)
        wanted = {gallery.generation, gallery.current_generation, gallery.other.number if gallery.other else -1}
        gone: list[Follower] = []
        with self._lock:
            # Evict generations that a finished migration has removed.
            for dropped in [k for k in self._followers if k[0] == gallery.pk and k[1] not in wanted]:
                gone += self._evict(dropped)
            follower = self._followers.get(key)
            if follower is None or _index_settings(follower.settings) != _index_settings(gallery.settings):
                gone += self._evict(key)
                follower = self._followers[key] = Follower(gallery, self._make_replica(gallery))
            self._followers.move_to_end(key)
            self._hold(key, BYTES_PER_GALLERY + gallery.templates * gallery.dimension * BYTES_PER_DIMENSION)
            while self._memory is not None and self._total > self._memory and len(self._followers) > 1:
                gone += self._evict(next(iter(self._followers)))
        _close(gone)
        return follower

    def catch_up_blocking(self, gallery: Gallery) -> Follower:
        """Return the follower after it has applied every write that was acknowledged before this call. Blocks.

        Raises StorageError, IndexUnavailableError: the change log cannot be read or applied.
        """
        follower = self.of(gallery)
        follower.catch_up()
        return follower

    async def catch_up(self, gallery: Gallery) -> Follower:
        """Catch up with every write acknowledged before ``gallery`` was read, and return the follower.

        Requests that wait hold no thread, so a slow load delays no other gallery. A catch-up that begins after a
        request has arrived applies all that it needs (single-flight).

        Raises:
            OverloadedError: too many requests wait for the gallery to be loaded.
            StorageError, IndexUnavailableError: as catch_up_blocking.
        """
        follower = self.of(gallery)
        if follower.is_at(gallery.version):
            return follower
        if not follower.loaded and follower.waiting >= self._max_waiting:
            raise OverloadedError(f"{follower.waiting} requests are waiting for the gallery to be loaded")
        arrived = follower.begun
        follower.waiting += 1
        try:
            async with follower.turn:
                if follower.ended > arrived:
                    return follower
                follower.begun = begun = follower.begun + 1
                if follower.loaded or gallery.templates < LARGE_TEMPLATES:
                    await self._in_thread(follower, gallery)
                else:
                    async with self._loading:
                        await self._in_thread(follower, gallery)
                follower.ended = begun
        finally:
            follower.waiting -= 1
        return follower

    async def _in_thread(self, follower: Follower, gallery: Gallery) -> None:
        await asyncio.get_running_loop().run_in_executor(self._threads, follower.catch_up, gallery.version)

    def drop(self, gallery: Gallery) -> None:
        """Evict all generations of a deleted gallery."""
        with self._lock:
            gone = [each for key in list(self._followers) if key[0] == gallery.pk for each in self._evict(key)]
        _close(gone)

    def close(self) -> None:
        """Finish running catch-ups, and close all followers."""
        self._threads.shutdown()
        with self._lock:
            gone = [each for key in list(self._followers) for each in self._evict(key)]
        _close(gone)

    def sequences(self) -> dict[tuple[int, str], int]:
        """Return the last applied log line by gallery key and name; of two generations, the lower one."""
        with self._lock:
            followers = [(pk, follower) for (pk, _), follower in self._followers.items()]
        sequences: dict[tuple[int, str], int] = {}
        for pk, follower in followers:
            if (sequence := follower.sequence()) is not None:
                sequences[pk, follower.name] = min(sequence, sequences.get((pk, follower.name), sequence))
        return sequences

    def __len__(self) -> int:
        return len(self._followers)

    def _hold(self, key: tuple[int, int], size: int) -> None:
        self._total += size - self._held.get(key, 0)
        self._held[key] = size

    def _evict(self, key: tuple[int, int]) -> list[Follower]:
        """Remove and return the follower, if any. The caller closes it after releasing the lock."""
        if key not in self._followers:
            return []
        self._total -= self._held.pop(key, 0)
        return [self._followers.pop(key)]


def _close(followers: list[Follower]) -> None:
    for follower in followers:
        follower.close()


def _index_settings(settings: GallerySettings) -> tuple[object, ...]:
    return settings.fusion, settings.index, settings.recall
