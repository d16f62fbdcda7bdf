"""Spool: encrypted archives of enrollment jobs on this node's disk, one per job."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from service.core.atomic_files import sync_folder
from service.core.errors import StorageFullError
from service.security.sealed_files import SealedFile, SealedWriter
from service.security.sealing import Seal
from service.storage.repositories.jobs import Job, JobStore

RESERVED_BYTES: Final = 256_000_000
"""Disk space reserved for the database."""
ABANDONED_AFTER_S: Final = 3600.0
"""Age of the last write after which a file without a job is abandoned."""
DISK_FULL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Spool:
    """Spool folder, created on first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, job_id: str) -> Path:
        """Return the path of a job's archive."""
        return self._folder / job_id

    def archive(self, job_id: str, seal: Seal) -> SealedFile:
        """Return a job's archive; ``seal``: that of its gallery."""
        return SealedFile(self.path(job_id), seal, f"archive {job_id}")

    def has(self, job: Job) -> bool:
        """Return whether this node has the job's archive."""
        return self.path(job.id).is_file()

    def discard(self, job_id: str) -> None:
        """Delete the archive of a job, if this node has it."""
        self.path(job_id).unlink(missing_ok=True)

    def write(self, file: SealedWriter, block: bytes) -> None:
        """Write a block. Raises StorageFullError: announced sizes are not trusted, and other processes write too."""
        self._check_free_space(len(block))
        file.write(block)

    @contextmanager
    def receiving(self, job_id: str, seal: Seal, announced: int = 0) -> Iterator[SealedWriter]:
        """Return a file for a job's archive; call :meth:`sync` at the end. It is deleted if the block raises.

        Raises StorageFullError; at once, if the disk has no room for the ``announced`` bytes.
        """
        archive = self.archive(job_id, seal)
        try:
            with _disk_full_errors():
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._check_free_space(announced)
                with archive.writing() as file:
                    yield file
        except BaseException:
            archive.path.unlink(missing_ok=True)
            raise

    def sync(self, file: SealedWriter) -> None:
        """Flush the file and its directory entry to disk; blocks."""
        file.finish()
        os.fsync(file.fileno())
        sync_folder(self._folder)

    def tidy(self, store: JobStore) -> None:
        """Delete the files of finished jobs and of interrupted uploads."""
        if not self._folder.is_dir():
            return
        files = list[Path]()
        for path in self._folder.iterdir():
            with suppress(FileNotFoundError):  # another process of this node tidies too
                if abs(time.time() - path.stat().st_mtime) > ABANDONED_AFTER_S:
                    files.append(path)
        kept = store.unfinished([path.name for path in files])
        for path in files:
            if path.name not in kept:
                path.unlink(missing_ok=True)

    def _check_free_space(self, size: int) -> None:
        free = shutil.disk_usage(self._folder).free
        if size + RESERVED_BYTES > free:
            raise StorageFullError(f"{size} more bytes are needed and {max(0, free - RESERVED_BYTES)} are available")


@contextmanager
def _disk_full_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL_ERRNOS:
            raise StorageFullError(f"an archive could not be written: {error.strerror}") from error
        raise
