"""Triggers that make the audit append-only in the database itself, against bugs and injected SQL.

An account that may alter tables can remove them: docs/audit.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from sqlalchemy.engine import Connection

REFUSAL: Final = "the audit is append-only"
"""Message of the triggers."""


def create_audit_triggers(connection: Connection) -> None:
    """Create the triggers of a new database."""
    if connection.dialect.name == "sqlite":
        for operation in ("UPDATE", "DELETE"):
            connection.exec_driver_sql(
                f"CREATE TRIGGER audit_{operation.lower()} BEFORE {operation} ON audit "
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


@contextmanager
def audit_triggers_off(connection: Connection) -> Iterator[None]:
    """Allow this transaction to replace the audit, until the block ends."""
    if connection.dialect.name == "sqlite":
        for operation in ("update", "delete"):
            connection.exec_driver_sql(f"DROP TRIGGER IF EXISTS audit_{operation}")
        yield
        create_audit_triggers(connection)
        return
    # A transaction-local setting: the account that restores need not own the tables.
    connection.exec_driver_sql("SELECT set_config('kith.restoring', 'on', true)")
    yield
    connection.exec_driver_sql("SELECT set_config('kith.restoring', 'off', true)")
