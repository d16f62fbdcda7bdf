"""Webhooks: creation, listing and deletion. Only its place is changed."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import sqlalchemy as sa

from service.core.errors import LimitReachedError, NotFoundError, StorageBusyError
from service.domain.events import EventFilter
from service.security.webhook_signature import new_secret
from service.storage.audit.log import note
from service.storage.db.engine import Database
from service.storage.db.tables import receivers
from service.storage.events.outbox import BUILT_IN, Webhook, read_webhooks
from service.storage.repositories.receivers import insert_receiver

MAX_WEBHOOKS: Final = 100
"""Every write to a gallery opens all webhooks, in about 10 microseconds each."""
OWN: Final = receivers.c.id.not_in(BUILT_IN)
_CONFLICT: Final = StorageBusyError("another webhook was written at the same time")


class WebhookStore:
    """Webhooks in SQL. Every method is one transaction and blocks.

    Writes and decisions that begin after :meth:`create` returned are reported; galleries are read with the filters of
    their decisions (``Gallery.listeners``).
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, url: str, name: str | None, chosen: EventFilter) -> Webhook:
        """Create a webhook with a new secret. Raises too_many_webhooks."""
        with self._database.write(_CONFLICT) as connection:
            count = connection.execute(sa.select(sa.func.count()).select_from(receivers).where(OWN)).scalar_one()
            if count >= MAX_WEBHOOKS:
                raise LimitReachedError("too_many_webhooks", f"there are {count} webhooks, the limit")
            webhook = Webhook(0, uuid.uuid4().hex, name, url, new_secret(), chosen, datetime.now(UTC))
            insert_receiver(self._database, connection, webhook)
            about: dict[str, Any] = {"webhook": webhook.id, "types": chosen.types, "galleries": chosen.galleries}
            note(self._database.vault, connection, "webhook_created", **about)
        return webhook

    def list_all(self) -> Sequence[Webhook]:
        """Return all webhooks, oldest first."""
        with self._database.read() as connection:
            return read_webhooks(connection, self._database.vault, OWN)

    def get(self, webhook_id: str) -> Webhook:
        """Raises webhook_not_found."""
        with self._database.read() as connection:
            found = read_webhooks(connection, self._database.vault, receivers.c.id == webhook_id)
        if not found:
            raise NotFoundError("webhook", f"there is no webhook {webhook_id!r}")
        return found[0]

    def delete(self, webhook_id: str) -> None:
        """Delete a webhook; it gets nothing from now on. Raises webhook_not_found."""
        with self._database.write(_CONFLICT) as connection:
            if connection.execute(receivers.delete().where(receivers.c.id == webhook_id)).rowcount == 0:
                raise NotFoundError("webhook", f"there is no webhook {webhook_id!r}")
            note(self._database.vault, connection, "webhook_deleted", webhook=webhook_id)
