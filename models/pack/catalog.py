"""Catalog of named packs: license, source and checksums.

The default catalog is ``catalog.toml``. A site can replace it with a file of the same format to use its own mirrors.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import ConfigDict, StrictBool, StringConstraints, ValidationInfo, field_validator
from pydantic.dataclasses import dataclass

from models.errors import PackError
from models.fields import NAME, Name, PositiveInt, Sha256, Text, checked

CATALOG_PATH: Final = Path(__file__).with_suffix(".toml")
PackKind = Literal["bundled", "files", "zip", "openvino", "liveness"]
DOWNLOADS: Final[Mapping[PackKind, int]] = {"bundled": 0, "zip": 1, "openvino": 3, "liveness": 2}
"""Number of downloads of a pack; other kinds have at least one."""

MemberPath = Annotated[Text, StringConstraints(pattern=f"^{NAME}(/{NAME})*$")]
"""File with its folders. No part may begin with a dot, so the path stays inside its directory."""


@dataclass(frozen=True)
class License:
    """License terms. ``allows`` summarizes them; ``acceptance`` demands consent before a download."""

    name: Text
    url: Text
    allows: Text
    acceptance: StrictBool


@dataclass(frozen=True)
class PackPart:
    """Terms of one network. ``commercial_use``: the license permits it; ``training_data`` may have other terms."""

    part: Text
    license: Text
    commercial_use: StrictBool
    training_data: Text


@dataclass(frozen=True)
class ArchiveMember:
    """File to extract from an archive, with its folders. ``sha256`` and ``size`` (bytes) are None if unknown."""

    file: MemberPath
    sha256: Sha256 | None = None
    size: PositiveInt | None = None


@dataclass(frozen=True)
class Download:
    """File to download."""

    file: Name
    url: Text
    sha256: Sha256 | None = None
    size: PositiveInt | None = None
    members: tuple[ArchiveMember, ...] = ()


@dataclass(frozen=True, config=ConfigDict(validate_default=True))
class CatalogEntry:
    """Pack of the catalog. ``kind``: bundled with Kith, single files, one zip archive, a detector and a
    recognizer in OpenVINO's format, or the parts of a liveness network, which is used beside any pack."""

    name: Name
    kind: PackKind
    about: Text
    license: License
    downloads: tuple[Download, ...] = ()
    parts: tuple[PackPart, ...] = ()

    @field_validator("downloads")
    @classmethod
    def _fit_kind(cls, downloads: tuple[Download, ...], info: ValidationInfo) -> tuple[Download, ...]:
        kind = info.data.get("kind")
        if kind is not None and len(downloads) != DOWNLOADS.get(kind, max(1, len(downloads))):
            raise ValueError(f"the number of downloads does not fit the kind {kind}")
        return downloads

    @property
    def commercial_use(self) -> bool | None:
        """Whether the licenses of all parts permit commercial use; None if the catalog does not list the parts."""
        return all(part.commercial_use for part in self.parts) if self.parts else None

    def license_of(self, part: str) -> str:
        """Return the license of a part; that of the pack if the catalog does not list the part."""
        return next((known.license for known in self.parts if known.part == part), self.license.name)

    @property
    def size(self) -> int | None:
        """Bytes to download; None if a size is unknown."""
        sizes = [download.size for download in self.downloads]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def known_checksums(self) -> dict[str, str]:
        """Return sha256 by file name for files that are installed as published."""
        published: dict[PackKind, list[Download | ArchiveMember]] = {
            "files": [*self.downloads],
            "zip": [member for download in self.downloads for member in download.members],
        }
        return {file.file: file.sha256 for file in published.get(self.kind, []) if file.sha256 is not None}


def read_catalog(path: Path = CATALOG_PATH) -> dict[str, CatalogEntry]:
    """Read all entries by name, in file order.

    Raises:
        PackError: the file cannot be read or a field is invalid.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, tomllib.TOMLDecodeError) as error:
        raise PackError(path.name, f"is not a readable catalog ({error})") from error
    entries: list[CatalogEntry] = checked(list[CatalogEntry], document.get("pack"), "pack")
    catalog = {entry.name: entry for entry in entries}
    if len(catalog) < len(entries):
        raise PackError("pack", "the catalog holds two packs of one name")
    return catalog
