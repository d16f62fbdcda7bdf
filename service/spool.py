"""Archives on their way into a gallery, on this node's disk: one sealed file a job, named after it; and imports that
are read from their end, in files without a name."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from service.errors import StorageFullError
from service.gallery.job_store import Job, JobStore
from service.security.sealed_files import SealedFile, SealedWriter, TemporaryFile
from service.security.sealing import Seal

SPARE_BYTES: Final = 256_000_000
"""Of the disk, left to the database."""
CHECKED_EVERY_BYTES: Final = 16_000_000
ABANDONED_S: Final = 3600.0
"""A file that nothing was written to for so long, and that no job waits for, is nobody's."""
NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Spool:
    """The files under ``folder``, which is made when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, job_id: str) -> Path:
        return self._folder / job_id

    def archive(self, job_id: str, seal: Seal) -> SealedFile:
        """``seal``: of the gallery that it goes into."""
        return SealedFile(self.path(job_id), seal, f"archive {job_id}")

    def has(self, job: Job) -> bool:
        return self.path(job.id).is_file()

    def discard(self, job: Job) -> None:
        self.path(job.id).unlink(missing_ok=True)

    def check_room(self, size: int) -> None:
        """Raises StorageFullError if so many bytes would fill the disk."""
        with _room():
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            free = shutil.disk_usage(self._folder).free
        if size + SPARE_BYTES > free:
            raise StorageFullError(f"{size} more bytes were to come, and {max(0, free - SPARE_BYTES)} can be taken")

    def temporary(self) -> TemporaryFile:
        """Raises StorageFullError."""
        self.check_room(0)
        with _room():
            return TemporaryFile(self._folder)

    def write(self, file: SealedWriter | TemporaryFile, block: bytes) -> None:
        """Write to a file of ``receiving``, or to a ``temporary`` one. What was announced is not believed, and others
        write, too: that there is room is looked at again and again.

        Raises:
            StorageFullError: there is none any more.
        """
        before = file.tell()
        file.write(block)
        if file.tell() // CHECKED_EVERY_BYTES > before // CHECKED_EVERY_BYTES:
            self.check_room(0)

    @contextmanager
    def receiving(self, job_id: str, seal: Seal) -> Iterator[SealedWriter]:
        """A file to write a job's archive to, and then to sync; it is gone if the block raises.

        Raises:
            StorageFullError: there is no room for it.
        """
        archive = self.archive(job_id, seal)
        try:
            with _room():
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                with archive.writing() as file:
                    yield file
        except BaseException:
            archive.path.unlink(missing_ok=True)
            raise

    def sync(self, file: SealedWriter) -> None:
        """Blocks until the whole file is on disk, and its name."""
        file.finish()
        os.fsync(file.fileno())
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def abandoned(self, store: JobStore) -> list[Path]:
        """What is left of jobs that are over, and of uploads that broke off with their process."""
        if not self._folder.is_dir():
            return []
        files = [path for path in self._folder.iterdir() if abs(time.time() - path.stat().st_mtime) > ABANDONED_S]
        kept = store.unfinished([path.name for path in files])
        return [path for path in files if path.name not in kept]

    def tidy(self, store: JobStore) -> None:
        """Remove what is abandoned."""
        for path in self.abandoned(store):
            path.unlink(missing_ok=True)


@contextmanager
def _room() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise StorageFullError(f"an archive could not be written: {error.strerror}") from error
        raise
