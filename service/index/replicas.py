"""In-memory replicas: a gallery's vectors in a segmented index, searched by its fusion rule."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from models.runtime.network import Float
from service.core.errors import GalleryMovedError, GalleryNotFoundError
from service.domain.fusion import TOP_K, VectorFusion, subject_vectors
from service.domain.gallery import Change, Gallery, Hit, Keys, LogTrimmedError, Snapshot
from service.index.faiss_structures import builders, products, use_one_thread
from service.index.follower import Replica
from service.index.protocol import IndexStats
from service.index.segment_builder import Batch
from service.index.segmented_index import SegmentedIndex
from service.index.segments import Matches, Rows, View
from service.index.selection import Sizes
from service.storage.repositories.change_log import MIN_KEPT_LINES
from service.storage.repositories.store import Store

LINES_PER_BATCH: Final = 20_000
"""Lines of the change log that are in memory at once."""
TRIM_AFTER: Final = 2 * MIN_KEPT_LINES
"""Lines of the change log after which trimming is attempted."""
NICENESS: Final = 10
"""Niceness of background threads, so that searches get the processor first."""
BACKGROUND_THREADS: Final = 2
UNKNOWN_VERSION: Final = -1
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class IndexOptions:
    """Options of in-memory indexes. ``device``: ``cpu`` or ``gpu``."""

    device: str = "cpu"
    sizes: Sizes = field(default_factory=Sizes)


def in_process(
    store: Store, options: IndexOptions | None = None, in_foreground: bool = False
) -> Callable[[Gallery], Replica]:
    """Return the factory of replicas of ``store``. ``in_foreground``: compact before a search, not in the background.

    Raises:
        SettingsError: the device is not available.
    """
    chosen = options or IndexOptions()
    build_for = builders(chosen.device)
    background = ThreadPoolExecutor(BACKGROUND_THREADS, thread_name_prefix="index", initializer=lower_thread_priority)

    def run_later(work: Callable[[], None]) -> None:
        if in_foreground:
            work()
            return
        with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
            background.submit(work)

    def make(gallery: Gallery) -> Replica:
        settings = gallery.settings
        index = SegmentedIndex(
            gallery.dimension,
            settings.index,
            settings.recall,
            build_for,
            run_later,
            chosen.sizes,
            chosen.device == "gpu",
        )
        match settings.fusion:
            case "max":
                return TemplatesReplica(store, gallery, index, run_later, 1)
            case "mean_top_k":
                return TemplatesReplica(store, gallery, index, run_later, TOP_K)
            case "centroid" | "quality_weighted" as rule:
                return SubjectsReplica(store, gallery, index, run_later, rule)

    return make


def lower_thread_priority() -> None:
    """Lower the priority of the calling thread on Linux. Elsewhere niceness belongs to the whole process."""
    use_one_thread()
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


class LogReplica(ABC):
    """Replica that applies a gallery's change log to an index."""

    def __init__(
        self, store: Store, gallery: Gallery, index: SegmentedIndex, run_later: Callable[[Callable[[], None]], None]
    ) -> None:
        self._store = store
        self._gallery = gallery
        self._index = index
        self._run_later = run_later
        self._loaded = False
        self._closed = False
        self._trimmed_at = gallery.log_floor
        self._version = UNKNOWN_VERSION
        self._catching_up = threading.Lock()

    def is_at(self, version: int) -> bool:
        return self._version == version

    def catch_up(self, version: int | None = None) -> None:
        if version is not None and self.is_at(version):
            return
        with self._catching_up:
            if version is not None and self.is_at(version):
                return
            try:
                if self._loaded:
                    self._follow()
                else:
                    self._load()
            except LogTrimmedError:
                self._load()
            if version is not None:
                self._version = version
            self._trim_if_long()

    def stats(self) -> IndexStats:
        return self._index.stats()

    def sequence(self) -> int | None:
        return self._index.view.sequence if self._loaded else None

    def close(self) -> None:
        self._closed = True
        self._index.close()

    def _load(self) -> None:
        # Release each copy before the next is made, so that memory holds two of each vector at most.
        self._loaded, self._version = False, UNKNOWN_VERSION
        self._index.unload()
        snapshot = self._store.changes.snapshot(self._gallery)
        rows, sequence = self._rows(snapshot), snapshot.sequence
        del snapshot
        self._index.load(rows, sequence)
        self._loaded = True

    @abstractmethod
    def _follow(self) -> None:
        """Apply new lines of the change log. Raises LogTrimmedError."""

    @abstractmethod
    def _rows(self, snapshot: Snapshot) -> Rows:
        """Return the index rows of these templates, sorted by owner and key."""

    def _trim_if_long(self) -> None:
        sequence = self._index.view.sequence
        if sequence - self._trimmed_at > TRIM_AFTER:
            self._trimmed_at = sequence
            self._run_later(self._trim)

    def _trim(self) -> None:
        try:
            self._store.changes.trim(self._gallery, stopped=lambda: self._closed)
        except (GalleryNotFoundError, GalleryMovedError):
            pass  # deleted or moved meanwhile; the next search handles it
        except Exception:  # no caller waits for this thread, so the log is the only report
            log.exception("trimming the change log of gallery %s failed", self._gallery.name)


