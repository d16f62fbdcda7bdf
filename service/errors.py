"""Every error a user can meet: a stable code, a status, and what to do. Translated to HTTP once, in the API."""

from __future__ import annotations

from typing import Any, ClassVar


class KithError(Exception):
    """Base. ``code`` is stable and documented in docs/errors.md; ``remedy`` says what to do: in general,
    or on this occasion."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal"
    title: ClassVar[str] = "Internal error"
    hides = False
    """Whether something may be there, for others."""
    remedy: str = "Try again; if it happens again, report it with the request id."

    def __init__(self, detail: str, remedy: str | None = None, **extra: Any) -> None:
        super().__init__(detail)
        self.detail = detail
        self.extra = extra
        if remedy is not None:
            self.remedy = remedy

    def document(self) -> dict[str, Any]:
        """RFC 9457."""
        return {
            "type": f"urn:kith:error:{self.code}",
            "title": self.title,
            "status": self.status,
            "code": self.code,
            "detail": self.detail,
            "remedy": self.remedy,
            **self.extra,
        }

    def kept(self) -> dict[str, Any]:
        """As :meth:`document`, to be stored with whom it concerns: it names nobody else, whose erasure would not find
        it there."""
        return self.document()


class InvalidRequestError(KithError):
    status, code, title = 422, "invalid_request", "The request does not fit its description"
    remedy = "See /docs for the fields, their types and ranges."


class AmbiguousPathError(KithError):
    status, code, title = 400, "ambiguous_path", "The path can be read as another one"
    remedy = "Send paths as /docs has them: no id has slashes or backslashes, or is '.' or '..', escaped or not."


class UnsupportedMediaTypeError(KithError):
    status, code, title = 415, "unsupported_media_type", "This content type is not understood"
    remedy = (
        "Send application/json, multipart/form-data with the photos as files, or a photo as image/jpeg or the like."
    )


class UnauthorizedError(KithError):
    status, code, title = 401, "unauthorized", "An API key is required"
    remedy = "Send the key in the header 'Authorization: Bearer KEY' or 'X-API-Key: KEY'."


class ForbiddenError(KithError):
    status, code, title = 403, "forbidden", "The API key may not do this"
    remedy = "Use a key that has the scope, or ask whoever runs the service for one (docs/keys.md)."


class ForeignOriginError(KithError):
    status, code, title = 403, "foreign_origin", "A web page of another origin may not use a service without keys"
    remedy = (
        "Call it as http://localhost or http://127.0.0.1; to be reached under other names it needs API keys, or "
        "KITH_ALLOW_ANONYMOUS=true (docs/keys.md)."
    )


class RateLimitedError(KithError):
    """``seconds``: until it may be tried again."""

    status, code, title = 429, "rate_limited", "Too many requests"
    remedy = "Wait as long as Retry-After says, and then send no more than RateLimit-Policy allows."

    def __init__(self, detail: str, seconds: int, remedy: str | None = None) -> None:
        super().__init__(detail, remedy)
        self.seconds = seconds


class ProbeBudgetError(RateLimitedError):
    code, title = "probe_budget", "Too many embeddings were compared with enrolled subjects"
    remedy = (
        "Wait as long as Retry-After says, send photos instead of embeddings, or raise KITH_EMBEDDING_RATE. Enrol many "
        "embeddings with an import."
    )


class KeyNotFoundError(KithError):
    status, code, title = 404, "key_not_found", "There is no such API key"
    remedy = "'kith keys list', or GET /v1/keys, lists them."


class KeyEndedError(KithError):
    status, code, title = 409, "key_ended", "The API key has ended, or is about to"
    remedy = "Create another one."


class RequestTooLargeError(KithError):
    status, code, title = 413, "request_too_large", "The request is too large"
    remedy = "Send fewer or smaller photos; the limits are in docs/settings.md."


# Connections: refused before there is a request


class MalformedHttpError(KithError):
    status, code, title = 400, "malformed_http", "These bytes are no request"
    remedy = (
        "Send HTTP/1.1 (RFC 9112), with one length of the body, one Host, and no Upgrade (Java: version(HTTP_1_1))."
    )


class ClientTooSlowError(KithError):
    status, code, title = 408, "client_too_slow", "The request did not come in time"
    remedy = "Send it at once; the limits are KITH_CLIENT_PATIENCE_S and KITH_CLIENT_LEAST_RATE."


class HeadTooLargeError(KithError):
    status, code, title = 431, "head_too_large", "The address and headers are too long"
    remedy = "Send fewer or shorter headers, and long options in the body; the limit is KITH_MAX_HEAD_BYTES."


class TooManyConnectionsError(KithError):
    status, code, title = 503, "too_many_connections", "As many connections are open as may be"
    remedy = "Close those that are done, and try again; the limits are KITH_MAX_CONNECTIONS and ..._PER_ADDRESS."


# Photos


class ImageError(KithError):
    """A photo cannot be used; in a call with several photos it fails alone."""

    status = 422


class ImageEmptyError(ImageError):
    code, title = "image_empty", "The photo has no bytes"
    remedy = "Send the file's content."


class ImageFormatError(ImageError):
    code, title = "image_format", "This is not a photo in a supported format"
    remedy = "Send JPEG, PNG, WebP, BMP, TIFF, GIF, AVIF or HEIC."


class ImageDamagedError(ImageError):
    code, title = "image_damaged", "The photo is damaged or truncated"
    remedy = "Send the complete file."


class ImageTooLargeError(ImageError):
    status, code, title = 413, "image_too_large", "The photo has too many bytes or pixels"
    remedy = "Shrink the photo; the limits are in docs/settings.md."


class UrlRefusedError(ImageError):
    code, title = "url_refused", "Photos are not fetched from this address"
    remedy = "Send the photo itself, or an https address of a host in KITH_URL_HOSTS (docs/rest.md)."


class UrlFailedError(ImageError):
    code, title = "url_failed", "The address did not give a photo"
    remedy = "Check the address, or send the photo itself."


class NoFaceError(ImageError):
    code, title = "no_face", "No face was found"
    remedy = "Send a photo in which the face is upright, visible and not tiny."


class SeveralFacesError(ImageError):
    code, title = "several_faces", "The photo shows several faces"
    remedy = "Crop the photo to one person, or set 'face' to 'largest'."


class LowQualityError(ImageError):
    code, title = "low_quality", "The face is not good enough to enrol"
    remedy = "Send a sharper, better lit, more frontal photo, or relax the gallery's quality gate."


class NotLiveError(ImageError):
    code, title = "not_live", "The face is not taken for that of a person before the camera"
    remedy = (
        "Send a photo taken of the person, with room around the face; or set 'allow_not_live' if it shall be enrolled."
    )


# Galleries


class LivenessUnavailableError(KithError):
    status, code, title = 409, "liveness_unavailable", "Liveness is asked for, and no model here tells it"
    remedy = "Serve a pack that has tasks.liveness (docs/models.md), or set the gallery's 'liveness' to 'off'."


class GalleryNotFoundError(KithError):
    status, code, title = 404, "gallery_not_found", "There is no such gallery"
    remedy = "Create it with POST /v1/galleries."


class GalleryExistsError(KithError):
    status, code, title = 409, "gallery_exists", "There is a gallery of this name"
    remedy = "Use it, or choose another name."


class SubjectNotFoundError(KithError):
    status, code, title = 404, "subject_not_found", "There is no such subject in this gallery"
    remedy = "Check its id; PUT, or enrolling a template for it, creates it."


class SubjectExistsError(KithError):
    status, code, title = 412, "subject_exists", "There is a subject of this id"
    remedy = "Choose another id; or leave 'If-None-Match' out, if it is them whom you mean."


class SubjectErasedError(KithError):
    status, code, title = 409, "subject_erased", "The subject was erased while this was under way"
    remedy = "Whoever is to be enrolled anew is so by a request that begins after the erasure."


class ReceiptNotFoundError(KithError):
    status, code, title = 404, "receipt_not_found", "There is no such receipt"
    remedy = (
        "Check its id, 32 hexadecimal digits, which 'kith erasures list' names; that of a database which was lost is "
        "in none of its backups."
    )


class TemplateNotFoundError(KithError):
    status, code, title = 404, "template_not_found", "There is no such template of this subject"
    remedy = "List the subject's templates."


class RecogniserMismatchError(KithError):
    status, code, title = 409, "recogniser_mismatch", "The gallery belongs to another recogniser"
    remedy = (
        "A gallery stays with the recogniser that made its vectors: serve its pack (KITH_PACK, or KITH_ALSO beside "
        "another), then, if you like, move the gallery to another (docs/migration.md). With embeddings, say whose they "
        "are, and send those of the gallery's own."
    )


class GalleryMovedError(RecogniserMismatchError):
    """It moved to another recogniser while a request was under way, which is done again."""


class MigrationStateError(KithError):
    status, code, title = 409, "migration_state", "The gallery's migration is not at this point"
    remedy = "GET .../migrate says where it is; finish or roll back before another one begins."


class MigrationIncompleteError(KithError):
    status, code, title = 409, "migration_incomplete", "Not all templates have vectors of this recogniser"
    remedy = "Wait for the job, enrol what has no crop anew, or say 'force': what is left out is found by no search."


class ModelNotServedError(KithError):
    status, code, title = 404, "model_not_served", "No such pack is served"
    remedy = "GET /v1/models lists those that are; KITH_ALSO names further ones."


class EmbeddingError(KithError):
    status, code, title = 422, "embedding_invalid", "This is not an embedding of this recogniser"
    remedy = "Send finite numbers, not all zero, as many as GET /v1/models says."


class DuplicateSubjectError(KithError):
    status, code, title = 409, "duplicate_subject", "The face already belongs to another subject"
    remedy = "Enrol it there, or repeat the request with 'allow_duplicate': true."

    def kept(self) -> dict[str, Any]:
        document = self.document() | {"detail": "the face resembles another subject"}
        for name in ("subject", "similarity"):
            document.pop(name, None)
        return document


class InconsistentTemplateError(KithError):
    status, code, title = 409, "inconsistent_template", "The face is unlike the subject's other templates"
    remedy = "Check the photo, or repeat the request with 'allow_inconsistent': true."

    def kept(self) -> dict[str, Any]:
        document = self.document()
        document.pop("similarity", None)
        return document


class IdempotencyConflictError(KithError):
    status, code, title = 409, "idempotency_conflict", "This Idempotency-Key was used for another request"
    remedy = "Use a new key for a new request."


class ImportFileError(KithError):
    """The file as a whole; what was taken of it before stays."""

    status, code, title = 422, "import_invalid", "The file cannot be imported"
    remedy = "See docs/galleries.md for the two formats; what was imported already is passed over the next time."


class ForeignFileError(KithError):
    """Of the command line alone: no server reads such files."""

    status, code, title = 422, "foreign_file", "The other service's file cannot be converted"
    remedy = "See docs/moving-here.md for the files that are understood, and how to get them."


class ItemError(KithError):
    status, code, title = 422, "item_invalid", "This item of the file cannot be imported"
    remedy = "Correct the item and send the file again: what is there already is passed over."


class TemplateConflictError(KithError):
    status, code, title = 409, "template_conflict", "There is another template of this id"
    remedy = "Delete the one that is enrolled, or leave this item's template id out."


class RiskUncalibratedError(KithError):
    status, code, title = 409, "risk_uncalibrated", "Too little is known of strangers, so a risk has no threshold"
    remedy = (
        'Ask with an explicit threshold: {"threshold": 0.4}; calibrate the pack with kith-train calibrate; or enrol 50 '
        "people or more."
    )


# Jobs


class ArchiveInvalidError(KithError):
    """Of an archive as a whole, or of one file in it."""

    status, code, title = 422, "archive_invalid", "The archive, or a file in it, cannot be read"
    remedy = "Send a whole zip (stored or deflated, not encrypted), tar, tar.gz or tar.zst."


class ArchiveTooLargeError(KithError):
    status, code, title = 413, "archive_too_large", "The archive holds more than it may"
    remedy = "Send it in parts; the limits are in docs/settings.md."


class JobNotFoundError(KithError):
    status, code, title = 404, "job_not_found", "There is no such job"
    remedy = "List the jobs with GET /v1/jobs; finished ones are forgotten after two weeks."


class JobCrashedError(KithError):
    """What the problem of a failed job says; no request is answered with it."""

    code, title = "job_crashed", "The job ended by an error that was not foreseen"
    remedy = "Start it again, it skips what is done; if it happens again, report it with the job's id."


class JobUnrunnableError(KithError):
    """What the problem of a failed job says; no request is answered with it."""

    code, title = "job_unrunnable", "No server had what the job needs"
    remedy = "Send its archive again, or serve the pack it needs and start it again; what it did stays."


# Load and storage


class OverloadedError(KithError):
    """``seconds``: how long what waits already will take, where that is known."""

    status, code, title = 503, "overloaded", "The service has as much work as it can take"
    remedy = "Try again after the seconds in Retry-After."

    def __init__(self, detail: str, seconds: float = 0.0) -> None:
        super().__init__(detail)
        self.seconds = seconds


class DeadlineExceededError(KithError):
    status, code, title = 504, "deadline_exceeded", "The answer was not ready in time"
    remedy = "Try again when there is less to do, or wait longer: see X-Request-Timeout-Ms and KITH_DEADLINE_S."


class ClientGoneError(KithError):
    """Nobody reads it but who reads the log; the status is nginx's."""

    status, code, title = 499, "client_gone", "The client left before its answer was ready"
    remedy = "Nothing was wrong: what still waited was dropped."


