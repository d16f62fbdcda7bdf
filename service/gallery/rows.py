"""Many rows at once, by the driver itself: executemany on SQLite, COPY on PostgreSQL. Keys are given by who writes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from service.gallery.tables import vectors as vectors_table

SQLITE_CACHE_KIB: Final = 65_536
"""Pages that a bulk writer may hold: with SQLite's default of 2 MB a block's pages are written more than once."""
EMPTY: Final[dict[type, str]] = {dict: "{}", list: "[]"}


def reserve(connection: Connection, table: sa.Table, count: int) -> list[int]:
    """Keys that nobody else has or will have."""
    if not count:
        return []
    if connection.dialect.name == "sqlite":  # whose only writer this is
        first = highest(connection, table) + 1
        return list(range(first, first + count))
    sequence = sa.func.nextval(sa.func.pg_get_serial_sequence(table.name, _key(table).name))
    drawn = connection.execute(sa.select(sequence).select_from(sa.func.generate_series(1, count)))
    return list(drawn.scalars())


def highest(connection: Connection, table: sa.Table) -> int:
    """The highest key ever given, were it deleted since; 0 if none was."""
    if connection.dialect.name == "sqlite":
        query = sa.text("SELECT seq FROM sqlite_sequence WHERE name = :name")
        return int(connection.execute(query, {"name": table.name}).scalar() or 0)
    sequence = connection.execute(sa.select(sa.func.pg_get_serial_sequence(table.name, _key(table).name))).scalar_one()
    last, called = connection.exec_driver_sql(f"SELECT last_value, is_called FROM {sequence}").one()  # noqa: S608
    return int(last) if called else 0


def raise_highest(connection: Connection, table: sa.Table, key: int) -> None:
    """Give only keys above this one from now on."""
    if not key:
        return
    if connection.dialect.name != "sqlite":
        serial = sa.func.pg_get_serial_sequence(table.name, _key(table).name)
        connection.execute(sa.select(sa.func.setval(serial, key)))
    elif highest(connection, table) < key:
        for statement in ("DELETE FROM sqlite_sequence WHERE name = :n", "INSERT INTO sqlite_sequence VALUES (:n, :k)"):
            values = {"n": table.name, "k": key}
            connection.execute(sa.text(statement), values if ":k" in statement else {"n": table.name})


def among(connection: Connection, column: sa.ColumnElement[Any], values: Sequence[str]) -> sa.ColumnElement[bool]:
    """Whether a text is one of thousands: one parameter, and a statement that is the same each time."""
    if connection.dialect.name == "sqlite":
        listed = sa.func.json_each(json.dumps(values)).table_valued("value")
        return column.in_(sa.select(listed.c.value))
    return column == sa.any_(sa.literal(values, sa.ARRAY(sa.Text)))


def insert(connection: Connection, table: sa.Table, columns: Sequence[str], rows: Iterable[Any]) -> None:
    """``rows`` in the order of ``columns``: JSON as :func:`as_json` gives it, times as :func:`as_time` does."""
    kinds = [table.c[column].type for column in columns]
    names = ", ".join(columns)
    driver = connection.dialect.loaded_dbapi
    cursor: Any = connection.connection.cursor()
    try:
        if connection.dialect.name == "sqlite":
            marks = ", ".join("?" * len(columns))
            cursor.executemany(f"INSERT INTO {table.name} ({names}) VALUES ({marks})", rows)  # noqa: S608
        elif table is vectors_table:
            # As text each byte would travel as two.
            with cursor.copy(f"COPY {table.name} ({names}) FROM STDIN (FORMAT BINARY)") as copy:
                copy.set_types([_postgres_type(kind) for kind in kinds])
                for row in rows:
                    copy.write_row(row)
        else:
            with cursor.copy(f"COPY {table.name} ({names}) FROM STDIN") as copy:
                for row in rows:
                    copy.write_row(row)
    except driver.Error as error:
        # As SQLAlchemy would, had it come by.
        raise sa.exc.DBAPIError.instance(f"bulk insertion into {table.name}", None, error, driver.Error) from error
    finally:
        cursor.close()


def insert_vectors(connection: Connection, keys: Sequence[int], generation: int, vectors: bytes, size: int) -> None:
    """``keys`` of templates, ascending; ``vectors``: one after the other, ``size`` bytes each."""
    if connection.dialect.name == "sqlite" and keys[-1] - keys[0] == len(keys) - 1:
        # One statement: no row passes through Python.
        connection.exec_driver_sql(
            "INSERT INTO vectors (template_pk, generation, vector) "
            "WITH RECURSIVE n(i) AS (VALUES (0) UNION ALL SELECT i + 1 FROM n WHERE i < ? - 1) "
            "SELECT ? + i, ?, substr(?, i * ? + 1, ?) FROM n",
            (len(keys), keys[0], generation, vectors, size, size),
        )
        return
    cut = (vectors[size * i : size * (i + 1)] for i in range(len(keys)))
    rows = ((key, generation, vector) for key, vector in zip(keys, cut, strict=True))
    insert(connection, vectors_table, ("template_pk", "generation", "vector"), rows)


@contextmanager
def wide_cache(connection: Connection) -> Iterator[None]:
    """More memory for SQLite, for as long as the block runs."""
    if connection.dialect.name != "sqlite":
        yield
        return
    before = connection.exec_driver_sql("PRAGMA cache_size").scalar()
    connection.exec_driver_sql(f"PRAGMA cache_size = {-SQLITE_CACHE_KIB}")
    try:
        yield
    finally:
        connection.exec_driver_sql(f"PRAGMA cache_size = {before}")


def as_json(value: Any) -> str | None:
    """As SQLAlchemy writes it; None stays None."""
    return None if value is None else json.dumps(value) if value else EMPTY[type(value)]


def as_time(connection: Connection, at: datetime) -> datetime | str:
    """As SQLAlchemy writes it; ``at`` is aware."""
    if connection.dialect.name != "sqlite":
        return at
    # Not strftime, which writes the year 999 with three digits.
    return at.astimezone(UTC).replace(tzinfo=None).isoformat(" ", "microseconds")


def _postgres_type(kind: sa.types.TypeEngine[Any]) -> str:
    if isinstance(kind, sa.LargeBinary):
        return "bytea"
    return "int4" if type(kind) is sa.Integer else "int8"


def _key(table: sa.Table) -> sa.Column[Any]:
    (key,) = table.primary_key.columns
    return key
