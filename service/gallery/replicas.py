"""The replicas that live in this process: a gallery's vectors, by its rule of fusion, in an index of segments."""

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
from pathlib import Path
from typing import Final

import numpy as np

from models.network import Float
from service.errors import GalleryMovedError, GalleryNotFoundError
from service.gallery.faiss_index import builders, products, use_one_thread
from service.gallery.follower import Replica
from service.gallery.fusion import TOP_K, OneVector, subject_vectors
from service.gallery.index import IndexStats, Keys
from service.gallery.index_choice import Sizes
from service.gallery.index_files import IndexFiles
from service.gallery.segmented import Batch, SegmentedIndex
from service.gallery.segments import Found, Rows, View
from service.gallery.store import KEEP_LINES, Store
from service.gallery.subjects import Change, Gallery, Hit, LogTrimmedError, Snapshot

LINES_AT_ONCE: Final = 20_000
"""Of the change log, that are in memory while an index follows it."""
TRIM_AFTER: Final = 2 * KEEP_LINES
"""Lines of all galleries' change logs, after which this one's is looked at."""
NICENESS: Final = 10
"""Of what goes on in the background: a search that wants the processor has it."""
BACKGROUND_THREADS: Final = 2
UNKNOWN: Final = -1
"""Stands for a gallery's version before any."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class InProcess:
    """How indexes in this process are kept. ``device``: ``cpu`` or ``gpu``; ``folder``: for the files of those that
    take long to build, None: there are none."""

    device: str = "cpu"
    folder: Path | None = None
    sizes: Sizes = field(default_factory=Sizes)


def in_process(store: Store, options: InProcess | None = None, at_once: bool = False) -> Callable[[Gallery], Replica]:
    """What makes a gallery's replica of the vectors in ``store``. ``at_once``: it is put in order before it is
    searched, not in the background.

    Raises:
        SettingsError: there is no such device.
    """
    chosen = options or InProcess()
    build_for = builders(chosen.device)
    background = ThreadPoolExecutor(BACKGROUND_THREADS, thread_name_prefix="index", initializer=stand_back)

    def later(work: Callable[[], None]) -> None:
        if at_once:
            work()
            return
        with contextlib.suppress(RuntimeError):  # the interpreter is ending
            background.submit(work)

    def make(gallery: Gallery) -> Replica:
        settings = gallery.settings
        index = SegmentedIndex(
            gallery.dimension,
            settings.index,
            settings.recall,
            build_for,
            later,
            chosen.sizes,
            chosen.device == "gpu",
            None if chosen.folder is None else IndexFiles(chosen.folder, gallery),
        )
        match settings.fusion:
            case "max":
                return TemplatesReplica(store, gallery, index, later, 1)
            case "mean_top_k":
                return TemplatesReplica(store, gallery, index, later, TOP_K)
            case "centroid" | "quality_weighted" as rule:
                return SubjectsReplica(store, gallery, index, later, rule)

    return make


def stand_back() -> None:
    """Let the calling thread take no processor that a search wants. Linux counts niceness by thread; elsewhere it is
    the process', and stays."""
    use_one_thread()
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


class Following(ABC):
    """Keeps an index in step with a gallery's change log."""

    def __init__(
        self, store: Store, gallery: Gallery, index: SegmentedIndex, later: Callable[[Callable[[], None]], None]
    ) -> None:
        self._store = store
        self._gallery = gallery
        self._index = index
        self._later = later
        self._loaded = False
        self._closed = False
        self._trimmed_at = gallery.log_floor
        self._begun = self._ended = 0
        self._version = UNKNOWN
        self._catching_up = threading.Lock()

    def is_at(self, version: int) -> bool:
        return self._version == version

    def catch_up(self, version: int | None = None) -> None:
        if version is not None and self.is_at(version):
            return
        arrived = self._begun
        with self._catching_up:
            if self._ended > arrived:
                return  # one that began after this call did saw all that this one must
            self._begun += 1
            try:
                if self._loaded:
                    self._follow()
                else:
                    self._load()
            except LogTrimmedError:
                self._load()
            self._ended = self._begun
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
        # What there was goes first, and each form once the next is made: never three of each vector.
        self._loaded, self._version = False, UNKNOWN
        self._index.unload()
        snapshot = self._store.snapshot(self._gallery)
        rows, sequence = self._rows(snapshot), snapshot.sequence
        del snapshot
        self._index.load(rows, sequence)
        self._loaded = True

    @abstractmethod
    def _follow(self) -> None:
        """Apply the log's later lines. Raises LogTrimmedError."""

    @abstractmethod
    def _rows(self, snapshot: Snapshot) -> Rows:
        """What the index holds of these templates, by owner and key."""

    def _trim_if_long(self) -> None:
        sequence = self._index.view.sequence
        if sequence - self._trimmed_at > TRIM_AFTER:
            self._trimmed_at = sequence
            self._later(self._trim)

    def _trim(self) -> None:
        try:
            self._store.trim_log(self._gallery, stopped=lambda: self._closed)
        except (GalleryNotFoundError, GalleryMovedError):
            pass  # meanwhile: whoever searches it next sees to it
        except Exception:  # nobody waits for this thread's answer: whatever it is, the log has it
            log.exception("the change log of gallery %s could not be shortened", self._gallery.name)


