"""Galleries as NDJSON: a header line, then one item per line.

Embeddings are base64 of little-endian float32, or lists of numbers.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, Final

import numpy as np
import orjson
from pydantic import ValidationError

from kith.wire.fields import MAX_DIMENSION, rfc3339
from kith.wire.transfer import RULES, TIME_RULE, GalleryFileHeader, GalleryFileItem, GalleryFileSubject
from service.core.errors import InvalidDataError, KithError
from service.core.json_limits import MAX_VALUES, check_json
from service.domain.gallery_items import FORMAT_VERSION, FileRow, read_header, rows_in_block
from service.security.sealing import VECTOR_TYPE

LINE: Final = orjson.OPT_APPEND_NEWLINE
MAX_LINE_BYTES: Final = 10_000_000
MAX_BLOCK_BYTES: Final = 64_000_000
"""Bytes of the lines in one block."""
MAX_BLOCK_VALUES: Final = 1_000_000
"""JSON values per block besides embeddings. An empty list takes 2 bytes in the file and 56 in memory."""
UNCHECKED_BYTES: Final = MAX_VALUES
"""A shorter line cannot exceed the limit of values per document."""


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

    def feed(self, piece: bytes) -> Iterator[list[FileRow]]:
        """Yield the blocks completed by this piece. Raises import_invalid."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise InvalidDataError(
                "import", f"line {self._lines + len(self._waiting) + 1} is longer than {MAX_LINE_BYTES} bytes"
            )
        yield from self._take(lines)

    def end(self) -> Iterator[list[FileRow]]:
        """Yield the last block. Raises import_invalid."""
        yield from self._take([self._rest])
        self._rest = b""
        if self.header is None:
            raise InvalidDataError("import", "the file is empty")
        yield from self._flush(self.header)

    def _take(self, lines: list[bytes]) -> Iterator[list[FileRow]]:
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

    def _flush(self, header: GalleryFileHeader) -> Iterator[list[FileRow]]:
        waiting, self._waiting, self._bytes, self._values = self._waiting, [], 0, 0
        if waiting:
            yield self._block(header, waiting)

    def _take_header(self, lines: list[bytes]) -> list[bytes]:
        for number, line in enumerate(lines):
            if not line.strip():
                self._lines += 1
                continue
            try:
                document = orjson.loads(line) if _has_few_values(line, MAX_DIMENSION) else None  # an item
            except ValueError as error:
                raise InvalidDataError("import", f"line {self._lines + 1} is not JSON") from error
            if isinstance(document, dict) and "kith" in document:
                self.header = read_header(document)
                self._lines += 1
                return lines[number + 1 :]
            if self._default is None:
                raise InvalidDataError("import", "the file has no header line; name its recognizer with ?recognizer=")
            self.header = self._default
            return lines[number:]
        return []

    def _block(self, header: GalleryFileHeader, lines: list[bytes]) -> list[FileRow]:
        """Parse a block. Blank lines are skipped but numbered."""
        first, self._lines = self._lines + 1, self._lines + len(lines)
        numbered = enumerate(lines, start=first)
        return [_row(number, line, header.dimension) for number, line in numbered if line and not line.isspace()]


def _has_few_values(line: bytes, dimension: int) -> bool:
    try:
        check_json(line, dimension)
    except ValueError:
        return False
    return True


def _row(number: int, line: bytes, dimension: int) -> FileRow:
    document: dict[str, Any] = {}
    try:
        document = _document(line, dimension)
        row = FileRow(number, None, document.get("subject"))
        # Bytes take less memory than text and lists.
        row.vector = _vector(document.pop("embedding", None), dimension)
        row.about = item = _item(document)
        if row.vector is None and item.template is not None:
            raise InvalidDataError("embedding", "a template needs an embedding")
        if (item.crop is None) != (item.landmarks is None):
            raise InvalidDataError("item", f"crop: {RULES['crop']}")
        return row
    except KithError as error:
        return FileRow(number, _about_subject(document), document.get("subject"), error=error)


def _document(line: bytes, dimension: int) -> dict[str, Any]:
    """Raises item_invalid."""
    if len(line) > UNCHECKED_BYTES:
        try:
            check_json(line, dimension)
        except ValueError as error:
            raise InvalidDataError("item", f"has {error}") from error
    try:
        document = orjson.loads(line)
    except ValueError as error:
        raise InvalidDataError("item", "is not JSON") from error
    if not isinstance(document, dict):
        raise InvalidDataError("item", "is not a JSON object")
    return document


def _item(document: dict[str, Any]) -> GalleryFileItem:
    """Raises item_invalid."""
    try:
        return GalleryFileItem.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        name = str(first["loc"][0])
        if first["type"] == "extra_forbidden":
            raise InvalidDataError("item", f"unknown field {name[:64]!r}") from error
        raise InvalidDataError("item", f"{name}: {RULES.get(name, TIME_RULE)}") from error


def _about_subject(document: dict[str, Any]) -> GalleryFileSubject | None:
    """Return what a refused item says of its subject, if that part is valid."""
    said = {name: document[name] for name in GalleryFileSubject.model_fields if name in document}
    try:
        return GalleryFileSubject.model_validate(said)
    except ValidationError:
        return None


def _vector(given: Any, dimension: int) -> bytes | None:
    """Return bytes, which take less memory than lists. Raises embedding_invalid."""
    if given is None:
        return None
    try:
        if isinstance(given, str):
            raw = binascii.a2b_base64(given, strict_mode=True)
        elif isinstance(given, list):
            raw = np.array(given, VECTOR_TYPE).tobytes()
        else:
            raise InvalidDataError("embedding", "embedding: must be base64 or a list of numbers")
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidDataError("embedding", f"embedding: {error}") from error
    if len(raw) % 4:
        raise InvalidDataError("embedding", f"embedding: {len(raw)} bytes are not float32 numbers of 4 bytes")
    if len(raw) != 4 * dimension:
        raise InvalidDataError(
            "embedding", f"embedding has {len(raw) // 4} numbers, this recognizer's have {dimension}"
        )
    return raw


def header_line(header: GalleryFileHeader) -> bytes:
    return orjson.dumps({"kith": "gallery", "version": FORMAT_VERSION, **vars(header)}, option=LINE)


def lines_of(items: Iterable[Mapping[str, Any]]) -> bytes:
    """Return one line per item, without empty fields. Bytes are written as base64."""
    return b"".join(
        orjson.dumps({name: _plain(value) for name, value in item.items() if value is not None}, option=LINE)
        for item in items
    )


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return binascii.b2a_base64(value, newline=False).decode()
    return rfc3339(value) if isinstance(value, datetime) else value
