"""Events that the service reports to webhooks, and the filter of each webhook. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from kith.wire.common import EventType
from kith.wire.fields import rfc3339

FIRST_RETRY: Final = timedelta(seconds=2)
RETRY_FACTOR: Final = 3
LONGEST_RETRY: Final = timedelta(hours=1)
GIVE_UP_AFTER: Final = timedelta(days=1)
"""Age of an event from which a failed attempt is the last."""
MAX_REFUSALS: Final = 4
"""Attempts, if the receiver itself refuses the event (:func:`is_refusal`). It would refuse later events no less, and
they wait for this one."""


@dataclass(frozen=True)
class Event:
    """Event of one gallery.

    ``data``: JSON without photos and embeddings. ``subject``: ID of the subject that ``data`` names, whose erasure also
    deletes the event; ``stranger``: that of the stranger, with the same effect.
    """

    type: EventType
    data: Mapping[str, Any]
    subject: str | None = None
    stranger: str | None = None
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

    types: frozenset[EventType] | None = None
    galleries: frozenset[str] | None = None
    outcomes: frozenset[str] | None = None
    min_risk: float | None = None

    def wants_decisions_of(self, gallery: str) -> bool:
        return self._wants_type("decision") and self._wants_gallery(gallery)

    def wants(self, gallery: str, event: Event) -> bool:
        if not (self._wants_type(event.type) and self._wants_gallery(gallery)):
            return False
        if event.type != "decision":
            return True
        if self.outcomes is not None and event.data["outcome"] not in self.outcomes:
            return False
        risk = event.data.get("false_alarm_probability")
        return self.min_risk is None or risk is None or risk >= self.min_risk

    def _wants_type(self, kind: EventType) -> bool:
        return self.types is None or kind in self.types

    def _wants_gallery(self, name: str) -> bool:
        return self.galleries is None or name in self.galleries


def is_refusal(status: int | None) -> bool:
    """Return whether a response says that a repetition will not help. ``status``: None without a response."""
    return status is not None and 300 <= status < 500 and status not in (408, 425, 429)


def next_attempt(attempts: int, created: datetime, now: datetime, status: int | None) -> datetime | None:
    """Return the time of the next attempt after so many failed ones; None: give up."""
    if now - created >= GIVE_UP_AFTER or (is_refusal(status) and attempts >= MAX_REFUSALS):
        return None
    wait_s = FIRST_RETRY.total_seconds() * RETRY_FACTOR ** min(attempts - 1, 20)
    return now + min(timedelta(seconds=wait_s), LONGEST_RETRY)
