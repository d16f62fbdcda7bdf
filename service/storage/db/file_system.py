"""Disk of an SQLite database: checks of its files."""

from __future__ import annotations

import os
import pwd
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from service.core.errors import StorageError

OPEN_REMEDY: Final = (
    "Check KITH_DATA_DIR or KITH_DATABASE_URL: the folder must be writable, or the PostgreSQL server reachable."
)
OWNER_REMEDY: Final = (
    "Give the folders and files of KITH_DATA_DIR and KITH_DATABASE_URL to the user that runs Kith (chown), run "
    "commands as that user, and mount nothing of them read-only."
)
ACCOUNT_REMEDY: Final = (
    "KITH_DATABASE_URL must name the primary server, and an account with SELECT, INSERT, UPDATE and DELETE on all "
    "tables and USAGE on all sequences (GRANT); for the first start and for upgrades, the owner of the tables."
)
LOCAL_DISK_REMEDY: Final = (
    "Put the database on a local disk (KITH_DATA_DIR, KITH_DATABASE_URL), or use PostgreSQL: network file systems such "
    "as NFS and SMB do not hold SQLite databases (docs/deployment.md)."
)


def check_writable(path: Path) -> None:
    """Raises StorageError, which names the owner, if this process may not read and write a file or folder.

    It is not opened: closing a database file would drop the locks of SQLite's connections. Raises OSError if it is
    missing.
    """
    status = path.stat()
    if not os.access(path, os.R_OK | os.W_OK | (os.X_OK if stat.S_ISDIR(status.st_mode) else 0)):
        raise StorageError(
            f"user {_user(os.geteuid())} may not write {path}, which belongs to {_user(status.st_uid)}, mode "
            f"{stat.S_IMODE(status.st_mode):o}",
            OWNER_REMEDY,
        )


def check_database_file(path: Path) -> None:
    """Check that an SQLite database can be written: SQLite opens others for reading. Raises StorageError, OSError."""
    check_writable(path)
    for suffix in ("wal", "shm"):
        with suppress(FileNotFoundError):  # SQLite deletes them with its last connection
            check_writable(path.with_name(f"{path.name}-{suffix}"))


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
