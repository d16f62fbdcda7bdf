"""The database itself refuses to alter or delete lines of the audit: what no mistake of ours does by the way then, and
no statement that somebody smuggled in. Whoever may alter tables can take it back: docs/audit.md."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from sqlalchemy.engine import Connection

GUARDED: Final = ("UPDATE", "DELETE")
REFUSAL: Final = "the audit is only added to"


def guard(connection: Connection) -> None:
    if connection.dialect.name == "sqlite":
        for what in GUARDED:
            connection.exec_driver_sql(
                f"CREATE TRIGGER audit_{what.lower()} BEFORE {what} ON audit "
                f"BEGIN SELECT RAISE(ABORT, '{REFUSAL}'); END"
            )
        return
    connection.exec_driver_sql(
        "CREATE FUNCTION audit_guard() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "IF current_setting('kith.restoring', true) = 'on' THEN RETURN NULL; END IF; "
        f"RAISE EXCEPTION '{REFUSAL}'; END $$"
    )
    connection.exec_driver_sql(
        "CREATE TRIGGER audit_guard BEFORE UPDATE OR DELETE OR TRUNCATE ON audit "
        "FOR EACH STATEMENT EXECUTE FUNCTION audit_guard()"
    )


def unguard(connection: Connection) -> None:
    if connection.dialect.name == "sqlite":
        for what in GUARDED:
            connection.exec_driver_sql(f"DROP TRIGGER IF EXISTS audit_{what.lower()}")
        return
    connection.exec_driver_sql("DROP TRIGGER audit_guard ON audit")
    connection.exec_driver_sql("DROP FUNCTION audit_guard()")


@contextmanager
def unguarded(connection: Connection) -> Iterator[None]:
    """For as long as the block runs, within a transaction: another audit takes the place of this one."""
    if connection.dialect.name == "sqlite":
        unguard(connection)
        yield
        guard(connection)
        return
    # Of this transaction alone: who restores need not own the tables.
    connection.exec_driver_sql("SELECT set_config('kith.restoring', 'on', true)")
    yield
    connection.exec_driver_sql("SELECT set_config('kith.restoring', 'off', true)")
