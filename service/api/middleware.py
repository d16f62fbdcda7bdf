"""What surrounds every request: an id, the key, the limit on its body, a line in the log."""

from __future__ import annotations

import hmac
import logging
import time
import uuid

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.problems import respond
from service.errors import KithError, RequestTooLargeError, UnauthorizedError
from service.settings import Settings

WITHOUT_PHOTOS_BYTES = 1_000_000
# /metrics names galleries and tells how many people come, as /v1 does; probes of /healthz and /readyz learn nothing.
GUARDED_PATHS = ("/v1/", "/metrics")
PHOTO_PATHS = ("/detect", "/embed", "/verify", "/identify", "/templates")
ARCHIVE_PATHS = ("/enrolments",)
IMPORT_PATH = "/import"  # read and stored piece by piece
log = logging.getLogger("service.access")


class Gate:
    """Plain ASGI, so that it sees every byte as it comes: a body is cut off at its limit, never stored first.

    The log line has the route's template, not the path: subjects' ids may be people's names.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._key = settings.api_key.get_secret_value().encode() if settings.api_key else None
        self._photo_bytes = settings.max_request_bytes
        self._archive_bytes = settings.max_archive_bytes
        self._import_bytes = settings.max_import_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        request_id = request.state.request_id = uuid.uuid4().hex
        limit = self._limit(scope["path"])
        received, status, start = 0, 500, time.perf_counter()

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > limit:
                raise RequestTooLargeError(f"more than {limit} bytes")
            return message

        async def identified(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            if (refusal := self._refusal(request, limit)) is not None:
                await respond(request, refusal)(scope, receive, identified)
            else:
                await self._app(scope, counted, identified)
        finally:
            route = getattr(scope.get("route"), "path", "-")
            elapsed_ms = (time.perf_counter() - start) * 1000
            log.info("%s %s %s %d %.1f ms", request_id, scope["method"], route, status, elapsed_ms)

    def _limit(self, path: str) -> int:
        if path.endswith(ARCHIVE_PATHS):
            return self._archive_bytes
        if path.endswith(IMPORT_PATH):
            return self._import_bytes
        return self._photo_bytes if path.endswith(PHOTO_PATHS) else WITHOUT_PHOTOS_BYTES

    def _refusal(self, request: Request, limit: int) -> KithError | None:
        """What can be refused before a byte of the body is read."""
        if self._key is not None and request.url.path.startswith(GUARDED_PATHS):
            bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
            given = request.headers.get("x-api-key") or bearer
            if not hmac.compare_digest(given.encode(), self._key):
                return UnauthorizedError("the API key is missing or wrong")
        declared = request.headers.get("content-length", "0")
        if declared.isdigit() and (len(declared) > 15 or int(declared) > limit):
            return RequestTooLargeError(f"{declared[:20]} bytes, the limit is {limit}")
        return None
