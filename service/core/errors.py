"""Errors that users can meet: a stable code, an HTTP status, and a remedy. The API translates them once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Final, NamedTuple

CODES: Final = {
    "album_group_not_found": "404 The album has no such group, or no such face. List the groups again.",
    "album_not_found": "404 The album does not exist. List the albums: they expire after KITH_RETENTION_ALBUMS_DAYS.",
    "album_not_ready": "409 The faces of the album are not grouped yet. Wait for the job with the album's ID.",
    "album_outdated": "409 The gallery moved to another recognizer since the album was made. Delete the album, and "
    "upload the photos again.",
    "album_too_large": "413 The album has too many photos or faces. Upload the photos in parts.",
    "archive_invalid": "422 The archive, or a file in it, cannot be read. Send a complete zip (stored or deflated, not "
    "encrypted), tar, tar.gz or tar.zst.",
    "archive_too_large": "413 The archive is too large. Send it in parts. docs/settings.md lists the limits.",
    "audit_unwritten": "503 The audit log cannot be written. Check that the database is writable. Nothing was done.",
    "backup": "500 The backup cannot be used. Nothing was changed.",
    "client_gone": "499 The client disconnected before the response was ready. No action is needed.",
    "client_too_slow": "408 The request arrived too slowly. Send the whole request without pauses of 20 seconds.",
    "clock_stepped": "503 The system clock is unreliable. Retention deletes nothing meanwhile. Correct the clock; if "
    "it is right now, restart the service.",
    "crop_not_found": "404 No face crop is stored. Set 'keep_crops' of the gallery to true (kith gallery update "
    "GALLERY --keep-crops) and enroll again.",
    "deadline_exceeded": "504 The deadline was exceeded. Try again under lower load, or raise KITH_DEADLINE_S of the "
    "server, and X-Request-Timeout-Ms if you send it.",
    "decoy_enrolled": "409 The photo is enrolled as this subject. Move the template to the right subject, or delete "
    "it; then the photo is not mistaken any more.",
    "decoy_not_found": "404 The subject has no such decoy. List the decoys of the subject.",
    "demo_photos": "500 The demo's photos are not installed. Run 'make demo', which installs them, or install "
    "scikit-image and (with --no-deps) insightface.",
    "duplicate_subject": "409 The face belongs to another subject. Enroll it for that subject, or use "
    "'allow_duplicate' (--allow-duplicate).",
    "embedding_invalid": "422 The embedding is invalid. Send finite numbers, not all zero, in the pack's dimension.",
    "events_expired": "410 Events after this Last-Event-ID are no longer stored. Connect without Last-Event-ID, and "
    "read what was missed from the audit (docs/events.md).",
    "forbidden": "403 The API key lacks permission. Use a key with the required scope (docs/keys.md).",
    "foreign_file": "422 The file of the other service cannot be converted. See docs/moving-here.md.",
    "foreign_origin": "403 Cross-origin requests need an API key. Call http://localhost or http://127.0.0.1. For other "
    "host names, set up API keys, or set KITH_ALLOW_ANONYMOUS=true (docs/keys.md).",
    "gallery_exists": "409 The gallery already exists. Use it, or choose another name.",
    "gallery_not_found": "404 The gallery does not exist. List the galleries, or create it: 'kith gallery create', or "
    "POST /v1/galleries.",
    "gpu_unavailable": "503 The requested GPU does not run the networks. Follow the detail and restart the service; "
    "'kith doctor' repeats the check. To run on the CPU, set KITH_DEVICE=cpu.",
    "idempotency_conflict": "409 The Idempotency-Key belongs to another request. Use a new one for each new request.",
    "image_damaged": "422 The photo is damaged or truncated. Send the complete file.",
    "image_empty": "422 The photo is empty. Send the content of the file.",
    "image_format": "422 The photo format is not supported. Send JPEG, PNG, WebP, BMP, TIFF, GIF, AVIF or HEIC.",
    "image_too_large": "413 The photo has too many bytes or pixels. Shrink it. docs/settings.md lists the limits.",
    "import_invalid": "422 The file cannot be imported. See docs/galleries.md for the format. A repeated import "
    "skips items that exist already.",
    "inconsistent_template": "409 The face differs from the subject's other templates. Check the photo, or use "
    "'allow_inconsistent' (--allow-inconsistent).",
    "index_unavailable": "503 The search index is unavailable. Try again. What was enrolled is searchable afterwards.",
    "internal": "500 Internal error. Try again. If it fails again, report it with the request ID.",
    "invalid_request": "422 The request is invalid. /docs lists the fields, their types and ranges; --help lists the "
    "options of a command.",
    "item_invalid": "422 The import item is invalid. Correct the item and send the file again. Items that exist "
    "already are skipped.",
    "job_crashed": "500 The job failed with an unexpected error. Start it again; it skips finished items. If it fails "
    "again, report it with the job ID.",
    "job_not_found": "404 The job does not exist. List the jobs. They are deleted after KITH_RETENTION_JOBS_DAYS.",
    "job_unrunnable": "500 No server can run the job. Send the archive again. Finished items stay.",
    "key_ended": "409 The API key is no longer valid. Create a new key.",
    "key_not_found": "404 The API key does not exist. List the keys: 'kith keys list', or GET /v1/keys.",
    "liveness_unavailable": "409 No liveness model is available. Serve a pack with tasks.liveness (docs/models.md), or "
    "set 'liveness' of the gallery to 'off'.",
    "low_quality": "422 The face quality is too low to enroll. Use a sharper, better lit, more frontal photo, or "
    "'allow_low_quality' (--allow-low-quality).",
    "master_key": "500 The master key does not match the stored data. Provide the key that the database was created "
    "with (KITH_MASTER_KEY_FILE; docs/privacy.md). Without it the galleries are unreadable. 'kith master show' lists "
    "the available keys; 'kith master rotate' changes the key.",
    "method_not_allowed": "405 The path has no such method. See /docs for the paths and their methods.",
    "migration_incomplete": "409 Some templates have no vector of the new recognizer. 'kith gallery migrate GALLERY' "
    "lists the templates without a crop: enroll them again with keep_crops on. With 'force' (--force), searches do not "
    "find the remaining templates.",
    "migration_state": "409 The migration is in another state. Read the state: 'kith gallery migrate GALLERY'. Finish "
    "or roll back a migration before you start another.",
    "model_not_served": "404 The pack is not served. List the served packs: 'kith models list', or GET /v1/models. "
    "KITH_EXTRA_PACKS of the server adds packs.",
    "no_database": "500 The database does not exist. Run the command in the server's folder, or set KITH_DATA_DIR or "
    "KITH_DATABASE_URL as on the server. 'kith serve', 'kith keys create' and 'kith restore' create a database.",
    "no_face": "422 No face was found. Send a photo with an upright, visible and sufficiently large face.",
    "not_found": "404 The path does not exist. See /docs for the paths and their methods.",
    "not_live": "422 The face did not pass the liveness check. Use a photo of the person with room around the face, or "
    "'allow_not_live' (--allow-not-live).",
    "overloaded": "503 The service is overloaded. Try again in a moment. The header Retry-After says when.",
    "readiness_unknown": "503 A dependency of the service did not respond in time. Check the database, and Milvus.",
    "recognizer_mismatch": "409 The gallery uses another recognizer. Serve the pack whose recognizer made the "
    "gallery's vectors (KITH_PACK or KITH_EXTRA_PACKS); docs/galleries.md describes how to change it. With embeddings, "
    "send 'recognizer', and embeddings of the gallery's recognizer.",
    "request_too_large": "413 The request is too large. Send fewer or smaller photos (limits: docs/settings.md).",
    "retention_unconfirmed": "409 A large part of the gallery would be erased. Repeat the change, with confirm.",
    "risk_uncalibrated": "409 The risk cannot be converted to a threshold. Use a threshold, such as 0.4 (--threshold "
    "0.4); or calibrate the pack with 'kith models calibrate PACK --photos FOLDER'; or enroll at least 50 people.",
    "settings": "500 A setting is invalid. Correct the setting. docs/settings.md lists all settings.",
    "several_faces": "422 The photo shows several faces. Use a photo of one person, or face=largest (--largest-face).",
    "storage_busy": "503 The database was locked by other writers for too long. Try again. Nothing was stored.",
    "storage_damaged": "500 The database is damaged. Stop the service, run kith doctor, and restore a backup.",
    "storage_full": "507 The disk is full. Free disk space, then try again. Nothing was stored. Searches still work.",
    "storage_unavailable": "503 The database is unavailable. Try again; repeat an enrollment with the same "
    "Idempotency-Key, so that it is not stored twice.",
    "stranger_not_found": "404 The gallery remembers no such stranger. List the strangers: they expire and are merged.",
    "subject_erased": "409 The subject was erased during this request. Enroll again with a new request.",
    "subject_exists": "412 The subject ID is already in use. Choose another ID. To update the existing subject, omit "
    "'If-None-Match' (client: only_new).",
    "subject_not_found": "404 The subject does not exist in this gallery. Check the ID, or list the subjects. "
    "Enrolling a photo creates the subject.",
    "template_conflict": "409 Another template has this ID. Delete that template, or omit the ID of this one.",
    "template_not_found": "404 The subject has no such template. List the templates of the subject.",
    "too_many_albums": "409 The gallery has too many albums. Delete albums that are no longer needed.",
    "too_many_decoys": "409 The subject has the most decoys allowed. Delete decoys that are no longer needed. If many "
    "strangers resemble the subject, enroll better photos or choose a smaller risk.",
    "too_many_streams": "429 Too many event streams of one key are open. Close a stream that is no longer read.",
    "too_many_webhooks": "409 The limit of webhooks is reached. Delete a webhook that is no longer used.",
    "unauthorized": "401 A valid API key is required. Send the key in the header 'Authorization: Bearer KEY' or "
    "'X-API-Key: KEY'. The client takes api_key, a command --api-key, and both KITH_CLIENT_KEY. 'kith keys create' on "
    "the server's machine creates a key.",
    "unsupported_encoding": "415 The content encoding is not supported. Send the body without Content-Encoding, or "
    "with one that the response lists in Accept-Encoding.",
    "unsupported_media_type": "415 The content type is not supported. Set the header Content-Type to application/json "
    "(curl: -H 'Content-Type: application/json'). Routes that take photos also take multipart/form-data with photos as "
    "files, and one photo with an image/* type.",
    "url_failed": "422 The photo could not be fetched. Check the URL, or send the photo itself.",
    "url_refused": "422 Photos from this URL are not allowed. Send the photo itself, or an https URL of a host in "
    "KITH_URL_HOSTS (docs/rest.md).",
    "webhook_not_found": "404 The webhook does not exist. List the webhooks.",
    "webhook_refused": "422 Webhooks to this address are not allowed. Set KITH_WEBHOOK_HOSTS (docs/events.md).",
}
"""Status, title and remedy of each code; the title ends at the first full stop."""
HEADERS: Final = {
    "client_too_slow": {"Connection": "close"},  # what else arrives belongs to the body
    "storage_busy": {"Retry-After": "1"},
    "unauthorized": {"WWW-Authenticate": 'Bearer realm="kith"'},
}
"""Headers of responses with these codes."""


class Meaning(NamedTuple):
    code: str
    status: int
    title: str
    remedy: str


def meaning_of(code: str) -> Meaning:
    status, _, text = CODES[code].partition(" ")
    title, _, remedy = text.partition(". ")
    return Meaning(code, int(status), title, remedy)


class KithError(Exception):
    """Base class. What is caught or told apart has a class of its own; the rest are kinds of a class.

    ``remedy`` says what to do. ``headers``: those that the response gets besides.
    """

    code = "internal"
    hides_existence = False
    """True if the error may hide that the resource exists for other keys."""

    def __init__(
        self, detail: str, remedy: str | None = None, headers: Mapping[str, str] | None = None, **extra: Any
    ) -> None:
        super().__init__(detail)
        _, self.status, self.title, usual = meaning_of(self.code)
        self.detail = detail
        self.remedy = usual if remedy is None else remedy
        self.headers = {**HEADERS.get(self.code, {}), **(headers or {})}
        self.extra = extra

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

    def redacted(self) -> KithError:
        """Return the error to store with a subject's data, and for callers who may not know more.

        It names no other subject, because the erasure of that subject would not find it there.
        """
        return self


class KindError(KithError):
    """An error of several codes: ``pattern`` with the kind in its place."""

    pattern: ClassVar[str] = "{}"

    def __init__(self, kind: str, detail: str, remedy: str | None = None, **extra: Any) -> None:
        self.code = self.pattern.format(kind)
        super().__init__(detail, remedy, **extra)


class NotFoundError(KindError):
    pattern = "{}_not_found"


class InvalidDataError(KindError):
    """Unusable data of an import. Items that were imported before it stay."""

    pattern = "{}_invalid"


class LimitReachedError(KindError):
    """Too much, too many or too slow."""


class RefusedError(KindError):
    """What the service cannot do as it is asked, as it is, or with what is stored."""


class ImageError(KindError):
    """Unusable photo. In a request with several photos, only the photo fails."""


class LocalError(KindError):
    """Only the command line prints it."""


class InvalidRequestError(KithError):
    code = "invalid_request"


class ArchiveInvalidError(KithError):
    """Unreadable archive, or unreadable file in an archive."""

    code = "archive_invalid"


class UnauthorizedError(KithError):
    code = "unauthorized"


class ForbiddenError(KithError):
    code = "forbidden"


class GalleryNotFoundError(KithError):
    code = "gallery_not_found"


class SubjectNotFoundError(KithError):
    code = "subject_not_found"


class GalleryExistsError(KithError):
    code = "gallery_exists"


class SubjectExistsError(KithError):
    code = "subject_exists"


class SubjectErasedError(KithError):
    code = "subject_erased"


class RecognizerMismatchError(KithError):
    code = "recognizer_mismatch"


class GalleryMovedError(RecognizerMismatchError):
    """Migration to another recognizer during a request; the request is retried."""


class GalleryChangedError(KithError):
    """Change of templates since the gallery was read; the checks before the own write are repeated."""


class DuplicateSubjectError(KithError):
    code = "duplicate_subject"

    def redacted(self) -> KithError:
        return DuplicateSubjectError("the face resembles another subject")


class InconsistentTemplateError(KithError):
    code = "inconsistent_template"

    def redacted(self) -> KithError:
        return InconsistentTemplateError(self.detail)


class RiskUncalibratedError(KithError):
    code = "risk_uncalibrated"


class OverloadedError(KithError):
    """Backpressure. ``seconds`` estimates the time until the queue is empty; 0 if unknown."""

    code = "overloaded"

    def __init__(self, detail: str, seconds: float = 0.0) -> None:
        super().__init__(detail, headers={"Retry-After": str(max(1, math.ceil(seconds)))})


class ClientGoneError(KithError):
    """Client disconnect. It appears in the log only; nginx uses the same status."""

    code = "client_gone"


class DeadlineExceededError(KithError):
    code = "deadline_exceeded"


class StorageError(KithError):
    code = "storage_unavailable"


class StorageBusyError(StorageError):
    code = "storage_busy"


class StorageFullError(StorageError):
    code = "storage_full"


class StorageDamagedError(StorageError):
    code = "storage_damaged"


class IndexUnavailableError(KithError):
    code = "index_unavailable"


class AuditWriteError(KithError):
    code = "audit_unwritten"


class ClockSteppedError(KithError):
    code = "clock_stepped"


class MasterKeyError(KithError):
    """Master key that does not open the stored data."""

    code = "master_key"


class SettingsError(KithError):
    """Invalid setting that prevents the service from starting."""

    code = "settings"


def all_errors() -> list[Meaning]:
    """Return what every code means, sorted by code."""
    return [meaning_of(code) for code in sorted(CODES)]
