"""Receivers of events: where each one is in the log, and which events stay stored."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from service.core.errors import StorageError
from service.domain.events import GIVE_UP_AFTER, EventFilter, Position
from service.storage.audit.log import note
from service.storage.db.bulk_rows import insert_missing
from service.storage.db.engine import Database
from service.storage.db.tables import events, receivers
from service.storage.events.outbox import (
    BUILT_IN,
    PLACED,
    BuiltIn,
    Place,
    Webhook,
    beyond,
    end_of_log,
    place_of,
    read_webhooks,
    seal_webhook,
    webhook_seal,
)

MAX_AGE: Final = timedelta(days=7)
"""Age at which an event is deleted, unless a receiver waits for it, and a built-in receiver that was not used."""
MAX_KEPT: Final = 100_000
"""Events that stay stored. Older ones are deleted even if a receiver waits for them."""
USED: Final = timedelta(hours=1)
"""Time between records that a built-in receiver is used."""
_CONFLICT: Final = StorageError("a constraint of the receivers was violated")
log = logging.getLogger(__name__)


class ReceiverStore:
    """Places of receivers in SQL. Every method is one transaction and blocks."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def claim(self, receiver: BuiltIn) -> None:
        """Have all events from now on stored for a built-in receiver, until ``MAX_AGE`` after its last claim."""
        now = datetime.now(UTC)
        with self._database.read() as connection:
            used = connection.execute(sa.select(receivers.c.used_at).where(receivers.c.id == receiver)).scalar()
        if used is not None and abs(now - used) < USED:
            return
        with self._database.write(_CONFLICT) as connection:
            again = receivers.update().where(receivers.c.id == receiver).values(used_at=now)
            if connection.execute(again).rowcount == 0:
                webhook = Webhook(0, receiver, None, "", "", EventFilter(), now)
                if insert_receiver(self._database, connection, webhook):  # no other process was faster
                    note(self._database.vault, connection, "webhook_created", webhook=receiver)

    def waiting(self) -> Sequence[Webhook]:
        """Return the webhooks with events after their places, but those that are switched off."""
        here = sa.tuple_(receivers.c.xid, receivers.c.event_pk)
        working = receivers.c.id.not_in(BUILT_IN) & (receivers.c.failing_s < GIVE_UP_AFTER.total_seconds())
        with self._database.read() as connection:
            chosen = working & sa.exists().where(here < PLACED)
            return read_webhooks(connection, self._database.vault, chosen)

    def built_in(self, receiver: BuiltIn) -> tuple[int, Place, list[str]]:
        """Return the row key, place and announced topics of a built-in receiver that was claimed."""
        with self._database.read() as connection:
            row = connection.execute(sa.select(receivers).where(receivers.c.id == receiver)).one()
        return row.pk, place_of(row), row.announced or []

    def is_due(self, receiver_pk: int, event_pk: int) -> bool:
        """Return whether an event is still to be sent: neither it nor its receiver was deleted meanwhile."""
        return self._database.first(DUE, {"receiver": receiver_pk, "event": event_pk}) is not None

    def record(self, receiver_pk: int, before: Place, after: Place) -> bool:
        """Store the place of a receiver. Return False if it is no longer at ``before``: it was replayed or deleted."""
        at = {"receiver": receiver_pk, "xid_before": before.position.xid, "pk_before": before.position.event_pk}
        values = {**after.position._asdict(), **{name: getattr(after, name) for name in STATE}}
        with self._database.write(_CONFLICT) as connection:
            return connection.execute(MOVE, at | values).rowcount == 1

    def replay(self, webhook: Webhook) -> int:
        """Set a webhook back to the first stored event, and switch it on; return the number of events after it."""
        start = {"xid": 0, "event_pk": 0, "failing_s": 0, "failing_since": None, "error": None}
        with self._database.write(_CONFLICT) as connection:
            connection.execute(receivers.update().where(receivers.c.pk == webhook.pk).values(**start))
            return connection.execute(sa.select(sa.func.count()).select_from(events)).scalar_one()

    def waiting_counts(self) -> dict[int, int]:
        """Return how many events, wanted or not, are after the place of each receiver, by row key."""
        with self._database.read() as connection:
            return {row[0]: row[1] for row in connection.execute(COUNTS)}

    def announce(self, receiver_pk: int, topics: Sequence[str]) -> None:
        """Store the topics of devices that a broker retains."""
        with self._database.write(_CONFLICT) as connection:
            connection.execute(receivers.update().where(receivers.c.pk == receiver_pk).values(announced=sorted(topics)))

    def sweep(self, now: datetime | None) -> None:
        """Delete events that no receiver needs any more; none by its age if ``now`` is None: the clock is wrong."""
        with self._database.read() as connection:
            rows = connection.execute(sa.select(receivers)).all()
            unused = [row.pk for row in rows if row.id in BUILT_IN and now is not None and row.used_at < now - MAX_AGE]
            rows = [row for row in rows if row.pk not in unused]
            doomed = _doomed(connection, rows, now)
            last = connection.execute(_last(doomed)).first()
            moved = self._database.file is None and connection.execute(MOVED).scalar_one()
        if last is None and not unused and not moved:
            return
        with self._database.write(_CONFLICT) as connection:
            if unused:
                connection.execute(receivers.delete().where(receivers.c.pk.in_(unused)))
            if moved:  # from another PostgreSQL server, with higher numbers of transactions
                connection.execute(events.update().values(xid=0))
                connection.execute(receivers.update().values(xid=0))
            elif last is not None:
                stream = receivers.c.id == "stream"
                earlier = sa.tuple_(receivers.c.xid, receivers.c.event_pk) < sa.tuple_(*map(sa.literal, last))
                connection.execute(receivers.update().where(stream, earlier).values(xid=last.xid, event_pk=last.pk))
                connection.execute(events.delete().where(doomed))


