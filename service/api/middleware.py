"""What surrounds every request: an id, who sends it, the limit on its body, a line in the log."""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.callers import Callers, limit_fields
from service.api.permissions import ANONYMOUS, CONSOLE, Caller, paths
from service.api.problems import respond
from service.api.requests import SIDES
from service.errors import (
    AmbiguousPathError,
    ForbiddenError,
    ForeignOriginError,
    KithError,
    OverloadedError,
    RateLimitedError,
    RequestTooLargeError,
    UnauthorizedError,
)
from service.measures import Measures, RequestSpan
from service.security.acting import Actor, acting_as
from service.security.addresses import is_loopback
from service.settings import Settings

WITHOUT_PHOTOS_BYTES = 1_000_000
_IN_GALLERY = "/v1/galleries/[^/]+"
VERIFY = "/v1/verify"
PHOTOS = re.compile(rf"/v1/(detect|embed|verify)|{_IN_GALLERY}/(identify|subjects/[^/]+/templates)")
# Read and stored piece by piece.
ARCHIVES = re.compile(f"{_IN_GALLERY}/enrolments")
IMPORTS = re.compile(f"{_IN_GALLERY}/import")
# What makes a path another one for who unescapes or normalises it: the server that routes it, a proxy, a client.
AMBIGUOUS = re.compile(rb"%2f|%5c|\\|(?:^|/)(?:\.|%2e){1,2}(?:/|$)", re.IGNORECASE)
REFUSALS = (UnauthorizedError, ForbiddenError, ForeignOriginError, RateLimitedError)
log = logging.getLogger("service.access")


