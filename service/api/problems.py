"""Errors to RFC 9457 problem documents, in one place."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from models.errors import ModelError
from service.api.schemas import GALLERY_NAME, IN_ONE_LINE, PLACE, WITHOUT_NUL, Problem
from service.errors import (
    ClientGoneError,
    InvalidRequestError,
    KithError,
    OverloadedError,
    RateLimitedError,
    StorageBusyError,
    UnauthorizedError,
)
from service.gallery.subjects import SUBJECT_ID

RETRY_AFTER_S = 1
MEDIA_TYPE = "application/problem+json"
PATTERNS: Final = {
    "^[0-9a-f]{12}$": "should have 12 hexadecimal digits, in small letters",
    "^[0-9a-f]{32}$": "should have 32 hexadecimal digits, in small letters",
    "^[0-9a-f]{1,64}$": "should have hexadecimal digits, 64 at most, in small letters",
    PLACE: "should be 'next' of the page before",
    GALLERY_NAME: "should have letters, digits and . _ - alone, 64 at most, and begin with a letter or a digit",
    SUBJECT_ID: "should have 1 to 128 characters, no slash or backslash among them",
    IN_ONE_LINE: "should have no control characters, line separators or marks of direction",
    WITHOUT_NUL: "should have no NUL",
}
"""What the patterns of service.api mean."""
DATES: Final = frozenset({"date_from_datetime_parsing", "datetime_from_date_parsing", "datetime_parsing"})
log = logging.getLogger(__name__)


def problem(error: KithError, request_id: str | None = None) -> Problem:
    return Problem(**error.document(), request_id=request_id)


def install(app: FastAPI) -> None:
    """Translate every error that leaves a route."""

    @app.exception_handler(KithError)
    async def known(request: Request, error: KithError) -> JSONResponse:
        return respond(request, error)

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, _error: ClientDisconnect) -> JSONResponse:
        return respond(request, ClientGoneError("the client closed the connection before its body was whole"))

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        return respond(request, validation_error(error.errors()))

    @app.exception_handler(HTTPException)
    async def routing(request: Request, error: HTTPException) -> JSONResponse:
        # FastAPI wraps whatever goes wrong while it reads a body.
        if isinstance(error.__cause__, KithError):
            return respond(request, error.__cause__)
        if isinstance(error.__cause__, ClientDisconnect):
            return await gone(request, error.__cause__)
        if error.status_code == HTTPStatus.BAD_REQUEST:
            return respond(request, InvalidRequestError(f"the body cannot be read: {error.detail}"))
        phrase = HTTPStatus(error.status_code).phrase
        document = Problem(
            type="about:blank",
            title=phrase,
            status=error.status_code,
            code=phrase.lower().replace(" ", "_"),
            detail=f"{request.method} {request.url.path}: {error.detail}",
            remedy="See /docs for the paths and their methods.",
            request_id=_request_id(request),
        )
        headers = dict(error.headers or {})
        if headers.get("Allow") == "GET":
            headers["Allow"] = "GET, HEAD"
        return _answer(document, headers)

    @app.exception_handler(ModelError)
    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> JSONResponse:
        log.error("request %s failed", _request_id(request), exc_info=error)
        return respond(request, KithError("an unforeseen error; the log has the details under the request id"))


def respond(request: Request, error: KithError) -> JSONResponse:
    request.state.error = error
    headers = {}
    if isinstance(error, OverloadedError | StorageBusyError):
        ahead_s = error.seconds if isinstance(error, OverloadedError) else 0
        headers["Retry-After"] = str(max(RETRY_AFTER_S, math.ceil(ahead_s)))
    if isinstance(error, RateLimitedError):
        headers["Retry-After"] = str(error.seconds)
    if isinstance(error, UnauthorizedError):
        headers["WWW-Authenticate"] = 'Bearer realm="kith"'
    return _answer(problem(error, _request_id(request)), headers)


def _answer(document: Problem, headers: dict[str, str]) -> JSONResponse:
    return JSONResponse(
        document.model_dump(mode="json", exclude_none=True), document.status, headers=headers, media_type=MEDIA_TYPE
    )


def _request_id(request: Request) -> str | None:
    return getattr(request.state, "request_id", None)


def validation_error(errors: Any) -> InvalidRequestError:
    """Name each field at fault; the values themselves may be photos or names and are not repeated."""
    fields = [
        {"field": ".".join(str(part) for part in e["loc"]) or "body", "problem": _in_words(e)}
        for e in list(errors)[:10]
    ]
    return InvalidRequestError("; ".join(f"{f['field']}: {f['problem']}" for f in fields), fields=fields)


def _in_words(error: Mapping[str, Any]) -> str:
    """Pydantic's words, but for those that speak of regular expressions, or of a parser's state."""
    if error["type"] in DATES:
        return "should be a date like 2026-01-31, or a time like 2026-01-31T12:00:00Z"
    if error["type"] == "string_pattern_mismatch" and (words := PATTERNS.get(error["ctx"]["pattern"])):
        return words
    return str(error["msg"])
