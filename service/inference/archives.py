"""Photos in archives: zip, tar, tar.gz and tar.zst, read one photo at a time without unpacking to disk.

Archives are untrusted. Declared sizes are verified, paths serve as names only, and at most one photo is in memory.
"""

from __future__ import annotations

import csv
import errno
import hashlib
import io
import os
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePosixPath
from typing import IO, BinaryIO, Final, Literal, Protocol, cast

from kith.wire.identifiers import to_nfc
from models.vision.photo_files import HEAD_BYTES, is_hidden, is_photo, printable_path
from service.core.errors import ArchiveInvalidError, ImageError, KithError, LimitReachedError
from service.core.unpacking import PiecesFile, max_unpacked_bytes, unpacked_pieces

MANIFEST: Final = "manifest.csv"
SIGNATURE_BYTES: Final = 512
"""Length of an archive's beginning that identifies its format."""
MAX_DIRECTORY_BYTES: Final = 64_000_000
"""Limit for the directory of a zip and for a manifest, which are read whole."""
MAX_COLUMNS: Final = 16
"""Mean number of columns of a manifest."""
MAX_GLOBAL_HEADER_BYTES: Final = 1000
"""Size of a global tar header, which holds a comment. Several may precede an entry."""
MAX_HEADER_BYTES: Final = 100_000
"""Limit for an extended header of a tar entry, which holds a name and little else."""
EXTENDED_HEADERS: Final = frozenset(
    {tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK}
)
UTF8_FLAG: Final = 0x800
ENTRY_SIGNATURE: Final = b"PK\1\2"
"""Signature of each entry of a zip's directory."""
MAX_NAME_LENGTH: Final = 512
NAMES_REMEDY: Final = (
    "State the encoding with names (kith enroll --names): gbk or big5 for Chinese, cp932 for Japanese, cp949 for "
    "Korean, cp866 or cp1251 for Russian. Or pack again with a tool that writes UTF-8, such as tar."
)


ArchiveKind = Literal["zip", "tar", "gzip", "zstd"]


class _Read(Protocol):
    """Read a file of an archive; ``head_bytes``: its beginning only."""

    def __call__(self, head_bytes: int | None = None) -> bytes: ...


class ArchiveSource(Protocol):
    """Source of an archive that can be opened repeatedly, such as a path."""

    def open(self, mode: Literal["rb"], /) -> IO[bytes]: ...


MAX_ENTRIES: Final = 1_000_000
"""Maximum number of entries in an archive, folders and links included."""


@dataclass(frozen=True)
class ArchiveLimits:
    """Limits: entries, bytes of one photo, and unpacked bytes of all entries."""

    entries: int
    photo_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class ArchivedFile:
    """File in an archive, with a unique ``name`` and the original ``path``; ``certain``: its encoding is known.

    Call ``read``, or ``read_head`` for the first HEAD_BYTES, once and before advancing to the next file. Their
    ArchiveInvalidError or image_too_large concerns this file only.
    """

    name: str
    path: str
    certain: bool
    read: Callable[[], bytes]
    read_head: Callable[[], bytes]


@dataclass(frozen=True)
class ArchiveContents:
    """Photos and other files of an archive.

    Attributes:
        subjects: subject of each photo by file name; None for a photo outside of subject folders.
        missing: manifest entries without a file.
        ignored: subject of each file, by name, that is not a photo, or not in the manifest.
        hidden: number of hidden files and files of operating systems.
    """

    subjects: Mapping[str, str | None]
    missing: Sequence[str]
    ignored: Mapping[str, str | None]
    hidden: int


def archive_kind(beginning: bytes) -> ArchiveKind:
    """Return zip, tar, gzip or zstd, from the first SIGNATURE_BYTES. Raises ArchiveInvalidError."""
    if beginning.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return "zip"
    if beginning.startswith(b"\x1f\x8b"):
        return "gzip"
    if beginning.startswith(b"\x28\xb5\x2f\xfd"):
        return "zstd"
    if beginning[257:262] == b"ustar":
        return "tar"
    raise ArchiveInvalidError("the file is not a zip, tar, tar.gz or tar.zst")


