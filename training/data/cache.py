"""Cache of decoded crops: a memory-mapped array and a companion array."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


@contextmanager
def create_crop_cache(
    cache: Path, companion: Path, count: int, size_px: int
) -> Iterator[tuple[NDArray[np.uint8], Callable[[NDArray[np.generic]], None]]]:
    """Yield a (count, size_px, size_px, 3) array to fill, and a function that saves the ``companion`` array.

    Both files appear under their names only after the block ends without error. Processes may build the same cache
    concurrently: each writes its own files, and the last one wins. Raises OSError: the disk has no space for it.
    """
    cache.parent.mkdir(parents=True, exist_ok=True)
    partial, partial_companion = (path.with_name(f"{path.name}.{os.getpid()}.partial") for path in (cache, companion))
    shape = (count, size_px, size_px, 3)
    try:
        crops_NHWC = np.lib.format.open_memmap(partial, mode="w+", dtype=np.uint8, shape=shape)
        _allocate(partial)

        def save_companion(values: NDArray[np.generic]) -> None:
            with partial_companion.open("wb") as stream:
                np.save(stream, values)

        yield crops_NHWC, save_companion
        crops_NHWC.flush()
        partial_companion.replace(companion)
        partial.replace(cache)
    finally:
        partial.unlink(missing_ok=True)
        partial_companion.unlink(missing_ok=True)


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
