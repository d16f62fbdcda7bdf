"""Cache of decoded crops: a memory-mapped array, and an array of what was found."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Crops = NDArray[np.uint8]


def cached_crops(
    folder: Path, kind: str, identity: str, count: int, size_px: int, fill: Callable[[Crops], NDArray[Any]]
) -> tuple[Crops, NDArray[Any]]:
    """Return (count, size_px, size_px, 3) crops as a read-only memory map, and the array that ``fill`` returned.

    ``fill`` writes the crops, if ``folder`` has none of this kind and ``identity``, which names all that they depend
    on. Both files appear only after it returned. Processes may fill one cache concurrently: each writes its own files,
    and the last one wins. Raises OSError: the disk has no space for it.
    """
    key = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    cache, found = folder / f"{kind}-{key}.npy", folder / f"{kind}-found-{key}.npy"
    if not (cache.exists() and found.exists()):
        folder.mkdir(parents=True, exist_ok=True)
        partial, partial_found = (path.with_name(f"{path.name}.{os.getpid()}.partial") for path in (cache, found))
        try:
            shape = (count, size_px, size_px, 3)
            crops_NHWC = np.lib.format.open_memmap(partial, mode="w+", dtype=np.uint8, shape=shape)
            _allocate(partial)
            with partial_found.open("wb") as stream:
                np.save(stream, fill(crops_NHWC))
            crops_NHWC.flush()
            partial_found.replace(found)
            partial.replace(cache)
        finally:
            partial.unlink(missing_ok=True)
            partial_found.unlink(missing_ok=True)
    return np.load(cache, mmap_mode="r"), np.load(found)


def _allocate(file: Path) -> None:
    """Reserve the disk space of a sparse file: a full disk would end a process that writes to its map by SIGBUS."""
    size = file.stat().st_size
    try:
        with file.open("r+b") as stream:
            os.posix_fallocate(stream.fileno(), 0, size)
    except OSError as error:
        raise OSError(
            error.errno, f"{os.strerror(error.errno or 0)} for {size / 1e6:,.0f} MB of crops", str(file)
        ) from error
