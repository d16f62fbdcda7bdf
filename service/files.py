"""Files that are there when they are complete."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that only its owner may read; it takes the place of ``path`` when the block is left, and then is on disk;
    if the block fails, nothing happened. Its name meanwhile is nobody else's, were they to write the same file.

    Raises:
        OSError: it cannot be written; it names ``path``.
    """
    with _part_of(path) as file:
        try:
            yield file
            with _named(path):
                file.flush()
                os.fsync(file.fileno())
                Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _part_of(path: Path) -> IO[bytes]:
    with _named(path):
        return tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name[:100]}.", suffix=".part", delete=False)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Nobody asked for the file that is written meanwhile."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
