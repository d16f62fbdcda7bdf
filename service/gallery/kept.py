"""What was read of galleries, kept for as long as it is true: rows, who subjects are, and what deserves a look. Memory
alone: it asks nobody.

A gallery's version says whether what was read of it still holds (service.gallery.subjects.Gallery.version), and of
SQLite the whole file's version whether anything at all was written since.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from service.gallery.hygiene import Finding
from service.gallery.subjects import Gallery, Named

MOST_GALLERIES: Final = 1000
MOST_NAMES: Final = 200_000
"""Of all galleries together, some 300 bytes each."""
MOST_FINDINGS: Final = 100_000
"""Likewise, some 500 bytes each: keys and similarities, nobody's name."""


@dataclass
class Page:
    """A gallery as of its version, which it had when the file had ``file_version``; ``names``: of some subjects, as of
    this version or later, replaced, never taken from; ``findings``: None where nobody looked."""

    gallery: Gallery
    file_version: int | None
    names: dict[int, Named] = field(default_factory=dict)
    findings: Sequence[Finding] | None = None


class Kept:
    """By the gallery's name; those asked for least lately go. Safe to share between threads."""

    def __init__(
        self, most_galleries: int = MOST_GALLERIES, most_names: int = MOST_NAMES, most_findings: int = MOST_FINDINGS
    ) -> None:
        self._most_galleries = most_galleries
        self._most_names = most_names
        self._most_findings = most_findings
        self._pages: OrderedDict[str, Page] = OrderedDict()
        self._names = 0
        self._lock = threading.Lock()

    def page(self, name: str) -> Page | None:
        with self._lock:
            if name in self._pages:
                self._pages.move_to_end(name)
            return self._pages.get(name)

    def page_of(self, gallery: Gallery) -> Page | None:
        """Of this gallery in this version."""
        with self._lock:
            page = self._pages.get(gallery.name)
        return page if page is not None and _is_same(page.gallery, gallery) else None

    def put(self, gallery: Gallery, file_version: int | None) -> None:
        """Keep what was read after the file had this version. Names stay where nothing changed. Of two that read at
        once the slower may have read what was: it is found out when the file's or the gallery's version is asked."""
        with self._lock:
            before = self._pages.get(gallery.name)
            if before is not None and _is_same(before.gallery, gallery):
                before.file_version = file_version
                return
            self._forget(gallery.name)
            self._pages[gallery.name] = Page(gallery, file_version)
            if len(self._pages) > self._most_galleries:
                self._forget(next(iter(self._pages)))

    def galleries(self) -> list[Gallery]:
        with self._lock:
            return [page.gallery for page in self._pages.values()]

    def forget(self, name: str) -> None:
        with self._lock:
            self._forget(name)

    def add_names(self, page: Page, names: Mapping[int, Named]) -> None:
        """``page``: as it was before they were read."""
        with self._lock:
            if self._pages.get(page.gallery.name) is not page:
                return
            self._names -= len(page.names)
            if len(page.names) + len(names) > self._most_names:
                page.names = {}
            page.names.update(names)
            self._names += len(page.names)
            for other in list(self._pages.values()):
                if self._names <= self._most_names:
                    break
                self._names -= len(other.names)
                other.names = {}

    def findings(self, gallery: Gallery) -> Sequence[Finding] | None:
        """Of this gallery in this version, if they are kept."""
        page = self.page_of(gallery)
        return None if page is None else page.findings

    def add_findings(self, gallery: Gallery, findings: Sequence[Finding]) -> None:
        """Not if it is another by now, or they are too many; those of others go where it would be too many with
        theirs, of who was asked for least lately first."""
        with self._lock:
            page = self._pages.get(gallery.name)
            if page is None or not _is_same(page.gallery, gallery) or len(findings) > self._most_findings:
                return
            page.findings = findings
            others = [other for other in self._pages.values() if other is not page and other.findings]
            kept = len(findings) + sum(len(other.findings or ()) for other in others)
            for other in others:
                if kept <= self._most_findings:
                    break
                kept -= len(other.findings or ())
                other.findings = None

    def _forget(self, name: str) -> None:
        page = self._pages.pop(name, None)
        self._names -= len(page.names) if page else 0


def _is_same(one: Gallery, other: Gallery) -> bool:
    return (one.pk, one.version) == (other.pk, other.version)
