"""Master key rotation: rewraps all keys of a database in one transaction."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from service.core.errors import MasterKeyError, StorageError
from service.security.master_keys import LocalKey, MasterKeys
from service.storage.audit.log import record
from service.storage.db.engine import Database
from service.storage.db.key_vault import GALLERY
from service.storage.db.tables import data_keys, galleries, secrets


@dataclass(frozen=True)
class Use:
    """Number of keys that a master key wraps."""

    secrets: int = 0
    galleries: int = 0


@dataclass(frozen=True)
class Rewrapped:
    """Result of a rotation. ``broken``: galleries whose keys cannot be unwrapped; they stay unchanged."""

    done: Use
    broken: tuple[str, ...] = ()


def uses(connection: Connection) -> dict[str, Use]:
    """Return the number of wrapped keys by master key id, the key in use first."""
    found: dict[str, Use] = {}
    for table, name in ((secrets, "secrets"), (data_keys, "galleries")):
        query = sa.select(table.c.master_key, sa.func.count()).group_by(table.c.master_key)
        for key, count in connection.execute(query):
            found[key] = replace(found.get(key, Use()), **{name: count})
    return found


def rewrap(database: Database, to: LocalKey) -> Rewrapped:
    """Rewrap every key under ``to``. Running servers continue if they have that key, or find it in their key file.

    Raises:
      MasterKeyError: a secret of the service cannot be unwrapped, or a key cannot be wrapped; nothing changed.
      StorageError: the database is unavailable; nothing changed.
    """
    master = database.vault.master
    with database.read() as connection:
        found = _others(connection, to)
    # Outside the transaction: writers must not wait for it.
    wrapped = {row.wrapped: _rewrapped(master, row, to) for row in found}
    with database.write(StorageError("the keys changed during the rotation; retry")) as connection:
        # Lock: a gallery created from here on waits, then reads which master key to use.
        connection.execute(sa.select(secrets.c.name).with_for_update()).all()
        done, broken = [], []
        for row in _others(connection, to):
            new = wrapped[row.wrapped] if row.wrapped in wrapped else _rewrapped(master, row, to)
            if new is None:
                broken.append(row.value)
                continue
            connection.execute(row.table.update().where(row.key == row.value).values(wrapped=new, master_key=to.id))
            done.append(row)
        named = sa.select(galleries.c.name).where(galleries.c.pk.in_(broken)).order_by(galleries.c.name)
        names = tuple(connection.execute(named).scalars())
        of_galleries = sum(row.table is data_keys for row in done)
        if done:
            before = sorted({row.master_key for row in done})
            record(database.vault, connection, "master_key_rotated", before=before, after=to.id, galleries=of_galleries)
    return Rewrapped(Use(len(done) - of_galleries, of_galleries), names)


@dataclass(frozen=True)
class _Row:
    """Wrapped key: the row of ``table`` where ``key`` equals ``value``."""

    table: sa.Table
    key: sa.Column[Any]
    value: Any
    purpose: str
    wrapped: bytes
    master_key: str


def _others(connection: Connection, to: LocalKey) -> list[_Row]:
    """Return all keys that another master key wraps."""
    found = []
    for table, key in ((secrets, secrets.c.name), (data_keys, data_keys.c.gallery_pk)):
        query = sa.select(key.label("value"), table.c.wrapped, table.c.master_key)
        for row in connection.execute(query.where(table.c.master_key != to.id)):
            purpose = row.value if table is secrets else GALLERY
            found.append(_Row(table, key, row.value, purpose, bytes(row.wrapped), row.master_key))
    return found


def _rewrapped(master: MasterKeys, row: _Row, to: LocalKey) -> bytes | None:
    """Return None for a gallery's key that cannot be unwrapped. Raises MasterKeyError."""
    try:
        key = master.unwrap(row.wrapped, row.purpose, row.master_key)
    except MasterKeyError:
        if row.table is secrets:
            raise
        return None
    wrapped = to.wrap(key, row.purpose)
    if to.unwrap(wrapped, row.purpose) != key:
        raise MasterKeyError(f"master key {to.id} cannot unwrap a key that it wrapped")
    return wrapped
