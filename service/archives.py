"""Photos in archives, read where they lie: nothing is unpacked to disk, and a path in an archive is only a name.

An archive is somebody else's file. Its own words about sizes are checked before they are believed, and no more is in
memory at once than one photo may have.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import IO, Any, BinaryIO, Final, Literal, Protocol, cast

from service.errors import ArchiveInvalidError, ArchiveTooLargeError, ImageTooLargeError, KithError
from service.gunzip import GunzipFile, max_unpacked
from service.json_limits import JsonLimits, check_json

PHOTO_SUFFIXES: Final = frozenset(
    {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".avif", ".heic", ".heif", ".hif"}
)
MANIFESTS: Final = ("manifest.csv", "manifest.ndjson")
SNIFFED_BYTES: Final = 512
"""Of an archive's beginning, what says which kind it is."""
MAX_DIRECTORY_BYTES: Final = 64_000_000
"""Of a zip's directory or of a manifest, which are read whole."""
ENTRY_SIGNATURE: Final = b"PK\1\2"
"""Beginning of each entry of a zip's directory."""
MAX_COLUMNS: Final = 16
"""Columns of a manifest, and values of each of its entries in JSON."""
MAX_HEADER_BYTES: Final = 100_000
"""Of a tar entry's extended header: a name, and little else."""
MAX_GLOBAL_HEADER_BYTES: Final = 1000
"""Of a tar's global header, of which several may stand before an entry: a comment."""
EXTENDED_HEADERS: Final = frozenset(
    {tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK}
)
ENTRY_LIMITS: Final = JsonLimits(4 * MAX_COLUMNS)
NAME_LENGTH: Final = 512
UNFIT_FOLDERS: Final = frozenset({"__MACOSX", "@eaDir"})


class Archive(Protocol):
    """As a path is."""

    def open(self, mode: Literal["rb"], /) -> IO[bytes]: ...


@dataclass(frozen=True)
class ArchiveLimits:
    """Most entries, folders and links included, bytes of one photo, and bytes of all entries unpacked."""

    entries: int
    photo_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Member:
    """A file in an archive: ``name`` is unique in it, ``path`` as it stands there. ``read`` it before the next one; it
    raises ArchiveInvalidError or ImageTooLargeError for this one alone."""

    name: str
    path: str
    read: Callable[[], bytes]


@dataclass(frozen=True)
class Contents:
    """``subjects``: whose face each photo is to show, by the member's name; None: it lies in no person's folder.
    ``missing``: what the manifest names and is not there. ``ignored``: files that are no photos, or not named."""

    subjects: Mapping[str, str | None]
    missing: Sequence[str]
    ignored: int


def archive_kind(beginning: bytes) -> str:
    """zip, tar, gzip or zstd, by the first SNIFFED_BYTES. Raises ArchiveInvalidError."""
    if beginning.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return "zip"
    if beginning.startswith(b"\x1f\x8b"):
        return "gzip"
    if beginning.startswith(b"\x28\xb5\x2f\xfd"):
        return "zstd"
    if beginning[257:262] == b"ustar":
        return "tar"
    raise ArchiveInvalidError("the bytes are no zip, tar, tar.gz or tar.zst")


def contents(archive: Archive, limits: ArchiveLimits, strip: int | None, check: Callable[[], None]) -> Contents:
    """What is in an archive, and whose each photo is: by its manifest, or else by the first folder of its path, without
    the ``strip`` first ones (None: without the one that everything lies in, if there is one above the people's).
    ``check`` is called for each file, and may raise.

    Raises:
        ArchiveInvalidError: it cannot be read to its end.
        ArchiveTooLargeError: it is over a limit.
    """
    files: dict[str, PurePosixPath] = {}
    manifest: tuple[PurePosixPath, dict[str, str]] | None = None
    ignored = 0
    for member in members(archive, limits):
        check()
        parts = _parts(member.path)
        if manifest is None and parts.name in MANIFESTS and len(parts.parts) <= 2:
            manifest = parts.parent, _manifest(parts.name, member.read(), limits.entries)
        elif is_photo(parts):
            files[member.name] = parts
        else:
            ignored += 1
    if manifest is not None:
        return _by_manifest(files, *manifest, ignored)
    depth = _common(list(files.values())) if strip is None else strip
    subjects = {name: f.parts[depth] if len(f.parts) > depth + 1 else None for name, f in files.items()}
    return Contents(subjects, [], ignored)


def is_photo(path: PurePosixPath) -> bool:
    """By its name: hidden files, and those that systems leave behind, are none."""
    hidden = any(part.startswith(".") or part in UNFIT_FOLDERS for part in path.parts)
    return path.suffix.lower() in PHOTO_SUFFIXES and not hidden


