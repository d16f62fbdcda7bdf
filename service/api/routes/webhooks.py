"""Webhooks: create, list, delete, test, see what was delivered, and send again what was not.

A secret is shown once, when it is created.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any

from fastapi import Path, Query

from kith.wire.common import DeliveryState
from kith.wire.webhooks import (
    CreatedWebhookOut,
    DeletedWebhookOut,
    DeliveriesOut,
    DeliveryOut,
    WebhookIn,
    WebhookOut,
    WebhookReplayOut,
    WebhooksOut,
    WebhookTestOut,
)
from service.api.http.parameters import Cursor, PageLimit, open_cursor, paginate
from service.api.http.routing import ADMIN_ALL, BackendDep, Routes
from service.core.errors import TooManyWebhooksError, WebhookRefusedError
from service.domain.events import EventFilter
from service.storage.events.deliveries import Delivery
from service.storage.events.outbox import Webhook

routes = Routes("/v1/webhooks", "webhooks")
WebhookPath = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]


@routes.add(
    "POST",
    "",
    ADMIN_ALL,
    status_code=201,
    example={"url": "https://door.example.org/events", "types": ["decision"], "outcomes": ["unknown"]},
    errors=(WebhookRefusedError, TooManyWebhooksError),
)
async def create_webhook(body: WebhookIn, backend: BackendDep) -> CreatedWebhookOut:
    """Create a webhook for the events from now on. Only this response contains its secret."""
    backend.operations.webhooks.sender.check(body.url)
    create = backend.operations.webhooks.store.create
    return _created(await backend.run(create, body.url, body.name, _filter(body)))


@routes.add("GET", "", ADMIN_ALL)
async def list_webhooks(backend: BackendDep) -> WebhooksOut:
    """List the webhooks, oldest first."""
    found = await backend.run(backend.operations.webhooks.store.list_all)
    return WebhooksOut(data=[_webhook(webhook) for webhook in found])


@routes.add("GET", "/{webhook}", ADMIN_ALL)
async def get_webhook(webhook: WebhookPath, backend: BackendDep) -> WebhookOut:
    """Return a webhook, without its secret."""
    return _webhook(await backend.run(backend.operations.webhooks.store.get, webhook))


@routes.add("DELETE", "/{webhook}", ADMIN_ALL)
async def delete_webhook(webhook: WebhookPath, backend: BackendDep) -> DeletedWebhookOut:
    """Delete a webhook with its deliveries. Pending ones are not sent."""
    await backend.run(backend.operations.webhooks.store.delete, webhook)
    return DeletedWebhookOut(id=webhook)


@routes.add("POST", "/{webhook}/test", ADMIN_ALL, errors=(WebhookRefusedError,))
async def test_webhook(webhook: WebhookPath, backend: BackendDep) -> WebhookTestOut:
    """Send an event of the type `test` now, once, and return the receiver's answer."""
    answer = await backend.operations.webhooks.sender.test(
        await backend.run(backend.operations.webhooks.store.get, webhook)
    )
    return WebhookTestOut(delivered=answer.error is None, status=answer.status, error=answer.error)


@routes.add("POST", "/{webhook}/replay", ADMIN_ALL)
async def replay_webhook(webhook: WebhookPath, backend: BackendDep) -> WebhookReplayOut:
    """Send the dead deliveries of a webhook again, with the same ids, after what was delivered since."""
    found = await backend.run(backend.operations.webhooks.store.get, webhook)
    return WebhookReplayOut(replayed_count=await backend.run(backend.operations.webhooks.deliveries.replay, found))


@routes.add("GET", "/{webhook}/deliveries", ADMIN_ALL)
async def list_deliveries(
    webhook: WebhookPath,
    backend: BackendDep,
    state: Annotated[
        list[DeliveryState], Query(max_length=3, description="Only deliveries in one of these states.")
    ] = [],  # noqa: B006
    cursor: Cursor = None,
    limit: PageLimit = 100,
) -> DeliveriesOut:
    """List the deliveries to a webhook, latest first: all pending ones, the last 100 delivered and 1,000 dead ones."""
    found = await backend.run(backend.operations.webhooks.store.get, webhook)
    seal = (await backend.run(backend.operations.keys.ring)).seal
    before = open_cursor(seal, cursor)
    rows = await backend.run(backend.operations.webhooks.deliveries.list_page, found, state, before, limit + 1)
    page, more = paginate(rows, limit, seal, lambda row: row.pk)
    return DeliveriesOut(data=[_delivery(row) for row in page], next=more)


def _filter(body: WebhookIn) -> EventFilter:
    return EventFilter(_set(body.types), _set(body.galleries), _set(body.outcomes), body.min_risk)


def _set(values: Collection[Any] | None) -> frozenset[Any] | None:
    return None if values is None else frozenset(values)


def _webhook(webhook: Webhook) -> WebhookOut:
    chosen = {n: sorted(value) if isinstance(value, frozenset) else value for n, value in vars(webhook.filter).items()}
    return WebhookOut.model_validate(vars(webhook) | chosen)


def _created(webhook: Webhook) -> CreatedWebhookOut:
    return CreatedWebhookOut(**vars(_webhook(webhook)), secret=webhook.secret)


def _delivery(delivery: Delivery) -> DeliveryOut:
    ended = {} if delivery.state == "pending" else {"next_at": None}
    return DeliveryOut.model_validate(vars(delivery) | {"attempt_count": delivery.attempts} | ended)
