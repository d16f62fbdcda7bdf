"""Consistency checks of a database, with repairs: one :class:`Check` per kind of damage.

The service never leaves such damage, even if it is killed. Disks, restored copies and manual changes do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from service.core.errors import StorageError
from service.domain.gallery import Gallery
from service.storage.audit.log import record
from service.storage.db.bulk_rows import highest_key, raise_highest_key
from service.storage.db.engine import Database, new_version
from service.storage.db.key_vault import Vault
from service.storage.db.tables import (
    audit,
    changes,
    evidence,
    galleries,
    index_states,
    jobs,
    metadata,
    subjects,
    templates,
)
from service.storage.repositories.api_keys import altered_keys

REPAIRED: Final = "repaired"
"""Audit event."""
Of = TypeVar("Of", Gallery, Vault)
"""Object of a check: a gallery, or the whole database, given by its vault."""


@dataclass(frozen=True)
class Check(Generic[Of]):
    """Check of one gallery or of the database.

    ``find`` counts the damaged places, ``mend`` repairs them, if a repair exists. ``action`` says what the repair does,
    or what an operator must do.
    """

    kind: str
    what: str
    find: Callable[[Connection, Of], int]
    mend: Callable[[Connection, Of], object] | None
    action: str

    def count(self, database: Database, of: Of) -> int:
        """Return the number of damaged places in one snapshot."""
        with database.read() as connection:
            return self.find(connection, of)

    def repair(self, database: Database, of: Of) -> None:
        """Repair in one transaction with an audit line. Requires ``mend``."""
        if isinstance(of, Gallery):
            with database.change(of) as connection:
                self._repair(database, connection, of, of)
            return
        with database.write(StorageError(f"the repair of {self.kind} violated a constraint")) as connection:
            # Lock every gallery before anything else, as its writers do (docs/decisions/0004).
            connection.execute(galleries.update().values(version=new_version()))
            self._repair(database, connection, of, None)

    def _repair(self, database: Database, connection: Connection, of: Of, gallery: Gallery | None) -> None:
        assert self.mend is not None  # noqa: S101 - the caller asks first
        found = self.find(connection, of)
        self.mend(connection, of)
        record(database.vault, connection, REPAIRED, gallery, kind=self.kind, count=found)


# Checks of the whole database


def _damaged_pages(connection: Connection, _: Vault) -> int:
    """Run SQLite's integrity check. PostgreSQL checks pages when it reads them."""
    if connection.dialect.name != "sqlite":
        return 0
    problems = connection.exec_driver_sql("PRAGMA integrity_check").scalars().all()
    return 0 if problems == ["ok"] else len(problems)


def _parentless() -> Iterator[tuple[sa.Table, sa.ColumnElement[bool]]]:
    """Yield each table with a condition for rows whose foreign key is dangling, parents before children."""
    for table in metadata.sorted_tables:
        for key in table.foreign_keys:
            parent = key.column.table.alias()
            there = sa.select(parent.c[key.column.name]).where(parent.c[key.column.name] == key.parent)
            yield table, key.parent.is_not(None) & ~there.exists()


def _count_orphans(connection: Connection, _: Vault) -> int:
    return sum(
        connection.execute(sa.select(sa.func.count()).select_from(table).where(lost)).scalar_one()
        for table, lost in _parentless()
    )


def _delete_orphans(connection: Connection, _: Vault) -> None:
    for table, lost in _parentless():
        if table is templates:
            # Indexes of existing galleries must remove these templates.
            alive = sa.select(galleries.c.pk)
            gone = sa.select(templates.c.gallery_pk, templates.c.pk, templates.c.subject_pk).where(
                lost, templates.c.gallery_pk.in_(alive)
            )
            connection.execute(changes.insert().from_select(["gallery_pk", "template_pk", "subject_pk"], gone))
        connection.execute(table.delete().where(lost))


def _highest_used(connection: Connection) -> dict[sa.Table, int]:
    """Return the highest key of each table that any row still mentions, deleted rows included."""
    remembered = {
        galleries: [audit.c.gallery_pk],
        subjects: [changes.c.subject_pk],
        templates: [changes.c.template_pk],
        changes: [galleries.c.log_floor, evidence.c.sequence, index_states.c.sequence],
        jobs: [],
        audit: [],
    }
    return {
        table: max(
            connection.execute(sa.select(sa.func.max(column))).scalar() or 0
            for column in (next(iter(table.primary_key)), *others)
        )
        for table, others in remembered.items()
    }


def _behind(connection: Connection) -> dict[sa.Table, int]:
    """Return tables whose next key may have been used before, with the highest used key."""
    return {table: used for table, used in _highest_used(connection).items() if highest_key(connection, table) < used}


def _advance_sequences(connection: Connection, _: Vault) -> None:
    for table, used in _behind(connection).items():
        raise_highest_key(connection, table, used)


PAGES: Final = Check[Vault](
    "pages",
    "damaged pages of the database file",
    _damaged_pages,
    None,
    "Stop the service, keep a copy of the file, and restore a backup.",
)
"""Damaged pages make all other results meaningless."""
DATABASE_CHECKS: Final = (
    Check[Vault](
        "orphans",
        "rows whose owner is not there",
        _count_orphans,
        _delete_orphans,
        "The repair deletes them and updates the indexes.",
    ),
    Check[Vault](
        "counters",
        "tables whose next key may have been used before",
        lambda connection, _: len(_behind(connection)),
        _advance_sequences,
        "The sequence continues after the highest key.",
    ),
    Check[Vault](
        "api_keys",
        "API keys were altered without the service's secret, and are rejected",
        lambda connection, vault: len(altered_keys(connection, vault)),
        None,
        "List them with 'kith keys list --ended', revoke and replace them, and check who can write to the database.",
    ),
)
