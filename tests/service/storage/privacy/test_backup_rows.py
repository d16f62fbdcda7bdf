"""Rows of a backup keep each value exactly, and a file of anything else is refused."""

from __future__ import annotations

import io
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson
import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from service.core.unpacking import ZstdFile
from service.storage.db.tables import Utc
from service.storage.privacy.backup_rows import read_rows, write_rows
from tests.refusals import raises_code

TABLE = sa.Table(
    "t",
    sa.MetaData(),
    sa.Column("key", sa.BigInteger),
    sa.Column("sealed", sa.LargeBinary),
    sa.Column("text", sa.Text),
    sa.Column("json", sa.JSON),
    sa.Column("flag", sa.Boolean),
    sa.Column("rate", sa.Float),
    sa.Column("at", Utc),
)
ROW: list[Any] = [1, b"\0\xff", "a", "{}", True, 0.5, datetime(2026, 1, 1, tzinfo=UTC)]
TIMES = st.datetimes(datetime.min + timedelta(days=1), datetime.max - timedelta(days=1), timezones=st.just(UTC))
VALUES = (
    st.integers(-(2**63), 2**63 - 1),
    st.binary(),
    st.text(),
    st.text(),
    st.booleans(),
    st.floats(allow_nan=False),
)


def written(*rows: list[Any]) -> io.BytesIO:
    file = io.BytesIO()
    assert write_rows(file, TABLE, rows) == len(rows)
    file.seek(0)
    return file


def packed(*lines: Any) -> io.BytesIO:
    file = io.BytesIO()
    with ZstdFile(file, "w") as stream:
        stream.write(b"".join(line if isinstance(line, bytes) else orjson.dumps(line) + b"\n" for line in lines))
    file.seek(0)
    return file


@given(st.lists(st.tuples(*(st.none() | value for value in (*VALUES, TIMES))).map(list), max_size=5))
def test_values_are_kept_exactly(rows: list[list[Any]]) -> None:
    assert list(read_rows(written(*rows), TABLE)) == rows


JSON = [1, "00ff", "a", "{}", True, 0.5, 0]


@pytest.mark.parametrize(
    "row",
    [
        *([*JSON[:at], wrong, *JSON[at + 1 :]] for at, wrong in ((1, "0g"), (1, 5), (5, "a"), (6, "2026"), (6, 2**62))),
        JSON[1:],
        [*JSON, 1],
        {"key": 1},
        5,
        b"[1\n",
        b"\xff\n",
    ],
    ids=repr,
)
def test_a_row_of_another_form_is_refused(row: Any) -> None:
    names = TABLE.columns.keys()
    assert [row[:2] for row in read_rows(packed(names, JSON), TABLE)] == [[1, b"\0\xff"]]
    with raises_code("backup", match="row 2 of table t"):
        list(read_rows(packed(names, JSON, row), TABLE))


@pytest.mark.parametrize("names", [["key"], [*TABLE.columns.keys(), "new"], {}, b"no JSON\n", b""])
def test_other_columns_are_refused(names: Any) -> None:
    with raises_code("backup"):
        list(read_rows(packed(names, JSON), TABLE))
