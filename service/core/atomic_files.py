"""Atomic file writes: a reader sees the old file or the complete new one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Yield a temporary file that replaces ``path`` when the block ends, synced to disk.

    Only the owner may read the file. If the block fails, ``path`` stays unchanged. Concurrent writers of the same path
    use different temporary names.

    Raises:
        OSError: The file cannot be written; the error names ``path``.
    """
    with _open_temporary(path) as file:
        try:
            yield file
            with _errors_naming(path):
                file.flush()
                os.fsync(file.fileno())
                Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Flush the entries of a folder to disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _open_temporary(path: Path) -> IO[bytes]:
    with _errors_naming(path):
        return tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name[:100]}.", suffix=".part", delete=False)


@contextmanager
def _errors_naming(path: Path) -> Iterator[None]:
    """Replace the temporary file's name in an OSError, since users do not know that file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
