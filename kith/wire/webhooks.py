"""Webhooks."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field, StringConstraints

from kith.wire.common import EventType, IdentifyOutcome
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
    position: int = Field(description="Number of the event up to which all were sent; 0: from the first one.")
    waiting_count: int = Field(description="Events after the position, also those that the filters leave out.")
    failing_since: Timestamp | None = Field(description="Time since which every attempt failed; null: it works.")
    error: str | None = Field(description="Problem of the last attempt.")
    off: bool = Field(description="It answered 410 or failed for seven days, and gets nothing until a replay.")


class CreatedWebhookOut(WebhookOut):
    secret: str = Field(description="Key of the signatures. Shown only once, in this response.")


class DeletedWebhookOut(BaseModel):
    id: str


class WebhookTestOut(BaseModel):
    delivered: bool
    status: int | None = Field(description="HTTP status of the receiver; null without a response.")
    error: str | None


class WebhookReplayOut(BaseModel):
    replayed_count: int = Field(description="Stored events that are sent again, before the filters.")
