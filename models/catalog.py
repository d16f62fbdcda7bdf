"""Packs that are known by name: what they are, whose terms they are under, where their files come from.

The catalogue is data, ``catalog.toml``. Another file of the same form may stand in for it, so that a site can fetch
from mirrors of its own.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

from models.errors import PackError, PackUnknownError

CATALOG: Final = Path(__file__).with_suffix(".toml")
Kind = Literal["bundled", "files", "zip", "dlib"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Licence:
    """``allows``: a sentence on what one may do. ``acceptance``: nothing is fetched before it is accepted."""

    name: str
    url: str
    allows: str
    acceptance: bool


@dataclass(frozen=True)
class Member:
    """A file that is taken out of an archive, of a pack with the folders that it lies in; ``sha256`` and ``size`` in
    bytes where they are known."""

    file: str
    sha256: str | None
    size: int | None


@dataclass(frozen=True)
class Download:
    """One file to fetch, from ``url`` or, where that is None, as a file of ``project`` in the package index."""

    file: str
    url: str | None
    project: str | None
    sha256: str | None
    size: int | None
    members: tuple[Member, ...] = ()


@dataclass(frozen=True)
class Entry:
    """One pack. ``kind``: it comes with Kith; its files are fetched as they are; out of one zip archive; or converted
    from dlib's network."""

    name: str
    kind: Kind
    about: str
    licence: Licence
    downloads: tuple[Download, ...]

    @property
    def size(self) -> int | None:
        """Bytes to fetch; None where a download's is unknown."""
        sizes = [download.size for download in self.downloads]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def known_checksums(self) -> dict[str, str]:
        """sha256 by file name, of the files that lie in the pulled pack as they were published."""
        kept: dict[Kind, list[Download | Member]] = {
            "files": [*self.downloads],
            "zip": [member for download in self.downloads for member in download.members],
        }
        return {file.file: file.sha256 for file in kept.get(self.kind, []) if file.sha256 is not None}


def read_catalog(path: Path = CATALOG) -> dict[str, Entry]:
    """All packs by name, in the file's order.

    Raises:
        PackError: the file cannot be read, or an entry of it cannot be used; the error names the field.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, tomllib.TOMLDecodeError) as error:
        raise PackError(path.name, f"is not a readable catalogue ({error})") from error
    entries = [_entry(pack, f"pack[{row}]") for row, pack in enumerate(_tables(document, "pack", "pack"))]
    catalog = {entry.name: entry for entry in entries}
    if not entries or len(catalog) < len(entries):
        raise PackError("pack", "the catalogue holds no pack, or two of one name")
    return catalog


def find(catalog: Mapping[str, Entry], name: str) -> Entry:
    """Raises PackUnknownError."""
    if name not in catalog:
        raise PackUnknownError(f"the catalogue has no pack {name!r}")
    return catalog[name]


def _entry(table: Mapping[str, Any], where: str) -> Entry:
    name = _file_name(table, "name", where)
    kind = _text(table, "kind", name)
    if kind not in get_args(Kind):
        raise PackError(f"{name}.kind", f"must be one of {', '.join(get_args(Kind))}")
    licence = table.get("licence")
    if not isinstance(licence, dict) or not isinstance(licence.get("acceptance"), bool):
        raise PackError(f"{name}.licence", "must be a table with name, url, allows, and acceptance true or false")
    downloads = tuple(
        _download(download, f"{name}.downloads[{row}]")
        for row, download in enumerate(_tables(table, "downloads", name))
    )
    if (kind in ("zip", "dlib") and len(downloads) != 1) or (kind == "bundled") != (not downloads):
        raise PackError(f"{name}.downloads", f"do not fit the kind {kind}")
    return Entry(
        name,
        kind,  # type: ignore[arg-type]  # checked above
        _text(table, "about", name),
        Licence(
            _text(licence, "name", f"{name}.licence"),
            _text(licence, "url", f"{name}.licence"),
            _text(licence, "allows", f"{name}.licence"),
            licence["acceptance"],
        ),
        downloads,
    )


def _download(table: Mapping[str, Any], where: str) -> Download:
    url, project = table.get("url"), table.get("project")
    if (url is None) == (project is None):
        raise PackError(where, "must name either url or project")
    members = tuple(
        Member(_member(m, f"{where}.members"), _sha256(m, where), _size(m, where))
        for m in _tables(table, "members", where)
    )
    return Download(
        _file_name(table, "file", where),
        None if url is None else _text(table, "url", where),
        None if project is None else _file_name(table, "project", where),
        _sha256(table, where),
        _size(table, where),
        members,
    )


def _tables(table: Mapping[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise PackError(f"{where}.{key}", "must be an array of tables")
    return value


def _text(table: Mapping[str, Any], key: str, where: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value.strip():
        raise PackError(f"{where}.{key}", "is required and must be a non-empty string")
    return value


def _member(table: Mapping[str, Any], where: str) -> str:
    """No part of it can begin with a dot: it stays in its directory."""
    value = _text(table, "file", where)
    if not all(_NAME.fullmatch(part) for part in value.split("/")):
        raise PackError(f"{where}.file", "must be file and folder names with '/' between, as int8/recogniser.onnx")
    return value


def _file_name(table: Mapping[str, Any], key: str, where: str) -> str:
    value = _text(table, key, where)
    if not _NAME.fullmatch(value):
        raise PackError(f"{where}.{key}", "must be letters, digits, '.', '_' or '-', beginning with a letter or digit")
    return value


def _sha256(table: Mapping[str, Any], where: str) -> str | None:
    value = table.get("sha256")
    if value is not None and not (isinstance(value, str) and _SHA256.fullmatch(value)):
        raise PackError(f"{where}.sha256", "must be 64 lower-case hexadecimal digits")
    return value


def _size(table: Mapping[str, Any], where: str) -> int | None:
    value = table.get("size")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value <= 0):
        raise PackError(f"{where}.size", "must be a positive number of bytes")
    return value
