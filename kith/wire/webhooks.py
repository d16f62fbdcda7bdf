"""Webhooks and their deliveries."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field, StringConstraints

from kith.wire.common import DeliveryState, EventType, IdentifyOutcome, Page
from kith.wire.fields import MAX_URL_LENGTH, NORMALIZED, SINGLE_LINE, GalleryName, RequestModel, Timestamp


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


class WebhookOut(BaseModel):
    id: str
    name: str | None
    url: str
    types: list[EventType] | None = Field(description="Null: all.")
    galleries: list[str] | None = Field(description="Null: all.")
    outcomes: list[IdentifyOutcome] | None = Field(description="Outcomes of decisions; null: all.")
    min_risk: float | None = Field(description="Minimum false alarm probability of decisions.")
    created_at: Timestamp


class CreatedWebhookOut(WebhookOut):
    secret: str = Field(description="Key of the signatures. Shown only once, in this response.")


class WebhooksOut(Page[WebhookOut]):
    """All webhooks."""


class DeletedWebhookOut(BaseModel):
    id: str


class WebhookTestOut(BaseModel):
    delivered: bool
    status: int | None = Field(description="HTTP status of the receiver; null without a response.")
    error: str | None


class WebhookReplayOut(BaseModel):
    replayed_count: int = Field(description="Dead deliveries that are pending again.")


class DeliveryOut(BaseModel):
    event: str = Field(description="ID of the event, as in the header webhook-id.")
    type: EventType
    gallery: str
    state: DeliveryState = Field(description="dead: given up; the receiver will not get the event.")
    attempt_count: int
    status: int | None = Field(description="HTTP status of the last attempt; null without a response.")
    error: str | None = Field(description="Problem of the last attempt.")
    at: Timestamp = Field(description="Time of the event.")
    updated_at: Timestamp = Field(description="Time of the last attempt.")
    next_at: Timestamp | None = Field(description="Time of the next attempt; null once the delivery has ended.")


class DeliveriesOut(Page[DeliveryOut]):
    """Page of the deliveries to a webhook."""