def read_contents(
    archive: ArchiveSource,
    limits: ArchiveLimits,
    strip: int | None,
    check: Callable[[], None],
    labeled: bool = True,
    names: str | None = None,
) -> ArchiveContents:
    """List an archive, and assign a subject to each photo, by the manifest or else by the folder.

    Args:
        strip: Number of leading folders to ignore. None: ignore one folder that encloses all subject folders.
        check: Called for each file; may raise to stop.
        labeled: Whether folders and a manifest say who is in the photos; otherwise no photo has a subject.
        names: Encoding of the names that do not declare one. None: UTF-8.

    Raises:
        ArchiveInvalidError: The archive cannot be read to its end, or the encoding of its people's names is unknown.
        archive_too_large: The archive exceeds a limit.
    """
    photos: dict[str, PurePosixPath] = {}
    others: dict[str, PurePosixPath] = {}
    manifest: tuple[PurePosixPath, dict[str, str]] | None = None
    hidden = 0
    uncertain: dict[str, str] = {}
    for member in iterate_members(archive, limits, names):
        check()
        path = _safe_path(member.path)
        if not member.certain:
            uncertain[member.name] = member.path
        if labeled and manifest is None and path.name == MANIFEST and len(path.parts) <= 2:
            manifest = path.parent, _read_manifest(member.read(), limits.entries)
        elif is_hidden(path):
            hidden += 1
        elif is_photo(path, partial(_head, member)):
            photos[member.name] = path
        else:
            others[member.name] = path
    if manifest is not None:
        contents = _by_manifest(photos | others, *manifest, hidden)
        if contents.missing:
            _refuse_names(uncertain.values())
        return contents
    if not labeled:
        return ArchiveContents(dict.fromkeys(photos), [], dict.fromkeys(others), hidden)
    depth = _common_folders(list(photos.values())) if strip is None else strip
    subjects, ignored = (
        {name: file.parts[depth] if len(file.parts) > depth + 1 else None for name, file in files.items()}
        for files in (photos, others)
    )
    people = (subjects[name] for name in uncertain if name in subjects)
    if not all(person is not None and person.isascii() for person in people):
        _refuse_names(uncertain.values())
    return ArchiveContents(subjects, [], ignored, hidden)


def _refuse_names(uncertain: Iterable[str]) -> None:
    """Raise ArchiveInvalidError if there are names of unknown encoding."""
    for name in uncertain:
        raise ArchiveInvalidError(
            f"the archive does not state the encoding of its names, and '{printable_path(name)}' is not UTF-8",
            NAMES_REMEDY,
        )


def _head(member: ArchivedFile) -> bytes:
    """Return the beginning of a file; empty if it cannot be read, so that its name decides."""
    try:
        return member.read_head()
    except (ArchiveInvalidError, ImageError):
        return b""


def iterate_members(archive: ArchiveSource, limits: ArchiveLimits, names: str | None = None) -> Iterator[ArchivedFile]:
    """Yield the files of an archive in order, without folders and links. ``names`` as in :func:`read_contents`.

    Raises as :func:`read_contents`; MemoryError and OSError if this machine, and not the archive, is at fault.
    """
    with _translated_errors("the archive cannot be read"):
        with archive.open("rb") as file:
            kind = archive_kind(file.read(SIGNATURE_BYTES))
            packed = file.seek(0, os.SEEK_END)
        limits = replace(limits, total_bytes=min(limits.total_bytes, max_unpacked_bytes(packed)))
        seen: dict[str, int] = {}
        entries = _zip_members(archive, limits, names) if kind == "zip" else _tar_members(archive, kind, limits, names)
        for found, certain, read in entries:
            name = storable_name(found)
            seen[name] = seen.get(name, 0) + 1
            unique = name if seen[name] == 1 else storable_name(f"{found}#{seen[name]}")
            yield ArchivedFile(unique, found, certain, read, partial(read, HEAD_BYTES))


@contextmanager
def _translated_errors(problem: str) -> Iterator[None]:
    try:
        yield
    except KithError:
        raise
    except Exception as error:  # readers raise unrelated exceptions on damaged files
        if (fault := _machine_fault(error)) is not None:
            raise fault from None
        if isinstance(error, UnicodeDecodeError):
            name = error.object.decode("ascii", "backslashreplace")
            raise ArchiveInvalidError(f"the name '{name}' is not in {error.encoding}", NAMES_REMEDY) from error
        raise ArchiveInvalidError(f"{problem}: {error}") from error


def _machine_fault(error: BaseException | None) -> Exception | None:
    """Return the failure of memory or of the disk behind an error of a reader; None if the archive is at fault.

    Readers raise an OSError without a number for a damaged archive.
    """
    while error is not None:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno not in (None, errno.EINVAL)):
            return error
        error = error.__context__
    return None


