"""Identifiers of classes, so that a resumed run gives each row of its classifier to the same person."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import NDArray

from training.data.subsampling import evenly_spaced_rows

MAX_CLASSES_READ: Final = 256
"""Classes whose first image is read, where classes are numbers. A person who is added or removed before a tool numbers
the people moves all later numbers, which is found; one who is renamed moves those up to the new place, which may be
missed between two classes that are read."""


def identify_classes(
    names: Sequence[str], labels: NDArray[np.int64], read_encoded: Callable[[int], bytes] | None
) -> NDArray[np.int64]:
    """Return (C,) hashes that identify the classes. Raises ConfigError: an image cannot be read.

    Args:
        names: (C,) name of each class, printable and in NFC: file systems differ in the form of accents.
        labels: (n,) class of each image.
        read_encoded: function from an image to its encoded bytes, for sets whose names are numbers that depend on the
            other people; the first image of evenly spaced classes is then part of the hash.
    """
    images: dict[int, bytes] = {}
    if read_encoded is not None:
        first_images = np.unique(labels, return_index=True)[1]
        chosen = evenly_spaced_rows(len(names), MAX_CLASSES_READ).tolist()
        images = {label: read_encoded(int(first_images[label])) for label in chosen}
    return np.array([_hash(name, images.get(label, b"")) for label, name in enumerate(names)], np.int64)


def _hash(name: str, image: bytes) -> int:
    digest = blake2b(name.encode() + b"\0" + image, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
