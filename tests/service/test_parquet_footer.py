"""What our reader of footers says is what pyarrow says of sound files; of others it says that they are none."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from service.gallery.parquet_footer import BYTE_ARRAY, row_groups


@pytest.fixture(scope="module")
def file() -> bytes:
    """Four row groups of texts, lists, structs and truth values."""
    columns: dict[str, list[Any]] = {
        "subject": ["a", "b"],
        "tags": [["x", "y"], None],
        "nested": [{"a": 1}] * 2,
        "flag": [True, None],
    }
    buffer = io.BytesIO()
    pq.write_table(pa.table({name: values * 5000 for name, values in columns.items()}), buffer, row_group_size=3000)
    return buffer.getvalue()


def test_it_says_what_pyarrow_says(file: bytes) -> None:
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


def test_what_is_none(file: bytes) -> None:
    size = int.from_bytes(file[-8:-4], "little")
    footer = file[-8 - size : -8]
    for cut in range(0, size, 7):
        with pytest.raises(ValueError, match=r"its footer|it does not end"):
            row_groups(io.BytesIO(b"PAR1" + footer[:cut] + cut.to_bytes(4, "little") + b"PAR1"))
    deep = b"\x1c" * 100_000
    for body in (deep, b"\x4f" * 50, b"\x19\xfc" + b"\xff" * 8 + b"\x01"):
        with pytest.raises(ValueError, match="footer"):
            row_groups(io.BytesIO(b"PAR1" + body + len(body).to_bytes(4, "little") + b"PAR1"))