def members(archive: Archive, limits: ArchiveLimits) -> Iterator[Member]:
    """The files of an archive in its order; neither folders nor links. Raises as :func:`contents`."""
    try:
        with archive.open("rb") as file:
            kind = archive_kind(file.read(SNIFFED_BYTES))
            packed = file.seek(0, os.SEEK_END)
        limits = replace(limits, total_bytes=min(limits.total_bytes, max_unpacked(packed)))
        names: dict[str, int] = {}
        entries = _zip(archive, limits) if kind == "zip" else _tar(archive, kind, limits)
        for found, read in entries:
            name = _name(found)
            names[name] = names.get(name, 0) + 1
            yield Member(name if names[name] == 1 else _name(f"{found}#{names[name]}"), found, read)
    except KithError:
        raise
    except Exception as error:  # what the readers raise on damaged files is no one family
        raise ArchiveInvalidError(f"the archive cannot be read: {error}") from error


def _zip(archive: Archive, limits: ArchiveLimits) -> Iterator[tuple[str, Callable[[], bytes]]]:
    total = 0
    with (
        archive.open("rb") as file,
        zipfile.ZipFile(cast(BinaryIO, _Capped(file, max(MAX_DIRECTORY_BYTES, limits.photo_bytes), limits))) as opened,
    ):
        _check_entries(len(opened.infolist()), limits)
        for info in opened.infolist():
            if info.is_dir():
                continue
            # No more than it says is ever unpacked.
            total += info.file_size
            _check_total(total, limits)
            yield info.filename, lambda info=info: _zip_entry(opened, info, limits)  # type: ignore[misc]


def _zip_entry(archive: zipfile.ZipFile, info: zipfile.ZipInfo, limits: ArchiveLimits) -> bytes:
    _check_size(info.file_size, limits)
    if info.flag_bits & 1:
        raise ArchiveInvalidError("the file is encrypted")
    # The readers of the others unpack a whole block, however much it holds.
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ArchiveInvalidError("only stored and deflated files of a zip are read")
    try:
        with archive.open(info) as stream:
            payload = stream.read(info.file_size)
    except KithError:
        raise
    except Exception as error:
        raise ArchiveInvalidError(f"the file cannot be unpacked: {error}") from error
    if len(payload) != info.file_size:
        raise ArchiveInvalidError(f"the file has {len(payload)} bytes, its archive says {info.file_size}")
    return payload


def _tar(archive: Archive, kind: str, limits: ArchiveLimits) -> Iterator[tuple[str, Callable[[], bytes]]]:
    with (
        archive.open("rb") as file,
        _unpacked(file, kind) as unpacked,
        tarfile.open(fileobj=cast(BinaryIO, _Counted(unpacked, limits)), mode="r|", tarinfo=_SmallHeaders) as opened,
    ):
        for count, info in enumerate(opened, start=1):
            _check_entries(count, limits)
            opened.members.clear()  # type: ignore[attr-defined]  # it keeps each of them
            opened.pax_headers.clear()  # type: ignore[attr-defined]  # each further entry gets them
            if info.isreg():
                yield info.name, lambda info=info: _tar_entry(opened, info, limits)  # type: ignore[misc]


def _tar_entry(archive: tarfile.TarFile, info: tarfile.TarInfo, limits: ArchiveLimits) -> bytes:
    _check_size(info.size, limits)
    try:
        stream = archive.extractfile(info)
        return b"" if stream is None else stream.read()
    except KithError:
        raise
    except Exception as error:
        raise ArchiveInvalidError(f"the file cannot be unpacked: {error}") from error


def _unpacked(file: IO[bytes], kind: str) -> AbstractContextManager[BinaryIO]:
    match kind:
        case "gzip":
            return cast(AbstractContextManager[BinaryIO], nullcontext(GunzipFile(file)))
        case "zstd":
            from pyarrow import input_stream  # which takes longer to import than most archives to read

            return cast(AbstractContextManager[BinaryIO], input_stream(file, compression="zstd"))
    return cast(AbstractContextManager[BinaryIO], nullcontext(file))


class _Capped:
    """A zip file. A read of more than ``most`` bytes is refused, and a directory of too many entries: ``zipfile`` makes
    an object of each before it says how many there are."""

    def __init__(self, file: IO[bytes], most: int, limits: ArchiveLimits) -> None:
        self._file = file
        self._most = most
        self._limits = limits
        self._size = file.seek(0, os.SEEK_END)
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, size: int = -1) -> bytes:
        wanted = self._size - self.tell() if size < 0 else size
        if wanted > self._most:
            raise ArchiveTooLargeError(f"the archive's directory has more than {self._most} bytes")
        block = self._file.read(wanted)
        if len(block) > len(ENTRY_SIGNATURE) * self._limits.entries:
            _check_entries(block.count(ENTRY_SIGNATURE), self._limits)
        return block


