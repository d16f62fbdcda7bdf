"""Server-sent events: parsing, and the call that continues a stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import httpx2 as httpx

from kith.errors import unknown_response_error
from kith.requests import Call
from kith.wire.events import EventOut

LAST_EVENT_ID: Final = "Last-Event-ID"


class EventParser:
    """Parser of one response. ``last_id``: where a new connection continues; None: at the end."""

    def __init__(self, last_id: str | None) -> None:
        self.last_id = last_id
        self._id = last_id
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the data of each event that a chunk of the response completes.

        Lines end with a line feed, as Kith sends them. ``last_id`` is then the id of the yielded event.
        """
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            name, _, value = line.rstrip(b"\r").partition(b":")
            value = value.removeprefix(b" ")
            if name == b"id":
                self._id = value.decode()
            elif name == b"data":
                self._data.append(value)
            elif not line.strip():
                self.last_id, data, self._data = self._id, self._data, []
                if data:
                    yield b"\n".join(data)


def resumed(call: Call[EventOut], last_id: str | None) -> Call[EventOut]:
    """Return the call that continues after an id."""
    if last_id is None:
        return call
    return replace(call, arguments={**call.arguments, "headers": {LAST_EVENT_ID: last_id}})


def parse_event(call: Call[EventOut], response: httpx.Response, data: bytes, parser: EventParser) -> EventOut:
    """Parse an event. Raise KithClientError if another program than Kith sent it."""
    try:
        return call.parse(data).model_copy(update={"position": parser.last_id})
    except (ValueError, RecursionError):
        raise unknown_response_error(response.status_code) from None
