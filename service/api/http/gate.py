"""ASGI middleware around every request: request id, authentication, body limits, metrics and the access log."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from typing import Final

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.http.access import Authenticator
from service.api.http.problems import cut_response, error_response
from service.core.actor import Actor, acting_as
from service.core.errors import LimitReachedError, OverloadedError
from service.observability.metrics import Metrics
from service.security.api_keys import ANONYMOUS
from service.settings import Settings

DEFAULT_BODY_BYTES: Final = 1_000_000
"""Body limit of routes that set no other before they read (service.api.http.bodies.set_body_limit)."""
AUDITED_REFUSALS: Final = ("unauthorized", "forbidden", "foreign_origin", "too_many_streams")
"""Codes of problems that the audit records."""
REQUEST_ID: Final = re.compile("[0-9a-f]{32}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""UUIDs only: other text could be a person's name, or break a log line."""
BODY_PATIENCE_S: Final = 20.0
"""Time that the server waits for the next part of a body. A body that stalls holds memory."""
log = logging.getLogger("service.access")


class Gate:
    """ASGI middleware, so that it sees each chunk as it arrives and stops a body at its limit.

    Log lines contain the route's template, not the path: subject ids may be people's names.
    """

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics
        self._authenticator = Authenticator(settings)
        self._max_held_bytes, self._held_bytes = settings.max_bodies_bytes, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request, begin_s = Request(scope), time.perf_counter()
        request_id = request.state.request_id = _client_request_id(request.headers) or uuid.uuid4().hex
        request.state.caller = ANONYMOUS
        status: int | None = None
        body = _Body()

        async def receive_limited() -> Message:
            if body.is_complete:
                return await receive()  # waits for a disconnect
            message = await body.receive(receive, scope.get("body_limit", DEFAULT_BODY_BYTES))
            if not scope.get("body_streamed"):  # held in memory until the response
                self._held_bytes += body.received - body.held
                body.held = body.received
                if self._held_bytes > max(self._max_held_bytes, body.received):  # a single request has its own limit
                    raise OverloadedError(f"the bodies of all requests exceed {self._max_held_bytes} bytes")
            return message

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        self._metrics.in_progress += 1
        try:
            caller = request.state.caller = await self._authenticator.authenticate(request)
            with acting_as(Actor(caller.name, request_id)):
                await self._app(scope, receive_limited, send_with_id)
        except Exception as error:
            if status is None:
                await error_response(request, error)(scope, receive, send_with_id)
            else:
                cut_response(request, error)  # the server closes the connection of a response that does not end
        finally:
            self._held_bytes -= body.held
            self._metrics.in_progress -= 1
            self._record(request, status or 500, time.perf_counter() - begin_s)

    def _record(self, request: Request, status: int, elapsed_s: float) -> None:
        """Write the metrics, the audit entry of a refusal, and the access log."""
        route = getattr(request.scope.get("route"), "path", "-")
        caller, code = request.state.caller, getattr(request.state, "problem_code", None)
        self._metrics.observe_request(request.method, route, status, elapsed_s)
        if code is not None:
            self._metrics.problems.labels(code).inc()
        # A hidden gallery is audited whether or not it exists, so that the audit does not reveal it either.
        if code in AUDITED_REFUSALS or getattr(request.state, "hides_existence", False):
            request.app.state.backend.audit.record_refusal(caller.name, code)
        fields = {
            "request_id": request.state.request_id,
            "method": request.method,
            "route": route,
            "status": status,
            "ms": round(elapsed_s * 1000, 1),
            "code": code,
            "caller": caller.name,
        }
        log.info("%s %s %s %d %.1f ms", *list(fields.values())[:5], extra={"fields": fields})


class _Body:
    """Body of a request: bytes received, and of these the bytes that count towards the total of all requests."""

    def __init__(self) -> None:
        self.received = self.held = 0
        self.is_complete = False

    async def receive(self, receive: Receive, limit: int) -> Message:
        """Receive a message. Raises client_too_slow, request_too_large: it has more than ``limit`` bytes."""
        try:
            async with asyncio.timeout(BODY_PATIENCE_S):
                message = await receive()
        except TimeoutError as error:
            raise LimitReachedError("client_too_slow", "the body did not arrive in time") from error
        self.is_complete = not message.get("more_body")
        self.received += len(message.get("body", b""))
        if self.received > limit:
            raise LimitReachedError("request_too_large", f"more than {limit} bytes")
        return message


def _client_request_id(headers: Headers) -> str | None:
    """Return X-Request-Id if it is a UUID. It is for correlation only: the audit never relies on it."""
    request_id = headers.get("x-request-id", "").lower()
    return request_id.replace("-", "") if REQUEST_ID.fullmatch(request_id) else None