class GpuUnavailableError(KithError):
    status, code, title = 503, "gpu_unavailable", "The GPU that is wanted does not run the networks"
    remedy = (
        "Do what the detail says and start the service again (kith doctor looks anew); KITH_ALLOW_CPU=true goes on "
        "without, KITH_DEVICE=cpu wants none."
    )


class ReadinessUnknownError(KithError):
    status, code, title = 503, "readiness_unknown", "What the service needs does not answer in time"
    remedy = "Look at the database, and at Milvus where it is used: one of them hangs, or the way to it is cut."


class StorageError(KithError):
    status, code, title = 503, "storage_unavailable", "The database cannot be used at the moment"
    remedy = (
        "Try again, under the same Idempotency-Key: should only the answer have been lost, nothing is stored twice."
    )


class StorageBusyError(StorageError):
    code, title = "storage_busy", "Others were writing to the database for too long"
    remedy = "Try again; nothing of this request was stored."


class StorageFullError(StorageError):
    status, code, title = 507, "storage_full", "There is no room left on the disk"
    remedy = "Make room, then try again; nothing of this request was stored. Searches go on meanwhile."


class ClockSteppedError(KithError):
    status, code, title = 503, "clock_stepped", "The clock cannot be relied on"
    remedy = (
        "Nothing is deleted for its age meanwhile. Correct the clock; if it is right now, restart the service. "
        "To erase a gallery's old templates all the same: kith gallery retention GALLERY --erase."
    )


