"""Leases of tasks that one process at a time does for all."""

from __future__ import annotations

import time
import uuid
from contextlib import suppress
from datetime import timedelta
from typing import Final

import sqlalchemy as sa

from service.core.errors import StorageError
from service.storage.db.bulk_rows import insert_missing
from service.storage.db.engine import Database
from service.storage.db.tables import leases

LEASE_S: Final = 20.0
"""Time until another process takes over the task of a dead one."""
_CONFLICT: Final = StorageError("a constraint of the leases was violated")


class Lease:
    """Lease of a task by name, for one process, which renews it for as long as it works. Methods block."""

    def __init__(self, database: Database, name: str, lasting_s: float = LEASE_S) -> None:
        self._database = database
        self._name = name
        self._lasting_s = lasting_s
        self._owner = uuid.uuid4().hex
        self._until_s = 0.0
        """End on the monotonic clock."""

    @property
    def is_held(self) -> bool:
        return time.monotonic() < self._until_s

    def hold(self) -> bool:
        """Acquire the lease, or renew it in its second half; return whether it is held. Raises StorageError."""
        now = time.monotonic()
        if now < self._until_s - self._lasting_s / 2:
            return True
        self._until_s = now + self._lasting_s if self._acquire() else 0.0
        return self.is_held

    def _acquire(self) -> bool:
        with self._database.read() as connection:
            now, lasting = self._database.now(connection), timedelta(seconds=self._lasting_s)
            row = connection.execute(sa.select(leases).where(leases.c.name == self._name)).first()
        # One that ends later than possible was written by a wrong clock. Clocks of servers may differ a little.
        furthest = now + 2 * lasting
        if row is not None and row.owner != self._owner and now <= row.until <= furthest:
            return False
        free = (leases.c.until < now) | (leases.c.until > furthest)
        mine = (leases.c.name == self._name) & ((leases.c.owner == self._owner) | free)
        taken = {"owner": self._owner, "until": now + lasting}
        with self._database.write(_CONFLICT) as connection:
            if row is None:
                return insert_missing(connection, leases, name=self._name, **taken)
            return connection.execute(leases.update().where(mine).values(**taken)).rowcount == 1

    def release(self) -> None:
        """Release the lease, if it was held; without a database it expires."""
        if self._until_s:
            own = (leases.c.name == self._name) & (leases.c.owner == self._owner)
            with suppress(StorageError), self._database.write(_CONFLICT) as connection:
                connection.execute(leases.delete().where(own))
            self._until_s = 0.0
