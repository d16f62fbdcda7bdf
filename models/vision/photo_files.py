"""Rule that tells photos from other files, for archives and folders: hidden names, file content, then the suffix."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Final, Literal

PhotoFormat = Literal["JPEG", "PNG", "WebP", "BMP", "TIFF", "GIF", "AVIF", "HEIC"]
PHOTO_SUFFIXES: Final = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif"}
    | {".avif", ".heic", ".heif", ".hif"}
)
"""Suffixes that announce a photo. A file with one is never ignored: if it is not a photo, decoding reports it."""
SYSTEM_NAMES: Final = frozenset(
    {"__macosx", "@eadir", "#recycle", "@recycle", "$recycle.bin", "system volume information", "lost+found"}
    | {"thumbs.db", "ehthumbs.db", "desktop.ini"}
)
"""Lower-case names of files and folders that operating systems and file servers create."""
MAX_BRANDS: Final = 64
HEAD_BYTES: Final = 16 + 4 * MAX_BRANDS
"""Length of a file's beginning that identifies its format."""
HEVC_BRANDS: Final = frozenset({b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"})
CODEC_NEUTRAL_BRANDS: Final = frozenset({b"mif1", b"mif2", b"msf1"})
AVIF_BRANDS: Final = frozenset({b"avif", b"avis"})
TIFF_SIGNATURES: Final = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
BMP_HEADER_SIZES: Final = frozenset({12, 40, 52, 56, 64, 108, 124})


def photo_format(head: bytes) -> PhotoFormat | None:
    """Return the format of a file from its first HEAD_BYTES; None if it is not a supported photo."""
    if head.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return "WebP"
    if head.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    if head.startswith(TIFF_SIGNATURES):
        return "TIFF"
    if head.startswith(b"BM") and int.from_bytes(head[14:18], "little") in BMP_HEADER_SIZES:
        return "BMP"
    return _container_format(head)


def _container_format(head: bytes) -> PhotoFormat | None:
    """Return the format of an ISO base media file by its brands (ISO/IEC 23008-12)."""
    if head[4:8] != b"ftyp":
        return None
    end = min(int.from_bytes(head[:4]), HEAD_BYTES)
    brands = {head[8:12], *(head[at : at + 4] for at in range(16, end, 4))}
    if brands & HEVC_BRANDS:
        return "HEIC"
    if brands & AVIF_BRANDS:
        return "AVIF"
    return "HEIC" if brands & CODEC_NEUTRAL_BRANDS else None


def is_hidden(path: PurePath) -> bool:
    """Return whether a part of a relative path is hidden, or is a name of the operating system."""
    return any(part.startswith(".") or part.lower() in SYSTEM_NAMES for part in path.parts)


def is_photo(path: PurePath, read_head: Callable[[], bytes]) -> bool:
    """Return whether a file that is not hidden is a photo.

    ``read_head`` returns the first HEAD_BYTES. It is called only if the suffix does not announce a photo.
    """
    return path.suffix.lower() in PHOTO_SUFFIXES or photo_format(read_head()) is not None


def read_head(path: Path) -> bytes:
    """Return the first HEAD_BYTES of a file. Raises OSError."""
    with path.open("rb") as file:
        return file.read(HEAD_BYTES)


def printable_path(path: PurePath | str) -> str:
    r"""Return a path as valid Unicode: bytes that are not UTF-8 become ``\xe9``."""
    try:
        return str(path).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # surrogates that stand for no byte, such as those of JSON
        return str(path).encode("utf-8", "backslashreplace").decode()


def visible_subfolders(folder: Path) -> list[Path]:
    """Return the sub-folders that are not hidden, sorted. Raises OSError."""
    return sorted(path for path in folder.iterdir() if path.is_dir() and not is_hidden(PurePath(path.name)))


@dataclass
class PhotoFolder:
    """Files below a folder, in the order of their names, files before sub-folders.

    Attributes:
        photos: path of each photo.
        ignored: reason by path of each file or link that is not a photo.
        unreadable: reason by path of each photo or folder that cannot be read.
        hidden: number of hidden entries and entries of the operating system. Such folders are not searched.
    """

    photos: list[Path] = field(default_factory=list)
    ignored: dict[Path, str] = field(default_factory=dict)
    unreadable: dict[Path, str] = field(default_factory=dict)
    hidden: int = 0


def list_photos(root: Path) -> PhotoFolder:
    """List the photos at any depth below a folder.

    Links to files are followed. Links to folders are followed directly below ``root`` only: deeper links may form a
    cycle.
    """
    listed = PhotoFolder()

    def note(error: OSError) -> None:
        listed.unreadable[Path(os.fsdecode(error.filename))] = error.strerror or str(error)

    for parent, folders, files in os.walk(root, onerror=note, followlinks=True):
        shown_folders, shown_files = (
            sorted(name for name in names if not is_hidden(PurePath(name))) for names in (folders, files)
        )
        listed.hidden += len(folders) + len(files) - len(shown_folders) - len(shown_files)
        for name in shown_files:
            _add(listed, Path(parent, name))
        folders[:] = shown_folders
        if Path(parent) != root:
            folders[:] = [name for name in shown_folders if not Path(parent, name).is_symlink()]
            links = set(shown_folders) - set(folders)
            listed.ignored.update((Path(parent, name), "link to a folder") for name in sorted(links))
    return listed


def _add(listed: PhotoFolder, path: Path) -> None:
    announced = path.suffix.lower() in PHOTO_SUFFIXES
    try:
        if not path.is_file():
            (listed.unreadable if announced else listed.ignored)[path] = "not a file, or a link to a missing file"
        elif is_photo(path, lambda: read_head(path)):
            listed.photos.append(path)
        else:
            listed.ignored[path] = "not a photo"
    except OSError as error:
        (listed.unreadable if announced else listed.ignored)[path] = error.strerror or str(error)
