"""Translation of errors to RFC 9457 problem documents."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from kith.wire.fields import GALLERY_NAME, OBJECT_ID, Problem
from kith.wire.keys import KEY_ID
from service.core.errors import ClientGoneError, InvalidRequestError, KithError, RefusedError

ProblemFormat = Callable[[Problem], tuple[int, Mapping[str, Any]]]
"""Converts a problem to the status and body of another API."""
MEDIA_TYPE: Final = "application/problem+json"
RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    "default": {
        "description": "A problem (RFC 9457) with a stable `code`: docs/errors.md has all.",
        "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
}
"""Every route's response to a request that fails."""
PATTERN_MESSAGES: Final = {
    KEY_ID: "must be 12 lowercase hexadecimal digits",
    OBJECT_ID: "must be 32 lowercase hexadecimal digits",
    GALLERY_NAME: "must be at most 64 letters, digits, '.', '_' or '-', and begin with a letter or digit",
}
"""Messages for regular expressions of names and ids that people type."""
DATE_ERRORS: Final = frozenset({"date_from_datetime_parsing", "datetime_from_date_parsing", "datetime_parsing"})
log = logging.getLogger(__name__)


def install_error_handlers(app: FastAPI) -> None:
    """Translate the errors of FastAPI and Starlette; the gate catches all others.

    ``app.state.problem_formats`` has the formats of other APIs, by the prefix of their paths.
    """
    app.state.problem_formats = {}

    @app.exception_handler(RequestValidationError)
    async def handle_invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return problem_response(request, validation_error(error.errors()))

    @app.exception_handler(HTTPException)
    async def handle_http(request: Request, error: HTTPException) -> JSONResponse:
        detail = f"{request.method} {request.url.path}: {error.detail}"
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            return problem_response(request, RefusedError("method_not_allowed", detail, headers=error.headers))
        return problem_response(request, RefusedError("not_found", detail))


def error_response(request: Request, error: Exception) -> JSONResponse:
    """Return the answer to an error. An unexpected one is logged, and its answer tells nothing about it."""
    if isinstance(error, ClientDisconnect):
        error = ClientGoneError("the client closed the connection before the body ended")
    elif not isinstance(error, KithError):
        log.error("request %s failed", _request_id(request), exc_info=error)
        error = KithError("an unexpected error; the log has the details under the request id")
    return problem_response(request, error)


def cut_response(request: Request, error: Exception) -> None:
    """Log an error that ends a response after its head was sent, and note it for the metrics."""
    log.error("request %s failed: its response is incomplete", _request_id(request), exc_info=error)
    request.state.problem_code = error.code if isinstance(error, KithError) else KithError.code


def problem_response(request: Request, error: KithError) -> JSONResponse:
    # Not the error: its traceback would keep the request's body in a reference cycle.
    request.state.hides_existence = error.hides_existence
    request.state.problem_code = error.code  # the gate keeps count
    document, headers = Problem(**error.document(), request_id=_request_id(request)), error.headers
    formats: Mapping[str, ProblemFormat] = request.app.state.problem_formats
    for prefix, to_format in formats.items():
        if request.url.path.startswith(prefix):
            status, body = to_format(document)
            return JSONResponse(body, status, headers=headers)
    return JSONResponse(
        document.model_dump(mode="json", exclude_none=True), document.status, headers=headers, media_type=MEDIA_TYPE
    )


def _request_id(request: Request) -> str | None:
    return getattr(request.state, "request_id", None)


def validation_error(errors: Any) -> InvalidRequestError:
    """Return an error that names each invalid field. Values are left out: they may be photos or names."""
    fields = [
        {"field": ".".join(str(part) for part in error["loc"]) or "body", "problem": _message(error)}
        for error in list(errors)[:10]
    ]
    return InvalidRequestError("; ".join(f"{f['field']}: {f['problem']}" for f in fields), fields=fields)


def _message(error: Mapping[str, Any]) -> str:
    """Return pydantic's message, or our own where a person would read a regular expression or a parser's state."""
    if error["type"] in DATE_ERRORS:
        return "must be a date like 2026-01-31, or a time like 2026-01-31T12:00:00Z"
    if error["type"] == "string_pattern_mismatch" and (message := PATTERN_MESSAGES.get(error["ctx"]["pattern"])):
        return message
    return str(error["msg"]).removeprefix("Value error, ")
