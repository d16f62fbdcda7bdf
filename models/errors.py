"""Errors of model packs, networks and downloads."""

from __future__ import annotations

from typing import ClassVar, Final

MAX_SUMMARY: Final = 500


class ModelError(Exception):
    """Base class of all errors raised by ``models``."""


class PackError(ModelError):
    """Unusable model pack. ``field`` is the dotted manifest key or the file at fault."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class PhotoError(ModelError):
    """Photo that cannot be read or decoded. The text is the reason, without the photo's name."""


class RuntimeUnavailableError(ModelError):
    """Inference runtime, execution provider or device that is missing or cannot start."""


def summarize(error: Exception) -> str:
    """Return a library's error message in one line of at most MAX_SUMMARY characters."""
    return " ".join(str(error).split())[:MAX_SUMMARY]


class PullError(ModelError):
    """Failed pull of a catalog pack. ``code`` is stable (docs/models.md); ``remedy`` tells the user what to do."""

    code: ClassVar[str] = "pull"
    remedy: ClassVar[str] = ""

    def __init__(self, detail: str) -> None:
        super().__init__(f"{self.code}: {detail}. {self.remedy}")
        self.detail = detail


class PackUnknownError(PullError):
    code = "pack_unknown"
    remedy = "`kith models list` shows all packs."


class LicenseNotAcceptedError(PullError):
    code = "license_not_accepted"
    remedy = "Nothing was downloaded. Read the license and repeat with --accept-license if you accept it."


class DownloadError(PullError):
    code = "download_failed"
    remedy = "Try again: the download resumes."


class DownloadCorruptError(PullError):
    code = "download_corrupt"
    remedy = "Nothing was installed. A proxy may have changed the file, or the publisher replaced it."


class DiskFullError(PullError):
    code = "disk_full"
    remedy = "Free disk space or set KITH_MODELS_DIR to a larger disk, then repeat: the download resumes."


class ArchiveError(PullError):
    code = "archive_invalid"
    remedy = "Nothing was installed: the archive does not match the catalog."
