"""Webhooks, and their outbox: events stored in the transaction of what they report, once for each webhook that wants
them.

Event streams receive as a webhook without deliveries: they read the events themselves. Nothing is written if no webhook
wants an event. The events of a gallery have ascending keys in the order of commits, because each transaction locks the
gallery's audit chain, which ``service.storage.audit.log`` locks as well.
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
from service.domain.events import Event, EventFilter
from service.domain.gallery import Gallery
from service.security.sealing import Seal, SealBrokenError
from service.storage.db.key_vault import Vault
from service.storage.db.row_sealing import EVENT, subject_lookup
from service.storage.db.tables import audit_heads, deliveries, events, galleries, subjects, webhooks

BuiltIn = Literal["stream", "mqtt"]
"""ID of a webhook that the service creates for itself: ``stream`` keeps the events for event streams, and ``mqtt``
stands for the MQTT broker."""
BUILT_IN: Final[tuple[BuiltIn, ...]] = get_args(BuiltIn)
PUBLISHING: Final = 0x4B69
"""First 16 bits of PostgreSQL's advisory locks of transactions that add events. The others are a lower bound of the
keys of those events."""
SECRET: Final = "webhooks"  # noqa: S105 - name of the service's secret that seals webhooks
PURPOSE: Final = "webhook"
log = logging.getLogger(__name__)


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


def read_webhooks(
    connection: Connection, vault: Vault, chosen: sa.ColumnElement[bool] | None = None, lock: bool = False
) -> Sequence[Webhook]:
    """Return all webhooks, or the chosen ones, oldest first. An altered row is logged and left out.

    Raises MasterKeyError: the webhooks cannot be opened. Without webhooks, no key is needed.
    """
    query = LOCKED if lock else WEBHOOKS
    rows = connection.execute(query if chosen is None else query.where(chosen)).all()
    if not rows:
        return ()
    seal = webhook_seal(connection, vault)
    return [webhook for row in rows if (webhook := _webhook(seal, row)) is not None]


def webhook_seal(connection: Connection, vault: Vault) -> Seal:
    """Return the seal of all webhooks. Raises MasterKeyError."""
    return Seal(vault.secret(connection, SECRET))


def seal_webhook(seal: Seal, webhook: Webhook) -> bytes:
    chosen = {
        name: sorted(value) if isinstance(value, frozenset) else value for name, value in vars(webhook.filter).items()
    }
    document = {
        "id": webhook.id,
        "name": webhook.name,
        "url": webhook.url,
        "secret": webhook.secret,
        "filter": chosen,
    }
    return seal.close_json(document, PURPOSE)


def _webhook(seal: Seal, row: sa.Row[Any]) -> Webhook | None:
    try:
        opened = seal.open_json(row.sealed, PURPOSE)
    except SealBrokenError:
        opened = {"id": None}
    if opened["id"] != row.id:
        log.error("webhook %s was altered in the database and receives nothing. Delete it.", row.id)
        return None
    chosen: dict[str, Any] = {
        field: frozenset(value) if isinstance(value, list) else value for field, value in opened["filter"].items()
    }
    name, url, secret = (opened[key] for key in ("name", "url", "secret"))
    return Webhook(row.pk, row.id, name, url, secret, EventFilter(**chosen), row.created_at)


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
    """Store the events that a webhook wants, in the current writing transaction.

    Left out are events of a deleted gallery, or one whose key is lost, and events about an erased subject.

    Raises MasterKeyError: the webhooks cannot be opened.
    """
    if not new:
        return
    known = read_webhooks(connection, vault, lock=True)
    wanted = [(event, [w for w in known if w.filter.wants(gallery.name, event)]) for event in new]
    wanted = [(event, receivers) for event, receivers in wanted if receivers]
    if not wanted or not _lock(connection, gallery.pk):
        return
    try:
        gallery.seal.unlock()
    except MasterKeyError as error:
        log.warning("events of gallery %d are not reported: %s", gallery.pk, error.detail)
        return
    if connection.dialect.name == "postgresql":
        connection.execute(LOCK_PUBLISHING)
    for event, receivers in wanted:
        _insert(connection, gallery, event, [webhook.pk for webhook in receivers if webhook.id != "stream"])


def _lock(connection: Connection, gallery_pk: int) -> bool:
    """Lock the gallery's row and its audit chain, in the order of a deletion; return whether the gallery exists."""
    exists = connection.execute(LOCK_ROW, {"gallery": gallery_pk}).first() is not None
    connection.execute(LOCK_CHAIN, {"gallery": gallery_pk})
    return exists


def _insert(connection: Connection, gallery: Gallery | Origin, event: Event, receivers: Sequence[int]) -> None:
    lookup = event.stranger if event.subject is None else subject_lookup(gallery.seal, event.subject)
    if (
        event.subject is not None
        and connection.execute(KNOWN, {"gallery": gallery.pk, "lookup": lookup}).first() is None
    ):
        return
    inserted = events.insert().values(
        id=uuid.uuid4().hex,
        gallery_pk=gallery.pk,
        type=event.type,
        subject=lookup,
        sealed=gallery.seal.close_json(event.document(gallery.name), EVENT),
        at=event.at,
    )
    event_pk: int = connection.execute(inserted.returning(events.c.pk)).scalar_one()
    row = {"gallery_pk": gallery.pk, "event_pk": event_pk, "state": "pending", "attempts": 0}
    times = {"next_at": event.at, "updated_at": event.at}
    if receivers:
        connection.execute(deliveries.insert(), [{"webhook_pk": pk, **row, **times} for pk in receivers])


# Built once: building a statement takes longer in SQLAlchemy than SQLite takes to run it.
WEBHOOKS: Final = sa.select(webhooks).order_by(webhooks.c.pk)
LOCKED: Final = WEBHOOKS.with_for_update(read=True, key_share=True)
LOCK_ROW: Final = (
    sa.select(galleries.c.pk)
    .where(galleries.c.pk == sa.bindparam("gallery"))
    .with_for_update(read=True, key_share=True)
)
LOCK_CHAIN: Final = (
    sa.select(audit_heads.c.chain).where(audit_heads.c.chain == sa.bindparam("gallery")).with_for_update()
)
LAST_KEY: Final = "SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END AS pk FROM events_pk_seq"
"""The highest key that an event got, also in an unfinished transaction."""
LOCK_PUBLISHING: Final = sa.text(
    f"SELECT pg_advisory_xact_lock_shared(({PUBLISHING}::bigint << 48) | pk) FROM ({LAST_KEY}) AS last"  # noqa: S608
)
KNOWN: Final = sa.select(subjects.c.pk).where(
    subjects.c.gallery_pk == sa.bindparam("gallery"), subjects.c.lookup == sa.bindparam("lookup")
)
