"""Disk of an SQLite database: checks of its file system, and space that is reserved for erasures."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

from service.core.errors import StorageError, StorageFullError

OPEN_REMEDY: Final = (
    "Check KITH_DATA_DIR or KITH_DATABASE_URL: the folder must be writable, or the PostgreSQL server reachable."
)
LOCAL_DISK_REMEDY: Final = (
    "Put the database on a local disk (KITH_DATA_DIR, KITH_DATABASE_URL), or use PostgreSQL: network file systems such "
    "as NFS and SMB do not hold SQLite databases (docs/deployment.md)."
)
SQLITE_LOCK_BYTE: Final = 0x40000000
"""First byte that SQLite locks (sqlite.org/fileformat.html#the_lock_byte_page)."""
RESERVE_BYTES: Final = 16 * 1024 * 1024
"""An erasure writes each overwritten page to the WAL: 1 MB for a subject with 20 photos and their crops."""


def check_file_system(folder: Path) -> None:
    """Check with a temporary file that SQLite can work in an existing folder.

    SQLite does not tell failing locks from locks of other processes: both are "database is locked". No other process
    can hold a lock on the temporary file.

    Raises:
        StorageError: the folder cannot be written, or its file system has no locks or no shared memory.
        StorageFullError: the disk is full.
    """
    try:
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - the block below closes it
    except OSError as error:
        problem = f"the database folder {folder} cannot be written: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFullError(problem) from error
        raise StorageError(problem, OPEN_REMEDY) from error
    with file:
        need = "lock files, which SQLite needs"
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, SQLITE_LOCK_BYTE)
            need = "share memory, which SQLite's WAL needs"
            file.truncate(mmap.PAGESIZE)
            mmap.mmap(file.fileno(), mmap.PAGESIZE).close()
        except OSError as error:
            problem = f"the file system of {folder} does not {need}: {error.strerror}"
            raise StorageError(problem, LOCAL_DISK_REMEDY) from error


class DiskReserve:
    """File of RESERVE_BYTES that an erasure deletes on a full disk, so that it succeeds. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self.released = False
        """True while the file is deleted by this process."""

    def create(self) -> bool:
        """Create the file if it is missing; return whether it exists."""
        with self._lock:
            try:
                if not self._path.exists() or self._path.stat().st_size != RESERVE_BYTES:
                    with os.fdopen(os.open(self._path, os.O_CREAT | os.O_WRONLY, 0o600), "wb") as file:
                        file.write(bytes(RESERVE_BYTES))
            except OSError:
                with suppress(OSError):
                    self._path.unlink(missing_ok=True)
                return False
            self.released = False
            return True

    def release(self) -> None:
        """Delete the file if less than its size is free on the disk."""
        with suppress(OSError):
            if shutil.disk_usage(self._path.parent).free < RESERVE_BYTES and self._path.exists():
                self._path.unlink()
                self.released = True
