"""Deadlines of photo requests. Work stops at the deadline, or when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from starlette.requests import Request

from service.core.deadlines import Deadline
from service.core.errors import InvalidRequestError

TIMEOUT_HEADER: Final = "X-Request-Timeout-Ms"
DISCONNECT_WATCH_DELAY_S: Final = 0.25
"""Delay before the watch for disconnects starts. Most requests end sooner and cost a timer, not a task."""


def timeout_s(request: Request, max_s: float) -> float:
    """Return the time of a request: the client's, or at most ``max_s``. Raises InvalidRequestError."""
    text = request.headers.get(TIMEOUT_HEADER)
    if text is None:
        return max_s
    digits = text.lstrip("0")
    if not (digits and text.isascii() and text.isdigit()):
        raise InvalidRequestError(f"{TIMEOUT_HEADER}: must be a whole number of milliseconds above 0")
    return min(max_s, int(digits[:10]) / 1000)


@asynccontextmanager
async def deadline(request: Request, seconds: float) -> AsyncIterator[None]:
    """Bound the block by a deadline. Enter it after the body: a slow network does not use up the time."""
    watch: asyncio.Task[None] | None = None
    current = Deadline(seconds)

    def start_watch() -> None:
        nonlocal watch
        watch = asyncio.create_task(_cancel_on_disconnect(request, current))

    current.begin()
    timer = asyncio.get_running_loop().call_later(DISCONNECT_WATCH_DELAY_S, start_watch)
    try:
        with current:
            yield
    finally:
        timer.cancel()
        if watch is not None:
            watch.cancel()


async def _cancel_on_disconnect(request: Request, current: Deadline) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    current.disconnect()
