"""ASGI middleware around every request: request id, authentication, body limits, metrics and the access log."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.http.auth import Authenticator
from service.api.http.bodies import VERIFY_SIDES
from service.api.http.content_encoding import ARCHIVE_CODINGS, IMPORT_CODINGS, content_coding
from service.api.http.problems import PROBLEM_CODE, cut_response, problem_response, unexpected_problem
from service.api.http.routing import BodyKind, KindOf
from service.core.actor import Actor, acting_as
from service.core.errors import (
    ClientTooSlowError,
    ForbiddenError,
    ForeignOriginError,
    KithError,
    OverloadedError,
    RequestTooLargeError,
    TooManyStreamsError,
    UnauthorizedError,
)
from service.observability.metrics import Metrics
from service.security.callers import ANONYMOUS, Caller
from service.settings import Settings

DEFAULT_BODY_BYTES: Final = 1_000_000
"""Body limit of routes that take no photos."""
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


@dataclass(frozen=True)
class _BodyLimit:
    """Maximum size of a body, and the content codings that its path supports.

    ``streamed``: it goes to disk or the database in pieces, and is not held in memory.
    """

    size: int
    streamed: bool = False
    codings: tuple[str, ...] = ()


CONSOLE: Final = "/console"
"""Path of the console's page. Its files lie below it and need no key; their API calls do."""


class Gate:
    """ASGI middleware, so that it sees each chunk as it arrives and stops a body at its limit.

    ``keyless_paths``: paths of routes that need no key. ``kind_of``: kind of body of each route.

    Log lines contain the route's template, not the path: subject ids may be people's names.
    """

    def __init__(
        self, app: ASGIApp, settings: Settings, metrics: Metrics, keyless_paths: Collection[str], kind_of: KindOf
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._public_paths = keyless_paths
        self._authenticator = Authenticator(settings)
        self._kind_of = kind_of
        self._limits: dict[BodyKind, _BodyLimit] = {
            "small": _BodyLimit(DEFAULT_BODY_BYTES),
            "photos": _BodyLimit(settings.max_request_bytes(settings.max_images)),
            "sides": _BodyLimit(settings.max_request_bytes(VERIFY_SIDES)),
            "archive": _BodyLimit(settings.max_upload_bytes, streamed=True, codings=ARCHIVE_CODINGS),
            "import": _BodyLimit(settings.max_upload_bytes, streamed=True, codings=IMPORT_CODINGS),
        }
        self._max_held_bytes, self._held_bytes = settings.max_bodies_bytes, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        request_id = request.state.request_id = _client_request_id(scope) or uuid.uuid4().hex
        exchange = _Exchange(request_id)
        limit = self._body_limit(scope["method"], scope["path"])
        # HEAD is routed as GET where that only reads a file or the health; the HTTP server drops the body. Other
        # handlers of GET read whole galleries and write audit lines: there HEAD has no route (405).
        request.state.has_head = self._is_keyless(scope["path"])
        is_head = request.state.has_head and scope["method"] == "HEAD"
        routed = {**scope, "method": "GET"} if is_head else scope
        added_headers = [(b"x-request-id", request_id.encode())]

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status, exchange.began = message["status"], True
                message["headers"] = [*message["headers"], *added_headers]
            await send(message)

        self._metrics.in_progress += 1
        try:
            try:
                caller = request.state.caller = await self._admit(scope, limit)
            except KithError as refusal:
                await problem_response(request, refusal)(scope, receive, send_with_headers)
            else:
                with acting_as(Actor(caller.name, request_id)):
                    await self._app(routed, self._limited(receive, limit, exchange), send_with_headers)
        except Exception as error:  # of a handler, or of this class
            if exchange.began:
                cut_response(request, error)  # the server closes the connection of a response that does not end
            else:
                await unexpected_problem(request, error)(scope, receive, send_with_headers)
        finally:
            self._held_bytes -= exchange.counted_bytes
            self._metrics.in_progress -= 1
            self._record(scope, getattr(routed.get("route"), "path", "-"), exchange)

    def _limited(self, receive: Receive, limit: _BodyLimit, exchange: _Exchange) -> Receive:
        """Wrap ``receive`` so that it raises when a body is slow, or a body or all together exceed their limit."""
        received, waited_s, is_complete = 0, 0.0, False

        async def receive_limited() -> Message:
            nonlocal received, waited_s, is_complete
            if is_complete:
                return await receive()  # waits for a disconnect
            begin_s = time.perf_counter()
            try:
                async with asyncio.timeout(BODY_PATIENCE_S + received / MIN_BODY_RATE - waited_s):
                    message = await receive()
            except TimeoutError as error:
                raise ClientTooSlowError("the body did not arrive in time") from error
            waited_s += time.perf_counter() - begin_s
            is_complete = not message.get("more_body")
            received += len(message.get("body", b""))
            if received > limit.size:
                raise RequestTooLargeError(f"more than {limit.size} bytes")
            if not limit.streamed:  # held in memory until the response
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
            scope["app"].state.backend.operations.audit.record_refusal(caller.name, error.code)
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

    def _is_keyless(self, path: str) -> bool:
        return path in self._public_paths or path.startswith(f"{CONSOLE}/")

    def _body_limit(self, method: str, path: str) -> _BodyLimit:
        return self._limits[self._kind_of(method, path)]

    async def _admit(self, scope: Scope, limit: _BodyLimit) -> Caller:
        """Return the caller, before any byte of the body is read.

        Raises:
            UnsupportedEncodingError: the body has a content coding that the path does not support.
            RequestTooLargeError: the declared length exceeds the limit.
            UnauthorizedError, ForeignOriginError, StorageError, MasterKeyError: as ``Authenticator.authenticate``.
        """
        headers, caller = Headers(scope=scope), ANONYMOUS
        if not self._is_keyless(scope["path"]):
            caller = await self._authenticator.authenticate(headers, scope["app"].state.backend)
            scope["state"]["caller"] = caller  # for the records, also of a refusal below
        declared = headers.get("content-length", "0")
        if declared != "0" or "transfer-encoding" in headers:
            content_coding(headers, limit.codings)
        if declared.isdigit() and (len(declared) > 15 or int(declared) > limit.size):
            raise RequestTooLargeError(f"{declared[:20]} bytes, the limit is {limit.size}")
        return caller


def _client_request_id(scope: Scope) -> str | None:
    """Return X-Request-Id if it is a UUID. It is for correlation only: the audit never relies on it."""
    request_id = Headers(scope=scope).get("x-request-id", "").lower()
    return request_id.replace("-", "") if REQUEST_ID.fullmatch(request_id) else None
