"""The replicas that live in this process: by each rule of fusion, a gallery's vectors in an index of FAISS."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.runtime import Float
from service.gallery.faiss_index import FaissIndex
from service.gallery.follower import Replica
from service.gallery.fusion import TOP_K, OneVector, subject_vectors
from service.gallery.index import IndexStats, VectorIndex
from service.gallery.store import Store
from service.gallery.subjects import Gallery, Hit

Keys = NDArray[np.int64]


@dataclass(frozen=True)
class InProcess:
    """How indexes in this process are kept."""


def in_process(store: Store, options: InProcess | None = None) -> Callable[[Gallery], Replica]:
    """What makes a gallery's replica of the vectors in ``store``."""

    def make(gallery: Gallery) -> Replica:
        index = FaissIndex(gallery.dimension)
        match gallery.settings.fusion:
            case "max":
                return TemplatesReplica(store, gallery, index, 1)
            case "mean_top_k":
                return TemplatesReplica(store, gallery, index, TOP_K)
            case "centroid" | "quality_weighted" as rule:
                return SubjectsReplica(store, gallery, index, rule)

    return make


class TemplatesReplica:
    """For a rule that takes the mean of a subject's ``best`` most similar templates: the index holds every template."""

    def __init__(self, store: Store, gallery: Gallery, index: VectorIndex, best: int) -> None:
        self._store = store
        self._gallery = gallery
        self._index = index
        self._best = best
        self._subject_of: dict[int, int] = {}
        self._templates_of: dict[int, set[int]] = {}
        self._sequence = 0
        self._lock = threading.Lock()

    def catch_up(self) -> None:
        with self._lock:
            self._catch_up()

    def stats(self) -> IndexStats:
        return IndexStats("faiss", "exact", "every vector is compared", len(self._index), self._sequence)

    def close(self) -> None:
        pass

    def search(self, probes: Float, k: int, among: set[int] | None) -> tuple[list[list[Hit]], int]:
        with self._lock:
            return self._search(probes, k, among)

    def _catch_up(self) -> None:
        changes = self._store.changes_after(self._gallery, self._sequence)
        if not changes:
            return
        # A template's last line says how it stands; earlier ones are history.
        latest = {change.template_pk: change for change in changes}
        self._forget([key for key in latest if key in self._subject_of])
        present = {key: change for key, change in latest.items() if change.vector is not None}
        if present:
            self._index.add(list(present), np.stack([c.vector for c in present.values() if c.vector is not None]))
            for key, change in present.items():
                self._subject_of[key] = change.subject_pk
                self._templates_of.setdefault(change.subject_pk, set()).add(key)
        self._sequence = changes[-1].sequence

    def _forget(self, keys: list[int]) -> None:
        self._index.remove(keys)
        for key in keys:
            subject = self._subject_of.pop(key)
            self._templates_of[subject].discard(key)
            if not self._templates_of[subject]:
                del self._templates_of[subject]

    def _search(self, probes: Float, k: int, among: set[int] | None) -> tuple[list[list[Hit]], int]:
        subjects = self._templates_of.keys() if among is None else among & self._templates_of.keys()
        if not subjects or not len(probes):
            return [[] for _ in probes], len(subjects)
        keys = None if among is None else self._keys_of(subjects)
        total = len(self._index) if keys is None else len(keys)
        wanted = min(k, len(subjects))
        depth = min(total, 4 * wanted * self._best)
        while True:
            similarities, found = self._index.search(probes, depth, keys)
            hits = self._fuse(probes, similarities, found, wanted)
            # A subject not seen yet has no template above the last one seen, and no fused similarity either.
            if depth == total or all(
                len(h) == wanted and h[-1].similarity >= last
                for h, last in zip(hits, similarities[:, -1].tolist(), strict=True)
            ):
                return hits, len(subjects)
            depth = min(total, depth * 4)

    def _fuse(self, probes: Float, similarities: Float, found: Keys, k: int) -> list[list[Hit]]:
        if self._best > 1:
            # Templates too far down to have been seen count as well.
            keys = self._keys_of({self._subject_of[key] for key in np.unique(found).tolist()})
            similarities, found = self._index.search(probes, len(keys), keys)
        return [
            sorted(self._means(s.tolist(), t.tolist()), key=lambda hit: -hit.similarity)[:k]
            for s, t in zip(similarities, found, strict=True)
        ]

    def _means(self, similarities: list[float], keys: list[int]) -> list[Hit]:
        """Of templates in order of similarity."""
        counted: dict[int, list[float]] = {}
        for similarity, key in zip(similarities, keys, strict=True):
            best = counted.setdefault(self._subject_of[key], [])
            if len(best) < self._best:
                best.append(similarity)
        return [Hit(subject, sum(best) / len(best)) for subject, best in counted.items()]

    def _keys_of(self, subjects: Collection[int]) -> Keys:
        return np.array(sorted(key for subject in subjects for key in self._templates_of[subject]), np.int64)


class SubjectsReplica:
    """For a rule that makes one vector of a subject's templates: the index holds these, by subject."""

    def __init__(self, store: Store, gallery: Gallery, index: VectorIndex, rule: OneVector) -> None:
        self._store = store
        self._gallery = gallery
        self._index = index
        self._rule = rule
        self._subjects: set[int] = set()
        self._sequence = 0
        self._lock = threading.Lock()

    def catch_up(self) -> None:
        with self._lock:
            self._catch_up()

    def stats(self) -> IndexStats:
        return IndexStats("faiss", "exact", "every vector is compared", len(self._index), self._sequence)

    def close(self) -> None:
        pass

    def search(self, probes: Float, k: int, among: set[int] | None) -> tuple[list[list[Hit]], int]:
        with self._lock:
            return self._search(probes, k, among)

    def _catch_up(self) -> None:
        changed, now = self._store.changed_subjects(self._gallery, self._sequence)
        if not changed:
            return
        self._index.remove(list(changed))
        present = np.unique(now.subject_pks).tolist()
        if present:
            self._index.add(present, subject_vectors(now.vectors, now.subject_pks, now.qualities, self._rule))
        self._subjects = (self._subjects - changed).union(present)
        self._sequence = now.sequence

    def _search(self, probes: Float, k: int, among: set[int] | None) -> tuple[list[list[Hit]], int]:
        subjects = self._subjects if among is None else among & self._subjects
        if not subjects or not len(probes):
            return [[] for _ in probes], len(subjects)
        keys = None if among is None else np.array(sorted(subjects), np.int64)
        similarities, found = self._index.search(probes, min(k, len(subjects)), keys)
        return [
            [Hit(subject, similarity) for subject, similarity in zip(row.tolist(), values.tolist(), strict=True)]
            for row, values in zip(found, similarities, strict=True)
        ], len(subjects)
