"""Log of the stored events, which event streams read in the order of keys.

Transactions commit in another order than they take keys. A reader that went by visible keys alone would therefore miss
an event whose transaction ends late. ``last`` is the key up to which all transactions have ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

import sqlalchemy as sa

from service.domain.events import Event, EventFilter
from service.storage.db.engine import Database
from service.storage.db.tables import data_keys, events, galleries
from service.storage.events.outbox import LAST_KEY, PUBLISHING, open_event

PAGE: Final = 100
"""Events that are read together."""


@dataclass(frozen=True)
class StoredEvent:
    """Event with its row key. ``document``: as a webhook receives it, with ``id``."""

    pk: int
    at: datetime
    document: dict[str, Any] = field(repr=False)


class EventLog:
    """Stored events in SQL. All methods block."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def last(self) -> int:
        """Return a key up to which no event will be added any more; 0: there was no event yet."""
        if self._database.file is not None:
            row = self._database.first(SQLITE_LAST, {})  # SQLite has one writer at a time
            return 0 if row is None else int(row.seq)
        # The sequence first: a transaction that locks after this statement takes higher keys.
        row = self._database.first(POSTGRESQL_LAST, {})
        last = 0 if row is None else int(row.pk)
        publishing = self._database.first(OLDEST_PUBLISHING, {})
        return last if publishing is None or publishing.pk is None else min(last, int(publishing.pk))

    def read(self, after: int, last: int, chosen: EventFilter) -> tuple[list[StoredEvent], StoredEvent | None]:
        """Return wanted events with keys above ``after`` and up to ``last``, in order.

        Second result: the event up to which the log was read, if more may follow. An event that cannot be decrypted is
        left out. Raises StorageError.
        """
        query = PAGES.where(events.c.pk > after, events.c.pk <= last)
        if chosen.galleries is not None:
            query = query.where(galleries.c.name.in_(sorted(chosen.galleries)))
        if chosen.types is not None:
            query = query.where(events.c.type.in_(sorted(chosen.types)))
        with self._database.read() as connection:
            rows = connection.execute(query).all()
        found = [event for row in rows if (event := self._open(row, chosen)) is not None]
        return found, StoredEvent(rows[-1].pk, rows[-1].at, {}) if len(rows) == PAGE else None

    def _open(self, row: sa.Row[*tuple[Any, ...]], chosen: EventFilter) -> StoredEvent | None:
        document = open_event(self._database.vault, row)
        if document is None or not chosen.wants(row.name, Event(row.type, document["data"])):
            return None
        return StoredEvent(row.pk, row.at, {"id": row.id, **document})


SQLITE_LAST: Final[sa.Select[Any]] = (
    sa.select(sa.column("seq")).select_from(sa.table("sqlite_sequence")).where(sa.column("name") == events.name)
)
POSTGRESQL_LAST: Final[sa.Select[Any]] = sa.select(sa.column("pk")).select_from(sa.text(f"({LAST_KEY}) AS last"))
OLDEST_PUBLISHING: Final[sa.Select[Any]] = sa.select(sa.column("pk")).select_from(
    sa.text(
        "(SELECT min(((classid::bigint & 65535) << 32) | objid::bigint) AS pk FROM pg_locks "  # noqa: S608
        f"WHERE locktype = 'advisory' AND objsubid = 1 AND classid::bigint >> 16 = {PUBLISHING} "
        "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())) AS publishing"
    )
)
PAGES: Final = (
    sa.select(
        *events.c["pk", "gallery_pk", "id", "type", "sealed", "at"],
        galleries.c.name,
        *data_keys.c["wrapped", "master_key"],
    )
    .select_from(
        events.join(galleries, galleries.c.pk == events.c.gallery_pk).outerjoin(
            data_keys, data_keys.c.gallery_pk == events.c.gallery_pk
        )
    )
    .order_by(events.c.pk)
    .limit(PAGE)
)
