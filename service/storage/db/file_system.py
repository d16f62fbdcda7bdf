"""Check of the file system of an SQLite database: writing, file locks and shared memory."""

from __future__ import annotations

import errno
import fcntl
import mmap
import tempfile
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
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, SQLITE_LOCK_BYTE)
        except OSError as error:
            raise StorageError(
                f"the file system of {folder} does not lock files, which SQLite needs: {error.strerror}",
                LOCAL_DISK_REMEDY,
            ) from error
        try:
            file.truncate(mmap.PAGESIZE)
            mmap.mmap(file.fileno(), mmap.PAGESIZE).close()
        except OSError as error:
            raise StorageError(
                f"the file system of {folder} does not share memory, which SQLite's WAL needs: {error.strerror}",
                LOCAL_DISK_REMEDY,
            ) from error