def insert_receiver(database: Database, connection: Connection, webhook: Webhook) -> bool:
    """Insert a receiver at the end of the log, unless there is one with its id."""
    row: dict[str, Any] = {
        "id": webhook.id,
        "sealed": seal_webhook(webhook_seal(connection, database.vault), webhook),
        "used_at": webhook.created_at,
        "created_at": webhook.created_at,
        **end_of_log(connection)._asdict(),
    }
    return insert_missing(connection, receivers, **row)


def _doomed(connection: Connection, rows: Sequence[sa.Row[Any]], now: datetime | None) -> sa.ColumnElement[bool]:
    """Select the events to delete, given the receivers."""
    if not rows:
        return sa.true()
    doomed: sa.ColumnElement[bool] = sa.false()
    if now is not None:
        # Only a sender moves a place: what a receiver did not get stays until it is switched off.
        places = [place_of(row) for row in rows if row.id != "stream"]
        passed = min((place.position for place in places if not place.is_off), default=None)
        old = events.c.at < now - MAX_AGE
        doomed = old if passed is None else old & ~beyond(passed)
    surplus = connection.execute(_last(sa.true()).offset(MAX_KEPT)).first()
    if surplus is None:
        return doomed
    first = Position(surplus.xid, surplus.pk)
    for row in rows:
        if row.id != "stream" and place_of(row).position < first:
            log.warning("receiver %s: the oldest of more than %d events that waited are deleted", row.id, MAX_KEPT)
    return doomed | ~beyond(first)


def _last(chosen: sa.ColumnElement[bool]) -> sa.Select[int, int]:
    return sa.select(events.c.xid, events.c.pk).where(chosen).order_by(events.c.xid.desc(), events.c.pk.desc()).limit(1)


STATE: Final = ("failing_s", "failing_since", "error")
# Built once: building a statement takes longer in SQLAlchemy than SQLite takes to run it.
DUE: Final = (
    sa.select(receivers.c.pk)
    .select_from(receivers.join(events, sa.true()))
    .where(receivers.c.pk == sa.bindparam("receiver"), events.c.pk == sa.bindparam("event"))
)
MOVE: Final = (
    receivers.update()
    .where(
        receivers.c.pk == sa.bindparam("receiver"),
        receivers.c.xid == sa.bindparam("xid_before"),
        receivers.c.event_pk == sa.bindparam("pk_before"),
    )
    .values({name: sa.bindparam(name) for name in ("xid", "event_pk", *STATE)})
)
COUNTS: Final = sa.select(
    receivers.c.pk,
    sa.select(sa.func.count())
    .where(sa.tuple_(receivers.c.xid, receivers.c.event_pk) < PLACED)
    .correlate(receivers)
    .scalar_subquery(),
)
MOVED: Final[sa.Select[Any]] = sa.select(
    sa.exists().where(receivers.c.xid > sa.text("pg_snapshot_xmax(pg_current_snapshot())::text::bigint"))
)
