"""Positions and turns of shared indexes: external indexes that all nodes of a deployment update.

A row in ``index_states`` stores how far an index has applied a gallery's change log. Its row lock is the turn: one node
at a time updates the index, and it reads the data only after it has the turn, so that it never writes stale data. A
dead node releases the turn with its connection. The next node repeats the step, which is idempotent.

SQLite has no row locks, and its only writer must not wait for a slow index. There, a file lock beside the database is
the turn of all galleries, and a turn reads and records in short transactions.

A new index, or one that fell behind the log's floor, first scans all subjects. Until the scan ends, a second row with
the suffix SCAN_SUFFIX stores its position, so that another node can resume it.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

from service.core.errors import StorageBusyError, StorageError
from service.domain.gallery import Gallery, LogTrimmedError, Snapshot
from service.storage.db.engine import BUSY_TIMEOUT_MS, Database, deleted_meanwhile
from service.storage.db.file_system import LOCAL_DISK_REMEDY
from service.storage.db.tables import changes, galleries, generations, index_states, subjects, templates
from service.storage.repositories.change_log import (
    INDEX_EXPIRY,
    MIN_KEPT_LINES,
    SCAN_SUFFIX,
    read_changes,
    read_snapshot,
)
from service.storage.repositories.gallery_rows import gallery_value
from service.storage.repositories.store import Store

LINES_PER_TURN: Final = 1000
SUBJECTS_PER_TURN: Final = 1000
POLL_S: Final = 0.005
Begin = Callable[[], AbstractContextManager[Connection]]


@dataclass(frozen=True)
class Position:
    """Position of an index in a change log whose last sequence number is ``last``."""

    applied: int | None
    """Last applied sequence number; None during a scan."""
    written_at: datetime | None
    last: int

    @property
    def behind(self) -> bool:
        return self.applied is None or self.applied < self.last


class SharedIndexes:
    """Positions and turns by gallery and engine, a name of at most 26 characters that identifies the index."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def position(self, gallery: Gallery, engine: str) -> Position:
        """Raises GalleryNotFoundError."""
        with self._database.read() as connection:
            return _position(connection, gallery, engine)

    @contextmanager
    def turn(self, gallery: Gallery, engine: str) -> Iterator[Turn]:
        """Wait for the turn to update an index, and hold it until the block ends.

        Record only changes that the index already has. On PostgreSQL, records are committed when the block ends.

        Raises GalleryNotFoundError, StorageError, and StorageBusyError if other nodes held the turn for too long.
        """
        write = partial(self._database.write, deleted_meanwhile(gallery))
        with self._file_lock():
            with write() as connection:
                while not _lock_row(connection, gallery, engine):
                    pass  # the row was deleted while this node waited for its lock
                if self._database.file is None:
                    yield Turn(lambda: nullcontext(connection), lambda: nullcontext(connection), gallery, engine)
                    return
            yield Turn(self._database.read, write, gallery, engine)

    @contextmanager
    def _file_lock(self) -> Iterator[None]:
        """Exclude all other threads and processes on SQLite."""
        if self._database.file is None:
            yield
            return
        path = self._database.file.with_name(f"{self._database.file.name}-turn")
        try:
            lock = path.open("ab")
        except OSError as error:
            raise StorageError(f"{path} cannot be opened: {error.strerror}") from error
        with lock:
            _lock(lock.fileno(), path)
            yield

    def trim_log(self, name: str) -> None:
        """Trim a gallery's change log, and forget abandoned indexes. Raises GalleryNotFoundError, StorageError."""
        store = Store(self._database)
        gallery, now = store.galleries.get(name), datetime.now(UTC)
        last = sa.select(sa.func.max(changes.c.sequence)).where(changes.c.gallery_pk == gallery.pk).scalar_subquery()
        abandoned = (
            index_states.delete()
            .where(index_states.c.gallery_pk == gallery.pk, ~index_states.c.engine.endswith(SCAN_SUFFIX))
            .where(~index_states.c.updated_at.between(now - INDEX_EXPIRY, now + INDEX_EXPIRY))
            .where(index_states.c.sequence < last - MIN_KEPT_LINES)
            .returning(index_states.c.engine)
        )
        with self._file_lock(), self._database.write(deleted_meanwhile(gallery)) as connection:
            scans = [engine + SCAN_SUFFIX for engine in connection.execute(abandoned).scalars()]
            own = (index_states.c.gallery_pk == gallery.pk) & index_states.c.engine.in_(scans)
            connection.execute(index_states.delete().where(own))
        store.changes.trim(gallery)

    def live_galleries(self, generation: int, fingerprint: str) -> set[int]:
        """Return the keys of galleries whose generation has a recognizer with this fingerprint prefix."""
        query = sa.select(generations.c.gallery_pk).where(
            generations.c.generation == generation,
            generations.c.fingerprint.startswith(fingerprint, autoescape=True),
            generations.c.state != "dropped",
        )
        with self._database.read() as connection:
            return set(connection.execute(query).scalars())