class TemplatesReplica(Following):
    """For a rule that takes the mean of a subject's ``best`` most similar templates: the index holds every template,
    its subject as owner."""

    def __init__(
        self,
        store: Store,
        gallery: Gallery,
        index: SegmentedIndex,
        later: Callable[[Callable[[], None]], None],
        best: int,
    ) -> None:
        super().__init__(store, gallery, index, later)
        self._best = best

    def _rows(self, snapshot: Snapshot) -> Rows:
        return Rows(snapshot.template_pks, snapshot.subject_pks, snapshot.vectors)

    def _follow(self) -> None:
        sequence = self._index.view.sequence
        if lines := self._store.changes_after(self._gallery, sequence, LINES_AT_ONCE):
            self._index.apply(self._batches(lines))

    def _batches(self, lines: list[Change]) -> Iterator[Batch]:
        while lines:
            # A template's last line says how it stands; earlier ones are history.
            latest = {line.template_pk: line for line in lines}
            present = [(line.template_pk, line.subject_pk, line.vector) for line in latest.values()]
            here = [line for line in present if line[2] is not None]
            keys, owners = (np.array([line[i] for line in here], np.int64) for i in (0, 1))
            vectors = np.array([line[2] for line in here], np.float32).reshape(-1, self._gallery.dimension)
            yield Batch(np.array(sorted(latest), np.int64), Rows(keys, owners, vectors), lines[-1].sequence)
            if len(lines) < LINES_AT_ONCE:
                return
            lines = self._store.changes_after(self._gallery, lines[-1].sequence, LINES_AT_ONCE)

    def search(self, probes: Float, k: int, among: Keys | None) -> tuple[list[list[Hit]], int]:
        view = self._index.view
        chosen, compared = _chosen(view, among)
        if not compared or not len(probes):
            return [[] for _ in probes], compared
        total = len(view) if chosen is None else int(view.count_of(chosen).sum())
        wanted = min(k, compared)
        depth = min(total, 4 * wanted * self._best)
        while True:
            found = self._index.search(view, probes, depth, chosen)
            hits = self._fuse(view, probes, found, wanted)
            # A subject not seen yet has no template above the last one seen, and no fused similarity either.
            if depth >= total or all(
                len(h) == wanted and h[-1].similarity >= last
                for h, last in zip(hits, found.similarities[:, -1].tolist(), strict=True)
            ):
                return hits, compared
            depth = min(total, depth * 4)

    def _fuse(self, view: View, probes: Float, found: Found, k: int) -> list[list[Hit]]:
        similarities, owners = found.similarities, found.owners
        if self._best > 1:
            # Templates too far down to have been seen count as well.
            seen = view.vectors_of(np.unique(owners[owners >= 0]))
            similarities = products(probes, seen.vectors)
            order = np.argsort(-similarities, axis=1, kind="stable")
            similarities, owners = np.take_along_axis(similarities, order, 1), seen.owners[order]
        return [
            sorted(self._means(s.tolist(), o.tolist()), key=lambda hit: -hit.similarity)[:k]
            for s, o in zip(similarities, owners, strict=True)
        ]

    def _means(self, similarities: list[float], owners: list[int]) -> list[Hit]:
        """Of templates in order of similarity."""
        counted: dict[int, list[float]] = {}
        for similarity, owner in zip(similarities, owners, strict=True):
            if owner >= 0:
                best = counted.setdefault(owner, [])
                if len(best) < self._best:
                    best.append(similarity)
        return [Hit(subject, sum(best) / len(best)) for subject, best in counted.items()]


class SubjectsReplica(Following):
    """For a rule that makes one vector of a subject's templates: the index holds these, by subject."""

    def __init__(
        self,
        store: Store,
        gallery: Gallery,
        index: SegmentedIndex,
        later: Callable[[Callable[[], None]], None],
        rule: OneVector,
    ) -> None:
        super().__init__(store, gallery, index, later)
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
        return self._store.changed_subjects(self._gallery, sequence, LINES_AT_ONCE)

    def search(self, probes: Float, k: int, among: Keys | None) -> tuple[list[list[Hit]], int]:
        view = self._index.view
        chosen, compared = _chosen(view, among)
        if not compared or not len(probes):
            return [[] for _ in probes], compared
        found = self._index.search(view, probes, min(k, compared), chosen)
        return [
            [Hit(subject, similarity) for subject, similarity in zip(row, values, strict=True) if subject >= 0]
            for row, values in zip(found.owners.tolist(), found.similarities.tolist(), strict=True)
        ], compared


def _chosen(view: View, among: Keys | None) -> tuple[Keys | None, int]:
    """Whom a search is restricted to, and how many of them have a vector."""
    if among is None:
        return None, view.owners
    present = among[view.count_of(among) > 0]
    return present, len(present)
