"""Followers: indexes of galleries, which apply the change log before a search, and their cache.

Those of this module are in memory: one vector per subject, in a segmented index.
service.index.milvus_follower has those in Milvus.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np

from models.runtime.network import Float
from service.core.errors import OverloadedError
from service.domain.fusion import subject_vectors
from service.domain.gallery import Gallery, Hit, Keys, LogTrimmedError, Snapshot
from service.index.faiss_structures import lower_thread_priority, trainer_for
from service.index.joint_search import JointSearch
from service.index.segment_builder import Batch, Sizes
from service.index.segmented_index import SegmentedIndex
from service.index.segments import Rows, View
from service.storage.repositories.store import Store

BYTES_PER_GALLERY: Final = 10_000
BYTES_PER_DIMENSION: Final = 5
"""Four bytes of the vector, and overhead."""
THREADS: Final = 4
MAX_LARGE_LOADS: Final = 2
"""Threads that may load large galleries at the same time. A load takes seconds to minutes."""
LARGE_TEMPLATES: Final = 20_000
MAX_WAITING: Final = 256
"""Requests that may wait for a gallery to be loaded."""
LINES_PER_BATCH: Final = 20_000
"""Lines of the change log that are in memory at once."""
BACKGROUND_THREADS: Final = 2
UNKNOWN_VERSION: Final = -1


class Followers:
    """LRU cache of followers, one per gallery and generation.

    A follower is replaced when an index setting of its gallery changes. ``memory``: limit in bytes for all vectors;
    None: no limit. ``max_waiting``: requests that may wait for a gallery to be loaded.
    """

    def __init__(
        self,
        follow: Callable[[Gallery], Follower],
        memory: int | None = None,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._follow = follow
        self._max_waiting = max_waiting
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="following")
        self._loading = asyncio.Semaphore(MAX_LARGE_LOADS)
        self._memory = memory
        self._followers: OrderedDict[tuple[int, int], Follower] = OrderedDict()
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
            if follower is None or follower.index_settings != (gallery.settings.index, gallery.settings.recall):
                gone += self._evict(key)
                follower = self._followers[key] = self._follow(gallery)
            self._followers.move_to_end(key)
            self._total -= follower.held
            follower.held = BYTES_PER_GALLERY + gallery.templates * gallery.dimension * BYTES_PER_DIMENSION
            self._total += follower.held
            while self._memory is not None and self._total > self._memory and len(self._followers) > 1:
                gone += self._evict(next(iter(self._followers)))
        _close(gone)
        return follower

    def catch_up_blocking(self, gallery: Gallery, version: int | None = None) -> Follower:
        """Return the follower at ``version``, or after every write that was acknowledged before this call. Blocks.

        Raises StorageError, IndexUnavailableError: the change log cannot be read or applied.
        """
        follower = self.of(gallery)
        if version is None or not follower.is_at(version):
            follower.catch_up(version)
        return follower

    def nearest(self, gallery: Gallery, probes: Float, k: int) -> tuple[list[list[Hit]], int]:
        """Search a gallery of strangers at its last change, its only version, or later. Blocks."""
        return self.catch_up_blocking(gallery, gallery.last_change).search(probes, k)

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
        if follower.next is None:
            follower.next = asyncio.create_task(self._catch_up(follower, gallery))
        follower.waiting += 1
        try:
            await asyncio.shield(follower.next)
        finally:
            follower.waiting -= 1
        return follower

    async def _catch_up(self, follower: Follower, gallery: Gallery) -> None:
        is_large = not follower.loaded and gallery.templates >= LARGE_TEMPLATES
        async with follower.turn, self._loading if is_large else contextlib.nullcontext():
            follower.next = None  # requests that arrive from now on may need more than this one applies
            await asyncio.get_running_loop().run_in_executor(self._threads, follower.catch_up, gallery.version)

    def drop(self, gallery: Gallery) -> None:
        """Evict all generations of a deleted gallery, and of its strangers."""
        with self._lock:
            doomed = [k for k, one in self._followers.items() if gallery.pk in (k[0], one.companion_of)]
            gone = [each for key in doomed for each in self._evict(key)]
        _close(gone)

    def close(self) -> None:
        """Finish running catch-ups, and close all followers."""
        self._threads.shutdown()
        with self._lock:
            gone = [each for key in list(self._followers) for each in self._evict(key)]
        _close(gone)

    def sequences(self) -> dict[tuple[int, str], int]:
        """Return the last applied log line by key and name of visible galleries; of two generations, the lower one."""
        with self._lock:
            followers = [(pk, one) for (pk, _), one in self._followers.items() if one.companion_of is None]
        sequences: dict[tuple[int, str], int] = {}
        for pk, follower in followers:
            if (sequence := follower.sequence()) is not None:
                sequences[pk, follower.name] = min(sequence, sequences.get((pk, follower.name), sequence))
        return sequences

    def __len__(self) -> int:
        return len(self._followers)

    def _evict(self, key: tuple[int, int]) -> list[Follower]:
        """Remove and return the follower, if any. The caller closes it after releasing the lock."""
        gone = [self._followers.pop(key)] if key in self._followers else []
        self._total -= sum(each.held for each in gone)
        return gone


def _close(followers: list[Follower]) -> None:
    for follower in followers:
        follower.close()


class Follower(ABC):
    """Index of one gallery, and the turns of the requests that wait for it. Safe to share between threads.

    ``joint``: searches together with other requests. ``held``: about how many bytes its vectors take.
    """

    def __init__(self, gallery: Gallery) -> None:
        self.name = gallery.name
        self.index_settings = gallery.settings.index, gallery.settings.recall
        self.companion_of = gallery.companion_of
        self.turn = asyncio.Lock()
        self.next: asyncio.Task[None] | None = None
        """Catch-up that has not begun."""
        self.waiting = 0
        self.joint = JointSearch()
        self.held = 0

    @property
    def loaded(self) -> bool:
        """True after the first catch-up; later ones are short."""
        return self.sequence() is not None

    @abstractmethod
    def catch_up(self, version: int | None = None) -> None:
        """Apply all writes committed before this call, by any process. The first call can take minutes.

        ``version``: of the gallery as a caller read it before; perhaps there are later writes.
        """

    @abstractmethod
    def is_at(self, version: int) -> bool:
        """Return whether it has reached this version of the gallery."""

    @abstractmethod
    def search(self, probes: Float, k: int, among: Keys | None = None) -> tuple[list[list[Hit]], int]:
        """Search for (q, d) probes, as of the last catch-up.

        Args:
            among: ascending keys of the subjects to search; None: all.

        Returns:
            The ``k`` best subjects of each probe, best first, and the number of subjects
            compared. Subjects without templates do not count.
        """

    @abstractmethod
    def sequence(self) -> int | None:
        """Return the last applied line of the change log, without I/O; None: not loaded."""

    @abstractmethod
    def close(self) -> None:
        """Stop without waiting. Work in progress may still finish."""


def in_process(store: Store, device: str = "cpu", sizes: Sizes | None = None) -> Callable[[Gallery], MemoryFollower]:
    """Return the factory of followers in memory of ``store``, on a ``device`` cpu or gpu."""
    build_for = trainer_for(device)
    background = ThreadPoolExecutor(BACKGROUND_THREADS, thread_name_prefix="index", initializer=lower_thread_priority)

    def run_later(work: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
            background.submit(work)

    def make(gallery: Gallery) -> MemoryFollower:
        settings = gallery.settings
        setting = settings.index if device == "cpu" else "compact"  # a GPU's structures are as exact
        index = SegmentedIndex(gallery.dimension, setting, settings.recall, build_for, run_later, sizes)
        return MemoryFollower(store, gallery, index)

    return make


class MemoryFollower(Follower):
    """Follower that applies a gallery's change log to a segmented index of one vector per subject."""

    def __init__(self, store: Store, gallery: Gallery, index: SegmentedIndex) -> None:
        super().__init__(gallery)
        self._store = store
        self._gallery = gallery
        self.index = index
        self._loaded = False
        self._version = UNKNOWN_VERSION
        self._catching_up = threading.Lock()

    def is_at(self, version: int) -> bool:
        return self._version == version

    def catch_up(self, version: int | None = None) -> None:
        with self._catching_up:
            followed = False
            if self._loaded:
                with contextlib.suppress(LogTrimmedError):
                    self.index.apply(self._batches(self.index.view.sequence))
                    followed = True
            if not followed:  # the error is gone, which held the old vectors
                self._load()
            if version is not None:
                self._version = version

    def search(self, probes: Float, k: int, among: Keys | None = None) -> tuple[list[list[Hit]], int]:
        view = self.index.view
        chosen, compared = _searched(view, among)
        if not compared or not len(probes):
            return [[] for _ in probes], compared
        found = view.search(probes, min(k, compared), chosen)
        return [
            [Hit(subject, similarity) for subject, similarity in zip(row, values, strict=True) if subject >= 0]
            for row, values in zip(found.keys.tolist(), found.similarities.tolist(), strict=True)
        ], compared

    def sequence(self) -> int | None:
        return self.index.view.sequence if self._loaded else None

    def close(self) -> None:
        self.index.close()

    def _load(self) -> None:
        # Release each copy before the next is made, so that memory holds two of each vector at most.
        self._loaded, self._version = False, UNKNOWN_VERSION
        self.index.unload()
        snapshot = self._store.changes.snapshot(self._gallery)
        rows, sequence = self._rows(snapshot), snapshot.sequence
        del snapshot
        self.index.load(rows, sequence)
        self._loaded = True

    def _rows(self, snapshot: Snapshot) -> Rows:
        subjects = np.unique(snapshot.subject_pks)
        return Rows(subjects, subject_vectors(snapshot.vectors, snapshot.subject_pks, snapshot.qualities))

    def _batches(self, sequence: int) -> Iterator[Batch]:
        """Yield the changes after this line of the log, in parts."""
        more = True
        while more:
            changed, now, more = self._store.changes.changed_subjects(self._gallery, sequence, LINES_PER_BATCH)
            sequence = now.sequence
            if changed:
                yield Batch(np.array(sorted(changed), np.int64), self._rows(now), sequence)


def _searched(view: View, among: Keys | None) -> tuple[Keys | None, int]:
    """Return the subjects to search (None: all), and how many of them have a vector."""
    if among is None:
        return None, len(view)
    present = among[view.contains(among)]
    return present, len(present)