# Nothing that could be somebody's name, or break a line of the log.
REQUEST_ID = re.compile("[0-9a-f]{32}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def takes_photos(method: str, path: str) -> bool:
    return method == "POST" and PHOTOS.fullmatch(path) is not None


class Gate:
    """Plain ASGI, so that it sees every byte as it comes: a body is cut off at its limit, never stored first.

    The log line has the route's template, not the path: subjects' ids may be people's names.
    """

    def __init__(self, app: ASGIApp, settings: Settings, measures: Measures) -> None:
        self._app = app
        self._measures = measures
        here = is_loopback(settings.host)
        self._unguarded = paths(lambda need: need.keyless or (need.on_loopback and here))
        self._callers = Callers(settings)
        self._photo_bytes = settings.max_request_bytes(settings.max_images)
        self._verify_bytes = settings.max_request_bytes(SIDES)
        self._archive_bytes = settings.max_archive_bytes
        self._import_bytes = settings.max_import_bytes
        self._most_held, self._held = settings.max_bodies_bytes, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with self._measures.traced(scope["method"], _header(scope, b"traceparent")) as span:
            await self._pass(scope, receive, send, span)

    async def _pass(self, scope: Scope, receive: Receive, send: Send, span: RequestSpan | None) -> None:
        request = Request(scope)
        request_id = request.state.request_id = _given_id(scope) or uuid.uuid4().hex
        trace_id = None if span is None else span.trace_id
        limit = self._limit(scope["method"], scope["path"])
        held = limit not in (self._archive_bytes, self._import_bytes)  # whole, until the answer
        received, counted_in, status, start = 0, 0, 500, time.perf_counter()
        # HEAD is answered as GET, whose body the HTTP server drops.
        routed = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        added = [(b"x-request-id", request_id.encode())]

        async def counted() -> Message:
            nonlocal received, counted_in
            message = await receive()
            received += len(message.get("body", b""))
            if received > limit:
                raise RequestTooLargeError(f"more than {limit} bytes")
            if held:
                self._held += received - counted_in
                counted_in = received
                if self._held > max(self._most_held, received):  # alone it has its own limit
                    raise OverloadedError(f"the bodies of requests under way have more than {self._most_held} bytes")
            return message

        async def identified(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *added]
            await send(message)

        self._measures.in_progress += 1
        try:
            try:
                caller = request.state.caller = await self._admit(scope, limit, added)
            except KithError as refusal:
                await respond(request, refusal)(scope, receive, identified)
            else:
                with acting_as(Actor(caller.name, request_id, trace_id)):
                    await self._app(routed, counted, identified)
        finally:
            self._held -= counted_in
            route, elapsed_s = getattr(routed.get("route"), "path", "-"), time.perf_counter() - start
            self._measures.in_progress -= 1
            self._measures.request(scope["method"], route, status, elapsed_s)
            error: KithError | None = scope["state"].get("error")
            if error is not None:
                self._note(scope, error)
            code = None if error is None else error.code
            if span is not None:
                span.answered(f"{scope['method']} {route}", route, status, code, request_id)
            elapsed_ms = elapsed_s * 1000
            fields = {
                "request_id": request_id,
                "trace_id": trace_id,
                "method": scope["method"],
                "route": route,
                "status": status,
                "ms": round(elapsed_ms, 1),
                "code": code,
                "caller": scope["state"].get("caller", ANONYMOUS).name,
            }
            log.info(
                *("%s %s %s %d %.1f ms", request_id, scope["method"], route, status, elapsed_ms),
                extra={"fields": fields},
            )

    def _note(self, scope: Scope, error: KithError) -> None:
        """Refusals stand in the audit: also of a gallery that is not there for this key, whether it is there for others
        or not."""
        self._measures.problems.add(error.code)
        caller: Caller = scope["state"].get("caller", ANONYMOUS)
        if error.hides or isinstance(error, REFUSALS):
            scope["app"].state.context.audit.record_refusal(caller.name, error.code)

    def _limit(self, method: str, path: str) -> int:
        """Of the body, by the route that it is for, which is not looked up yet."""
        if method == "POST" and ARCHIVES.fullmatch(path):
            return self._archive_bytes
        if method == "POST" and IMPORTS.fullmatch(path):
            return self._import_bytes
        if path == VERIFY:
            return self._verify_bytes if method == "POST" else WITHOUT_PHOTOS_BYTES
        return self._photo_bytes if takes_photos(method, path) else WITHOUT_PHOTOS_BYTES

    async def _admit(self, scope: Scope, limit: int, added: list[tuple[bytes, bytes]]) -> Caller:
        """Whose request it is, before a byte of its body is read. ``added``: fields of the answer.

        Raises:
            AmbiguousPathError: its path may mean another.
            RequestTooLargeError, RateLimitedError: it says, or they are, too many.
            UnauthorizedError, ForeignOriginError, StorageError, MasterKeyError: as Callers.of.
        """
        headers, caller = Headers(scope=scope), ANONYMOUS
        if AMBIGUOUS.search(scope.get("raw_path") or scope["path"].encode()):
            raise AmbiguousPathError("the path has an escaped slash, a backslash, or '.' or '..' as a part")
        if scope["path"] not in self._unguarded and not scope["path"].startswith(f"{CONSOLE}/"):
            caller, kept_to = await self._callers.of(scope, headers, scope["app"].state.context)
            scope["state"]["caller"] = caller
            if kept_to is not None:
                standing = self._callers.standing(caller, kept_to)
                added += limit_fields(kept_to, standing)
                if not standing.passes:
                    raise RateLimitedError(
                        f"more than {kept_to.rate:g} requests a second, and {kept_to.burst} at once",
                        max(1, standing.next_s),
                    )
        declared = headers.get("content-length", "0")
        if declared.isdigit() and (len(declared) > 15 or int(declared) > limit):
            raise RequestTooLargeError(f"{declared[:20]} bytes, the limit is {limit}")
        return caller


def _header(scope: Scope, wanted: bytes) -> str | None:
    found: bytes | None = next((value for name, value in scope["headers"] if name == wanted), None)
    return None if found is None else found.decode("latin-1")


def _given_id(scope: Scope) -> str | None:
    """The request's id by which whoever sends it knows it (X-Request-Id), where it is one that a machine made: a UUID.
    It proves nothing: lines of the audit are told apart by their numbers, and name who acts themselves."""
    given = (_header(scope, b"x-request-id") or "").lower()
    return given.replace("-", "") if REQUEST_ID.fullmatch(given) else None
