"""Webhooks: create, list, delete, test, and send stored events again.

A secret is shown once, when it is created.
"""

from __future__ import annotations

from collections.abc import Mapping

from kith.wire.fields import ObjectId, Page
from kith.wire.webhooks import (
    CreatedWebhookOut,
    DeletedWebhookOut,
    WebhookIn,
    WebhookOut,
    WebhookReplayOut,
    WebhookTestOut,
)
from service.api.http.access import ADMIN_ALL, BackendDep, router
from service.api.http.bodies import JsonBody
from service.api.http.openapi import example
from service.domain.events import EventFilter
from service.storage.events.outbox import Webhook

routes = router("/v1/webhooks", "webhooks")


@routes.post(
    "",
    dependencies=[ADMIN_ALL],
    status_code=201,
    openapi_extra=example({"url": "https://door.example.org/events", "types": ["decision"], "outcomes": ["unknown"]}),
)
async def create_webhook(body: JsonBody[WebhookIn], backend: BackendDep) -> CreatedWebhookOut:
    """Create a webhook for the events from now on. Only this response contains its secret."""
    backend.webhooks.sender.check(body.url)
    create, chosen = backend.store.webhooks.create, body.model_dump(exclude={"url", "name"})
    return _created(await backend.threads.run(create, body.url, body.name, EventFilter(**chosen)))


@routes.get("", dependencies=[ADMIN_ALL])
async def list_webhooks(backend: BackendDep) -> Page[WebhookOut]:
    """List the webhooks, oldest first, with the place of each in the log of events."""
    waiting = await backend.threads.run(backend.store.receivers.waiting_counts)
    found = await backend.threads.run(backend.store.webhooks.list_all)
    return Page[WebhookOut](data=[_webhook(webhook, waiting) for webhook in found])


@routes.get("/{webhook}", dependencies=[ADMIN_ALL])
async def get_webhook(webhook: ObjectId, backend: BackendDep) -> WebhookOut:
    """Return a webhook, without its secret."""
    waiting = await backend.threads.run(backend.store.receivers.waiting_counts)
    return _webhook(await backend.threads.run(backend.store.webhooks.get, webhook), waiting)


@routes.delete("/{webhook}", dependencies=[ADMIN_ALL])
async def delete_webhook(webhook: ObjectId, backend: BackendDep) -> DeletedWebhookOut:
    """Delete a webhook. Events that wait for it are not sent."""
    await backend.threads.run(backend.store.webhooks.delete, webhook)
    return DeletedWebhookOut(id=webhook)


@routes.post("/{webhook}/test", dependencies=[ADMIN_ALL])
async def test_webhook(webhook: ObjectId, backend: BackendDep) -> WebhookTestOut:
    """Send an event of the type `test` now, once, and return the receiver's answer."""
    answer = await backend.webhooks.sender.test(await backend.threads.run(backend.store.webhooks.get, webhook))
    return WebhookTestOut(delivered=answer.error is None, status=answer.status, error=answer.error)


@routes.post("/{webhook}/replay", dependencies=[ADMIN_ALL])
async def replay_webhook(webhook: ObjectId, backend: BackendDep) -> WebhookReplayOut:
    """Send all stored events to a webhook again, with the same ids, and switch it on if it is off."""
    found = await backend.threads.run(backend.store.webhooks.get, webhook)
    count = await backend.threads.run(backend.store.receivers.replay, found)
    backend.webhooks.wake()
    return WebhookReplayOut(replayed_count=count)


def _webhook(webhook: Webhook, waiting: Mapping[int, int]) -> WebhookOut:
    place = webhook.place
    about = {
        "position": place.position.event_pk,
        "waiting_count": waiting.get(webhook.pk, 0),
        "failing_since": place.failing_since,
        "error": place.error,
        "off": place.is_off,
    }
    return WebhookOut.model_validate(vars(webhook) | vars(webhook.filter) | about)


def _created(webhook: Webhook) -> CreatedWebhookOut:
    return CreatedWebhookOut(**vars(_webhook(webhook, {})), secret=webhook.secret)
