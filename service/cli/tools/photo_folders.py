"""Photos in local folders, and the tar stream that uploads them."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from service.inference.archives import is_photo

MAX_ARCHIVE_BYTES: Final = 1_000_000_000
"""Default size of one upload. The server needs this much free disk space."""


@dataclass(frozen=True)
class FolderPhoto:
    """Photo in a folder. ``name`` is PERSON/.../FILE, relative to the source folder; ``size`` is in bytes."""

    name: str
    path: Path
    size: int


def find_photos(folder: Path) -> tuple[list[FolderPhoto], int]:
    """Return the photos below each person's folder, sorted by name, and the number of other files.

    Links to files are followed. Links to folders are not, since they may form a cycle. Hidden folders are skipped.
    """
    found: list[FolderPhoto] = []
    ignored = 0
    for person in sorted(folder.iterdir()):
        if not person.is_dir():
            ignored += 1
            continue
        for parent, folders, files in os.walk(person):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for path in sorted(Path(parent, name) for name in files):
                name = path.relative_to(folder).as_posix()
                if is_photo(PurePosixPath(name)) and path.is_file():
                    found.append(FolderPhoto(name, path, path.stat().st_size))
                else:
                    ignored += 1
    return found, ignored


def split(photos: Sequence[FolderPhoto], max_bytes: int = MAX_ARCHIVE_BYTES) -> Iterator[list[FolderPhoto]]:
    """Yield consecutive photos of at most ``max_bytes`` in total. A larger photo is yielded alone."""
    part: list[FolderPhoto] = []
    size = 0
    for photo in photos:
        if part and size + photo.size > max_bytes:
            yield part
            part, size = [], 0
        part.append(photo)
        size += photo.size
    if part:
        yield part


class TarStream:
    """Tar archive of photos with a known size, generated while it is sent. It can be iterated more than once.

    Attributes:
        size: bytes of the archive.
        unreadable: reason by path for photos that could not be read. They are sent as zeros.
    """

    def __init__(self, photos: Sequence[FolderPhoto]) -> None:
        self._photos = photos
        self.size = sum(len(_header(photo)) + _padded(photo.size) for photo in photos) + 2 * tarfile.BLOCKSIZE
        self.unreadable: dict[str, str] = {}

    def __iter__(self) -> Iterator[bytes]:
        for photo in self._photos:
            try:
                content = photo.path.read_bytes()[: photo.size]
            except OSError as error:
                self.unreadable[str(photo.path)] = error.strerror or str(error)
                content = b""
            yield _header(photo) + content.ljust(_padded(photo.size), b"\0")
        yield bytes(2 * tarfile.BLOCKSIZE)


def _header(photo: FolderPhoto) -> bytes:
    info = tarfile.TarInfo(photo.name)
    info.size = photo.size
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _padded(size: int) -> int:
    return -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
