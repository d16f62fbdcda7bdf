"""For how long photos are worked on: until a deadline, or until the client leaves, which has to be watched for."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.middleware import takes_photos
from service.api.problems import respond
from service.errors import InvalidRequestError
from service.patience import Patience
from service.settings import Settings

HEADER = "X-Request-Timeout-Ms"
NOTICED_S = 0.25
"""After its body, a request that is not done is watched for its client: most are done before, and cost a timer."""


class Deadlines:
    """Plain ASGI. Time counts from the body's end: slow networks are no reason to give up."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._most_s = settings.deadline_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not takes_photos(scope["method"], scope["path"]):
            await self._app(scope, receive, send)
            return
        try:
            patience = Patience(self._seconds(Headers(scope=scope)))
        except InvalidRequestError as error:
            await respond(Request(scope), error)(scope, receive, send)
            return
        watch: asyncio.Task[None] | None = None
        timer: asyncio.TimerHandle | None = None

        def begin_watch() -> None:
            nonlocal watch
            watch = asyncio.create_task(_watch(receive, patience))

        async def read() -> Message:
            nonlocal timer
            message = await receive()
            if timer is None and message["type"] == "http.request" and not message.get("more_body"):
                patience.begin()
                timer = asyncio.get_running_loop().call_later(NOTICED_S, begin_watch)
            return message

        try:
            with patience:
                await self._app(scope, read, send)
        finally:
            if timer is not None:
                timer.cancel()
            if watch is not None:
                watch.cancel()

    def _seconds(self, headers: Headers) -> float:
        asked = headers.get(HEADER)
        if asked is None:
            return self._most_s
        digits = asked.lstrip("0")
        if not (digits and asked.isascii() and asked.isdigit()):
            raise InvalidRequestError(f"{HEADER}: milliseconds are expected, a whole number above 0")
        return min(self._most_s, int(digits[:10]) / 1000)


async def _watch(receive: Receive, patience: Patience) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    patience.leave()
