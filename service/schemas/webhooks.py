"""Webhooks: requests, and conversion to responses."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any

from pydantic import Field, StringConstraints

from kith.wire.common import EventType, IdentifyOutcome
from kith.wire.webhooks import CreatedWebhookOut, DeliveryOut, WebhookOut
from service.domain.events import EventFilter
from service.schemas.fields import NORMALIZED, SINGLE_LINE, GalleryName, RequestModel
from service.security.outbound_http import MAX_URL_LENGTH
from service.storage.events.deliveries import Delivery
from service.storage.events.webhook_rows import Webhook


class WebhookIn(RequestModel):
    url: Annotated[str, StringConstraints(min_length=1, max_length=MAX_URL_LENGTH, pattern=SINGLE_LINE)] = Field(
        description="Address that KITH_WEBHOOK_HOSTS allows."
    )
    name: Annotated[str, StringConstraints(max_length=128, pattern=SINGLE_LINE), NORMALIZED] | None = None
    types: list[EventType] | None = Field(None, min_length=1, max_length=10, description="Types of events; null: all.")
    galleries: list[GalleryName] | None = Field(
        None, min_length=1, max_length=100, description="Names of galleries, existing or future; null: all."
    )
    outcomes: list[IdentifyOutcome] | None = Field(
        None, min_length=1, max_length=10, description="Outcomes of decisions; null: all."
    )
    min_risk: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Minimum false_alarm_probability of decisions. Decisions without a candidate pass it.",
    )

    @property
    def filter(self) -> EventFilter:
        return EventFilter(_set(self.types), _set(self.galleries), _set(self.outcomes), self.min_risk)


def _set(values: Collection[Any] | None) -> frozenset[Any] | None:
    return None if values is None else frozenset(values)


def to_webhook_out(webhook: Webhook) -> WebhookOut:
    """Convert a webhook, without its secret."""
    return WebhookOut.model_validate(_fields(webhook))


def to_new_webhook_out(webhook: Webhook) -> CreatedWebhookOut:
    """Convert a webhook with its secret."""
    return CreatedWebhookOut.model_validate({**_fields(webhook), "secret": webhook.secret})


def to_delivery_out(delivery: Delivery) -> DeliveryOut:
    fields = vars(delivery) | ({} if delivery.state == "pending" else {"next_at": None})
    return DeliveryOut.model_validate(fields)


def _fields(webhook: Webhook) -> dict[str, Any]:
    chosen = {n: sorted(value) if isinstance(value, frozenset) else value for n, value in vars(webhook.filter).items()}
    return {**vars(webhook), **chosen}
