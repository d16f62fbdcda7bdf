"""Errors that users can meet: a stable code, an HTTP status, and a remedy. The API translates them once."""

from __future__ import annotations

from typing import Any, ClassVar


class KithError(Exception):
    """Base class. ``code`` is stable and listed in docs/errors.md; ``remedy`` says what to do."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal"
    title: ClassVar[str] = "Internal error"
    hides_existence = False
    """True if the error may hide that the resource exists for other keys."""
    remedy: str = "Try again. If it fails again, report it with the request ID."

    def __init__(self, detail: str, remedy: str | None = None, **extra: Any) -> None:
        super().__init__(detail)
        self.detail = detail
        self.extra = extra
        if remedy is not None:
            self.remedy = remedy

    def document(self) -> dict[str, Any]:
        """Return the RFC 9457 problem document."""
        return {
            "type": f"urn:kith:error:{self.code}",
            "title": self.title,
            "status": self.status,
            "code": self.code,
            "detail": self.detail,
            "remedy": self.remedy,
            **self.extra,
        }

    def redacted(self) -> dict[str, Any]:
        """Return the document to store with a subject's data.

        It names no other subject, because the erasure of that subject would not find it there.
        """
        return self.document()


class InvalidRequestError(KithError):
    status, code, title = 422, "invalid_request", "The request is invalid"
    remedy = "/docs lists the fields, their types and ranges; --help lists the options of a command."


class UnsupportedMediaTypeError(KithError):
    status, code, title = 415, "unsupported_media_type", "The content type is not supported"
    remedy = (
        "Set the header Content-Type to application/json (curl: -H 'Content-Type: application/json'). Routes that take "
        "photos also take multipart/form-data with photos as files, and one photo with an image/* type."
    )


class UnsupportedEncodingError(KithError):
    """Unsupported Content-Encoding. ``accepted``: content codings that the path supports, as in Accept-Encoding."""

    status, code, title = 415, "unsupported_encoding", "The content encoding is not supported"
    remedy = "Send the body without Content-Encoding, or with one that the response lists in Accept-Encoding."

    def __init__(self, detail: str, accepted: str) -> None:
        super().__init__(detail)
        self.accepted = accepted


class UnauthorizedError(KithError):
    status, code, title = 401, "unauthorized", "A valid API key is required"
    remedy = (
        "Send the key in the header 'Authorization: Bearer KEY' or 'X-API-Key: KEY'. The client takes api_key, a "
        "command --api-key, and both KITH_CLIENT_KEY. 'kith keys create' on the server's machine creates a key."
    )


class ForbiddenError(KithError):
    status, code, title = 403, "forbidden", "The API key lacks permission"
    remedy = "Use a key with the required scope, or ask the operator for one (docs/keys.md)."


class ForeignOriginError(KithError):
    status, code, title = 403, "foreign_origin", "Cross-origin requests need an API key"
    remedy = (
        "Call http://localhost or http://127.0.0.1. For other host names, set up API keys, or set "
        "KITH_ALLOW_ANONYMOUS=true (docs/keys.md)."
    )


class TooManyStreamsError(KithError):
    """``seconds`` is the time until the next attempt may succeed."""

    status, code, title = 429, "too_many_streams", "Too many event streams of one key are open"
    remedy = "Close a stream that is no longer read, or filter the events of one stream."

    def __init__(self, detail: str, seconds: int) -> None:
        super().__init__(detail)
        self.seconds = seconds


class EventsExpiredError(KithError):
    status, code, title = 410, "events_expired", "Events after this Last-Event-ID are no longer stored"
    remedy = "Connect without Last-Event-ID, and read what was missed from the audit (docs/events.md)."


class KeyNotFoundError(KithError):
    status, code, title = 404, "key_not_found", "The API key does not exist"
    remedy = "List the keys: 'kith keys list', or GET /v1/keys."


class KeyEndedError(KithError):
    status, code, title = 409, "key_ended", "The API key is no longer valid"
    remedy = "Create a new key."


class WebhookNotFoundError(KithError):
    status, code, title = 404, "webhook_not_found", "The webhook does not exist"
    remedy = "List the webhooks."


class WebhookRefusedError(KithError):
    status, code, title = 422, "webhook_refused", "Webhooks to this address are not allowed"
    remedy = "Use an address that KITH_WEBHOOK_HOSTS allows (docs/events.md)."


class TooManyWebhooksError(KithError):
    status, code, title = 409, "too_many_webhooks", "The limit of webhooks is reached"
    remedy = "Delete a webhook that is no longer used."


class TooManyDecoysError(KithError):
    status, code, title = 409, "too_many_decoys", "The subject has the most decoys allowed"
    remedy = (
        "Delete decoys that are no longer needed. If many strangers resemble the subject, enroll better photos or "
        "choose a smaller risk."
    )


class DecoyEnrolledError(KithError):
    status, code, title = 409, "decoy_enrolled", "The photo is enrolled as this subject"
    remedy = "Move the template to the right subject, or delete it; then the photo is not mistaken any more."


class RequestTooLargeError(KithError):
    status, code, title = 413, "request_too_large", "The request is too large"
    remedy = "Send fewer or smaller photos. docs/settings.md lists the limits."


class ClientTooSlowError(KithError):
    status, code, title = 408, "client_too_slow", "The request arrived too slowly"
    remedy = "Send the whole request at once, with at least 1 kB a second."


# Galleries


class LivenessUnavailableError(KithError):
    status, code, title = 409, "liveness_unavailable", "No liveness model is available"
    remedy = "Serve a pack with tasks.liveness (docs/models.md), or set 'liveness' of the gallery to 'off'."


class GalleryNotFoundError(KithError):
    status, code, title = 404, "gallery_not_found", "The gallery does not exist"
    remedy = "List the galleries, or create it: 'kith gallery create', or POST /v1/galleries."


class GalleryExistsError(KithError):
    status, code, title = 409, "gallery_exists", "The gallery already exists"
    remedy = "Use it, or choose another name."


class SubjectNotFoundError(KithError):
    status, code, title = 404, "subject_not_found", "The subject does not exist in this gallery"
    remedy = "Check the ID, or list the subjects. Enrolling a photo creates the subject."


class StrangerNotFoundError(KithError):
    status, code, title = 404, "stranger_not_found", "The gallery remembers no such stranger"
    remedy = "List the strangers: they expire, and are merged, promoted or forgotten."


class SubjectExistsError(KithError):
    status, code, title = 412, "subject_exists", "The subject ID is already in use"
    remedy = "Choose another ID. To update the existing subject, omit 'If-None-Match' (client: only_new)."


class SubjectErasedError(KithError):
    status, code, title = 409, "subject_erased", "The subject was erased during this request"
    remedy = "Enroll again with a request sent after the erasure."


class TemplateNotFoundError(KithError):
    status, code, title = 404, "template_not_found", "The subject has no such template"
    remedy = "List the templates of the subject."


class DecoyNotFoundError(KithError):
    status, code, title = 404, "decoy_not_found", "The subject has no such decoy"
    remedy = "List the decoys of the subject."


class CropNotFoundError(KithError):
    status, code, title = 404, "crop_not_found", "No face crop is stored"
    remedy = "Set 'keep_crops' of the gallery to true (kith gallery update GALLERY --keep-crops) and enroll again."


class RecognizerMismatchError(KithError):
    status, code, title = 409, "recognizer_mismatch", "The gallery uses another recognizer"
    remedy = (
        "Serve the pack whose recognizer made the gallery's vectors (KITH_PACK or KITH_EXTRA_PACKS); docs/galleries.md "
        "describes how to change it. With embeddings, send 'recognizer', and embeddings of the gallery's recognizer."
    )


class GalleryMovedError(RecognizerMismatchError):
    """Migration to another recognizer during a request; the request is retried."""


class GalleryChangedError(KithError):
    """Change of templates since the gallery was read; the checks before the own write are repeated."""


class MigrationStateError(KithError):
    status, code, title = 409, "migration_state", "The migration is in another state"
    remedy = "Read the state: 'kith gallery migrate GALLERY'. Finish or roll back a migration before you start another."


class MigrationIncompleteError(KithError):
    status, code, title = 409, "migration_incomplete", "Some templates have no vector of the new recognizer"
    remedy = (
        "'kith gallery migrate GALLERY' lists the templates without a crop: enroll them again with keep_crops on. With "
        "'force' (--force), searches do not find the remaining templates."
    )


class ModelNotServedError(KithError):
    status, code, title = 404, "model_not_served", "The pack is not served"
    remedy = "List the served packs: 'kith models list', or GET /v1/models. KITH_EXTRA_PACKS of the server adds packs."


class EmbeddingError(KithError):
    status, code, title = 422, "embedding_invalid", "The embedding is invalid"
    remedy = "Send finite numbers, not all zero, in the dimension that GET /v1/models lists."


class DuplicateSubjectError(KithError):
    status, code, title = 409, "duplicate_subject", "The face belongs to another subject"
    remedy = "Enroll it for that subject, or use 'allow_duplicate' (--allow-duplicate)."

    def redacted(self) -> dict[str, Any]:
        document = self.document() | {"detail": "the face resembles another subject"}
        return {name: value for name, value in document.items() if name not in ("subject", "similarity")}


class InconsistentTemplateError(KithError):
    status, code, title = 409, "inconsistent_template", "The face differs from the subject's other templates"
    remedy = "Check the photo, or use 'allow_inconsistent' (--allow-inconsistent)."

    def redacted(self) -> dict[str, Any]:
        return {name: value for name, value in self.document().items() if name != "similarity"}


class IdempotencyConflictError(KithError):
    status, code, title = 409, "idempotency_conflict", "The Idempotency-Key belongs to another request"
    remedy = "Use a new Idempotency-Key (client: idempotency_key) for each new request."


class ImportFileError(KithError):
    """Unusable import file. Items that were imported before the error stay."""

    status, code, title = 422, "import_invalid", "The file cannot be imported"
    remedy = "See docs/galleries.md for the two formats. A repeated import skips items that exist already."


class ForeignFileError(KithError):
    """Unusable input of 'kith convert'. Servers never return it."""

    status, code, title = 422, "foreign_file", "The file of the other service cannot be converted"
    remedy = "See docs/moving-here.md for the supported files and how to export them."


class ItemError(KithError):
    status, code, title = 422, "item_invalid", "The import item is invalid"
    remedy = "Correct the item and send the file again. Items that exist already are skipped."


class TemplateConflictError(KithError):
    status, code, title = 409, "template_conflict", "Another template has this ID"
    remedy = "Delete the enrolled template, or omit the template ID of this item."


class RiskUncalibratedError(KithError):
    status, code, title = 409, "risk_uncalibrated", "The risk cannot be converted to a threshold"
    remedy = (
        "Use a threshold, such as 0.4 (--threshold 0.4); or calibrate the pack with "
        "'kith models calibrate PACK --photos FOLDER'; or enroll at least 50 people."
    )


# Jobs


class ArchiveInvalidError(KithError):
    """Unreadable archive, or unreadable file in an archive."""

    status, code, title = 422, "archive_invalid", "The archive, or a file in it, cannot be read"
    remedy = "Send a complete zip (stored or deflated, not encrypted), tar, tar.gz or tar.zst."


class ArchiveTooLargeError(KithError):
    status, code, title = 413, "archive_too_large", "The archive is too large"
    remedy = "Send it in parts. docs/settings.md lists the limits."


class JobNotFoundError(KithError):
    status, code, title = 404, "job_not_found", "The job does not exist"
    remedy = "List the jobs. Finished jobs are deleted after two weeks."


class JobCrashedError(KithError):
    """Problem of a failed job. No request is answered with it."""

    code, title = "job_crashed", "The job failed with an unexpected error"
    remedy = "Start it again; it skips finished items. If it fails again, report it with the job ID."


class JobUnrunnableError(KithError):
    """Problem of a failed job. No request is answered with it."""

    code, title = "job_unrunnable", "No server can run the job"
    remedy = "Send the archive again. Finished items stay."


# Albums


class AlbumNotFoundError(KithError):
    status, code, title = 404, "album_not_found", "The album does not exist"
    remedy = "List the albums: they expire after KITH_RETENTION_ALBUMS_DAYS. An album whose job failed is deleted."


class AlbumGroupNotFoundError(KithError):
    status, code, title = 404, "album_group_not_found", "The album has no such group, or no such face"
    remedy = "List the groups again: they were merged, split or enrolled meanwhile."


class AlbumNotReadyError(KithError):
    status, code, title = 409, "album_not_ready", "The faces of the album are not grouped yet"
    remedy = "Wait until the job with the album's ID has succeeded."


class AlbumOutdatedError(KithError):
    status, code, title = 409, "album_outdated", "The gallery moved to another recognizer since the album was made"
    remedy = "Delete the album, and upload the photos again."


class TooManyAlbumsError(KithError):
    status, code, title = 409, "too_many_albums", "The gallery has too many albums"
    remedy = "Delete albums that are no longer needed."


class AlbumTooLargeError(KithError):
    status, code, title = 413, "album_too_large", "The album has too many photos or faces"
    remedy = "Upload the photos in parts."


# Load and storage


class OverloadedError(KithError):
    """Backpressure. ``seconds`` estimates the time until the queue is empty; 0 if unknown."""

    status, code, title = 503, "overloaded", "The service is overloaded"
    remedy = "Try again in a moment. The header Retry-After says when."

    def __init__(self, detail: str, seconds: float = 0.0) -> None:
        super().__init__(detail)
        self.seconds = seconds


class DeadlineExceededError(KithError):
    status, code, title = 504, "deadline_exceeded", "The deadline was exceeded"
    remedy = "Try again under lower load, or allow more time with X-Request-Timeout-Ms and KITH_DEADLINE_S."


class ClientGoneError(KithError):
    """Client disconnect. It appears in the log only; nginx uses the same status."""

    status, code, title = 499, "client_gone", "The client disconnected before the response was ready"
    remedy = "No action is needed. Queued work of the request was dropped."


class GpuUnavailableError(KithError):
    status, code, title = 503, "gpu_unavailable", "The requested GPU does not run the networks"
    remedy = (
        "Follow the detail and restart the service; 'kith doctor' repeats the check. To run on the CPU, set "
        "KITH_DEVICE=cpu."
    )


class ReadinessUnknownError(KithError):
    status, code, title = 503, "readiness_unknown", "A dependency of the service did not respond in time"
    remedy = "Check the database, and Milvus if used, and the network connection to them."


class StorageError(KithError):
    status, code, title = 503, "storage_unavailable", "The database is unavailable"
    remedy = "Try again; repeat an enrollment with the same Idempotency-Key, so that it is not stored twice."


class StorageBusyError(StorageError):
    code, title = "storage_busy", "The database was locked by other writers for too long"
    remedy = "Try again. Nothing of this request was stored."


class StorageFullError(StorageError):
    status, code, title = 507, "storage_full", "The disk is full"
    remedy = "Free disk space, then try again. Nothing of this request was stored. Searches still work."


class ClockSteppedError(KithError):
    status, code, title = 503, "clock_stepped", "The system clock is unreliable"
    remedy = "Retention deletes nothing meanwhile. Correct the clock; if it is right now, restart the service."


class RetentionUnconfirmedError(KithError):
    """Change of retention_days that would erase much. ``confirm``: the number that confirms it."""

    status, code, title = 409, "retention_unconfirmed", "A large part of the gallery would be erased"
    remedy = "If this is meant, repeat the change with the number in the message as confirm."


class StorageDamagedError(StorageError):
    status, code, title = 500, "storage_damaged", "The database is damaged"
    remedy = "Stop the service, run kith doctor, and restore a backup. Nothing of this request was stored."


class IndexUnavailableError(KithError):
    status, code, title = 503, "index_unavailable", "The search index is unavailable"
    remedy = "Try again. Enrolled subjects are searchable again as soon as the index responds."


class BackupError(KithError):
    """Backup that cannot be created or restored."""

    code, title = "backup", "The backup cannot be used"
    remedy = "Nothing was changed."


class DatabaseMissingError(KithError):
    """Missing database of a command line tool. A server creates its database."""

    code, title = "no_database", "The database does not exist"
    remedy = (
        "Run the command in the server's folder, or set KITH_DATA_DIR or KITH_DATABASE_URL as on the server. "
        "'kith serve', 'kith keys create' and 'kith restore' create a database."
    )


class AuditWriteError(KithError):
    status, code, title = 503, "audit_unwritten", "The audit log cannot be written"
    remedy = "Check that the database is writable. The refused operation was not performed. See docs/keys.md."


class MasterKeyError(KithError):
    """Master key that does not open the stored data."""

    code, title = "master_key", "The master key does not match the stored data"
    remedy = (
        "Provide the key that the database was created with (KITH_MASTER_KEY_FILE; docs/privacy.md). Without it the "
        "galleries are unreadable. 'kith master show' lists the available keys; 'kith master rotate' changes the key."
    )


class SettingsError(KithError):
    """Invalid setting that prevents the service from starting."""

    code, title = "settings", "A setting is invalid"
    remedy = "Correct the setting. docs/settings.md lists all settings."
