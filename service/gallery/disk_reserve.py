"""Disk space that is kept for erasures, so that a full disk does not prevent them."""

from __future__ import annotations

import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

RESERVE_BYTES: Final = 16 * 1024 * 1024
"""An erasure writes each page that it overwrites to SQLite's log: for a person with 20 photos and their crops, 1 MB."""


class DiskReserve:
    """File of RESERVE_BYTES. An erasure deletes it where the disk is full; it is made again afterwards."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._making = threading.Lock()
        self.released = False
        """By this process, and not made again."""

    def keep(self) -> bool:
        """Make the file, if it is not there; tells whether it is."""
        with self._making:
            return self._keep()

    def _keep(self) -> bool:
        try:
            if self._path.exists() and self._path.stat().st_size == RESERVE_BYTES:
                self.released = False
                return True
            with os.fdopen(os.open(self._path, os.O_CREAT | os.O_WRONLY, 0o600), "wb") as file:
                file.write(bytes(RESERVE_BYTES))
        except OSError:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
            return False
        self.released = False
        return True

    def release(self) -> None:
        """Delete the file, if the disk has less room than it takes."""
        with suppress(OSError):
            if shutil.disk_usage(self._path.parent).free < RESERVE_BYTES and self._path.exists():
                self._path.unlink()
                self.released = True
