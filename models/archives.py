"""Single files out of archives, bounded in size. Nothing is ever written by a name that an archive chose."""

from __future__ import annotations

import hashlib
import tarfile
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Final

from models.catalog import Member
from models.errors import ArchiveError

MAX_MEMBER_BYTES: Final = 1_000_000_000
CHUNK: Final = 1 << 20


def extract_zip(archive: Path, members: Sequence[Member], directory: Path) -> None:
    """Write each member to ``directory`` under its catalogue name, which may begin with folders, from wherever in the
    archive it lies: of files whose paths end in that name, the one in the fewest folders.

    Raises:
        ArchiveError: it is no zip, names a path outside itself, lacks a member or has it twice, or a member is larger
            than stated or has another checksum.
    """
    try:
        with zipfile.ZipFile(archive) as opened:
            for info in opened.infolist():
                _check_inside(info.filename)
            for member in members:
                with opened.open(_find(opened.namelist(), member, archive)) as stream:
                    (directory / member.file).parent.mkdir(parents=True, exist_ok=True)
                    _copy(stream, member, directory / member.file)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, zlib.error) as error:
        raise ArchiveError(f"{archive.name} cannot be read ({error})") from error


def extract_tar(archive: Path, member: Member, directory: Path) -> None:
    """Write one regular file of a compressed tar archive to ``directory``.

    Raises:
        ArchiveError: as of :func:`extract_zip`.
    """
    try:
        with tarfile.open(archive, "r:*") as opened:
            for info in opened:
                if PurePosixPath(info.name).name == member.file and (stream := opened.extractfile(info)) is not None:
                    with stream:
                        _copy(stream, member, directory / member.file)
                    return
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise ArchiveError(f"{archive.name} cannot be read ({error})") from error
    raise ArchiveError(f"{archive.name} does not hold {member.file}")


def _find(names: Sequence[str], member: Member, archive: Path) -> str:
    wanted = PurePosixPath(member.file).parts
    ending = [name for name in names if PurePosixPath(name).parts[-len(wanted) :] == wanted]
    depths = [len(PurePosixPath(name).parts) for name in ending]
    found = [name for name, depth in zip(ending, depths, strict=True) if depth == min(depths)]
    if len(found) != 1:
        raise ArchiveError(f"{archive.name} holds {member.file} {len(found)} times, not once")
    return found[0]


def _check_inside(name: str) -> None:
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or ":" in path.parts[0]:
        raise ArchiveError(f"it names {name!r}, which lies outside the archive")


def _copy(stream: IO[bytes], member: Member, target: Path) -> None:
    limit = member.size or MAX_MEMBER_BYTES
    digest, written = hashlib.sha256(), 0
    with target.open("wb") as out:
        # Sizes in an archive's own headers may lie: what is unpacked is counted.
        while chunk := stream.read(CHUNK):
            written += len(chunk)
            if written > limit:
                raise ArchiveError(f"{member.file} is larger than {limit} bytes")
            digest.update(chunk)
            out.write(chunk)
    if member.sha256 is not None and digest.hexdigest() != member.sha256:
        raise ArchiveError(
            f"{member.file} has sha256 {digest.hexdigest()[:12]}..., {member.sha256[:12]}... was expected"
        )
