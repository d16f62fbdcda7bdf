"""Import of gallery files in blocks, and export in pieces."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final

from kith.wire.fields import Problem
from kith.wire.transfer import GalleryFileHeader, ImportOut, ImportRefusalOut
from service.core.errors import InvalidDataError, RecognizerMismatchError
from service.domain.gallery import Gallery
from service.domain.gallery_items import FileRow, People, checked
from service.storage.repositories.bulk_templates import BulkStore
from service.storage.transfer import ndjson

MAX_REFUSALS: Final = 1000


def check_header(header: GalleryFileHeader, gallery: str, fingerprint: str, dimension: int) -> None:
    """Raises RecognizerMismatchError, import_invalid if a gallery cannot accept the file's vectors."""
    if header.recognizer != fingerprint:
        raise RecognizerMismatchError(
            f"the file holds vectors of recognizer {header.recognizer[:12]}, "
            f"gallery {gallery!r} those of {fingerprint[:12]}"
        )
    if header.dimension != dimension:
        raise InvalidDataError("import", f"embeddings have {header.dimension} numbers, the gallery's have {dimension}")
    if not header.embeddings:
        raise InvalidDataError("import", "the file was exported without embeddings, which search requires")


class Import:
    """Import into a gallery, one transaction per block. To resume it, import the same items again."""

    def __init__(self, store: BulkStore, gallery: Gallery, header: GalleryFileHeader) -> None:
        """Raises RecognizerMismatchError, import_invalid."""
        check_header(header, gallery.name, gallery.fingerprint, gallery.dimension)
        none = dict.fromkeys(ImportOut.model_fields, 0)
        self.report = ImportOut.model_validate({**none, "gallery": gallery.name, "refusals": []})
        self._store = store
        self._gallery = gallery
        self._people = People()
        self._header = header
        self._templates = 0
        self._subjects = 0
        self._last: Any = None

    def end(self) -> None:
        """Check the counts after the last block. Raises import_invalid if the header counts more items."""
        header = self._header
        if self._templates < (header.template_count or 0) or self._subjects < (header.subject_count or 0):
            raise InvalidDataError(
                "import",
                f"the file is truncated: its header counts {header.template_count} templates of "
                f"{header.subject_count} subjects, it contains {self._templates} of {self._subjects}, which were "
                "imported",
            )

    def take(self, rows: Sequence[FileRow]) -> None:
        """Import one block. Raises GalleryNotFoundError, RecognizerMismatchError, StorageError."""
        self._count(rows)
        items, refusals = checked(rows, self._gallery)
        report = self.report
        report.item_count += len(rows)
        people = self._people.of(rows)
        if items:
            done = self._store.add(self._gallery, items, people)
            report.subject_count += done.subjects
            report.template_count += len(done.enrolled)
            report.present_count += done.present
            refusals |= {items[row].number: error for row, error in done.refused.items()}
        report.refused_count += len(refusals)
        for number in sorted(refusals)[: MAX_REFUSALS - len(report.refusals)]:
            report.refusals.append(ImportRefusalOut(item=number, error=Problem(**refusals[number].document())))

    def _count(self, rows: Sequence[FileRow]) -> None:
        """Count templates and subjects, rounding up: an unreadable item may have been of another subject."""
        for row in rows:
            self._templates += row.vector is not None or row.error is not None
            # Exports list the items of a subject consecutively.
            self._subjects += row.subject is None or row.subject != self._last
            self._last = row.subject


class Export:
    """Iterator of file pieces that another thread may close. Closing waits for the piece in progress."""

    def __init__(self, pieces: Generator[bytes, None, None]) -> None:
        self._pieces = pieces
        self._lock = threading.Lock()

    def next(self) -> bytes | None:
        """Return None at the end."""
        with self._lock:
            return next(self._pieces, None)

    def close(self) -> None:
        with self._lock:
            self._pieces.close()


def export(
    store: BulkStore,
    name: str,
    settings: Callable[[Gallery], dict[str, Any]],
    embeddings: bool = True,
    crops: bool = False,
) -> Generator[bytes, None, None]:
    """Export a snapshot, held until the last piece is taken or the iterator closed. ``settings``: those for the header.

    Raises GalleryNotFoundError, StorageError.
    """
    with store.open_export(name, embeddings, crops) as reading:
        gallery = reading.gallery
        counts = {"subject_count": gallery.subjects, "template_count": gallery.templates}
        header = GalleryFileHeader(
            gallery.fingerprint, gallery.dimension, gallery.name, settings(gallery), embeddings, **counts
        )
        yield ndjson.header_line(header)
        for block in reading.blocks():
            yield ndjson.lines_of(block)
