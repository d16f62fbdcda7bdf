"""An index that follows a gallery's change log: before a search it applies whatever was committed since."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from models.runtime import Float
from service.gallery.index import VectorIndex
from service.gallery.store import Store
from service.gallery.subjects import Gallery, Hit


class Follower:
    """The searchable replica of one gallery. Safe to share between threads."""

    def __init__(self, store: Store, gallery: Gallery, index: VectorIndex) -> None:
        self._store = store
        self._gallery_pk = gallery.pk
        self._index = index
        self._subject_of: dict[int, int] = {}
        self._templates_of: dict[int, set[int]] = {}
        self._sequence = 0
        self._lock = threading.Lock()

    def search(self, probes: Float, k: int, among: set[int] | None = None) -> tuple[list[list[Hit]], int]:
        """The ``k`` best subjects for each of (q, d) probes, each by its most similar template, best first; and how
        many templates each probe was compared with. ``among`` restricts the search to these subjects."""
        with self._lock:
            self._catch_up()
            return self._search(probes, k, among)

    def _catch_up(self) -> None:
        changes = self._store.changes_after(self._gallery_pk, self._sequence)
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
        keys = None
        if among is not None:
            keys = np.array(sorted(t for s in subjects for t in self._templates_of[s]), np.int64)
        total = len(self._index) if keys is None else len(keys)
        if not total or not len(probes):
            return [[] for _ in probes], total
        wanted = min(k, len(subjects))
        depth = min(total, 4 * wanted)
        while True:
            similarities, found = self._index.search(probes, depth, keys)
            hits = [self._fuse(s, t, wanted) for s, t in zip(similarities, found, strict=True)]
            # Many templates of one subject may fill the list: look deeper until k distinct subjects are found.
            if depth == total or all(len(h) == wanted for h in hits):
                return hits, total
            depth = min(total, depth * 4)

    def _fuse(self, similarities: Float, keys: np.ndarray[tuple[int], np.dtype[np.int64]], k: int) -> list[Hit]:
        """Max fusion: a subject's first appearance in a sorted list is its best template."""
        best: dict[int, Hit] = {}
        for similarity, key in zip(similarities.tolist(), keys.tolist(), strict=True):
            if key < 0 or len(best) == k:
                break
            subject = self._subject_of[key]
            if subject not in best:
                best[subject] = Hit(subject, similarity)
        return list(best.values())


class Followers:
    """One follower per gallery in use, made on first search."""

    def __init__(self, store: Store, make_index: Callable[[int], VectorIndex]) -> None:
        self._store = store
        self._make_index = make_index
        self._followers: dict[int, Follower] = {}
        self._lock = threading.Lock()

    def of(self, gallery: Gallery) -> Follower:
        with self._lock:
            if gallery.pk not in self._followers:
                self._followers[gallery.pk] = Follower(self._store, gallery, self._make_index(gallery.dimension))
            return self._followers[gallery.pk]

    def drop(self, gallery: Gallery) -> None:
        with self._lock:
            self._followers.pop(gallery.pk, None)
