"""Follow events: those after a position, then new ones, for as long as the caller may read them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any, Final

from service.domain.events import EventFilter
from service.operations.event_streams import Position
from service.security.callers import ANONYMOUS, OPERATOR, Caller
from service.usecases.backend import Backend

HEARTBEAT_S: Final = 10.0
"""Maximum time between two items of a stream, and until a revoked key ends it."""


async def follow(
    backend: Backend, caller: Caller, chosen: EventFilter, position: Position
) -> AsyncIterator[tuple[dict[str, Any] | None, Position]]:
    """Yield wanted events, each with the position after it; None instead of an event: a heartbeat.

    It ends when the caller's key does, or when the server stops. Raises as
    :meth:`service.operations.event_streams.EventStreams.read`.
    """
    streams = backend.operations.webhooks.streams
    while not streams.ending:
        found, after = await streams.read(position, chosen)
        if not await _may_read(backend, caller):
            return
        for event in found:
            yield event.document, Position(event.pk, min(after.at, int(event.at.timestamp())))
        yield None, after
        position = after
        await streams.wait(position, HEARTBEAT_S)


async def _may_read(backend: Backend, caller: Caller) -> bool:
    """Return whether the caller's key is still valid."""
    if caller is OPERATOR:
        return True
    ring = await backend.run(backend.operations.keys.ring)
    if caller is ANONYMOUS:
        return not len(ring)
    key = ring.find(caller.name.removeprefix("key:"))
    return key is not None and key.state(datetime.now(UTC)) == "active"
