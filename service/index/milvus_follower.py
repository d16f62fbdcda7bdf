"""Followers in Milvus: shared by all nodes, updated by one node at a time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

import numpy as np

from models.runtime.network import Float
from service.core.errors import GalleryNotFoundError, IndexUnavailableError, KithError
from service.domain.fusion import subject_vectors
from service.domain.gallery import Gallery, Hit, Keys, Snapshot
from service.index.follower import Follower
from service.index.milvus import NOT_FOUND, Collection, Milvus, MilvusOptions, Place, parts
from service.storage.repositories.shared_indexes import Position, SharedIndexes, Turn

SETTLED_S: Final = 15.0
"""Age after which changes are visible with bounded consistency: three times Milvus' ``common.gracefulTime``."""
PROBES_PER_REQUEST: Final = 64
SWEEP_S: Final = 600.0
"""Time between sweeps for rows of deleted galleries."""
log = logging.getLogger(__name__)


class _Reached(NamedTuple):
    """Collection to search, its minimum position in the change log, and the time when that was read."""

    collection: Collection
    position: Position
    since: float


class MilvusFollower(Follower):
    """Follower of one gallery in Milvus.

    A search uses the collection of the latest catch-up. If that was dropped, it fails; a new one would be empty.
    """

    def __init__(self, milvus: Milvus, shared: SharedIndexes, gallery: Gallery) -> None:
        super().__init__(gallery)
        self._milvus = milvus
        self._shared = shared
        self._gallery = gallery
        self._collection: Collection | None = None
        self._lock = threading.Lock()
        self._failed: tuple[float, IndexUnavailableError] | None = None
        self._latest: _Reached | None = None
        self._counted: tuple[_Reached, int] | None = None

    def is_at(self, version: int) -> bool:
        return False  # other nodes change the position too

    def catch_up(self, version: int | None = None) -> None:
        collection = self.opened()
        position = self._shared.position(self._gallery, collection.engine)
        if position.behind:
            asked = time.monotonic()
            # One thread of this process waits for the turn, so that the others keep no database connection busy.
            with self._lock, self._reopening_if_dropped():
                # Fail at once if a concurrent attempt failed, instead of waiting for another timeout.
                if self._failed and self._failed[0] > asked:
                    raise IndexUnavailableError(self._failed[1].detail)
                self._apply_up_to(collection, position.last)
            position = self._shared.position(self._gallery, collection.engine)
        latest = self._latest
        if latest is None or (latest.collection is not collection or latest.position != position):
            self._latest = _Reached(collection, position, time.monotonic())

    def search(self, probes: Float, k: int, among: Keys | None = None) -> tuple[list[list[Hit]], int]:
        reached = self._latest  # a concurrent catch-up must not change it during the search
        assert reached is not None  # noqa: S101 - a search follows a catch-up
        within = [self._own]
        if among is not None:
            within = [f"{self._own} and key in {some}" for some in parts(among.tolist())]
        settled = time.monotonic() - reached.since > SETTLED_S
        hits: list[list[Hit]] = [[] for _ in probes]
        with self._reopening_if_dropped():
            compared = self._count(reached) if among is None else sum(map(reached.collection.count, within))
            for where in within if compared else []:
                for start in range(0, len(probes), PROBES_PER_REQUEST):
                    some = probes[start : start + PROBES_PER_REQUEST]
                    found = reached.collection.search(some, min(k, compared), where, settled)
                    for row, new in enumerate(found, start):
                        hits[row] = sorted(hits[row] + new, key=lambda hit: -hit.similarity)[:k]
        return hits, compared

    def sequence(self) -> int | None:
        return None if self._latest is None else self._latest.position.applied

    def close(self) -> None:
        pass

    @property
    def _own(self) -> str:
        return f"gallery == {self._gallery.pk}"

    def opened(self) -> Collection:
        """Return the gallery's collection; create it if missing. Raises IndexUnavailableError."""
        if self._collection is None:
            gallery = self._gallery
            self._collection = self._milvus.collection(
                Place(gallery.fingerprint, gallery.dimension, gallery.generation)
            )
        return self._collection

    @contextmanager
    def _reopening_if_dropped(self) -> Iterator[None]:
        """Open a dropped collection again on the next call."""
        try:
            yield
        except IndexUnavailableError as error:
            if getattr(error.__cause__, "code", None) == NOT_FOUND:
                self._collection = None
            raise

    def _apply_up_to(self, collection: Collection, last: int) -> None:
        try:
            self._follow(collection, last)
        except IndexUnavailableError as error:
            self._failed = (time.monotonic(), error)
            raise
        except GalleryNotFoundError:
            # This thread may have written rows after the deletion of the gallery removed them.
            collection.remove_where(self._own)
            raise

    def _follow(self, collection: Collection, last: int) -> None:
        while True:
            position = self._shared.position(self._gallery, collection.engine)
            if position.applied is not None and position.applied >= last:
                return
            with self._shared.turn(self._gallery, collection.engine) as turn:
                if turn.position.applied is None:
                    self.pass_on(collection, turn)
                elif turn.position.behind:
                    changed, now = turn.next_changes()
                    self.apply(collection, changed, now)
                    turn.advance(now.sequence)

    def pass_on(self, collection: Collection, turn: Turn) -> None:
        """Copy the next batch of subjects during the initial load."""
        until, now = turn.next_subjects()
        keys = self._put(collection, now)
        within = f"{self._own} and key > {turn.position.scanned}" + ("" if until is None else f" and key <= {until}")
        collection.remove(collection.keys(within) - keys)
        turn.record_scan(until)

    def apply(self, collection: Collection, changed: set[int], now: Snapshot) -> None:
        """Replace the rows of changed subjects by their current ones."""
        collection.remove(changed - self._put(collection, now))

    def _put(self, collection: Collection, now: Snapshot) -> set[int]:
        keys = np.unique(now.subject_pks)
        collection.put(self._gallery.pk, keys, subject_vectors(now.vectors, now.subject_pks, now.qualities))
        return set(keys.tolist())

    def _count(self, reached: _Reached) -> int:
        """Count the subjects of the gallery, once after each change."""
        counted = self._counted
        if counted is None or counted[0] is not reached:
            counted = self._counted = (reached, reached.collection.count(self._own))
        return counted[1]


