"""What can go wrong with a model pack or a photo, before any transport knows of it."""

from __future__ import annotations

from typing import ClassVar


class ModelError(Exception):
    """Base of everything the ``models`` package raises on purpose."""


class PackError(ModelError):
    """A model pack cannot be used. ``field`` names the manifest key (dotted) or the file at fault."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class RuntimeUnavailableError(ModelError):
    """No inference runtime, or not the execution provider that was asked for."""


class PullError(ModelError):
    """A pack of the catalogue cannot be had. ``code`` is stable and documented in docs/models.md; ``remedy`` says what
    to do."""

    code: ClassVar[str] = "pull"
    remedy: ClassVar[str] = ""

    def __init__(self, detail: str) -> None:
        super().__init__(f"{self.code}: {detail}. {self.remedy}")
        self.detail = detail


class PackUnknownError(PullError):
    code = "pack_unknown"
    remedy = "`kith models list` names all."


class LicenceNotAcceptedError(PullError):
    code = "licence_not_accepted"
    remedy = "Read it, and repeat with --accept-licence if you accept it; nothing was fetched."


class DownloadError(PullError):
    code = "download_failed"
    remedy = "Try again: what has arrived is kept, and the download goes on from there."


class DownloadCorruptError(PullError):
    code = "download_corrupt"
    remedy = "Nothing was installed. A proxy may have altered the file, or its publisher replaced it."


class DiskFullError(PullError):
    code = "disk_full"
    remedy = "Make room, or set KITH_MODELS_DIR to a larger disk, and repeat: the download goes on from there."


class ArchiveError(PullError):
    code = "archive_invalid"
    remedy = "Nothing was installed: this is not the archive that the catalogue describes."


class IndexFileError(PullError):
    code = "package_index"
    remedy = "Check the index in PIP_INDEX_URL or pip's configuration; it must hold the file under its original name."
