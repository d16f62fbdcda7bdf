"""Size-limited extraction of single files from archives; names in archives never choose where files are written."""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Final

from models.errors import ArchiveError
from models.pack.catalog import ArchiveMember

MAX_MEMBER_BYTES: Final = 1_000_000_000
CHUNK_BYTES: Final = 1 << 20


def extract_zip(archive: Path, members: Sequence[ArchiveMember], directory: Path) -> None:
    """Extract members of a zip archive to ``directory`` under their catalog names.

    A member matches files whose path ends in its name; the file in the fewest folders wins.

    Raises:
        ArchiveError: the archive is invalid, names a path outside itself, or lacks a member or has it twice; or a
            member exceeds its size or has another checksum.
    """
    try:
        with zipfile.ZipFile(archive) as opened:
            for info in opened.infolist():
                _check_inside(info.filename)
            for member in members:
                with opened.open(_find_member(opened.namelist(), member, archive)) as stream:
                    (directory / member.file).parent.mkdir(parents=True, exist_ok=True)
                    _copy(stream, member, directory / member.file)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, zlib.error) as error:
        raise ArchiveError(f"{archive.name} cannot be read ({error})") from error


def _find_member(names: Sequence[str], member: ArchiveMember, archive: Path) -> str:
    wanted = PurePosixPath(member.file).parts
    matches = [name for name in names if PurePosixPath(name).parts[-len(wanted) :] == wanted]
    depths = [len(PurePosixPath(name).parts) for name in matches]
    shallowest = [name for name, depth in zip(matches, depths, strict=True) if depth == min(depths)]
    if len(shallowest) != 1:
        raise ArchiveError(f"{archive.name} holds {member.file} {len(shallowest)} times, not once")
    return shallowest[0]


def _check_inside(name: str) -> None:
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or ":" in path.parts[0]:
        raise ArchiveError(f"it names {name!r}, a path outside the archive")


def _copy(stream: IO[bytes], member: ArchiveMember, target: Path) -> None:
    limit = member.size or MAX_MEMBER_BYTES
    digest, written = hashlib.sha256(), 0
    with target.open("wb") as out:
        # Archive headers may state false sizes, so the extracted bytes are counted.
        while chunk := stream.read(CHUNK_BYTES):
            written += len(chunk)
            if written > limit:
                raise ArchiveError(f"{member.file} is larger than {limit} bytes")
            digest.update(chunk)
            out.write(chunk)
    if member.sha256 is not None and digest.hexdigest() != member.sha256:
        raise ArchiveError(
            f"{member.file} has sha256 {digest.hexdigest()[:12]}..., {member.sha256[:12]}... was expected"
        )