class _Counted:
    """A stream that ends with an error where the limit is."""

    def __init__(self, file: IO[bytes], limits: ArchiveLimits) -> None:
        self._file = file
        self._limits = limits
        self._total = 0

    def read(self, size: int) -> bytes:
        block = self._file.read(size)
        self._total += len(block)
        _check_total(self._total, self._limits)
        return block


class _SmallHeaders(tarfile.TarInfo):
    """Extended headers, and the maps of sparse files, are read whole before anything is known of them."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _SmallHeaders:
        info = super().frombuf(buf, encoding, errors)
        most = MAX_GLOBAL_HEADER_BYTES if info.type == tarfile.XGLTYPE else MAX_HEADER_BYTES
        if info.type in EXTENDED_HEADERS and info.size > most:
            raise ArchiveTooLargeError(f"a header in the archive has {info.size} bytes")
        if info.size < 0 or info.type == tarfile.GNUTYPE_SPARSE:
            raise ArchiveInvalidError("sparse files are not read")
        return info

    def _proc_gnusparse_10(self, *_: object) -> None:
        raise ArchiveInvalidError("sparse files are not read")


def _check_entries(count: int, limits: ArchiveLimits) -> None:
    if count > limits.entries:
        raise ArchiveTooLargeError(f"more than {limits.entries} files")


def _check_total(total: int, limits: ArchiveLimits) -> None:
    if total > limits.total_bytes:
        raise ArchiveTooLargeError(f"more than {limits.total_bytes} bytes when unpacked")


def _check_size(size: int, limits: ArchiveLimits) -> None:
    if size > limits.photo_bytes:
        raise ImageTooLargeError(f"the photo has {size} bytes, the limit is {limits.photo_bytes}")


def _parts(path: str) -> PurePosixPath:
    return PurePosixPath(*(part for part in path.replace("\\", "/").split("/") if part not in ("", ".", "..")))


def _name(path: str) -> str:
    """A name that any database can keep: at most NAME_LENGTH characters, all of them Unicode's."""
    name = path.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")
    if len(name) <= NAME_LENGTH:
        return name
    return f"{name[: NAME_LENGTH - 65]}~{hashlib.sha256(name.encode()).hexdigest()}"


def _common(files: Sequence[PurePosixPath]) -> int:
    """1 if everything lies in one folder and each photo in a folder within it; else 0."""
    outer = {file.parts[0] for file in files}
    return int(len(outer) == 1 and all(len(file.parts) > 2 for file in files))


def _manifest(name: str, payload: bytes, entries: int) -> dict[str, str]:
    """Subject by path."""
    if sum(payload.count(mark) for mark in (b"\n", b"\r", b",")) > MAX_COLUMNS * (entries + 1):
        raise ArchiveTooLargeError(f"{name} has more than {entries} entries")
    try:
        text = payload.decode("utf-8-sig")
        rows = _csv_rows(text) if name.endswith(".csv") else (_entry(line) for line in text.split("\n") if line.strip())
        subjects: dict[str, str] = {}
        for number, row in enumerate(rows, start=1):
            if not _is_row(row):
                raise ArchiveInvalidError(f"{name}, entry {number}: 'file' and 'subject' are needed, and both are text")
            subjects[str(_parts(row["file"]))] = row["subject"]
    except (ValueError, RecursionError, csv.Error) as error:
        raise ArchiveInvalidError(f"{name} cannot be read: {error}") from error
    return subjects


def _csv_rows(text: str) -> Iterator[Any]:
    """Raises ValueError: the header has too many columns, each of which every row gets, however short it is."""
    rows = csv.DictReader(io.StringIO(text, newline=""))
    if len(rows.fieldnames or ()) > MAX_COLUMNS:
        raise ValueError(f"more than {MAX_COLUMNS} columns")
    yield from rows


def _entry(line: str) -> Any:
    check_json(line.encode(), ENTRY_LIMITS)
    return json.loads(line)


def _is_row(row: Any) -> bool:
    return isinstance(row, dict) and isinstance(row.get("file"), str) and isinstance(row.get("subject"), str)


def _by_manifest(
    files: Mapping[str, PurePosixPath], folder: PurePosixPath, wanted: Mapping[str, str], ignored: int
) -> Contents:
    subjects: dict[str, str | None] = {}
    here = set()
    for name, file in files.items():
        path = str(file.relative_to(folder)) if file.is_relative_to(folder) else ""
        if path in wanted:
            subjects[name] = wanted[path]
            here.add(path)
    missing = [_name(path) for path in wanted if path not in here]
    return Contents(subjects, missing, ignored + len(files) - len(subjects))
