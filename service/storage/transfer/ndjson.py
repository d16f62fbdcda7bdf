"""Galleries as NDJSON: a header line, then one item per line.

Embeddings are base64 of little-endian float32, or lists of numbers.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
import orjson

from kith.wire.fields import rfc3339
from service.core.errors import EmbeddingError, ImportFileError, ItemError, KithError
from service.core.json_limits import MAX_VALUES, JsonLimits, check_json
from service.domain.gallery_items import (
    MAX_VECTOR_DIMENSION,
    GalleryFileHeader,
    GalleryItems,
    from_microseconds,
    rows_in_block,
    to_microseconds,
)
from service.security.sealing import VECTOR_TYPE

MAX_LINE_BYTES: Final = 10_000_000
MAX_BLOCK_BYTES: Final = 64_000_000
"""Bytes of the lines in one block."""
MAX_BLOCK_VALUES: Final = 1_000_000
"""JSON values per block besides embeddings. An empty list takes 2 bytes in the file and 56 in memory."""
UNCHECKED_BYTES: Final = MAX_VALUES
"""A shorter line cannot exceed the limit of values per document."""
COLUMNS: Final = {
    "subject": "subjects",
    "name": "names",
    "metadata": "metadata",
    "tags": "tags",
    "subject_created_at": "subject_created_us",
    "subject_updated_at": "subject_updated_us",
    "template": "templates",
    "kind": "kinds",
    "quality": "qualities",
    "detection_score": "detection_scores",
    "created_at": "created_us",
}
"""Columns of GalleryItems by field of a file."""
TIMES: Final = ("subject_created_at", "subject_updated_at", "created_at")
KNOWN: Final = frozenset({*COLUMNS, "embedding", "crop", "landmarks"})


class Lines:
    """Incremental parser of an NDJSON file. Not thread-safe."""

    def __init__(self, default: GalleryFileHeader | None = None) -> None:
        """``default``: header of a file without one; without a default such a file is refused."""
        self.header: GalleryFileHeader | None = None
        self._default = default
        self._rest = b""
        self._waiting: list[bytes] = []
        self._bytes = 0
        self._values = 0
        self._lines = 0

    def feed(self, piece: bytes) -> Iterator[GalleryItems]:
        """Yield the blocks completed by this piece. Raises ImportFileError."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise ImportFileError(f"line {self._lines + len(self._waiting) + 1} is longer than {MAX_LINE_BYTES} bytes")
        yield from self._take(lines)

    def end(self) -> Iterator[GalleryItems]:
        """Yield the last block. Raises ImportFileError."""
        yield from self._take([self._rest])
        self._rest = b""
        if self.header is None:
            raise ImportFileError("the file is empty")
        yield from self._flush(self.header)

    def _take(self, lines: list[bytes]) -> Iterator[GalleryItems]:
        if self.header is None:
            lines = self._take_header(lines)
        if self.header is None:
            return
        size = rows_in_block(self.header.dimension)
        for line in lines:
            self._waiting.append(line)
            self._bytes += len(line)
            self._values += max(0, line.count(b",") - self.header.dimension) + line.count(b"[") + line.count(b"{")
            if len(self._waiting) == size or self._bytes > MAX_BLOCK_BYTES or self._values > MAX_BLOCK_VALUES:
                yield from self._flush(self.header)

    def _flush(self, header: GalleryFileHeader) -> Iterator[GalleryItems]:
        waiting, self._waiting, self._bytes, self._values = self._waiting, [], 0, 0
        if waiting:
            yield self._block(header, waiting)

    def _take_header(self, lines: list[bytes]) -> list[bytes]:
        for number, line in enumerate(lines):
            if not line.strip():
                self._lines += 1
                continue
            try:
                document = orjson.loads(line) if _has_few_values(line, MAX_VECTOR_DIMENSION) else None  # an item
            except ValueError as error:
                raise ImportFileError(f"line {self._lines + 1} is not JSON") from error
            if isinstance(document, dict) and "kith" in document:
                self.header = GalleryFileHeader.of(document)
                self._lines += 1
                return lines[number + 1 :]
            if self._default is None:
                raise ImportFileError("the file has no header line; name its recognizer with ?recognizer=")
            self.header = self._default
            return lines[number:]
        return []

    def _block(self, header: GalleryFileHeader, lines: list[bytes]) -> GalleryItems:
        """Parse a block. Blank lines are skipped but numbered."""
        numbers: list[int] = []
        documents: list[dict[str, Any]] = []
        malformed: dict[int, KithError] = {}
        for number, line in enumerate(lines, start=self._lines + 1):
            if not line or line.isspace():
                continue
            document: dict[str, Any] = {}
            try:
                document = _document(line, header.dimension)
                document["embedding"] = _vector(document.pop("embedding", None), header.dimension)
            except KithError as error:
                malformed[len(numbers)] = error
            documents.append(document)
            numbers.append(number)
        self._lines += len(lines)
        return _items(numbers, documents, header.dimension, malformed)


