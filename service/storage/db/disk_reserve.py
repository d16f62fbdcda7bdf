"""Disk space reserved for erasures, so that they succeed on a full disk."""

from __future__ import annotations

import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

RESERVE_BYTES: Final = 16 * 1024 * 1024
"""An erasure writes each overwritten page to the WAL: 1 MB for a subject with 20 photos and their crops."""


class DiskReserve:
    """File of RESERVE_BYTES that an erasure deletes on a full disk. Thread-safe."""

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
