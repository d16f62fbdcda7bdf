"""Catalog of named packs: license, source and checksums.

The default catalog is ``catalog.toml``. A site can replace it with a file of the same format to use its own mirrors.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

from models.errors import PackError, PackUnknownError
from models.pack.fields import read_sha256, read_text

CATALOG_PATH: Final = Path(__file__).with_suffix(".toml")
PackKind = Literal["bundled", "files", "zip", "openvino", "liveness"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True)
class License:
    """License terms. ``allows`` summarizes them; ``acceptance`` demands consent before a download."""

    name: str
    url: str
    allows: str
    acceptance: bool


@dataclass(frozen=True)
class PackPart:
    """Terms of one network. ``commercial_use``: the license permits it; ``training_data`` may have other terms."""

    part: str
    license: str
    commercial_use: bool
    training_data: str


@dataclass(frozen=True)
class ArchiveMember:
    """File to extract from an archive, with its folders. ``sha256`` and ``size`` (bytes) are None if unknown."""

    file: str
    sha256: str | None
    size: int | None


@dataclass(frozen=True)
class Download:
    """File to download."""

    file: str
    url: str
    sha256: str | None
    size: int | None
    members: tuple[ArchiveMember, ...] = ()


@dataclass(frozen=True)
class CatalogEntry:
    """Pack of the catalog. ``kind``: bundled with Kith, single files, one zip archive, a detector and a
    recognizer to convert from OpenVINO IR, or a liveness network to convert, which is used beside any pack."""

    name: str
    kind: PackKind
    about: str
    license: License
    downloads: tuple[Download, ...]
    parts: tuple[PackPart, ...] = ()

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
    entries = [_parse_entry(pack, f"pack[{row}]") for row, pack in enumerate(_tables(document, "pack", "pack"))]
    catalog = {entry.name: entry for entry in entries}
    if not entries or len(catalog) < len(entries):
        raise PackError("pack", "the catalog holds no pack, or two packs of one name")
    return catalog


def find_entry(catalog: Mapping[str, CatalogEntry], name: str) -> CatalogEntry:
    """Return an entry by name. Raises PackUnknownError."""
    if name not in catalog:
        raise PackUnknownError(f"the catalog has no pack {name!r}")
    return catalog[name]


def _parse_entry(table: Mapping[str, Any], where: str) -> CatalogEntry:
    name = _file_name(table, "name", where)
    kind = read_text(table, "kind", f"{name}.kind")
    if kind not in get_args(PackKind):
        raise PackError(f"{name}.kind", f"must be one of {', '.join(get_args(PackKind))}")
    license = table.get("license")
    if not isinstance(license, dict) or not isinstance(license.get("acceptance"), bool):
        raise PackError(f"{name}.license", "must be a table with name, url, allows, and acceptance true or false")
    downloads = tuple(
        _parse_download(download, f"{name}.downloads[{row}]")
        for row, download in enumerate(_tables(table, "downloads", name))
    )
    allowed = {"bundled": (0,), "zip": (1,), "openvino": (3,), "liveness": (2,)}
    if (len(downloads) not in allowed[kind]) if kind in allowed else not downloads:
        raise PackError(f"{name}.downloads", f"the number of downloads does not fit the kind {kind}")
    terms = {key: read_text(license, key, f"{name}.license.{key}") for key in ("name", "url", "allows")}
    about = read_text(table, "about", f"{name}.about")
    accepted = License(**terms, acceptance=license["acceptance"])
    parts = tuple(_parse_part(part, f"{name}.parts[{row}]") for row, part in enumerate(_tables(table, "parts", name)))
    return CatalogEntry(name, kind, about, accepted, downloads, parts)  # type: ignore[arg-type]  # kind is checked above


def _parse_part(table: Mapping[str, Any], where: str) -> PackPart:
    allowed = table.get("commercial_use")
    if not isinstance(allowed, bool):
        raise PackError(f"{where}.commercial_use", "must be true or false")
    part, license, data = (read_text(table, key, f"{where}.{key}") for key in ("part", "license", "training_data"))
    return PackPart(part, license, allowed, data)


def _parse_download(table: Mapping[str, Any], where: str) -> Download:
    members = tuple(
        ArchiveMember(
            _member_path(member, f"{where}.members"),
            read_sha256(member, "sha256", f"{where}.sha256"),
            _size(member, where),
        )
        for member in _tables(table, "members", where)
    )
    return Download(
        _file_name(table, "file", where),
        read_text(table, "url", f"{where}.url"),
        read_sha256(table, "sha256", f"{where}.sha256"),
        _size(table, where),
        members,
    )


def _tables(table: Mapping[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise PackError(f"{where}.{key}", "must be an array of tables")
    return value


def _member_path(table: Mapping[str, Any], where: str) -> str:
    value = read_text(table, "file", f"{where}.file")
    # No part may begin with a dot, so the path stays inside its directory.
    if not all(_NAME.fullmatch(part) for part in value.split("/")):
        raise PackError(f"{where}.file", "must be file and folder names separated by '/', as int8/recognizer.onnx")
    return value


def _file_name(table: Mapping[str, Any], key: str, where: str) -> str:
    value = read_text(table, key, f"{where}.{key}")
    if not _NAME.fullmatch(value):
        raise PackError(f"{where}.{key}", "must be letters, digits, '.', '_' or '-', beginning with a letter or digit")
    return value


def _size(table: Mapping[str, Any], where: str) -> int | None:
    value = table.get("size")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value <= 0):
        raise PackError(f"{where}.size", "must be a positive number of bytes")
    return value