def _has_few_values(line: bytes, dimension: int) -> bool:
    try:
        check_json(line, JsonLimits(numbers=dimension))
    except ValueError:
        return False
    return True


def _document(line: bytes, dimension: int) -> dict[str, Any]:
    """Raises ItemError."""
    if len(line) > UNCHECKED_BYTES:
        try:
            check_json(line, JsonLimits(numbers=dimension))
        except ValueError as error:
            raise ItemError(f"has {error}") from error
    try:
        document = orjson.loads(line)
    except ValueError as error:
        raise ItemError("is not JSON") from error
    if not isinstance(document, dict):
        raise ItemError("is not a JSON object")
    if unknown := document.keys() - KNOWN:
        raise ItemError(f"unknown field {min(unknown)[:64]!r}")
    return document


def _items(
    numbers: list[int], documents: list[dict[str, Any]], d: int, malformed: dict[int, KithError]
) -> GalleryItems:
    def converted(convert: Callable[[Any], Any], values: Iterable[Any]) -> Iterator[Any]:
        for row, value in enumerate(values):
            try:
                yield convert(value)
            except KithError as error:
                malformed.setdefault(row, error)
                yield None

    columns: dict[str, Any] = {
        column: [document.get(name) for document in documents] for name, column in COLUMNS.items()
    }
    for name in TIMES:
        columns[COLUMNS[name]] = list(converted(_microseconds, columns[COLUMNS[name]]))
    columns["crops"] = list(converted(_crop, documents))
    vectors: list[bytes | None] = [document.get("embedding") for document in documents]
    nothing = bytes(4 * d)
    columns["vectors"] = np.frombuffer(b"".join(v or nothing for v in vectors), VECTOR_TYPE).reshape(-1, d)
    columns["given"] = np.array([v is not None for v in vectors], np.bool_)
    return GalleryItems(numbers, **columns, malformed=malformed)


def _vector(given: Any, dimension: int) -> bytes | None:
    """Return bytes, which take less memory than lists. Raises EmbeddingError."""
    if given is None:
        return None
    try:
        if isinstance(given, str):
            raw = binascii.a2b_base64(given, strict_mode=True)
        elif isinstance(given, list):
            raw = np.array(given, VECTOR_TYPE).tobytes()
        else:
            raise EmbeddingError("embedding: must be base64 or a list of numbers")
    except (ValueError, TypeError, OverflowError) as error:
        raise EmbeddingError(f"embedding: {error}") from error
    if len(raw) % 4:
        raise EmbeddingError(f"embedding: {len(raw)} bytes are not float32 numbers of 4 bytes")
    if len(raw) != 4 * dimension:
        raise EmbeddingError(f"embedding has {len(raw) // 4} numbers, this recognizer's have {dimension}")
    return raw


def _microseconds(text: Any) -> int | None:
    if text is None:
        return None
    try:
        given = datetime.fromisoformat(text)
        return to_microseconds(given if given.tzinfo else given.replace(tzinfo=UTC))
    except (ValueError, TypeError, OverflowError) as error:
        raise ItemError(f"{str(text)[:64]!r} is not a time such as 2026-01-31T12:00:00Z") from error


def _crop(document: dict[str, Any]) -> tuple[bytes, Any] | None:
    image = document.get("crop")
    if image is None:
        return None
    try:
        return binascii.a2b_base64(image, strict_mode=True), document.get("landmarks")
    except (ValueError, TypeError) as error:
        raise ItemError(f"crop: must be base64 ({error})") from error


def header_line(header: GalleryFileHeader) -> bytes:
    return orjson.dumps(header.document(), option=orjson.OPT_APPEND_NEWLINE)


def lines_of(items: GalleryItems, as_lists: bool = False) -> bytes:
    """Return one line per item, without empty fields. ``as_lists``: write embeddings as lists of numbers."""
    columns = {name: getattr(items, column) for name, column in COLUMNS.items()}
    for name in TIMES:
        columns[name] = [_iso(us) for us in columns[name]]
    lines = []
    vectors = items.vectors if as_lists else np.ascontiguousarray(items.vectors, VECTOR_TYPE)
    for row, (vector, given, crop) in enumerate(zip(vectors, items.given.tolist(), items.crops, strict=True)):
        said = {name: column[row] for name, column in columns.items() if column[row] is not None}
        if given:
            said["embedding"] = vector if as_lists else _base64(vector.tobytes())
        if crop is not None:
            said |= {"crop": _base64(crop[0]), "landmarks": crop[1]}
        lines.append(orjson.dumps(said, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY))
    return b"".join(lines)


def _base64(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode()


def _iso(us: int | None) -> str | None:
    return None if us is None else rfc3339(from_microseconds(us))
