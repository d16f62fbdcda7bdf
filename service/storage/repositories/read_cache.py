"""Read cache: rows, names and faces of subjects, and hygiene findings of galleries, in memory, valid for one version.

A gallery's version shows whether its cached values are still valid (service.domain.gallery.Gallery.version). On SQLite,
the file's version shows whether any process wrote anything.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from models.runtime.network import Float
from service.domain.findings import HygieneReport
from service.domain.gallery import Gallery, SubjectLabel

MAX_GALLERIES: Final = 1000
MAX_NAMES: Final = 200_000
"""Names of all galleries together, about 300 bytes each."""
MAX_FINDINGS: Final = 100_000
"""Findings of all galleries together, about 500 bytes each: keys and similarities, no names."""
MAX_VECTORS: Final = 20_000
"""Vectors of verified subjects of all galleries together, about 2 kB each."""


@dataclass(frozen=True, eq=False)
class SubjectFaces:
    """Data that a verification compares a face with: (n, d) unit vectors of the subject's templates, (n,) quality
    scores, NaN for bare embeddings, and the (k, d) vectors of its decoys; None without decoys."""

    vectors: Float
    qualities: Float
    decoys: Float | None

    @property
    def count(self) -> int:
        """Number of vectors, at least one: a subject without templates takes room, too."""
        return max(1, len(self.vectors) + (0 if self.decoys is None else len(self.decoys)))


@dataclass
class Page:
    """Cached values of one gallery version, which was current at ``file_version`` of the database file.

    ``names`` and ``faces`` of some subjects are as of this version or later; the dict of names is replaced, never
    shrunk. ``findings`` is None until the gallery was inspected.
    """

    gallery: Gallery
    file_version: int | None
    names: dict[int, SubjectLabel] = field(default_factory=dict)
    faces: dict[str, SubjectFaces] = field(default_factory=dict)
    findings: HygieneReport | None = None

    @property
    def vectors(self) -> int:
        return sum(faces.count for faces in self.faces.values())


class ReadCache:
    """LRU cache of pages by gallery name. Thread-safe."""

    def __init__(
        self,
        max_galleries: int = MAX_GALLERIES,
        max_names: int = MAX_NAMES,
        max_findings: int = MAX_FINDINGS,
        max_vectors: int = MAX_VECTORS,
    ) -> None:
        self._max_galleries = max_galleries
        self._max_names = max_names
        self._max_findings = max_findings
        self._max_vectors = max_vectors
        self._pages: OrderedDict[str, Page] = OrderedDict()
        self._names = 0
        self._vectors = 0
        self._lock = threading.Lock()

    def page(self, name: str) -> Page | None:
        with self._lock:
            if name in self._pages:
                self._pages.move_to_end(name)
            return self._pages.get(name)

    def page_of(self, gallery: Gallery) -> Page | None:
        """Return the page of exactly this gallery version."""
        with self._lock:
            page = self._pages.get(gallery.name)
        return page if page is not None and _is_same(page.gallery, gallery) else None

    def put(self, gallery: Gallery, file_version: int | None) -> None:
        """Cache a gallery that was read after ``file_version`` was; keep the names of an unchanged version.

        A slow reader may put an outdated gallery. The next check of the file's or the gallery's version detects it.
        """
        with self._lock:
            before = self._pages.get(gallery.name)
            if before is not None and _is_same(before.gallery, gallery):
                before.file_version = file_version
                return
            self._evict(gallery.name)
            self._pages[gallery.name] = Page(gallery, file_version)
            if len(self._pages) > self._max_galleries:
                self._evict(next(iter(self._pages)))

    def galleries(self) -> list[Gallery]:
        with self._lock:
            return [page.gallery for page in self._pages.values()]

    def evict(self, name: str) -> None:
        with self._lock:
            self._evict(name)

    def add_names(self, page: Page, names: Mapping[int, SubjectLabel]) -> None:
        """Add names to the ``page`` that was current before they were read; evict other pages' names if needed."""
        with self._lock:
            if self._pages.get(page.gallery.name) is not page:
                return
            self._names -= len(page.names)
            if len(page.names) + len(names) > self._max_names:
                page.names = {}
            page.names.update(names)
            self._names += len(page.names)
            for other in list(self._pages.values()):
                if self._names <= self._max_names:
                    break
                self._names -= len(other.names)
                other.names = {}

    def add_faces(self, page: Page, subject_id: str, faces: SubjectFaces) -> None:
        """Add a subject's faces to the ``page`` that was current before they were read; make room for them."""
        with self._lock:
            is_current = self._pages.get(page.gallery.name) is page
            if not is_current or subject_id in page.faces or faces.count > self._max_vectors:
                return
            for other in list(self._pages.values()):  # the page itself is last: it was used just now
                if self._vectors + faces.count <= self._max_vectors:
                    break
                self._vectors -= other.vectors
                other.faces = {}
            page.faces[subject_id] = faces
            self._vectors += faces.count

    def findings(self, gallery: Gallery) -> HygieneReport | None:
        """Return the cached hygiene findings of this gallery version."""
        page = self.page_of(gallery)
        return None if page is None else page.findings

    def add_findings(self, gallery: Gallery, findings: HygieneReport) -> None:
        """Cache findings unless the gallery changed or they exceed the limit; evict the oldest of other galleries."""
        with self._lock:
            page = self._pages.get(gallery.name)
            if page is None or not _is_same(page.gallery, gallery) or len(findings) > self._max_findings:
                return
            page.findings = findings
            others = [other for other in self._pages.values() if other is not page and other.findings]
            cached = len(findings) + sum(len(other.findings or ()) for other in others)
            for other in others:
                if cached <= self._max_findings:
                    break
                cached -= len(other.findings or ())
                other.findings = None

    def _evict(self, name: str) -> None:
        page = self._pages.pop(name, None)
        if page is not None:
            self._names -= len(page.names)
            self._vectors -= page.vectors


def _is_same(one: Gallery, other: Gallery) -> bool:
    return (one.pk, one.version, one.webhooks) == (other.pk, other.version, other.webhooks)
