"""Damage of a stored database: what the database itself finds, data keys and sealed values that do not open.

The service never leaves such damage, even if it is killed. Disks, restored copies and other programs do.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from service.core.errors import MasterKeyError
from service.security.sealing import Seal, SealBrokenError
from service.storage.db.engine import Database
from service.storage.db.row_sealing import SEALED, subject_lookup
from service.storage.db.tables import galleries, receivers, subjects
from service.storage.events.outbox import read_webhooks
from service.storage.repositories.gallery_rows import VISIBLE, gallery_rows

ROWS_PER_READ: Final = 4096


def damage(database: Database) -> Iterator[str]:
    """Yield what is damaged and what to do, a sentence each. Opens every sealed value. Servers may run meanwhile.

    Raises StorageError: the database cannot be read.
    """
    with database.read() as connection:
        if connection.dialect.name == "sqlite":  # PostgreSQL checks pages when it reads them
            pages = connection.exec_driver_sql("PRAGMA integrity_check").scalars().all()
            if pages != ["ok"]:
                yield f"the file is damaged ({pages[0]}). Stop the service, keep a copy, and restore a backup."
                return
            orphans = Counter(row[0] for row in connection.exec_driver_sql("PRAGMA foreign_key_check"))
            for table, count in orphans.items():
                yield f"{count} rows of {table} belong to no other row. Restore a backup."
        seals: dict[int, tuple[str, Seal]] = {}
        # A companion is sealed by the key of its gallery, which comes first.
        for row in connection.execute(gallery_rows().order_by(VISIBLE.desc(), galleries.c.name)).all():
            if row.companion_of is not None:
                if row.companion_of in seals:
                    seals[row.pk] = seals[row.companion_of]
                continue
            seal = database.vault.seal(row.pk, row.wrapped, row.master_key)
            try:
                seal.pseudonym("gallery", "")
            except MasterKeyError as error:
                yield (
                    f"gallery {row.name} cannot be read: {error.detail}. Provide the master key that wraps its data "
                    "key, restore a backup, or delete the gallery."
                )
            else:
                seals[row.pk] = row.name, seal
        for column in SEALED:
            for gallery, count in _broken(connection, column, seals).items():
                yield (
                    f"gallery {gallery}: {count} values of {column} were altered, or are another gallery's or row's. "
                    "Restore a backup, or delete what they belong to."
                )
        rows = connection.execute(sa.select(sa.func.count()).select_from(receivers)).scalar_one()
        if altered := rows - len(read_webhooks(connection, database.vault)):
            yield f"{altered} webhooks were altered and receive nothing. The log names them: delete them."


def _broken(connection: Connection, column: sa.Column[Any], seals: Mapping[int, tuple[str, Seal]]) -> Counter[str]:
    """Count the values of a column that do not open, and subjects' rows under another id, by gallery."""
    purpose, generation = SEALED[column]
    source, gallery_pk = _to_gallery(column.table)
    chosen: list[sa.ColumnElement[Any]] = [column.label("value"), gallery_pk.label("gallery")]
    chosen.append((sa.null() if generation is None else generation).label("generation"))
    chosen.append((subjects.c.lookup if column.table is subjects else sa.null()).label("lookup"))
    query = sa.select(*chosen).select_from(source).where(column.is_not(None))
    broken: Counter[str] = Counter()
    for row in connection.execute(query.execution_options(yield_per=ROWS_PER_READ)):
        if row.gallery not in seals:
            continue
        name, seal = seals[row.gallery]
        try:
            opened = seal.open(row.value, purpose if generation is None else f"{purpose} {row.generation}")
        except SealBrokenError:
            broken[name] += 1
        else:
            broken[name] += row.lookup is not None and subject_lookup(seal, json.loads(opened)["id"]) != row.lookup
    return +broken


def _to_gallery(table: sa.Table) -> tuple[sa.FromClause, sa.Column[Any]]:
    """Return a table joined with its owners, up to one with the gallery's key, and that key."""
    joined: sa.FromClause = table
    while "gallery_pk" not in table.c:
        (key,) = (key for key in table.foreign_keys if not key.parent.nullable)
        table = key.column.table
        joined = joined.join(table, key.parent == key.column)
    return joined, table.c.gallery_pk