class RetentionChangedError(KithError):
    status, code, title = 409, "retention_changed", "More would be erased than was confirmed"
    remedy = "Read what is due now (GET .../retention), and confirm those counts."


class StorageDamagedError(StorageError):
    status, code, title = 500, "storage_damaged", "The database is damaged"
    remedy = "Stop the service, run kith gallery check, and restore a backup; nothing of this request was stored."


class IndexUnavailableError(KithError):
    status, code, title = 503, "index_unavailable", "The search index cannot be used at the moment"
    remedy = "Try again; whoever is enrolled will be found once the index answers."


class BackupError(KithError):
    """A backup that cannot be made or restored."""

    code, title = "backup", "The backup cannot be used"
    remedy = "Nothing was changed."


class DatabaseMissingError(KithError):
    """Of the command line alone: a server makes its database."""

    code, title = "no_database", "There is no database"
    remedy = (
        "Run it where the server's data are: in its folder, or with its KITH_DATA_DIR or KITH_DATABASE_URL. "
        "'kith serve', 'kith keys create' and 'kith restore' make a database."
    )


class AuditUnwrittenError(KithError):
    status, code, title = 503, "audit_unwritten", "The audit cannot be written at the moment"
    remedy = "See that the database can be written; what was refused for this was not done. docs/audit.md."