def _zip_members(archive: ArchiveSource, limits: ArchiveLimits, names: str | None) -> Iterator[tuple[str, bool, _Read]]:
    total = 0
    with (
        archive.open("rb") as file,
        zipfile.ZipFile(
            cast(BinaryIO, _LimitedZipFile(file, max(MAX_DIRECTORY_BYTES, limits.photo_bytes), limits)),
            metadata_encoding=names,
        ) as opened,
    ):
        _check_entries(len(opened.infolist()), limits)
        for info in opened.infolist():
            if info.is_dir():
                continue
            # _zip_entry never unpacks more than the declared size.
            total += info.file_size
            _check_total(total, limits)
            yield *_zip_name(info, names), partial(_zip_entry, opened, info, limits)


def _zip_name(info: zipfile.ZipInfo, names: str | None) -> tuple[str, bool]:
    """Return the name of an entry, and whether its encoding is known: flagged, stated, or UTF-8.

    Bytes that are not UTF-8 become surrogates, as in tar archives. Some writers separate folders by backslashes.
    """
    if info.flag_bits & UTF8_FLAG or names is not None:
        return info.filename.replace("\\", "/"), True
    stored = info.orig_filename.encode("cp437").partition(b"\0")[0]  # the reverse of zipfile's decoding
    name = stored.decode("utf-8", "surrogateescape")
    if not is_utf8(name):
        return name, False  # a backslash may be half of a character
    return name.replace("\\", "/"), True


def is_utf8(name: str) -> bool:
    """Return False for a name with surrogates, which stand for bytes that are not UTF-8."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def _zip_entry(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, limits: ArchiveLimits, head_bytes: int | None = None
) -> bytes:
    _check_size(info.file_size, limits)
    if info.flag_bits & 1:
        raise ArchiveInvalidError("the file is encrypted")
    # Decompressors of other methods unpack a whole block, of any size.
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ArchiveInvalidError("the file is neither stored nor deflated")
    with _translated_errors("the file cannot be unpacked"), archive.open(info) as stream:
        payload = stream.read(info.file_size if head_bytes is None else head_bytes)
    if head_bytes is None and len(payload) != info.file_size:
        raise ArchiveInvalidError(f"the file has {len(payload)} bytes, its archive says {info.file_size}")
    return payload


def _tar_members(
    archive: ArchiveSource, kind: ArchiveKind, limits: ArchiveLimits, names: str | None
) -> Iterator[tuple[str, bool, _Read]]:
    with (
        archive.open("rb") as file,
        tarfile.open(
            fileobj=cast(BinaryIO, _LimitedStream(_unpacked(file, kind), limits)),
            mode="r|",
            tarinfo=_LimitedTarInfo,
            encoding=names or "utf-8",
            errors="surrogateescape" if names is None else "strict",
        ) as opened,
    ):
        for count, info in enumerate(opened, start=1):
            _check_entries(count, limits)
            opened.members.clear()  # type: ignore[attr-defined]  # tarfile keeps every entry
            opened.pax_headers.clear()  # type: ignore[attr-defined]  # every further entry gets a copy
            if info.isreg():
                certain = names is not None or is_utf8(info.name) or "path" in info.pax_headers
                yield info.name, certain, partial(_tar_entry, opened, info, limits)


def _tar_entry(
    archive: tarfile.TarFile, info: tarfile.TarInfo, limits: ArchiveLimits, head_bytes: int | None = None
) -> bytes:
    _check_size(info.size, limits)
    with _translated_errors("the file cannot be unpacked"):
        stream = archive.extractfile(info)
        return b"" if stream is None else stream.read(-1 if head_bytes is None else head_bytes)


def _unpacked(file: IO[bytes], kind: ArchiveKind) -> IO[bytes] | PiecesFile:
    return PiecesFile(unpacked_pieces(file, kind)) if kind in ("gzip", "zstd") else file


class _LimitedZipFile:
    """Zip file that rejects reads above ``max_bytes``, and directories with too many entries.

    ``zipfile`` creates an object per directory entry before it reports their number.
    """

    def __init__(self, file: IO[bytes], max_bytes: int, limits: ArchiveLimits) -> None:
        self._file = file
        self._max_bytes = max_bytes
        self._limits = limits
        self._size = file.seek(0, os.SEEK_END)
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, size: int = -1) -> bytes:
        wanted = self._size - self.tell() if size < 0 else size
        if wanted > self._max_bytes:
            raise LimitReachedError(
                "archive_too_large", f"the archive's directory has more than {self._max_bytes} bytes"
            )
        block = self._file.read(wanted)
        if len(block) > len(ENTRY_SIGNATURE) * self._limits.entries:
            _check_entries(block.count(ENTRY_SIGNATURE), self._limits)
        return block


class _LimitedStream:
    """Stream that raises archive_too_large at the limit of unpacked bytes."""

    def __init__(self, file: IO[bytes] | PiecesFile, limits: ArchiveLimits) -> None:
        self._file = file
        self._limits = limits
        self._total = 0

    def read(self, size: int) -> bytes:
        block = self._file.read(size)
        self._total += len(block)
        _check_total(self._total, self._limits)
        return block


class _LimitedTarInfo(tarfile.TarInfo):
    """Tar entry that rejects large extended headers and sparse files, which ``tarfile`` reads whole."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _LimitedTarInfo:
        info = super().frombuf(buf, encoding, errors)
        limit = MAX_GLOBAL_HEADER_BYTES if info.type == tarfile.XGLTYPE else MAX_HEADER_BYTES
        if info.type in EXTENDED_HEADERS and info.size > limit:
            raise LimitReachedError("archive_too_large", f"a header in the archive has {info.size} bytes")
        if info.size < 0 or info.type == tarfile.GNUTYPE_SPARSE:
            raise ArchiveInvalidError("sparse files are not read")
        return info

    def _proc_gnusparse_10(self, *_: object) -> None:
        raise ArchiveInvalidError("sparse files are not read")


