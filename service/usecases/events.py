"""Follow events: those after a position, then new ones, for as long as the caller may read them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Final

from service.domain.events import EventFilter, Position
from service.security.api_keys import ANONYMOUS, OPERATOR, Caller
from service.storage.events.log import StoredEvent
from service.usecases.backend import Backend

HEARTBEAT_S: Final = 10.0
"""Maximum time between two items of a stream, and until a revoked key ends it."""


async def follow(
    backend: Backend, caller: Caller, chosen: EventFilter, position: Position
) -> AsyncIterator[tuple[list[StoredEvent], Position]]:
    """Yield wanted events that came together, with the position after them; without events: a heartbeat.

    It ends when the caller's key does, or when the server stops. Raises as
    :meth:`service.operations.event_streams.EventStreams.read`.
    """
    streams = backend.webhooks.streams
    due_s = time.monotonic() + HEARTBEAT_S
    while not streams.ending:
        found, after = await streams.read(position, chosen)
        if not _may_read(backend, caller):
            return
        if found or time.monotonic() >= due_s:
            yield found, after
            due_s = time.monotonic() + HEARTBEAT_S
        position = after
        await streams.wait(position, due_s - time.monotonic())


def _may_read(backend: Backend, caller: Caller) -> bool:
    """Return whether the caller's key is still valid."""
    if caller is OPERATOR:
        return True
    ring = backend.webhooks.streams.ring
    if caller is ANONYMOUS:
        return not len(ring)
    key = ring.find(caller.name.removeprefix("key:"))
    return key is not None and key.state(datetime.now(UTC)) == "active"
