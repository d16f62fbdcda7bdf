"""Events as server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any, Final

from fastapi import Header, Query
from fastapi.responses import StreamingResponse
from fastapi.sse import format_sse_event

from kith.wire.common import EventType, IdentifyOutcome
from kith.wire.fields import GalleryName
from service.api.http.access import READ, BackendDep, CallerDep, EndingResponse, router
from service.api.http.parameters import open_cursor_numbers
from service.core.errors import KithError
from service.domain.events import EventFilter, Position
from service.security.api_keys import Caller
from service.security.sealing import ENCODER, Seal
from service.storage.db.row_sealing import seal_cursor
from service.storage.events.log import StoredEvent
from service.usecases.backend import Backend
from service.usecases.events import follow

routes = router("/v1/events", "events")
MEDIA_TYPE: Final = "text/event-stream"
HEADERS: Final = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""nginx would otherwise collect events before it sends them."""
RETRY_MS: Final = 2000
"""Time after which a browser connects again."""
RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    200: {"content": {MEDIA_TYPE: {"schema": {"type": "string"}}}, "description": "Events, until the client leaves."}
}


@routes.get("", dependencies=[READ], response_class=StreamingResponse, responses=RESPONSES)
async def follow_events(
    backend: BackendDep,
    caller: CallerDep,
    type: Annotated[  # noqa: A002 - name of the query parameter
        list[EventType], Query(max_length=10, description="Only events of these types.")
    ] = [],  # noqa: B006
    gallery: Annotated[list[GalleryName], Query(max_length=100, description="Only these galleries.")] = [],  # noqa: B006
    outcome: Annotated[
        list[IdentifyOutcome], Query(max_length=10, description="Only decisions with these outcomes.")
    ] = [],  # noqa: B006
    min_risk: Annotated[
        float | None,
        Query(
            ge=0,
            le=1,
            description="Minimum false_alarm_probability of decisions. Decisions without a candidate pass it.",
        ),
    ] = None,
    last_event_id: Annotated[
        str | None, Header(description="`id` of the last received event: continue after it.")
    ] = None,
) -> StreamingResponse:
    """Follow the events of the galleries that the key may read: from now on, or after `Last-Event-ID`.

    `data` of each is JSON with `id`, `type`, `timestamp` and `data`. An `id` alone, every 10 seconds, is a heartbeat.
    """
    for name in gallery:
        caller.check_gallery(name)
    chosen = EventFilter(type or None, gallery or caller.rights.galleries, outcome or None, min_risk)
    seal = (await backend.threads.run(backend.store.keys.ring)).seal
    # Browsers send an empty header before the first id.
    numbers = open_cursor_numbers(seal, last_event_id or None, len(Position._fields), "Last-Event-ID")
    resumed = None if numbers is None else Position(*numbers)
    streams = backend.webhooks.streams
    leave = streams.admit(caller.name)
    try:
        position = await streams.begin(resumed)
        await streams.read(position, chosen)  # a fault has a status before the stream has begun
    except BaseException:
        leave()
        raise
    chunks = _encode(backend, caller, chosen, position, seal)
    return EndingResponse(chunks, leave, media_type=MEDIA_TYPE, headers=HEADERS)


async def _encode(
    backend: Backend, caller: Caller, chosen: EventFilter, position: Position, seal: Seal
) -> AsyncIterator[bytes]:
    yield format_sse_event(id=seal_cursor(seal, *position), retry=RETRY_MS)
    try:
        async for events, after in follow(backend, caller, chosen, position):
            yield b"".join(_encoded(event, seal) for event in events) or format_sse_event(id=seal_cursor(seal, *after))
            backend.metrics.events.labels("stream").inc(len(events))
    except KithError:
        return  # the client connects again and gets the error as a response


def _encoded(event: StoredEvent, seal: Seal) -> bytes:
    at, data = seal_cursor(seal, *event.position), ENCODER.encode({"id": event.id, **event.document})
    return format_sse_event(event=event.event.type, id=at, data_str=data)
