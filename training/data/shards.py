"""WebDataset shards: tar files with an image and a ``.cls`` label under one key."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path, PurePosixPath
from typing import Final

import numpy as np
from numpy.typing import NDArray

from models.vision.photo_files import PHOTO_SUFFIXES, is_hidden, printable_path
from training.config import ConfigError

IMAGE_EXTENSIONS: Final = frozenset(suffix.removeprefix(".") for suffix in PHOTO_SUFFIXES)
LABEL_EXTENSION: Final = "cls"
MAX_LABEL_BYTES: Final = 32
MIN_LABEL: Final = -(2**63)
MAX_LABEL: Final = 2**63 - 1


class TarShards:
    """Images of all ``*.tar`` files of a folder, by name of the shard and order within it. Hidden files are ignored.

    The headers of all members are read once, at the start; images are read at their offsets. Raises ConfigError if a
    shard is damaged or has no image, or a sample lacks its image or its integer label.
    """

    def __init__(self, folder: Path) -> None:
        self._shards = find_shards(folder)
        rows, self._names = list[tuple[int, int, int]](), list[str]()
        labels = []
        for number, shard in enumerate(self._shards):
            for name, offset, size, label in _scan(shard):
                rows.append((number, offset, size))
                self._names.append(name)
                labels.append(label)
        self._rows = np.array(rows, np.int64).reshape(-1, 3)
        self.labels = np.array(labels, np.int64)

    def name(self, i: int) -> str:
        return f"{self._shards[self._rows[i, 0]]}, {self._names[i]}"

    def read_encoded(self, i: int) -> bytes:
        number, offset, size = self._rows[i].tolist()
        with self._shards[number].open("rb") as stream:
            return os.pread(stream.fileno(), size, offset)

    def fingerprint(self, rows: NDArray[np.int64]) -> str:
        stamps = [f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in self._shards]
        return f"{stamps} {rows.tobytes().hex()}"


def find_shards(folder: Path) -> list[Path]:
    """Return the ``*.tar`` files of a folder that are not hidden, sorted."""
    return sorted(path for path in folder.glob("*.tar") if not is_hidden(PurePosixPath(path.name)))


def _scan(shard: Path) -> Iterator[tuple[str, int, int, int]]:
    """Yield name, offset, size and label of each image, in the order of the images."""
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    try:
        with tarfile.open(shard, "r:", encoding="utf-8") as archive:
            for member in archive:
                key, extension = split_name(member.name)
                if extension not in IMAGE_EXTENSIONS | {LABEL_EXTENSION} or member.isdir():
                    continue
                if not member.isreg():
                    raise ValueError(f"{printable_path(member.name)} is a link; pack with tar -h --hard-dereference")
                if key in (labels if extension == LABEL_EXTENSION else images):
                    raise ValueError(f"{printable_path(member.name)} is a second image or label of its sample")
                if extension == LABEL_EXTENSION:
                    labels[key] = _read_label(archive, member)
                else:
                    images[key] = member.offset_data, member.size
    except (tarfile.TarError, OSError, ValueError) as error:
        raise ConfigError(f"{shard} is not a readable shard: {error}. Copy or write it again") from error
    _check(shard, images.keys(), labels.keys())
    for key, (offset, size) in images.items():
        yield printable_path(key), offset, size, labels[key]


def split_name(path: str) -> tuple[str, str]:
    """Split a path at the first dot of its base name, as the webdataset library does: key and lower-case extension.
    Both are empty for hidden files, those in hidden folders, and names without a dot."""
    name = PurePosixPath(path)
    if is_hidden(name):
        return "", ""
    key, dot, extension = name.name.partition(".")
    return (str(name.with_name(key)), extension.lower()) if key and dot else ("", "")


def _read_label(archive: tarfile.TarFile, member: tarfile.TarInfo) -> int:
    """Return a label. Raises ValueError if it is not an integer of 64 bits."""
    content = archive.extractfile(member)
    label = int(content.read(MAX_LABEL_BYTES) if content else b"")
    if member.size > MAX_LABEL_BYTES or not MIN_LABEL <= label <= MAX_LABEL:
        raise ValueError(f"{printable_path(member.name)} is not an integer of 64 bits")
    return label


def _check(shard: Path, images: AbstractSet[str], labels: AbstractSet[str]) -> None:
    """Check that each image has a label, and each label an image. Raises ConfigError."""
    if missing := images - labels:
        key = printable_path(min(missing))
        raise ConfigError(f"{shard}: {key} has no .{LABEL_EXTENSION} file with its label. Write the shard again")
    hint = f"Images have one of the extensions {', '.join(sorted(IMAGE_EXTENSIONS))}, and labels .{LABEL_EXTENSION}"
    if missing := labels - images:
        key = printable_path(min(missing))
        raise ConfigError(f"{shard}: {key} has a label and no image. {hint}")
    if not images:
        raise ConfigError(f"{shard} contains no image. {hint}")
