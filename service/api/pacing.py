"""Delay of refusals under overload, so that clients which retry at once leave time for accepted work."""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import OverloadedError

REFUSALS_PER_S: Final = 100
"""Of all clients together. A refusal costs about half a millisecond of the event loop."""
MAX_DELAY_S: Final = 1.5


class RefusalPacing:
    """Plain ASGI, outside of everything else: a refused request is over, and its body is freed, before the delay.

    The delay grows with the number of delayed answers: a single refusal is sent after ten milliseconds.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._delayed = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal: list[Message] = []

        async def hold_refusal(message: Message) -> None:
            if refusal or (
                message["type"] == "http.response.start" and isinstance(scope["state"].get("error"), OverloadedError)
            ):
                refusal.append(message)
            else:
                await send(message)

        await self._app(scope, receive, hold_refusal)
        if not refusal:
            return
        self._delayed += 1
        try:
            await asyncio.sleep(min(MAX_DELAY_S, self._delayed / REFUSALS_PER_S))
        finally:
            self._delayed -= 1
        for message in refusal:
            await send(message)
