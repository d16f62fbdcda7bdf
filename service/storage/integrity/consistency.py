"""Consistency checks of a database, with repairs: one :class:`Check` per kind of damage.

The service never leaves such damage, even if it is killed. Disks, restored copies and manual changes do.
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa

from service.core.errors import StorageDamagedError, StorageError
from service.domain.gallery import Gallery
from service.storage.audit.log import record
from service.storage.db.engine import Database, new_version
from service.storage.db.tables import (
    galleries,
    jobs,
)
from service.storage.integrity.database_checks import PAGES, DatabaseCheck
from service.storage.integrity.gallery_checks import Check

REPAIRED: Final = "repaired"
"""Audit event."""


class Consistency:
    """Runs checks, each on one snapshot, and repairs, each one transaction with an audit line."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def count(self, check: Check, gallery: Gallery) -> int:
        with self._database.read() as connection:
            return check.find(connection, gallery)

    def repair(self, check: Check, gallery: Gallery) -> None:
        assert check.mend is not None  # noqa: S101 - the caller asks first
        with self._database.change(gallery) as connection:
            found = check.find(connection, gallery)
            check.mend(connection, gallery)
            record(self._database.vault, connection, REPAIRED, gallery, kind=check.kind, count=found)

    def count_in_database(self, check: DatabaseCheck) -> int:
        try:
            with self._database.read() as connection:
                return check.find(connection, self._database.vault)
        except StorageDamagedError:
            if check is PAGES:
                return 1  # the check itself hit a damaged page
            raise

    def repair_database(self, check: DatabaseCheck) -> None:
        assert check.mend is not None  # noqa: S101 - the caller asks first
        with self._database.write(StorageError(f"the repair of {check.kind} violated a constraint")) as connection:
            # Lock every gallery before anything else, as its writers do (docs/decisions/0004).
            connection.execute(galleries.update().values(version=new_version()))
            found = check.find(connection, self._database.vault)
            check.mend(connection)
            record(self._database.vault, connection, REPAIRED, kind=check.kind, count=found)

    def job_ids(self) -> set[str]:
        with self._database.read() as connection:
            return set(connection.execute(sa.select(jobs.c.id)).scalars())
