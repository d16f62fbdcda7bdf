"""Webhook rows: their sealed columns, and the query that reads them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from service.domain.events import EventFilter
from service.security.sealing import Seal, SealBrokenError
from service.storage.db.key_vault import Vault
from service.storage.db.tables import webhooks

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
    return seal.close_json(
        {
            "id": webhook.id,
            "name": webhook.name,
            "url": webhook.url,
            "secret": webhook.secret,
            "filter": {
                name: sorted(value) if isinstance(value, frozenset) else value
                for name, value in vars(webhook.filter).items()
            },
        },
        PURPOSE,
    )


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


# Built once: building a statement takes longer in SQLAlchemy than SQLite takes to run it.
WEBHOOKS: Final = sa.select(webhooks).order_by(webhooks.c.pk)
LOCKED: Final = WEBHOOKS.with_for_update(read=True, key_share=True)