class AuditFileError(KithError):
    """What an audit is to be read from, or compared with, cannot be."""

    code, title = "audit_file", "The audit cannot be read from there"
    remedy = "Name a database of Kith, or a file that 'kith audit export' wrote; docs/audit.md."


class MasterKeyError(KithError):
    """What is stored cannot be opened, or sealed, by the key that the service was given."""

    code, title = "master_key", "The master key does not open what is stored"
    remedy = (
        "Give the key that the database was made with (KITH_MASTER_KEY_FILE; docs/privacy.md). Without it nobody can "
        "read the galleries. 'kith master show' says which keys are at hand, 'kith master rotate' puts another in use."
    )


class MasterKeyAwayError(MasterKeyError):
    status, code, title = 503, "master_key_unavailable", "The master key cannot be asked for at the moment"
    remedy = (
        "Try again; galleries that were used before are searched meanwhile. See to the program of "
        "KITH_MASTER_KEY_COMMAND, whose words are in the log."
    )


class SettingsError(KithError):
    """A setting the service cannot start with."""

    code, title = "settings", "A setting is wrong"
    remedy = "Correct the setting; docs/settings.md lists all."


def all_errors() -> list[type[KithError]]:
    """Every error class with a code of its own, for the documents' tests."""
    found: list[type[KithError]] = []
    waiting: list[type[KithError]] = [KithError]
    while waiting:
        error = waiting.pop()
        waiting += error.__subclasses__()
        if "code" in vars(error):
            found.append(error)
    return sorted(found, key=lambda e: e.code)
