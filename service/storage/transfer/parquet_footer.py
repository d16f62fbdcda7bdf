"""Parser of Parquet footers. Pure.

pyarrow reads untrusted files safely, but its metadata classes abort the process on damaged column metadata, through a
C++ exception that it does not catch.

The footer is a struct of Thrift's compact protocol
(https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md). Its fields are defined in
https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Final

MAGIC: Final = b"PAR1"
MAX_BYTES: Final = 16_000_000
MAX_COLUMNS: Final = 100_000
"""Limit for all row groups together; reading that many takes 2 s. A million templates with crops have 30,000."""
MAX_DEPTH: Final = 16
BYTE_ARRAY: Final = 6
TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT, UUID = range(1, 14)
FIXED: Final = {BYTE: 1, DOUBLE: 8, UUID: 16}


@dataclass(frozen=True, slots=True)
class Column:
    """Column chunk of a row group. ``size``: uncompressed bytes. ``values``: of a list column, the elements of all
    lists."""

    path: str
    physical_type: int
    values: int
    size: int
    has_dictionary: bool


@dataclass(frozen=True, slots=True)
class RowGroup:
    rows: int
    columns: list[Column]


def row_groups(file: IO[bytes]) -> list[RowGroup]:
    """Raises ValueError if the footer is missing, malformed, or exceeds MAX_BYTES or MAX_COLUMNS."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - 8))
    tail = file.read(8)
    size = int.from_bytes(tail[:4], "little")
    if len(tail) < 8 or tail[4:] != MAGIC or not 0 < size <= min(end - 8, MAX_BYTES):
        raise ValueError("it has no Parquet footer")
    file.seek(end - 8 - size)
    reader = _Compact(file.read(size))
    groups = list[RowGroup]()
    columns = 0
    try:
        for field, kind in reader.fields():
            if (field, kind) == (4, LIST):
                for _ in reader.items(STRUCT):
                    groups.append(_row_group(reader, MAX_COLUMNS - columns))
                    columns += len(groups[-1].columns)
            else:
                reader.skip(kind)
    except IndexError as error:
        raise ValueError("its footer is truncated") from error
    return groups


def _row_group(reader: _Compact, most: int) -> RowGroup:
    rows, columns = -1, list[Column]()
    for field, kind in reader.fields():
        if (field, kind) == (1, LIST):
            found = reader.items(STRUCT)
            if columns or len(found) > most:
                raise ValueError(f"its row groups have more than {MAX_COLUMNS} columns: write larger groups")
            columns = [_column(reader) for _ in found]
        elif (field, kind) == (3, I64):
            rows = reader.integer()
        else:
            reader.skip(kind)
    if rows < 0 or not columns:
        raise ValueError("a row group in its footer lacks rows or columns")
    return RowGroup(rows, columns)


def _column(reader: _Compact) -> Column:
    column: Column | None = None
    for field, kind in reader.fields():
        if (field, kind) == (3, STRUCT):
            column = _column_metadata(reader)
        else:
            reader.skip(kind)
    if column is None:
        raise ValueError("a column in its footer lacks its metadata")
    return column


def _column_metadata(reader: _Compact) -> Column:
    numbers: dict[int, int] = {}
    path: list[str] = []
    for field, kind in reader.fields():
        if kind in (I32, I64):
            numbers[field] = reader.integer()
        elif (field, kind) == (3, LIST):
            path = [reader.text() for _ in reader.items(BINARY)]
        else:
            reader.skip(kind)
    if not path or not {1, 5, 6} <= numbers.keys() or min(numbers[5], numbers[6]) < 0:
        raise ValueError("a column in its footer lacks its name or its size")
    return Column(".".join(path), numbers[1], numbers[5], numbers[6], 11 in numbers)


class _Compact:
    """Sequential decoder. Raises IndexError at the end, ValueError on malformed values."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def fields(self) -> Iterator[tuple[int, int]]:
        """Yield (number, type) of each field of a struct. The caller reads or skips each value."""
        field = 0
        while head := self._byte():
            field = field + (head >> 4) if head >> 4 else self.integer()
            yield field, head & 15

    def items(self, kind: int) -> range:
        size, found = self._list()
        if found != kind and size:
            raise ValueError("a list in its footer has an unexpected type")
        return range(size)

    def integer(self) -> int:
        number = self._varint()
        return (number >> 1) ^ -(number & 1)

    def text(self) -> str:
        size = self._varint()
        text = self._data[self._at : self._at + size]
        self._pass(size)
        return text.decode("utf-8", "replace")

    def skip(self, kind: int, depth: int = 0) -> None:
        if depth > MAX_DEPTH:
            raise ValueError("its footer is nested too deeply")
        if kind in (I16, I32, I64):
            self._varint()
        elif kind in FIXED:
            self._pass(FIXED[kind])
        elif kind == BINARY:
            self._pass(self._varint())
        elif kind in (LIST, SET):
            size, found = self._list()
            if found in FIXED or found in (TRUE, FALSE):
                self._pass(size * FIXED.get(found, 1))
                return
            for _ in range(size):
                self._skip_item(found, depth)
        elif kind == MAP:
            size = self._varint()
            kinds = self._byte() if size else 0
            for _ in range(size):
                self._skip_item(kinds >> 4, depth)
                self._skip_item(kinds & 15, depth)
        elif kind == STRUCT:
            for _, found in self.fields():
                self.skip(found, depth + 1)
        elif kind not in (TRUE, FALSE):
            raise ValueError(f"its footer has a value of unknown type {kind}")

    def _skip_item(self, kind: int, depth: int) -> None:
        """Skip an element. In a collection a boolean takes a byte; in a struct its value is the field's type."""
        if kind in (TRUE, FALSE):
            self._pass(1)
        else:
            self.skip(kind, depth + 1)

    def _list(self) -> tuple[int, int]:
        head = self._byte()
        return (self._varint() if head >> 4 == 15 else head >> 4), head & 15

    def _varint(self) -> int:
        number = shift = 0
        while True:
            byte = self._byte()
            number |= (byte & 127) << shift
            if byte < 128:
                return number
            shift += 7
            if shift > 63:
                raise ValueError("a number in its footer is too long")

    def _byte(self) -> int:
        byte = self._data[self._at]
        self._at += 1
        return byte

    def _pass(self, size: int) -> None:
        self._at += size
        if self._at > len(self._data):
            raise IndexError
