"""The Parquet footer parser agrees with pyarrow on valid files and refuses damaged ones."""

from __future__ import annotations

import io
import time
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from service.storage.transfer.parquet_footer import BYTE_ARRAY, MAX_COLUMNS, row_groups


@pytest.fixture(scope="module")
def file() -> bytes:
    """File with four row groups of texts, lists, structs and booleans."""
    columns: dict[str, list[Any]] = {
        "subject": ["a", "b"],
        "tags": [["x", "y"], None],
        "nested": [{"a": 1}] * 2,
        "flag": [True, None],
    }
    buffer = io.BytesIO()
    pq.write_table(pa.table({name: values * 5000 for name, values in columns.items()}), buffer, row_group_size=3000)
    return buffer.getvalue()


def test_the_parser_agrees_with_pyarrow(file: bytes) -> None:
    metadata = pq.ParquetFile(io.BytesIO(file)).metadata
    groups = row_groups(io.BytesIO(file))
    assert len(groups) == metadata.num_row_groups == 4
    for number, group in enumerate(groups):
        expected = metadata.row_group(number)
        assert (group.rows, len(group.columns)) == (expected.num_rows, expected.num_columns)
        for place, column in enumerate(group.columns):
            other = expected.column(place)
            assert column.path == other.path_in_schema
            assert (column.values, column.size) == (other.num_values, other.total_uncompressed_size)
            assert (column.physical_type == BYTE_ARRAY) == (other.physical_type == "BYTE_ARRAY")
            assert column.has_dictionary == other.has_dictionary_page


def test_invalid_footers_are_refused(file: bytes) -> None:
    size = int.from_bytes(file[-8:-4], "little")
    footer = file[-8 - size : -8]
    for cut in range(0, size, 7):
        with pytest.raises(ValueError, match=r"its footer|no Parquet footer"):
            row_groups(io.BytesIO(b"PAR1" + footer[:cut] + cut.to_bytes(4, "little") + b"PAR1"))
    deep = b"\x1c" * 100_000
    for body in (deep, b"\x4f" * 50, b"\x19\xfc" + b"\xff" * 8 + b"\x01"):
        with pytest.raises(ValueError, match="footer"):
            row_groups(io.BytesIO(b"PAR1" + body + len(body).to_bytes(4, "little") + b"PAR1"))


def _small_columns(groups: int, columns: int) -> io.BytesIO:
    """Return a footer of many columns of 13 bytes each."""
    column = b"\x3c\x15\x0c\x29\x18\x01a\x26\x02\x16\x02\0\0"
    listed = b"\x19\xfc" + bytes([columns & 127 | 128, columns >> 7 & 127 | 128, columns >> 14]) + columns * column
    footer = b"\x49\xfc" + bytes([groups & 127 | 128, groups >> 7]) + groups * (listed + b"\x26\x02\0") + b"\0"
    return io.BytesIO(b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1")


def test_the_column_limit_allows_a_million_templates_with_crops() -> None:
    assert len(row_groups(_small_columns(2000, 17))) == 2000
    for groups, columns in ((1, 600_000), (1, MAX_COLUMNS + 1), (11, 10_000)):
        began = time.process_time()
        with pytest.raises(ValueError, match="more than 100000 columns"):
            row_groups(_small_columns(groups, columns))
        assert time.process_time() - began < 6


def test_skipping_a_long_list_takes_no_time() -> None:
    size = 8_000_000
    length = bytes([size & 127 | 128, size >> 7 & 127 | 128, size >> 14 & 127 | 128, size >> 21])
    footer = b"\x29\xf1" + length + b"\x01" * size + b"\0"
    began = time.process_time()
    assert row_groups(io.BytesIO(b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1")) == []
    assert time.process_time() - began < 2