class TemplatesReplica(LogReplica):
    """Replica for the mean of a subject's ``best`` most similar templates. The index holds all templates."""

    def __init__(
        self,
        store: Store,
        gallery: Gallery,
        index: SegmentedIndex,
        run_later: Callable[[Callable[[], None]], None],
        best: int,
    ) -> None:
        super().__init__(store, gallery, index, run_later)
        self._best = best

    def _rows(self, snapshot: Snapshot) -> Rows:
        return Rows(snapshot.template_pks, snapshot.subject_pks, snapshot.vectors)

    def _follow(self) -> None:
        sequence = self._index.view.sequence
        if lines := self._store.changes.read_after(self._gallery, sequence, LINES_PER_BATCH):
            self._index.apply(self._batches(lines))

    def _batches(self, lines: list[Change]) -> Iterator[Batch]:
        while lines:
            # Only the last line of a template counts.
            latest = {line.template_pk: line for line in lines}
            present = [(line.template_pk, line.subject_pk, line.vector) for line in latest.values()]
            here = [line for line in present if line[2] is not None]
            keys, owners = (np.array([line[i] for line in here], np.int64) for i in (0, 1))
            vectors = np.array([line[2] for line in here], np.float32).reshape(-1, self._gallery.dimension)
            yield Batch(np.array(sorted(latest), np.int64), Rows(keys, owners, vectors), lines[-1].sequence)
            if len(lines) < LINES_PER_BATCH:
                return
            lines = self._store.changes.read_after(self._gallery, lines[-1].sequence, LINES_PER_BATCH)

    def search(self, probes: Float, k: int, among: Keys | None) -> tuple[list[list[Hit]], int]:
        view = self._index.view
        chosen, compared = _searched(view, among)
        if not compared or not len(probes):
            return [[] for _ in probes], compared
        total = len(view) if chosen is None else int(view.count_of(chosen).sum())
        wanted = min(k, compared)
        depth = min(total, 4 * wanted * self._best)
        while True:
            found = self._index.search(view, probes, depth, chosen)
            hits = self._fuse(view, probes, found, wanted)
            # The fused similarity of an unseen subject is at most the last similarity seen.
            if depth >= total or all(
                len(h) == wanted and h[-1].similarity >= last
                for h, last in zip(hits, found.similarities[:, -1].tolist(), strict=True)
            ):
                return hits, compared
            depth = min(total, depth * 4)

    def _fuse(self, view: View, probes: Float, found: Matches, k: int) -> list[list[Hit]]:
        similarities, owners = found.similarities, found.owners
        if self._best > 1:
            # Include templates below the search depth.
            seen = view.vectors_of(np.unique(owners[owners >= 0]))
            similarities = products(probes, seen.vectors)
            order = np.argsort(-similarities, axis=1, kind="stable")
            similarities, owners = np.take_along_axis(similarities, order, 1), seen.owners[order]
        return [
            sorted(self._means(s.tolist(), o.tolist()), key=lambda hit: -hit.similarity)[:k]
            for s, o in zip(similarities, owners, strict=True)
        ]

    def _means(self, similarities: list[float], owners: list[int]) -> list[Hit]:
        """Return one hit per subject from templates by descending similarity."""
        counted: dict[int, list[float]] = {}
        for similarity, owner in zip(similarities, owners, strict=True):
            if owner >= 0:
                best = counted.setdefault(owner, [])
                if len(best) < self._best:
                    best.append(similarity)
        return [Hit(subject, sum(best) / len(best)) for subject, best in counted.items()]


class SubjectsReplica(LogReplica):
    """Replica for a rule that fuses templates into one vector. The index holds one vector per subject."""

    def __init__(
        self,
        store: Store,
        gallery: Gallery,
        index: SegmentedIndex,
        run_later: Callable[[Callable[[], None]], None],
        rule: VectorFusion,
    ) -> None:
        super().__init__(store, gallery, index, run_later)
        self._rule = rule

    def _rows(self, snapshot: Snapshot) -> Rows:
        subjects = np.unique(snapshot.subject_pks)
        vectors = subject_vectors(snapshot.vectors, snapshot.subject_pks, snapshot.qualities, self._rule)
        return Rows(subjects, subjects, vectors)

    def _follow(self) -> None:
        changed, now, more = self._next_changes(self._index.view.sequence)
        if changed:
            self._index.apply(self._batches(changed, now, more))

    def _batches(self, changed: set[int], now: Snapshot, more: bool) -> Iterator[Batch]:
        while changed:
            yield Batch(np.array(sorted(changed), np.int64), self._rows(now), now.sequence)
            if not more:
                return
            changed, now, more = self._next_changes(now.sequence)

    def _next_changes(self, sequence: int) -> tuple[set[int], Snapshot, bool]:
        return self._store.changes.changed_subjects(self._gallery, sequence, LINES_PER_BATCH)

    def search(self, probes: Float, k: int, among: Keys | None) -> tuple[list[list[Hit]], int]:
        view = self._index.view
        chosen, compared = _searched(view, among)
        if not compared or not len(probes):
            return [[] for _ in probes], compared
        found = self._index.search(view, probes, min(k, compared), chosen)
        return [
            [Hit(subject, similarity) for subject, similarity in zip(row, values, strict=True) if subject >= 0]
            for row, values in zip(found.owners.tolist(), found.similarities.tolist(), strict=True)
        ], compared


def _searched(view: View, among: Keys | None) -> tuple[Keys | None, int]:
    """Return the subjects to search (None: all), and how many of them have a vector."""
    if among is None:
        return None, view.owners
    present = among[view.count_of(among) > 0]
    return present, len(present)
