"""Crops decoded once: a memory-mapped array and a small one beside it, complete or not there at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from models.alignment import CROP_SIZE_PX


@contextmanager
def new_crops(
    cache: Path, beside: Path, count: int, size_px: int = CROP_SIZE_PX
) -> Iterator[tuple[NDArray[np.uint8], Callable[[NDArray[np.generic]], None]]]:
    """Yield (count, size_px, size_px, 3) to fill, and a function that takes the array for ``beside``.

    Both appear under their names once the block is left without an error. Two processes may build the same cache at
    once: each writes files of its own, and the last to end wins.
    """
    cache.parent.mkdir(parents=True, exist_ok=True)
    partial, partial_beside = (path.with_name(f"{path.name}.{os.getpid()}.partial") for path in (cache, beside))
    shape = (count, size_px, size_px, 3)
    try:
        crops_NHWC = np.lib.format.open_memmap(partial, mode="w+", dtype=np.uint8, shape=shape)

        def put_beside(values: NDArray[np.generic]) -> None:
            with partial_beside.open("wb") as stream:
                np.save(stream, values)

        yield crops_NHWC, put_beside
        crops_NHWC.flush()
        partial_beside.replace(beside)
        partial.replace(cache)
    finally:
        partial.unlink(missing_ok=True)
        partial_beside.unlink(missing_ok=True)
