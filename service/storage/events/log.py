"""Reading the log of events by position."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import sqlalchemy as sa

from service.domain.events import Event, EventFilter, Position
from service.storage.db.engine import Database
from service.storage.db.tables import data_keys, events, galleries
from service.storage.events.outbox import beyond, end_of_log, open_event

PAGE: Final = 100
"""Events that are read together."""


@dataclass
class StoredEvent:
    """Event with its position. ``document``: as a webhook receives it."""

    position: Position
    id: str
    event: Event
    gallery: str
    document: dict[str, Any] = field(repr=False)


class Page(NamedTuple):
    """Wanted events in order, the position up to which the log was read, and whether more may follow it."""

    events: list[StoredEvent]
    position: Position
    has_more: bool


class EventLog:
    """Stored events in SQL. All methods block."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def end(self) -> Position:
        """Return the position up to which no event will be added any more."""
        with self._database.read() as connection:
            return end_of_log(connection)

    def read(self, after: Position, chosen: EventFilter) -> Page:
        """Return the next page. An event that cannot be decrypted is left out. Raises StorageError."""
        with self._database.read() as connection:
            end = max(after, end_of_log(connection))
            query = ROWS.where(beyond(after))
            if self._database.file is None:
                query = query.where(events.c.xid < end.xid)  # those above may not be complete
            rows = connection.execute(query).all()
        found = [event for row in rows if (event := self._open(row, chosen)) is not None]
        if len(rows) < PAGE:
            return Page(found, end, False)
        return Page(found, Position(rows[-1].xid, rows[-1].pk), True)

    def _open(self, row: sa.Row[*tuple[Any, ...]], chosen: EventFilter) -> StoredEvent | None:
        if not chosen.may_want(row.name, row.type) or (document := open_event(self._database.vault, row)) is None:
            return None
        event = Event(row.type, document["data"], at=row.at)
        if not chosen.wants(row.name, event):
            return None
        return StoredEvent(Position(row.xid, row.pk), row.id, event, row.name, document)


ROWS: Final = (
    sa.select(
        *events.c["pk", "xid", "gallery_pk", "id", "type", "sealed", "at"],
        galleries.c.name,
        *data_keys.c["wrapped", "master_key"],
    )
    .select_from(
        events.join(galleries, galleries.c.pk == events.c.gallery_pk).outerjoin(
            data_keys, data_keys.c.gallery_pk == events.c.gallery_pk
        )
    )
    .order_by(events.c.xid, events.c.pk)
    .limit(PAGE)
)
