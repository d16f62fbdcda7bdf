"""ASGI middleware around every request: request id, authentication, body limits, metrics and the access log."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from dataclasses import dataclass, field
from typing import Final

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.http.auth import Authenticator
from service.api.http.problems import PROBLEM_CODE, cut_response, problem_response, unexpected_problem
from service.core.actor import Actor, acting_as
from service.core.errors import (
    ForbiddenError,
    ForeignOriginError,
    KithError,
    LimitReachedError,
    OverloadedError,
    TooManyStreamsError,
    UnauthorizedError,
)
from service.observability.metrics import Metrics
from service.security.addresses import is_loopback
from service.security.api_keys import Rights
from service.security.callers import ANONYMOUS, Caller
from service.settings import Settings

DEFAULT_BODY_BYTES: Final = 1_000_000
"""Body limit of routes that set no other before they read (service.api.http.bodies.set_body_limit)."""
PUBLIC: Final = frozenset({"/", "/healthz", "/readyz", "/console"})
"""Paths that need no key, like the console's files below `/console/`; their API calls do."""
# The reference is public information, but it reveals the version, which helps an attacker. A browser cannot send a key
# when it opens a page.
PUBLIC_ON_LOOPBACK: Final = ("/docs", "/openapi.json")
NOBODY: Final = Caller("anonymous", Rights(frozenset(), frozenset()))
"""Caller of paths that need no key. If such a path were routed to a route that needs one, it would be refused."""
AUDITED_REFUSALS: Final = (UnauthorizedError, ForbiddenError, ForeignOriginError, TooManyStreamsError)
REQUEST_ID: Final = re.compile("[0-9a-f]{32}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""UUIDs only: other text could be a person's name, or break a log line."""
BODY_PATIENCE_S: Final = 20.0
"""Time that the server waits for a body, besides what MIN_BODY_RATE gives. A body that stalls holds memory."""
MIN_BODY_RATE: Final = 1_000
"""Bytes per second."""
log = logging.getLogger("service.access")


@dataclass
class _Exchange:
    """State of one request and its response."""

    request_id: str
    start_s: float = field(default_factory=time.perf_counter)
    status: int = 500
    began: bool = False
    """True once the response's head was sent."""
    counted_bytes: int = 0
    """Bytes of the body that count towards the total of all requests."""


class Gate:
    """ASGI middleware, so that it sees each chunk as it arrives and stops a body at its limit.

    Log lines contain the route's template, not the path: subject ids may be people's names.
    """

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics
        self._authenticator = Authenticator(settings)
        self._is_on_loopback = is_loopback(settings.host)
        self._max_held_bytes, self._held_bytes = settings.max_bodies_bytes, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        request_id = request.state.request_id = _client_request_id(scope) or uuid.uuid4().hex
        exchange = _Exchange(request_id)
        added_headers = [(b"x-request-id", request_id.encode())]

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status, exchange.began = message["status"], True
                message["headers"] = [*message["headers"], *added_headers]
            await send(message)

        self._metrics.in_progress += 1
        try:
            try:
                caller = request.state.caller = await self._authenticate(scope)
            except KithError as refusal:
                await problem_response(request, refusal)(scope, receive, send_with_headers)
            else:
                with acting_as(Actor(caller.name, request_id)):
                    await self._app(scope, self._limited(scope, receive, exchange), send_with_headers)
        except Exception as error:  # of a handler, or of this class
            if exchange.began:
                cut_response(request, error)  # the server closes the connection of a response that does not end
            else:
                await unexpected_problem(request, error)(scope, receive, send_with_headers)
        finally:
            self._held_bytes -= exchange.counted_bytes
            self._metrics.in_progress -= 1
            self._record(scope, getattr(scope.get("route"), "path", "-"), exchange)

    def _limited(self, scope: Scope, receive: Receive, exchange: _Exchange) -> Receive:
        """Wrap ``receive`` so that it raises when a body is slow, or a body or all together exceed their limit."""
        received, waited_s, is_complete = 0, 0.0, False

        async def receive_limited() -> Message:
            nonlocal received, waited_s, is_complete
            if is_complete:
                return await receive()  # waits for a disconnect
            limit = scope.get("body_limit", DEFAULT_BODY_BYTES)
            begin_s = time.perf_counter()
            try:
                async with asyncio.timeout(BODY_PATIENCE_S + received / MIN_BODY_RATE - waited_s):
                    message = await receive()
            except TimeoutError as error:
                raise LimitReachedError("client_too_slow", "the body did not arrive in time") from error
            waited_s += time.perf_counter() - begin_s
            is_complete = not message.get("more_body")
            received += len(message.get("body", b""))
            if received > limit:
                raise LimitReachedError("request_too_large", f"more than {limit} bytes")
            if not scope.get("body_streamed"):  # held in memory until the response
                self._held_bytes += received - exchange.counted_bytes
                exchange.counted_bytes = received
                if self._held_bytes > max(self._max_held_bytes, received):  # a single request has its own limit
                    raise OverloadedError(f"the bodies of all requests exceed {self._max_held_bytes} bytes")
            return message

        return receive_limited

    def _record(self, scope: Scope, route: str, exchange: _Exchange) -> None:
        """Write the metrics, the audit entry of a refusal, and the access log."""
        elapsed_s = time.perf_counter() - exchange.start_s
        method, status = scope["method"], exchange.status
        self._metrics.observe_request(method, route, status, elapsed_s)
        error: KithError | None = scope["state"].get("error")
        caller: Caller = scope["state"].get("caller", ANONYMOUS)
        code: str | None = scope["state"].get(PROBLEM_CODE)
        if code is not None:
            self._metrics.count_problem(code)
        # A hidden gallery is audited whether or not it exists, so that the audit does not reveal it either.
        if error is not None and (error.hides_existence or isinstance(error, AUDITED_REFUSALS)):
            scope["app"].state.backend.audit.record_refusal(caller.name, error.code)
        elapsed_ms = elapsed_s * 1000
        fields = {
            "request_id": exchange.request_id,
            "method": method,
            "route": route,
            "status": status,
            "ms": round(elapsed_ms, 1),
            "code": code,
            "caller": caller.name,
        }
        words = (exchange.request_id, method, route, status, elapsed_ms)
        log.info("%s %s %s %d %.1f ms", *words, extra={"fields": fields})

    async def _authenticate(self, scope: Scope) -> Caller:
        """Return the caller. Raises as ``Authenticator.authenticate``."""
        path: str = scope["path"]
        if (
            path in PUBLIC
            or path.startswith("/console/")
            or (self._is_on_loopback and path.startswith(PUBLIC_ON_LOOPBACK))
        ):
            return NOBODY
        return await self._authenticator.authenticate(Headers(scope=scope), scope["app"].state.backend)


def _client_request_id(scope: Scope) -> str | None:
    """Return X-Request-Id if it is a UUID. It is for correlation only: the audit never relies on it."""
    request_id = Headers(scope=scope).get("x-request-id", "").lower()
    return request_id.replace("-", "") if REQUEST_ID.fullmatch(request_id) else None
