"""Errors that each route can answer with: the OpenAPI document and the REST reference state them.

Groups follow from a route's description: its key, its path and its body. ``OWN`` adds what only its handler raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

from service.core import errors as e
from service.core import photo_errors as p

Errors = Sequence[type[e.KithError]]


class Route(Protocol):
    """What the errors of a route follow from. ``name``: method and path."""

    @property
    def name(self) -> str: ...

    @property
    def needs_key(self) -> bool: ...

    @property
    def takes_photos(self) -> bool: ...

    @property
    def writes(self) -> bool: ...


HTTP: Final[Errors] = (
    e.MalformedHttpError,
    e.AmbiguousPathError,
    e.UrlEncodingError,
    e.ClientTooSlowError,
    e.HeadTooLargeError,
    e.RequestTooLargeError,
    e.UnsupportedEncodingError,
    e.TooManyConnectionsError,
    e.KithError,
)
"""Of every route."""
WITH_KEY: Final[Errors] = (
    e.UnauthorizedError,
    e.ForbiddenError,
    e.ForeignOriginError,
    e.RateLimitedError,
    e.InvalidRequestError,
    e.OverloadedError,
    e.StorageError,
    e.StorageBusyError,
    e.StorageDamagedError,
    e.MasterKeyError,
    e.MasterKeyUnavailableError,
)
"""Of every route that needs a key."""
IN_PATH: Final[dict[str, type[e.KithError]]] = {
    "{gallery}": e.GalleryNotFoundError,
    "{subject}": e.SubjectNotFoundError,
    "{stranger}": e.StrangerNotFoundError,
    "{template}": e.TemplateNotFoundError,
    "{decoy}": e.DecoyNotFoundError,
    "{job}": e.JobNotFoundError,
    "{key}": e.KeyNotFoundError,
    "{webhook}": e.WebhookNotFoundError,
    "{receipt}": e.ReceiptNotFoundError,
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
MIGRATION: Final[Errors] = (
    e.MigrationStateError,
    e.ModelNotServedError,
    e.RecognizerMismatchError,
    e.RiskUncalibratedError,
)
GALLERY: Final = "/v1/galleries/{gallery}"
SUBJECT: Final = f"{GALLERY}/subjects/{{subject}}"
OWN: Final[dict[str, Errors]] = {
    "GET /readyz": (
        e.StorageError,
        e.StorageFullError,
        e.StorageDamagedError,
        e.MasterKeyError,
        e.MasterKeyUnavailableError,
        e.IndexUnavailableError,
        e.GpuUnavailableError,
        e.ReadinessUnknownError,
        e.AuditWriteError,
        e.OverloadedError,
    ),
    "POST /v1/embed": (e.ModelNotServedError,),
    "POST /v1/verify": (
        *SEARCH,
        e.EmbeddingError,
        e.GalleryNotFoundError,
        e.SubjectNotFoundError,
        e.TemplateNotFoundError,
        e.ModelNotServedError,
        e.LivenessUnavailableError,
    ),
    "POST /v1/galleries": (e.GalleryExistsError, e.LivenessUnavailableError, e.IdempotencyConflictError),
    f"PATCH {GALLERY}": (e.LivenessUnavailableError, e.PreconditionFailedError),
    f"DELETE {GALLERY}": (e.PreconditionFailedError,),
    f"GET {GALLERY}/stats": (e.IndexUnavailableError, e.RecognizerMismatchError),
    f"POST {GALLERY}/retention": (e.RetentionChangedError,),
    f"GET {GALLERY}/hygiene": CALIBRATED,
    f"GET {GALLERY}/risk": CALIBRATED,
    f"POST {GALLERY}/calibrate": CALIBRATED,
    f"POST {GALLERY}/identify": (*SEARCH, e.EmbeddingError, e.LivenessUnavailableError),
    f"PUT {SUBJECT}": (e.SubjectExistsError, e.SubjectErasedError, e.PreconditionFailedError),
    f"PATCH {SUBJECT}": (e.SubjectErasedError, e.PreconditionFailedError),
    f"DELETE {SUBJECT}": (e.PreconditionFailedError,),
    f"POST {SUBJECT}/merge": (e.SubjectErasedError,),
    f"PATCH {SUBJECT}/templates/{{template}}": (e.SubjectErasedError,),
    f"POST {SUBJECT}/templates": (
        *SEARCH,
        e.EmbeddingError,
        e.LivenessUnavailableError,
        p.NoFaceError,
        p.SeveralFacesError,
        p.LowQualityError,
        p.NotLiveError,
        e.DuplicateSubjectError,
        e.InconsistentTemplateError,
        e.IdempotencyConflictError,
        e.SubjectExistsError,
        e.SubjectErasedError,
    ),
    f"PUT {SUBJECT}/lookalikes/{{other}}": (e.SubjectErasedError,),
    f"POST {SUBJECT}/decoys": (
        e.EmbeddingError,
        e.RecognizerMismatchError,
        p.NoFaceError,
        p.SeveralFacesError,
        p.LowQualityError,
        e.SubjectErasedError,
        e.DecoyEnrolledError,
        e.TooManyDecoysError,
    ),
    f"GET {SUBJECT}/thumbnail": (e.TemplateNotFoundError, e.CropNotFoundError, e.AuditWriteError),
    f"GET {SUBJECT}/templates/{{template}}/crop": (e.CropNotFoundError, e.AuditWriteError),
    f"GET {SUBJECT}/export": (e.AuditWriteError,),
    f"POST {GALLERY}/strangers/{{stranger}}/promote": (e.SubjectErasedError,),
    f"POST {GALLERY}/crops": (e.AuditWriteError,),
    f"GET {GALLERY}/strangers/{{stranger}}/thumbnail": (e.CropNotFoundError, e.AuditWriteError),
    f"GET {GALLERY}/strangers/{{stranger}}/export": (e.AuditWriteError,),
    f"POST {GALLERY}/enrollments": (
        e.RecognizerMismatchError,
        e.ArchiveInvalidError,
        e.ArchiveTooLargeError,
        e.IdempotencyConflictError,
    ),
    f"GET {GALLERY}/export": (e.AuditWriteError, e.ExtraMissingError),
    f"POST {GALLERY}/import": (
        e.UnsupportedMediaTypeError,
        e.ImportFileError,
        e.RecognizerMismatchError,
        e.ModelNotServedError,
        e.GalleryExistsError,
        e.LivenessUnavailableError,
    ),
    f"POST {GALLERY}/migrate": MIGRATION,
    f"GET {GALLERY}/migrate": MIGRATION,
    f"POST {GALLERY}/migrate/cut-over": (*MIGRATION, e.MigrationIncompleteError),
    f"POST {GALLERY}/migrate/roll-back": MIGRATION,
    f"POST {GALLERY}/migrate/finish": (*MIGRATION, e.MigrationIncompleteError),
    "GET /v1/events": (e.GalleryNotFoundError, e.TooManyStreamsError, e.EventsExpiredError),
    "GET /v1/jobs": (e.GalleryNotFoundError,),
    "POST /v1/webhooks": (e.WebhookRefusedError, e.TooManyWebhooksError, e.IdempotencyConflictError),
    "POST /v1/webhooks/{webhook}/test": (e.WebhookRefusedError,),
    "POST /v1/keys": (e.IdempotencyConflictError,),
    "POST /v1/keys/{key}/rotate": (e.KeyEndedError, e.IdempotencyConflictError),
}
"""By method and path."""
CREATING: Final = frozenset({f"PUT {SUBJECT}", f"POST {SUBJECT}/templates"})
"""Routes that create a missing subject."""


def own_errors(route: Route) -> list[type[e.KithError]]:
    """Return the errors of a route beyond HTTP and WITH_KEY, by status and code."""
    found = set(OWN.get(route.name, ()))
    found |= {error for part, error in IN_PATH.items() if part in route.name}
    if route.name in CREATING:
        found.discard(e.SubjectNotFoundError)
    if route.takes_photos:
        found |= {*PHOTOS}
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