class MilvusEngine:
    """Factory of followers in Milvus, and sweeper of rows of deleted galleries.

    Rows are removed with their gallery, and by a background sweep in case a node or Milvus failed in between.
    """

    def __init__(self, options: MilvusOptions, shared: SharedIndexes) -> None:
        self.options = options
        self._milvus = Milvus(options)
        self._shared = shared
        self._served: set[str] = set()
        self._stop = threading.Event()
        self._sweeper = threading.Thread(target=self._sweep_at_times, name="milvus-sweeper", daemon=True)
        self.check = self._milvus.check
        self.start = self._sweeper.start

    def close(self) -> None:
        self._stop.set()
        if self._sweeper.ident is not None:
            self._sweeper.join()
        self._milvus.close()

    def follower(self, gallery: Gallery) -> MilvusFollower:
        self._served.add(gallery.name)
        return MilvusFollower(self._milvus, self._shared, gallery)

    def forget(self, gallery: Gallery) -> None:
        """Remove the rows of a deleted gallery. If Milvus is away, a later sweep removes them."""
        try:
            for _, collection in self._milvus.collections():
                collection.remove_where(f"gallery == {gallery.pk}")
        except IndexUnavailableError as error:
            log.warning(
                "rows of deleted gallery %d are still in the index; a later sweep removes them: %s",
                gallery.pk,
                error.detail,
            )

    def sweep(self) -> None:
        """Remove the rows of deleted galleries and generations. Raises IndexUnavailableError."""
        for place, collection in self._milvus.collections():
            while not self._stop.is_set():
                living = self._shared.live_galleries(place.generation, place.fingerprint)
                found = collection.galleries(f"gallery not in {sorted(living)}")
                # Check again: a new gallery may be missing from the first list. Keys are never reused.
                gone = found - self._shared.live_galleries(place.generation, place.fingerprint)
                if not gone:
                    break
                collection.remove_where(f"gallery in {sorted(gone)}")

    def shorten_logs(self) -> None:
        """Trim the change logs of galleries served here. Raises StorageError."""
        for name in sorted(self._served):
            try:
                self._shared.trim_log(name)
            except GalleryNotFoundError:
                self._served.discard(name)

    def _sweep_at_times(self) -> None:
        while True:
            for task in (self.sweep, self.shorten_logs):
                try:
                    task()
                except KithError as error:
                    log.warning("cleaning up Milvus failed and is retried later: %s", error.detail)
            if self._stop.wait(SWEEP_S):
                return
