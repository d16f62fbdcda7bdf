"""A file into a gallery, block by block; a gallery out, piece by piece."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np

from service.core.errors import ImportFileError, RecognizerMismatchError
from service.domain.gallery import Gallery
from service.domain.gallery_items import (
    GalleryFileHeader,
    GalleryItems,
    RejectedItem,
    SubjectCarryover,
    items_after,
    validate_items,
)
from service.storage.repositories.bulk_templates import BulkStore
from service.storage.transfer import ndjson

MOST_REFUSALS: Final = 1000
Format = Literal["ndjson", "parquet"]


@dataclass
class Report:
    """What an import did so far. ``items``: read; ``present``: templates that were there already; ``refusals``: the
    first of the ``refused``."""

    items: int = 0
    subjects: int = 0
    templates: int = 0
    present: int = 0
    refused: int = 0
    refusals: list[RejectedItem] = field(default_factory=list)

    def refuse(self, refusals: list[RejectedItem]) -> None:
        self.refused += len(refusals)
        self.refusals += refusals[: MOST_REFUSALS - len(self.refusals)]


def check_header(header: GalleryFileHeader, gallery: str, fingerprint: str, dimension: int) -> None:
    """Raises RecogniserMismatchError, ImportFileError: nothing of such a file can be taken into this gallery."""
    if header.recognizer != fingerprint:
        raise RecognizerMismatchError(
            f"the file holds vectors of recognizer {header.recognizer[:12]}, "
            f"gallery {gallery!r} those of {fingerprint[:12]}"
        )
    if header.dimension != dimension:
        raise ImportFileError(f"embeddings have {header.dimension} numbers, this gallery's have {dimension}")
    if not header.embeddings:
        raise ImportFileError("the file was exported without embeddings: there is nothing to search by")


class Import:
    """Takes blocks of items into a gallery, each in a transaction of its own: an import that ends early is resumed by
    giving it the same items again."""

    def __init__(self, store: BulkStore, gallery: Gallery, skip: int = 0) -> None:
        """``skip``: items with a number up to this one are passed over unread."""
        self.report = Report()
        self._store = store
        self._gallery = gallery
        self._skip = skip
        self._told = SubjectCarryover()
        self._header: GalleryFileHeader | None = None
        self._templates = 0
        self._subjects = 0
        self._last: Any = None

    def accept(self, header: GalleryFileHeader) -> None:
        """Raises RecogniserMismatchError, ImportFileError."""
        check_header(header, self._gallery.name, self._gallery.fingerprint, self._gallery.dimension)
        self._header = header

    def end(self) -> None:
        """After the last block. Raises ImportFileError: the header counts more than came."""
        header = self._header
        if header is None or self._skip:
            return
        if self._templates < (header.templates or 0) or self._subjects < (header.subjects or 0):
            raise ImportFileError(
                f"the file is cut short: its header counts {header.templates} templates of {header.subjects} subjects, "
                f"{self._templates} of {self._subjects} came, and are taken"
            )

    def take_all(self, blocks: Iterable[GalleryItems]) -> None:
        """As :meth:`take` each; a block is read and checked while the one before is stored."""
        checked = map(self._checked, blocks)
        with ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as reader:
            following = reader.submit(next, checked, None)
            while (block := following.result()) is not None:
                following = reader.submit(next, checked, None)
                self._store_block(*block)

    def take(self, items: GalleryItems) -> None:
        """Raises GalleryNotFoundError, RecogniserMismatchError, StorageError."""
        self._store_block(*self._checked(items))

    def _checked(self, items: GalleryItems) -> tuple[int, GalleryItems, list[RejectedItem]]:
        self._count(items)
        wanted = items_after(items, self._skip)
        return len(wanted), *validate_items(wanted, self._gallery.dimension, self._told)

    def _count(self, items: GalleryItems) -> None:
        """At most too many: what could not be read may have been a template, and another subject."""
        unread = items.malformed.keys()
        bare = np.flatnonzero(~items.given).tolist()
        named = sum(items.templates[row] is not None or row in unread for row in bare)
        self._templates += len(items) - len(bare) + named
        # Those of an export come one after the other.
        self._subjects += sum(map(operator.ne, items.subjects, [self._last, *items.subjects])) + len(unread)
        self._last = items.subjects[-1] if len(items) else self._last

    def _store_block(self, count: int, sound: GalleryItems, refusals: list[RejectedItem]) -> None:
        self.report.items += count
        if len(sound):
            added = self._store.add(self._gallery, sound)
            self.report.subjects += added.subjects
            self.report.templates += added.templates
            self.report.present += added.present
            refusals = sorted(refusals + added.refused, key=lambda refusal: refusal.number)
        self.report.refuse(refusals)


class Export:
    """Pieces of a file, taken by one thread and closed by another: closing waits for the piece being made."""

    def __init__(self, pieces: Generator[bytes, None, None]) -> None:
        self._pieces = pieces
        self._lock = threading.Lock()

    def next(self) -> bytes | None:
        """None: that was all."""
        with self._lock:
            return next(self._pieces, None)

    def close(self) -> None:
        with self._lock:
            self._pieces.close()


def export(
    store: BulkStore,
    name: str,
    kind: Format,
    settings: Callable[[Gallery], dict[str, Any]],
    embeddings: bool = True,
    crops: bool = False,
) -> Generator[bytes, None, None]:
    """The gallery at one moment, which lasts until the last piece is taken or the iterator closed. ``settings``: what
    the header says of the gallery's.

    Raises:
        GalleryNotFoundError, StorageError.
    """
    with store.open_export(name, embeddings, crops) as reading:
        gallery = reading.gallery
        counts = {"subjects": gallery.subjects, "templates": gallery.templates}
        header = GalleryFileHeader(
            gallery.fingerprint, gallery.dimension, gallery.name, settings(gallery), embeddings, **counts
        )
        if kind == "parquet":
            from service.storage.transfer import parquet  # 30 MB of pyarrow, for those who use it

            writer = parquet.Writer(header)
            for block in reading.blocks():
                yield writer.write(block)
            yield writer.end()
            return
        yield ndjson.header_line(header)
        for block in reading.blocks():
            yield ndjson.lines_of(block)
