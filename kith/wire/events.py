"""Events of a stream."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from kith.wire.common import EventType
from kith.wire.fields import Timestamp


class EventOut(BaseModel):
    """Event of a stream. ``position``: the id after which a stream continues behind this event."""

    id: str = Field(description="ID of the event, as in the header webhook-id.")
    type: EventType
    timestamp: Timestamp
    data: dict[str, Any] = Field(description="As docs/events.md states for each type, with gallery.")
    position: str = ""
