"""Photos in local folders, and the tar stream that uploads them."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from models.vision.photo_files import PhotoFolder
from service.inference.archives import storable_name

MAX_ARCHIVE_BYTES: Final = 1_000_000_000
"""Default size of one upload. The server needs this much free disk space."""


@dataclass(frozen=True)
class FolderPhoto:
    """Photo in a folder. ``name`` is PERSON/.../FILE, relative to the source folder; ``size`` is in bytes."""

    name: str
    path: Path
    size: int

    @property
    def item(self) -> str:
        """Name of the photo in the report of the server."""
        return storable_name(self.name)


def photos_of(folder: Path, listed: PhotoFolder) -> list[FolderPhoto]:
    """Return the photos of a folder with their sizes."""
    return [FolderPhoto(path.relative_to(folder).as_posix(), path, path.stat().st_size) for path in listed.photos]


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
        unreadable: reason by item for photos that could not be read. They are sent as zeros.
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
                self.unreadable[photo.item] = error.strerror or str(error)
                content = b""
            yield _header(photo) + content.ljust(_padded(photo.size), b"\0")
        yield bytes(2 * tarfile.BLOCKSIZE)


def _header(photo: FolderPhoto) -> bytes:
    info = tarfile.TarInfo(photo.name)
    info.size = photo.size
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _padded(size: int) -> int:
    return -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
