"""Writes of thousands of rows, whose keys callers assign, and of rows that may exist."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import lru_cache
from itertools import chain, islice
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

SQLITE_CACHE_KIB: Final = 65_536
"""SQLite page cache of a bulk writer. With the default of 2 MB, pages are written more than once per block."""
ROWS_PER_STATEMENT: Final = 50
"""Rows of an INSERT. Triggers change the same pages for each row, and many rows of a statement change them once."""


def reserve_keys(connection: Connection, table: sa.Table, count: int) -> list[int]:
    """Return ``count`` keys that no other writer has used or will use."""
    if not count:
        return []
    if connection.dialect.name == "sqlite":  # this transaction is its only writer
        first = highest_key(connection, table) + 1
        return list(range(first, first + count))
    sequence = sa.func.nextval(_sequence(table))
    drawn = connection.execute(sa.select(sequence).select_from(sa.func.generate_series(1, count)))
    return list(drawn.scalars())


def highest_key(connection: Connection, table: sa.Table) -> int:
    """Return the highest key ever assigned, including deleted rows; 0 if there is none."""
    if connection.dialect.name == "sqlite":
        query = sa.text("SELECT seq FROM sqlite_sequence WHERE name = :name")
        return int(connection.execute(query, {"name": table.name}).scalar() or 0)
    sequence = connection.execute(sa.select(_sequence(table))).scalar_one()
    last, called = connection.exec_driver_sql(f"SELECT last_value, is_called FROM {sequence}").one()  # noqa: S608
    return int(last) if called else 0


def raise_highest_key(connection: Connection, table: sa.Table, key: int) -> None:
    """Make the next assigned key larger than ``key``."""
    if not key or highest_key(connection, table) >= key:
        return
    if connection.dialect.name != "sqlite":
        connection.execute(sa.select(sa.func.setval(_sequence(table), key)))
        return
    connection.execute(sa.text("DELETE FROM sqlite_sequence WHERE name = :name"), {"name": table.name})
    insertion = sa.text("INSERT INTO sqlite_sequence (name, seq) VALUES (:name, :key)")
    connection.execute(insertion, {"name": table.name, "key": key})


def _sequence(table: sa.Table) -> sa.Function[Any]:
    (key,) = table.primary_key.columns
    return sa.func.pg_get_serial_sequence(table.name, key.name)


def insert(connection: Connection, table: sa.Table, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Insert rows given in the order of ``columns``, with JSON as text and times from :func:`as_time`."""
    row = f"({', '.join(['?' if connection.dialect.name == 'sqlite' else '%s'] * len(columns))})"
    start = f"INSERT INTO {table.name} ({', '.join(columns)}) VALUES "  # noqa: S608
    rest = iter(rows)
    while some := list(islice(rest, ROWS_PER_STATEMENT)):
        connection.exec_driver_sql(start + ", ".join([row] * len(some)), tuple(chain.from_iterable(some)))


def insert_missing(connection: Connection, table: sa.Table, **values: Any) -> bool:
    """Insert a row unless there is one with its key; return whether it was inserted."""
    insert = (sqlite if connection.dialect.name == "sqlite" else postgresql).insert(table)
    new = insert.values(**values).on_conflict_do_nothing().returning(*table.primary_key)
    return connection.execute(new).first() is not None


@contextmanager
def large_page_cache(connection: Connection) -> Iterator[None]:
    """Enlarge SQLite's page cache until the block ends."""
    if connection.dialect.name != "sqlite":
        yield
        return
    before = connection.exec_driver_sql("PRAGMA cache_size").scalar()
    connection.exec_driver_sql(f"PRAGMA cache_size = {-SQLITE_CACHE_KIB}")
    try:
        yield
    finally:
        connection.exec_driver_sql(f"PRAGMA cache_size = {before}")


def as_time(connection: Connection, at: datetime | None, latest: datetime | None = None) -> datetime | str:
    """Return the value that SQLAlchemy would write for an aware time. ``latest``: instead of none or of a later one."""
    if latest is not None and (at is None or at > latest):
        at = latest
    assert at is not None  # noqa: S101 - without a latest time
    if connection.dialect.name != "sqlite":
        return at
    return _as_text(at)


@lru_cache(1024)  # many rows have the same time
def _as_text(at: datetime) -> str:
    # strftime would write the year 999 with three digits.
    return at.astimezone(UTC).replace(tzinfo=None).isoformat(" ", "microseconds")
