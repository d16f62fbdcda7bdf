"""Master key rotation: rewraps all keys of a database in one transaction."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from service.core.errors import MasterKeyError, StorageError
from service.security.master_keys import LocalKey
from service.storage.audit.log import note
from service.storage.db.engine import Database
from service.storage.db.key_vault import GALLERY
from service.storage.db.tables import data_keys, secrets


@dataclass(frozen=True)
class Use:
    """Number of keys that a master key wraps."""

    secrets: int = 0
    galleries: int = 0


def uses(connection: Connection) -> dict[str, Use]:
    """Return the number of wrapped keys by master key id, the key in use first."""
    found: dict[str, Use] = {}
    for table, name in ((secrets, "secrets"), (data_keys, "galleries")):
        query = sa.select(table.c.master_key, sa.func.count()).group_by(table.c.master_key)
        for key, count in connection.execute(query):
            found[key] = replace(found.get(key, Use()), **{name: count})
    return found


def rewrap(database: Database, to: LocalKey) -> Use:
    """Rewrap every key under ``to``, in one transaction, but galleries' keys that do not open. Return the changed keys.

    Raises MasterKeyError: a secret of the service cannot be unwrapped. StorageError.
    """
    done, before = Counter[str](), set[str]()
    with database.write(StorageError("the keys changed during the rotation; retry")) as connection:
        for table, key in ((secrets, secrets.c.name), (data_keys, data_keys.c.gallery_pk)):
            query = sa.select(key.label("value"), table.c.wrapped, table.c.master_key)
            for row in connection.execute(query.where(table.c.master_key != to.id)).all():
                purpose = row.value if table is secrets else GALLERY
                try:
                    unwrapped = database.vault.master.unwrap(bytes(row.wrapped), purpose, row.master_key)
                except MasterKeyError:
                    if table is secrets:
                        raise
                    continue
                values = {"wrapped": to.wrap(unwrapped, purpose), "master_key": to.id}
                connection.execute(table.update().where(key == row.value).values(values))
                done[table.name] += 1
                before.add(row.master_key)
        changed = Use(done[secrets.name], done[data_keys.name])
        if done:
            keys, galleries = sorted(before), changed.galleries
            note(database.vault, connection, "master_key_rotated", before=keys, after=to.id, galleries=galleries)
    return changed