class Turn:
    """Exclusive turn of one node to update one index."""

    def __init__(self, read: Begin, write: Begin, gallery: Gallery, engine: str) -> None:
        self._read, self._write = read, write
        self._gallery = gallery
        self._log, self._scan = _is(gallery, engine), _is(gallery, engine + SCAN_SUFFIX)
        self._engine = engine
        with read() as connection:
            self.position = _position(connection, gallery, engine)

    def scan_position(self) -> int:
        """Return the last scanned subject's key; start a new scan if the log was trimmed past the index's position."""
        sequence = sa.select(index_states.c.sequence)
        with self._write() as connection:
            scanned = connection.execute(sequence.where(self._scan)).scalar()
            reached = connection.execute(sequence.where(self._log)).scalar()
            if reached is None:
                raise deleted_meanwhile(self._gallery)
            if reached >= gallery_value(connection, self._gallery.pk, galleries.c.log_floor):
                return -int(scanned or 0)
            _update(connection, self._log, sequence=self.position.last)
            if not _insert(connection, self._gallery, self._engine + SCAN_SUFFIX, 0):
                _update(connection, self._scan, sequence=0)
            return 0

    def next_subjects(self, after: int) -> tuple[int | None, Snapshot]:
        """Return the templates of the next subjects, and the last one's key; None if no subjects follow."""
        query = (
            sa.select(subjects.c.pk)
            .where(subjects.c.gallery_pk == self._gallery.pk, subjects.c.pk > after)
            .order_by(subjects.c.pk)
            .limit(SUBJECTS_PER_TURN)
        )
        with self._read() as connection:
            pks = connection.execute(query).scalars().all()
            chosen = templates.c.subject_pk.in_(pks)
            last = pks[-1] if len(pks) == SUBJECTS_PER_TURN else None
            return last, read_snapshot(connection, self._gallery, self.position.last, chosen)

    def record_scan(self, subject_pk: int | None) -> None:
        """Record that the scan reached a subject, or with None its end: the index then follows the log."""
        with self._write() as connection:
            if subject_pk is not None:
                _update(connection, self._scan, sequence=-subject_pk)
            else:
                connection.execute(index_states.delete().where(self._scan))
                _update(connection, self._log)

    def next_changes(self) -> tuple[set[int], Snapshot]:
        """Read the keys of the subjects that the next lines of the log name, and their current templates.

        Raises StorageBusyError: the index was abandoned for days, and the log trimmed; the next turn starts a scan.
        """
        assert self.position.applied is not None  # noqa: S101 - callers check Position.behind
        with self._read() as connection:
            try:
                return read_changes(connection, self._gallery, self.position.applied, LINES_PER_TURN)[:2]
            except LogTrimmedError as error:
                raise StorageBusyError("the change log was trimmed meanwhile") from error

    def advance(self, sequence: int) -> None:
        """Record that the index applied the log up to this sequence number."""
        with self._write() as connection:
            _update(connection, self._log, sequence=sequence)


def _lock_row(connection: Connection, gallery: Gallery, engine: str) -> bool:
    start, scan = _position(connection, gallery, engine).last, engine + SCAN_SUFFIX
    if _insert(connection, gallery, engine, start):
        connection.execute(index_states.delete().where(_is(gallery, scan)))
        _insert(connection, gallery, scan, 0)
    # Waits for the end of the turn of a node whose row the insertion found.
    row = sa.select(index_states.c.sequence).where(_is(gallery, engine)).with_for_update()
    return connection.execute(row).first() is not None


def _lock(file: int, path: Path) -> None:
    deadline = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise StorageBusyError(f"{path} is locked: another process updates an index") from error
        except OSError as error:
            problem = f"the file system of {path.parent} does not lock files: {error.strerror}"
            raise StorageError(problem, LOCAL_DISK_REMEDY) from error
        time.sleep(POLL_S)


def _position(connection: Connection, gallery: Gallery, engine: str) -> Position:
    own, scan = _is(gallery, engine), _is(gallery, engine + SCAN_SUFFIX)
    parts = {
        "last": sa.select(sa.func.max(changes.c.sequence)).where(changes.c.gallery_pk == gallery.pk),
        "applied": sa.select(index_states.c.sequence).where(own),
        "written_at": sa.select(index_states.c.updated_at).where(own),
        "scan": sa.select(index_states.c.sequence).where(scan),
    }
    columns = [part.scalar_subquery().label(name) for name, part in parts.items()]
    row = connection.execute(sa.select(galleries.c.log_floor, *columns).where(galleries.c.pk == gallery.pk)).first()
    if row is None:
        raise deleted_meanwhile(gallery)
    followed = row.applied is not None and row.scan is None and row.applied >= row.log_floor
    return Position(row.applied if followed else None, row.written_at, max(row.last or 0, row.log_floor))


def _is(gallery: Gallery, engine: str) -> sa.ColumnElement[bool]:
    return (
        (index_states.c.gallery_pk == gallery.pk)
        & (index_states.c.generation == gallery.generation)
        & (index_states.c.engine == engine)
    )


def _insert(connection: Connection, gallery: Gallery, engine: str, sequence: int) -> bool:
    """Insert a row unless it exists; return whether it was inserted."""
    insert = (sqlite if connection.dialect.name == "sqlite" else postgresql).insert(index_states)
    key = {"gallery_pk": gallery.pk, "generation": gallery.generation, "engine": engine}
    added = insert.values(**key, sequence=sequence, updated_at=datetime.now(UTC)).on_conflict_do_nothing()
    return connection.execute(added.returning(index_states.c.engine)).first() is not None


def _update(connection: Connection, chosen: sa.ColumnElement[bool], **values: int) -> None:
    connection.execute(index_states.update().where(chosen).values(**values, updated_at=datetime.now(UTC)))
