"""Errors of model packs, networks and downloads."""

from __future__ import annotations

from typing import Final

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


PULL_REMEDIES: Final = {
    "pack_unknown": "`kith models list` shows all packs.",
    "license_not_accepted": "Nothing was downloaded. Read the license, and repeat with --accept-license to accept it.",
    "download_failed": "Try again: the download resumes.",
    "download_corrupt": "Nothing was installed. A proxy may have changed the file, or the publisher replaced it.",
    "disk_full": "Free disk space or set KITH_MODELS_DIR to a larger disk, then repeat: the download resumes.",
    "archive_invalid": "Nothing was installed: the archive does not match the catalog.",
}
"""What the user can do, by stable code (docs/models.md)."""


class PullError(ModelError):
    """Failed pull of a catalog pack, with a ``code`` of PULL_REMEDIES."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}. {PULL_REMEDIES[code]}")
        self.code = code
        self.detail = detail
        self.remedy = PULL_REMEDIES[code]
