"""Errors that each route can answer with: the OpenAPI document and the REST reference state them.

Groups follow from a route's description: its key, its path and its body. The description adds what only its handler
raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

from service.core import errors as e
from service.core import photo_errors as p

Errors = Sequence[type[e.KithError]]


class Route(Protocol):
    """Properties of a route that decide its errors. ``name``: method and path."""

    @property
    def name(self) -> str: ...

    @property
    def needs_key(self) -> bool: ...

    @property
    def takes_photos(self) -> bool: ...

    @property
    def takes_json(self) -> bool: ...

    @property
    def writes(self) -> bool: ...

    @property
    def creates_subject(self) -> bool: ...

    @property
    def errors(self) -> Errors: ...


HTTP: Final[Errors] = (
    e.ClientTooSlowError,
    e.RequestTooLargeError,
    e.UnsupportedEncodingError,
    e.KithError,
)
"""Errors of every route."""
WITH_KEY: Final[Errors] = (
    e.UnauthorizedError,
    e.ForbiddenError,
    e.ForeignOriginError,
    e.InvalidRequestError,
    e.OverloadedError,
    e.StorageError,
    e.StorageBusyError,
    e.StorageDamagedError,
    e.MasterKeyError,
)
"""Errors of every route that needs a key."""
IN_PATH: Final[dict[str, type[e.KithError]]] = {
    "{gallery}": e.GalleryNotFoundError,
    "{subject}": e.SubjectNotFoundError,
    "{stranger}": e.StrangerNotFoundError,
    "{album}": e.AlbumNotFoundError,
    "{group}": e.AlbumGroupNotFoundError,
    "{template}": e.TemplateNotFoundError,
    "{decoy}": e.DecoyNotFoundError,
    "{job}": e.JobNotFoundError,
    "{key}": e.KeyNotFoundError,
    "{webhook}": e.WebhookNotFoundError,
}
PHOTOS: Final[Errors] = (
    e.UnsupportedMediaTypeError,
    e.DeadlineExceededError,
    p.ImageEmptyError,
    p.ImageFormatError,
    p.ImageDamagedError,
    p.ImageTooLargeError,
    p.UrlRefusedError,
    p.UrlFailedError,
)
WRITE: Final[Errors] = (e.StorageFullError,)
SEARCH: Final[Errors] = (e.IndexUnavailableError, e.RecognizerMismatchError, e.RiskUncalibratedError, e.AuditWriteError)
CALIBRATED: Final[Errors] = (e.RecognizerMismatchError, e.RiskUncalibratedError)


def own_errors(route: Route) -> list[type[e.KithError]]:
    """Return the errors of a route beyond HTTP and WITH_KEY, by status and code."""
    found = set(route.errors)
    found |= {error for part, error in IN_PATH.items() if part in route.name}
    if route.creates_subject:
        found.discard(e.SubjectNotFoundError)
    if route.takes_photos:
        found |= {*PHOTOS}
    if route.takes_json:
        found.add(e.UnsupportedMediaTypeError)
    if route.writes:
        found |= {*WRITE}
    return _sorted(found)


def errors_of(route: Route) -> list[type[e.KithError]]:
    """Return all errors that a route can answer with, by status and code."""
    return _sorted({*HTTP, *(WITH_KEY if route.needs_key else ()), *own_errors(route)})


def problem_responses(route: Route) -> dict[int | str, dict[str, Any]]:
    """Return the responses of a route with problems, by status, as FastAPI takes them. ``x-codes`` lists the codes.

    They name no model: FastAPI would build a validator for each. service.api.http.openapi adds the schema.
    """
    codes: dict[int | str, dict[str, str]] = {}
    for error in errors_of(route):
        codes.setdefault(error.status, {})[error.code] = error.title
    return {
        status: {
            "description": " ".join(f"`{code}`: {title}." for code, title in titles.items()),
            "x-codes": [*titles],
        }
        for status, titles in codes.items()
    }


def _sorted(found: set[type[e.KithError]]) -> list[type[e.KithError]]:
    return sorted(found, key=lambda error: (error.status, error.code))
