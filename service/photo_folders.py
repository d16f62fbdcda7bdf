"""Photos in folders on this side of the wire: found, and sent as an archive that is made while it is sent."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from service.archives import is_photo

PART_BYTES: Final = 1_000_000_000
"""Of photos in one archive: what the server's disk must have room for at once."""


@dataclass(frozen=True)
class FolderPhoto:
    """``name``: PERSON/.../FILE, relative to the folder that was given."""

    name: str
    path: Path
    size: int


def find_photos(folder: Path) -> tuple[list[FolderPhoto], int]:
    """Every photo in a folder per person, however deep, in order of their names, and how many files are none. Links to
    files are followed; links to folders are not, as they may lead in a circle; hidden ones are passed over."""
    found: list[FolderPhoto] = []
    ignored = 0
    for person in sorted(folder.iterdir()):
        if not person.is_dir():
            ignored += 1
            continue
        for here, folders, files in os.walk(person):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for path in sorted(Path(here, name) for name in files):
                name = path.relative_to(folder).as_posix()
                if is_photo(PurePosixPath(name)) and path.is_file():
                    found.append(FolderPhoto(name, path, path.stat().st_size))
                else:
                    ignored += 1
    return found, ignored


def parts(photos: Sequence[FolderPhoto], most_bytes: int = PART_BYTES) -> Iterator[list[FolderPhoto]]:
    """In order, at most so many bytes at a time; a larger photo is alone."""
    part: list[FolderPhoto] = []
    size = 0
    for photo in photos:
        if part and size + photo.size > most_bytes:
            yield part
            part, size = [], 0
        part.append(photo)
        size += photo.size
    if part:
        yield part


class TarStream:
    """Photos as a tar archive, of a size that is known before it is made; may be iterated again. ``unreadable``: why,
    by path, of those that could not be read, which are sent as zeros."""

    def __init__(self, photos: Sequence[FolderPhoto]) -> None:
        self._photos = photos
        self.size = sum(len(_header(photo)) + _padded(photo.size) for photo in photos) + 2 * tarfile.BLOCKSIZE
        self.unreadable: dict[str, str] = {}

    def __iter__(self) -> Iterator[bytes]:
        for photo in self._photos:
            try:
                payload = photo.path.read_bytes()[: photo.size]
            except OSError as error:
                self.unreadable[str(photo.path)] = error.strerror or str(error)
                payload = b""
            yield _header(photo) + payload.ljust(_padded(photo.size), b"\0")
        yield bytes(2 * tarfile.BLOCKSIZE)


def _header(photo: FolderPhoto) -> bytes:
    info = tarfile.TarInfo(photo.name)
    info.size = photo.size
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _padded(size: int) -> int:
    return -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
