"""Followers in Milvus: shared by all nodes, updated by one node at a time."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

import numpy as np

from models.runtime.network import Float
from service.core.errors import GalleryNotFoundError, IndexUnavailableError
from service.core.periodic import PeriodicTask
from service.domain.fusion import subject_vectors
from service.domain.gallery import Gallery, Hit, Keys
from service.index.follower import Follower
from service.index.milvus import NOT_FOUND, Collection, Milvus, parts
from service.storage.repositories.shared_indexes import Batch, Position, SharedIndexes, Turn

SETTLED_S: Final = 15.0
"""Age after which changes are visible with bounded consistency: three times Milvus' ``common.gracefulTime``."""
PROBES_PER_REQUEST: Final = 64
SWEEP_S: Final = 600.0
"""Time between sweeps for rows of deleted galleries."""
log = logging.getLogger(__name__)


class _Reached(NamedTuple):
    """Collection to search, its number of subjects, its minimum position in the log, and when that was read."""

    collection: Collection
    subject_count: int
    position: Position
    since_s: float


class MilvusFollower(Follower):
    """Follower of one gallery in Milvus.

    A search uses the collection of the latest catch-up. If that was dropped, it fails; a new one would be empty.
    """

    def __init__(self, milvus: Milvus, shared: SharedIndexes, gallery: Gallery) -> None:
        super().__init__(gallery)
        self._milvus = milvus
        self._shared = shared
        self._gallery = gallery
        self._own = f"gallery == {gallery.pk}"
        self._collection: Collection | None = None
        self._lock = threading.Lock()
        self._latest: _Reached | None = None

    def is_at(self, version: int) -> bool:
        return False  # other nodes change the position too

    def catch_up(self, version: int | None = None) -> None:
        # One thread of this process waits for the turn, so that the others keep no database connection busy.
        with self._lock, self._reopening_if_dropped():
            collection = self.opened()
            position = self._apply_all(collection)
            latest = self._latest
            if latest is None or (latest.collection is not collection or latest.position != position):
                self._latest = _Reached(collection, collection.count(self._own), position, time.monotonic())

    def search(self, probes: Float, k: int, among: Keys | None = None) -> tuple[list[list[Hit]], int]:
        reached = self._latest  # a concurrent catch-up must not change it during the search
        assert reached is not None  # noqa: S101 - a search follows a catch-up
        within, compared = [self._own], reached.subject_count
        settled = time.monotonic() - reached.since_s > SETTLED_S
        hits: list[list[Hit]] = [[] for _ in probes]
        with self._reopening_if_dropped():
            if among is not None:
                within = [f"{self._own} and key in {some}" for some in parts(among.tolist())]
                compared = sum(map(reached.collection.count, within))
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

    def opened(self) -> Collection:
        """Return the gallery's collection; create it if missing. Raises IndexUnavailableError."""
        if self._collection is None:
            gallery = self._gallery
            self._collection = self._milvus.collection(gallery.fingerprint, gallery.dimension, gallery.generation)
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

    def _apply_all(self, collection: Collection) -> Position:
        """Apply what was committed before this call, and return the position then."""
        position = self._shared.position(self._gallery, collection.engine)
        last = position.last
        while position.applied is None or position.applied < last:
            with self._shared.turn(self._gallery, collection.engine) as turn:
                self.step(collection, turn)
            position = self._shared.position(self._gallery, collection.engine)
        return position

    def step(self, collection: Collection, turn: Turn) -> None:
        """Apply the next batch, if there is one: replace the rows of its subjects by their current ones."""
        if turn.position.behind:
            batch = turn.next()
            try:
                self.apply(collection, batch)
                turn.record(batch)
            except GalleryNotFoundError:
                # This thread may have written rows after the deletion of the gallery removed them.
                collection.remove_where(self._own)
                raise

    def apply(self, collection: Collection, batch: Batch) -> None:
        """Replace the rows of a batch's subjects by their current ones."""
        now, changed = batch.now, batch.changed
        keys = np.unique(now.subject_pks)
        collection.put(self._gallery.pk, keys, subject_vectors(now.vectors, now.subject_pks, now.qualities))
        if changed is None:
            end = "" if batch.until is None else f" and key <= {batch.until}"
            changed = collection.keys(f"{self._own} and key > {batch.after}{end}")
        collection.remove(changed - set(keys.tolist()))


class MilvusEngine(PeriodicTask):
    """Factory of followers in Milvus. In the background it removes rows of deleted galleries.

    Rows are removed with their gallery, and later in case a node or Milvus failed in between.
    """

    def __init__(self, milvus: Milvus, shared: SharedIndexes) -> None:
        super().__init__(SWEEP_S, "cleaning up Milvus failed and is retried later", log)
        self.milvus = milvus
        self._shared = shared
        self.check = self.milvus.check
        self.close = self.milvus.close

    def follower(self, gallery: Gallery) -> MilvusFollower:
        return MilvusFollower(self.milvus, self._shared, gallery)

    def forget(self, gallery: Gallery) -> None:
        """Remove the rows of a deleted gallery. If Milvus is away, a later sweep removes them."""
        try:
            for collection in self.milvus.collections():
                collection.remove_where(f"gallery == {gallery.pk}")
        except IndexUnavailableError as error:
            about = "rows of deleted gallery %d are still in the index; a later sweep removes them: %s"
            log.warning(about, gallery.pk, error.detail)

    def sweep(self) -> None:
        """Remove the rows of deleted galleries and generations, and doubles. Raises IndexUnavailableError."""
        places = set[str]()
        for collection in self.milvus.collections():
            if collection.place in places:
                collection.drop()
                continue
            places.add(collection.place)
            while not self._stopping:
                living = self._shared.live_galleries(collection.generation, collection.fingerprint)
                found = collection.galleries(f"gallery not in {sorted(living)}")
                # Check again: a new gallery may be missing from the first list. Keys are never reused.
                gone = found - self._shared.live_galleries(collection.generation, collection.fingerprint)
                if not gone:
                    break
                collection.remove_where(f"gallery in {sorted(gone)}")

    async def _look(self) -> None:
        await asyncio.to_thread(self.sweep)
