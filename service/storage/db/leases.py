"""Leases of tasks that one process at a time runs for all."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

import sqlalchemy as sa

from service.core.errors import StorageError
from service.storage.db.engine import Database
from service.storage.db.tables import leases

_CONFLICT: Final = StorageError("a constraint of the leases was violated")


class Lease:
    """Lease of a task. All methods block."""

    def __init__(self, database: Database, name: str) -> None:
        self._database = database
        self._name = name

    def acquire(self, owner: str, now: datetime, lasting: timedelta) -> bool:
        """Acquire or renew the lease for ``lasting``; return whether ``owner`` holds it.

        One that ends later than possible was written by a wrong clock.
        """
        furthest = now + 2 * lasting  # allows for small clock differences between servers
        free = (leases.c.until < now) | (leases.c.until > furthest)
        mine = (leases.c.name == self._name) & ((leases.c.owner == owner) | free)
        taken = {"owner": owner, "until": now + lasting}
        with self._database.read() as connection:
            row = connection.execute(sa.select(leases).where(leases.c.name == self._name)).first()
        if row is not None and row.owner != owner and now <= row.until <= furthest:
            return False
        try:
            with self._database.write(_CONFLICT) as connection:
                if row is None:
                    connection.execute(leases.insert().values(name=self._name, **taken))
                    return True
                return connection.execute(leases.update().where(mine).values(**taken)).rowcount == 1
        except StorageError as error:
            if error is _CONFLICT:  # another process inserted the first lease
                return False
            raise

    def release(self, owner: str) -> None:
        """Release the lease. Raises StorageError."""
        with self._database.write(_CONFLICT) as connection:
            connection.execute(leases.delete().where(leases.c.name == self._name, leases.c.owner == owner))