def _check_entries(count: int, limits: ArchiveLimits) -> None:
    if count > limits.entries:
        raise LimitReachedError("archive_too_large", f"more than {limits.entries} files")


def _check_total(total: int, limits: ArchiveLimits) -> None:
    if total > limits.total_bytes:
        raise LimitReachedError("archive_too_large", f"more than {limits.total_bytes} bytes when unpacked")


def _check_size(size: int, limits: ArchiveLimits) -> None:
    if size > limits.photo_bytes:
        raise ImageError("image_too_large", f"the photo has {size} bytes, the limit is {limits.photo_bytes}")


def _safe_path(path: str) -> PurePosixPath:
    """Return a path in NFC, as people type it; macOS writes decomposed names."""
    parts = _compose(path).split("/")
    return PurePosixPath(*(part for part in parts if part not in ("", ".", "..")))


def _compose(text: str) -> str:
    """Return a text in NFC; unchanged if that would take long. No id may have so many combining marks."""
    try:
        return to_nfc(text)
    except ValueError:
        return text


def storable_name(path: str) -> str:
    """Return a name that any database can store: at most MAX_NAME_LENGTH characters, without NUL and surrogates."""
    name = printable_path(path).replace("\0", "\\0")
    if len(name) <= MAX_NAME_LENGTH:
        return name
    return f"{name[: MAX_NAME_LENGTH - 65]}~{hashlib.sha256(name.encode()).hexdigest()}"


def _common_folders(files: Sequence[PurePosixPath]) -> int:
    """Return 1 if one folder contains everything and each photo is in a subfolder of it, else 0."""
    outer = {file.parts[0] for file in files}
    return int(len(outer) == 1 and all(len(file.parts) > 2 for file in files))


def _read_manifest(payload: bytes, entries: int) -> dict[str, str]:
    """Parse a manifest. Return the subject by path."""
    if sum(payload.count(mark) for mark in (b"\n", b"\r", b",")) > MAX_COLUMNS * (entries + 1):
        raise LimitReachedError("archive_too_large", f"{MANIFEST} has more than {entries} entries")
    try:
        rows = csv.reader(io.StringIO(payload.decode("utf-8-sig"), newline=""))
        columns = next(rows, [])
        subjects: dict[str, str] = {}
        for number, row in enumerate(filter(None, rows), start=1):
            entry = dict(zip(columns, row, strict=False))  # a DictReader would give a short row all columns
            file, subject = entry.get("file"), entry.get("subject")
            if file is None or subject is None:
                raise ArchiveInvalidError(f"{MANIFEST}, entry {number}: 'file' and 'subject' are required")
            subjects[str(_safe_path(file.replace("\\", "/")))] = _compose(subject)
    except (ValueError, csv.Error) as error:
        raise ArchiveInvalidError(f"{MANIFEST} cannot be read: {error}") from error
    return subjects


def _by_manifest(
    files: Mapping[str, PurePosixPath], folder: PurePosixPath, wanted: Mapping[str, str], hidden: int
) -> ArchiveContents:
    subjects: dict[str, str | None] = {}
    ignored: dict[str, str | None] = {}
    here = set()
    for name, file in files.items():
        path = str(file.relative_to(folder)) if file.is_relative_to(folder) else ""
        if path in wanted:
            subjects[name] = wanted[path]
            here.add(path)
        else:
            ignored[name] = None
    missing = [storable_name(path) for path in wanted if path not in here]
    return ArchiveContents(subjects, missing, ignored, hidden)
