"""Webhooks: creation, listing and deletion. A webhook is never changed."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

import sqlalchemy as sa

from service.core.errors import StorageBusyError, TooManyWebhooksError, WebhookNotFoundError
from service.domain.events import EventFilter
from service.security.webhook_signature import new_secret
from service.storage.audit.log import note
from service.storage.db.engine import Database
from service.storage.db.leases import Lease
from service.storage.db.tables import webhooks
from service.storage.events.deliveries import MAX_AGE, lease_of
from service.storage.events.outbox import BUILT_IN, BuiltIn, Webhook, read_webhooks, seal_webhook, webhook_seal

MAX_WEBHOOKS: Final = 100
"""Every write to a gallery opens all webhooks, in about 10 microseconds each."""
OWN: Final = webhooks.c.id.not_in(BUILT_IN)
_CONFLICT: Final = StorageBusyError("another webhook was written at the same time")


class WebhookStore:
    """Webhooks in SQL. Every method is one transaction and blocks.

    Writes and decisions that begin after :meth:`create` returned are reported; galleries are read with the filters of
    their decisions (``Gallery.listeners``).
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, url: str, name: str | None, chosen: EventFilter) -> Webhook:
        """Create a webhook with a new secret. Raises TooManyWebhooksError."""
        with self._database.write(_CONFLICT) as connection:
            count = connection.execute(sa.select(sa.func.count()).select_from(webhooks).where(OWN)).scalar_one()
            if count >= MAX_WEBHOOKS:
                raise TooManyWebhooksError(f"there are {count} webhooks, the limit")
            webhook = Webhook(0, uuid.uuid4().hex, name, url, new_secret(), chosen, datetime.now(UTC))
            sealed = seal_webhook(webhook_seal(connection, self._database.vault), webhook)
            row = {"id": webhook.id, "sealed": sealed, "created_at": webhook.created_at}
            pk = connection.execute(webhooks.insert().values(**row).returning(webhooks.c.pk)).scalar_one()
            galleries = None if chosen.galleries is None else sorted(chosen.galleries)
            types = None if chosen.types is None else sorted(chosen.types)
            about: dict[str, Any] = {"webhook": webhook.id, "types": types, "galleries": galleries}
            note(self._database.vault, connection, "webhook_created", **about)
        return replace(webhook, pk=pk)

    def list_all(self) -> Sequence[Webhook]:
        """Return all webhooks, oldest first."""
        with self._database.read() as connection:
            return read_webhooks(connection, self._database.vault, OWN)

    def get(self, webhook_id: str) -> Webhook:
        """Raises WebhookNotFoundError."""
        with self._database.read() as connection:
            found = read_webhooks(connection, self._database.vault, webhooks.c.id == webhook_id)
        if not found:
            raise WebhookNotFoundError(f"there is no webhook {webhook_id!r}")
        return found[0]

    def delete(self, webhook_id: str) -> None:
        """Delete a webhook with its deliveries. Raises WebhookNotFoundError."""
        with self._database.write(_CONFLICT) as connection:
            if connection.execute(webhooks.delete().where(webhooks.c.id == webhook_id)).rowcount == 0:
                raise WebhookNotFoundError(f"there is no webhook {webhook_id!r}")
            note(self._database.vault, connection, "webhook_deleted", webhook=webhook_id)

    def claim(self, receiver: BuiltIn) -> None:
        """Have all events from now on stored for a built-in receiver, until ``MAX_AGE`` after its last claim."""
        lease = Lease(self._database, lease_of(receiver))
        with self._database.read() as connection:
            now = self._database.now(connection)
        while not lease.acquire(receiver, now, MAX_AGE):
            pass  # a sweep ended the lease at the same time
        with self._database.read() as connection:
            if connection.execute(sa.select(webhooks.c.pk).where(webhooks.c.id == receiver)).first() is not None:
                return
        try:
            with self._database.write(_CONFLICT) as connection:
                webhook = Webhook(0, receiver, None, "", "", EventFilter(), datetime.now(UTC))
                sealed = seal_webhook(webhook_seal(connection, self._database.vault), webhook)
                connection.execute(webhooks.insert().values(id=receiver, sealed=sealed, created_at=webhook.created_at))
                note(self._database.vault, connection, "webhook_created", webhook=receiver)
        except StorageBusyError as error:
            if error is not _CONFLICT:  # otherwise another process inserted it
                raise
