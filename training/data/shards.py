"""WebDataset shards: tar files with an image and a ``.cls`` label under one name."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from training.config import ConfigError

IMAGE_SUFFIXES = frozenset({"jpg", "jpeg", "png", "webp"})
LABEL_SUFFIX = "cls"


class TarShards:
    """Images of all ``*.tar`` files of a folder, by name of the shard and order within it.

    The headers of all members are read once, at the start; images are read at their offsets. Raises ConfigError if a
    shard is damaged, or an image has no integer label.
    """

    def __init__(self, folder: Path) -> None:
        self._shards = sorted(folder.glob("*.tar"))
        rows, self._names = list[tuple[int, int, int]](), list[str]()
        labels = []
        for number, shard in enumerate(self._shards):
            for name, offset, size, label in _scan(shard):
                rows.append((number, offset, size))
                self._names.append(name)
                labels.append(label)
        self._rows = np.array(rows, np.int64).reshape(-1, 3)
        self.labels = np.array(labels, np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def name(self, i: int) -> str:
        return f"{self._shards[self._rows[i, 0]]}, {self._names[i]}"

    def read_encoded(self, i: int) -> bytes:
        number, offset, size = self._rows[i].tolist()
        with self._shards[number].open("rb") as stream:
            return os.pread(stream.fileno(), size, offset)

    def fingerprint(self, rows: NDArray[np.int64]) -> str:
        stamps = [f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in self._shards]
        return f"{stamps} {rows.tobytes().hex()}"


def _scan(shard: Path) -> Iterator[tuple[str, int, int, int]]:
    """Yield name, offset, size and label of each image."""
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    try:
        with tarfile.open(shard, "r:") as archive:
            for member in archive:
                name, _, suffix = member.name.partition(".")
                if suffix.lower() in IMAGE_SUFFIXES:
                    images[name] = member.offset_data, member.size
                elif suffix == LABEL_SUFFIX:
                    content = archive.extractfile(member)
                    labels[name] = int(content.read() if content else b"")
    except (tarfile.TarError, ValueError) as error:
        raise ConfigError(f"{shard} is not a readable shard: {error}. Copy or write it again") from error
    if missing := images.keys() - labels.keys():
        raise ConfigError(f"{shard}: {min(missing)} has no .{LABEL_SUFFIX} file with its label")
    for name, (offset, size) in images.items():
        yield name, offset, size, labels[name]
