"""Rows of a table in a backup: JSON lines in zstd. The first line has the names of the columns, each other line a row.

A row is an array: bytes are hexadecimal, times microseconds since 1970 in UTC, JSON its text, and numbers that are not
finite the texts of Python. Compression halves the digits of encrypted bytes again, which have no other redundancy, and
base64 would take three times as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import BufferedReader, BufferedWriter, RawIOBase
from typing import IO, Any, Final, cast

import orjson
import sqlalchemy as sa

from service.core.errors import LocalError
from service.core.unpacking import ZstdError, ZstdFile
from service.domain.gallery_items import from_microseconds, to_microseconds
from service.storage.db.tables import Utc

LEVEL: Final = 1
"""Level of zstd. Higher levels take longer, and make encrypted bytes no smaller."""
BUFFER_BYTES: Final = 262_144


def _float_to_json(value: float) -> float | str:
    return value if math.isfinite(value) else repr(value)


Convert = Callable[[Any], Any]
FORMS: Final[dict[type[Any], tuple[Convert, Convert]]] = {
    Utc: (to_microseconds, from_microseconds),
    sa.LargeBinary: (bytes.hex, bytes.fromhex),
    sa.Float: (_float_to_json, float),
}
"""Functions to JSON and back, by the type of columns whose values have another form there."""


def write_rows(file: IO[bytes], table: sa.Table, rows: Iterable[Sequence[Any]]) -> int:
    """Write rows with all columns of a table in order, JSON as text. Return their number."""
    forms = [form[0] if form else None for form in _forms(table)]
    count = 0
    with ZstdFile(file, "w", level=LEVEL) as packed, BufferedWriter(cast(RawIOBase, packed), BUFFER_BYTES) as stream:
        stream.write(orjson.dumps(table.columns.keys(), option=orjson.OPT_APPEND_NEWLINE))
        for row in rows:
            values = [
                value if form is None or value is None else form(value) for value, form in zip(row, forms, strict=True)
            ]
            stream.write(orjson.dumps(values, option=orjson.OPT_APPEND_NEWLINE))
            count += 1
    return count


def read_rows(file: IO[bytes], table: sa.Table) -> Iterator[list[Any]]:
    """Yield the rows of a table. Raises backup: the file is damaged, or has other columns."""
    forms, found = [form[1] if form else None for form in _forms(table)], 0
    try:
        with ZstdFile(file) as packed, BufferedReader(cast(RawIOBase, packed), BUFFER_BYTES) as stream:
            if orjson.loads(stream.readline()) != table.columns.keys():
                raise LocalError("backup", f"table {table.name} of the backup has different columns")
            for line in stream:
                found += 1
                yield [
                    value if form is None or value is None else form(value)
                    for value, form in zip(orjson.loads(line), forms, strict=True)
                ]
    except (ArithmeticError, EOFError, TypeError, ValueError, ZstdError) as error:
        raise LocalError(
            "backup", f"row {found} of table {table.name} of the backup cannot be read: {error}"
        ) from error


def _forms(table: sa.Table) -> list[tuple[Convert, Convert] | None]:
    return [
        next((form for kind, form in FORMS.items() if isinstance(column.type, kind)), None) for column in table.columns
    ]
