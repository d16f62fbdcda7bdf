"""Deadlines of photo requests. Work stops at the deadline, or when the client disconnects."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.http.problems import problem_response
from service.api.http.routing import KindOf
from service.core.deadlines import Deadline
from service.core.errors import InvalidRequestError
from service.settings import Settings

TIMEOUT_HEADER = "X-Request-Timeout-Ms"
DISCONNECT_WATCH_DELAY_S = 0.25
"""Delay before the watch for disconnects starts. Most requests end sooner and cost a timer, not a task."""


class Deadlines:
    """ASGI middleware. The time counts from the end of the body, so that a slow network does not use it up."""

    def __init__(self, app: ASGIApp, settings: Settings, kind_of: KindOf) -> None:
        self._app = app
        self._kind_of = kind_of
        self._max_s = settings.deadline_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._kind_of(scope["method"], scope["path"]) not in ("photos", "sides"):
            await self._app(scope, receive, send)
            return
        try:
            deadline = Deadline(self._timeout_s(Headers(scope=scope)))
        except InvalidRequestError as error:
            await problem_response(Request(scope), error)(scope, receive, send)
            return
        watch: asyncio.Task[None] | None = None
        timer: asyncio.TimerHandle | None = None

        def start_watch() -> None:
            nonlocal watch
            watch = asyncio.create_task(_cancel_on_disconnect(receive, deadline))

        async def receive_and_start() -> Message:
            nonlocal timer
            message = await receive()
            if timer is None and message["type"] == "http.request" and not message.get("more_body"):
                deadline.begin()
                timer = asyncio.get_running_loop().call_later(DISCONNECT_WATCH_DELAY_S, start_watch)
            return message

        try:
            with deadline:
                await self._app(scope, receive_and_start, send)
        finally:
            if timer is not None:
                timer.cancel()
            if watch is not None:
                watch.cancel()

    def _timeout_s(self, headers: Headers) -> float:
        text = headers.get(TIMEOUT_HEADER)
        if text is None:
            return self._max_s
        digits = text.lstrip("0")
        if not (digits and text.isascii() and text.isdigit()):
            raise InvalidRequestError(f"{TIMEOUT_HEADER}: must be a whole number of milliseconds above 0")
        return min(self._max_s, int(digits[:10]) / 1000)


async def _cancel_on_disconnect(receive: Receive, deadline: Deadline) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    deadline.disconnect()
