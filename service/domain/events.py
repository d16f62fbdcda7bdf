"""Events that the service reports, the filter of each receiver, and when a failing one is tried again. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

from kith.wire.common import EventType
from kith.wire.fields import rfc3339

FIRST_RETRY: Final = timedelta(seconds=2)
RETRY_FACTOR: Final = 3
LONGEST_RETRY: Final = timedelta(hours=1)
GIVE_UP_AFTER: Final = timedelta(days=7)
"""Time of failing after which a receiver is switched off."""
GONE: Final = 410
"""Status by which a receiver says that it wants no events any more."""


class Position(NamedTuple):
    """Place in the log of events: that of its last event before it. ``xid``: transaction in PostgreSQL."""

    xid: int
    event_pk: int


@dataclass(frozen=True)
class Event:
    """Event of one gallery.

    ``data``: JSON without photos and embeddings. ``subject``: ID of the subject that ``data`` names, whose erasure also
    deletes the event; ``stranger_pk``: row key of the stranger, with the same effect.
    """

    type: EventType
    data: Mapping[str, Any]
    subject: str | None = None
    stranger_pk: int | None = None
    at: datetime = field(default_factory=lambda: datetime.now(UTC))

    def document(self, gallery: str) -> dict[str, Any]:
        """Return the body that receivers get, as Standard Webhooks recommends it."""
        return {"type": self.type, "timestamp": rfc3339(self.at), "data": {"gallery": gallery, **self.data}}


@dataclass(frozen=True)
class EventFilter:
    """Events that a webhook receives. None: no restriction.

    ``outcomes`` and ``min_risk`` restrict decisions only. ``min_risk``: minimum false alarm probability of the best
    candidate, in [0, 1]. Decisions without a candidate pass it.
    """

    types: Collection[EventType] | None = None
    galleries: Collection[str] | None = None
    outcomes: Collection[str] | None = None
    min_risk: float | None = None

    def may_want(self, gallery: str, kind: EventType) -> bool:
        """Return whether an event of this type can pass, whatever its data."""
        return (self.types is None or kind in self.types) and (self.galleries is None or gallery in self.galleries)

    def wants(self, gallery: str, event: Event) -> bool:
        if not self.may_want(gallery, event.type):
            return False
        if event.type != "decision":
            return True
        if self.outcomes is not None and event.data["outcome"] not in self.outcomes:
            return False
        risk = event.data.get("false_alarm_probability")
        return self.min_risk is None or risk is None or risk >= self.min_risk


def pause_s(failures: int, retry_after_s: float | None) -> float:
    """Return the time to the next attempt after so many failed ones. ``retry_after_s``: what the receiver asked for."""
    grown_s: float = FIRST_RETRY.total_seconds() * RETRY_FACTOR ** min(failures - 1, 20)
    return min(max(grown_s, retry_after_s or 0), LONGEST_RETRY.total_seconds())
