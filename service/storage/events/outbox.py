"""Log of events: rows stored in the transaction of what they report, if at least one receiver wants them.

Readers go by position, in the order of ``xid`` and ``pk``. SQLite has one writer at a time: its keys are in the order
of commits. PostgreSQL commits in another order than it gives numbers to transactions. There an event is read once all
transactions up to its own have ended, so that none is passed over.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple, get_args

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from service.core.errors import MasterKeyError
from service.domain.events import GIVE_UP_AFTER, Event, EventFilter, Position
from service.domain.gallery import Gallery
from service.security.sealing import Seal, SealBrokenError
from service.storage.db.key_vault import Vault
from service.storage.db.row_sealing import EVENT, subject_lookup
from service.storage.db.tables import events, receivers, subjects

BuiltIn = Literal["stream", "mqtt"]
"""ID of a receiver that the service creates for itself: ``mqtt`` is the MQTT broker. ``stream`` has events stored for
event streams; its position is the last event that was deleted."""
BUILT_IN: Final[tuple[BuiltIn, ...]] = get_args(BuiltIn)
SECRET: Final = "webhooks"  # noqa: S105 - name of the service's secret that seals webhooks
PURPOSE: Final = "webhook"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """Where a receiver is. ``failing_s``: how long senders saw it fail, since ``failing_since``; 0: it works."""

    position: Position
    failing_s: float = 0
    failing_since: datetime | None = None
    error: str | None = None

    @property
    def is_off(self) -> bool:
        """Whether it is switched off: it said so, or failed for too long. A replay switches it on again."""
        return self.failing_s >= GIVE_UP_AFTER.total_seconds()


@dataclass(frozen=True)
class Webhook:
    """Receiver of events. ``secret``: as :func:`service.security.webhook_signature.new_secret` returns it."""

    pk: int
    id: str
    name: str | None
    url: str = field(repr=False)
    secret: str = field(repr=False)
    filter: EventFilter
    created_at: datetime
    place: Place = Place(Position(0, 0))


def read_webhooks(
    connection: Connection, vault: Vault, chosen: sa.ColumnElement[bool] | None = None
) -> Sequence[Webhook]:
    """Return all receivers, or the chosen ones, oldest first. An altered row is logged and left out.

    Raises MasterKeyError: they cannot be opened. Without receivers, no key is needed.
    """
    rows = connection.execute(RECEIVERS if chosen is None else RECEIVERS.where(chosen)).all()
    if not rows:
        return ()
    seal = webhook_seal(connection, vault)
    return [webhook for row in rows if (webhook := _webhook(seal, row)) is not None]


def place_of(row: sa.Row[Any]) -> Place:
    return Place(Position(row.xid, row.event_pk), row.failing_s, row.failing_since, row.error)


def end_of_log(connection: Connection) -> Position:
    """Return the position up to which no event will be added any more."""
    if connection.dialect.name == "postgresql":
        return Position(connection.execute(HORIZON).scalar_one(), 0)
    return Position(0, connection.execute(SQLITE_LAST).scalar() or 0)


def beyond(position: Position) -> sa.ColumnElement[bool]:
    """Select the events after a position."""
    return sa.tuple_(*map(sa.literal, position)) < PLACED


def webhook_seal(connection: Connection, vault: Vault) -> Seal:
    """Return the seal of all webhooks. Raises MasterKeyError."""
    return Seal(vault.secret(connection, SECRET))


def seal_webhook(seal: Seal, webhook: Webhook) -> bytes:
    document = {name: getattr(webhook, name) for name in ("id", "name", "url", "secret")}
    return seal.close_json(document | {"filter": vars(webhook.filter)}, PURPOSE)


def _webhook(seal: Seal, row: sa.Row[Any]) -> Webhook | None:
    try:
        opened = seal.open_json(row.sealed, PURPOSE)
    except SealBrokenError:
        opened = {"id": None}
    if opened["id"] != row.id:
        log.error("webhook %s was altered in the database and receives nothing. Delete it.", row.id)
        return None
    name, url, secret = (opened[key] for key in ("name", "url", "secret"))
    return Webhook(row.pk, row.id, name, url, secret, EventFilter(**opened["filter"]), row.created_at, place_of(row))


class Origin(NamedTuple):
    """Gallery of an event, where no whole :class:`Gallery` is known."""

    pk: int
    name: str
    seal: Seal


def open_event(vault: Vault, row: sa.Row[*tuple[Any, ...]]) -> dict[str, Any] | None:
    """Return the document of an event's row with its gallery's key; None if it cannot be decrypted."""
    seal = vault.seal(row.gallery_pk, row.wrapped, row.master_key)
    try:
        document: dict[str, Any] = seal.open_json(row.sealed, EVENT)
    except (MasterKeyError, SealBrokenError):
        return None
    return document


def publish(vault: Vault, connection: Connection, gallery: Gallery | Origin, new: Sequence[Event]) -> None:
    """Store the events that a receiver wants, in the current writing transaction, which must hold the gallery's row.

    Left out are events of a gallery whose key is lost, and events about an erased subject. A stranger is one that the
    transaction holds.

    Raises MasterKeyError: the webhooks cannot be opened.
    """
    if not new:
        return
    known = [webhook for webhook in read_webhooks(connection, vault) if not webhook.place.is_off]
    wanted = [event for event in new if any(webhook.filter.wants(gallery.name, event) for webhook in known)]
    if not wanted:
        return
    xid = connection.execute(XID).scalar_one() if connection.dialect.name == "postgresql" else 0
    try:
        for event in wanted:
            _insert(connection, gallery, event, xid)
    except MasterKeyError as error:
        log.warning("events of gallery %d are not reported: %s", gallery.pk, error.detail)


def _insert(connection: Connection, gallery: Gallery | Origin, event: Event, xid: int) -> None:
    about = event.stranger_pk
    if event.subject is not None:
        lookup = subject_lookup(gallery.seal, event.subject)
        about = connection.execute(SUBJECT, {"gallery": gallery.pk, "lookup": lookup}).scalar()
        if about is None:
            return
    row = {
        "id": uuid.uuid4().hex,
        "xid": xid,
        "gallery_pk": gallery.pk,
        "type": event.type,
        "subject_pk": about,
        "sealed": gallery.seal.close_json(event.document(gallery.name), EVENT),
        "at": event.at,
    }
    connection.execute(EVENTS, row)


# Built once: building a statement takes longer in SQLAlchemy than SQLite takes to run it.
RECEIVERS: Final = sa.select(receivers).order_by(receivers.c.pk)
EVENTS: Final = events.insert()
PLACED: Final = sa.tuple_(events.c.xid, events.c.pk)
"""Position of an event."""
SUBJECT: Final = (
    sa.select(subjects.c.pk)
    .where(subjects.c.gallery_pk == sa.bindparam("gallery"), subjects.c.lookup == sa.bindparam("lookup"))
    .with_for_update(read=True, key_share=True)
)
SQLITE_LAST: Final[sa.Select[Any]] = (
    sa.select(sa.column("seq")).select_from(sa.table("sqlite_sequence")).where(sa.column("name") == events.name)
)
XID: Final[sa.Select[Any]] = sa.select(sa.text("pg_current_xact_id()::text::bigint"))
HORIZON: Final[sa.Select[Any]] = sa.select(sa.text("pg_snapshot_xmin(pg_current_snapshot())::text::bigint"))
"""All transactions with a lower number have ended."""
