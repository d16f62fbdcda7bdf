"""Positions and turns of shared indexes: external indexes that all nodes of a deployment update.

A row in ``index_states`` stores how far an index has applied a gallery's change log. Its row lock is the turn: one node
at a time updates the index, and it reads the data only after it has the turn, so that it never writes stale data. A
dead node releases the turn with its connection. The next node repeats the step, which is idempotent.

SQLite has no row locks, and its only writer must not wait for a slow index. There, a file lock beside the database is
the turn of all galleries, and a turn reads and records in short transactions.

A new index, or one that fell behind the log's floor, first scans all subjects. Until the scan ends, ``scanned`` is the
key of the last one, so that another node can resume it.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from service.core.errors import StorageBusyError
from service.domain.gallery import Gallery, LogTrimmedError, Snapshot
from service.storage.db.bulk_rows import insert_missing
from service.storage.db.engine import Database, deleted_meanwhile
from service.storage.db.tables import galleries, generations, index_states, last_change, subjects, templates
from service.storage.repositories.change_log import read_changes, read_snapshot

LINES_PER_TURN: Final = 1000
SUBJECTS_PER_TURN: Final = 1000
Begin = Callable[[], AbstractContextManager[Connection]]


@dataclass(frozen=True)
class Position:
    """Position of an index in a change log whose last sequence number is ``last``."""

    applied: int | None
    """Last applied sequence number; None before the end of a scan."""
    scanned: int
    """Key of the last subject that a scan has copied."""
    last: int

    @property
    def behind(self) -> bool:
        return self.applied is None or self.applied < self.last


class Batch(NamedTuple):
    """Current templates of some subjects: those that lines of the log name (``changed``), or during a scan those with
    keys above ``after`` up to ``until``, None at its end.
    """

    now: Snapshot
    changed: set[int] | None
    after: int = 0
    until: int | None = None


class SharedIndexes:
    """Positions and turns by gallery and engine, a name of at most 32 characters that identifies the index."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def position(self, gallery: Gallery, engine: str) -> Position:
        """Raises GalleryNotFoundError."""
        with self.database.read() as connection:
            return _position(connection, gallery, engine)

    @contextmanager
    def turn(self, gallery: Gallery, engine: str) -> Iterator[Turn]:
        """Wait for the turn to update an index, and hold it until the block ends.

        Record only changes that the index already has. On PostgreSQL, records are committed when the block ends.

        Raises GalleryNotFoundError, StorageError.
        """
        write = partial(self.database.write, deleted_meanwhile(gallery))
        with self._file_lock():
            with write() as connection:
                while not _lock_row(connection, gallery, engine):
                    pass  # the row was deleted while this node waited for its lock
                if self.database.file is None:
                    yield Turn(lambda: nullcontext(connection), lambda: nullcontext(connection), gallery, engine)
                    return
            yield Turn(self.database.read, write, gallery, engine)

    @contextmanager
    def _file_lock(self) -> Iterator[None]:
        """Exclude all other threads and processes on SQLite. Their turns end, because calls of an index time out."""
        if self.database.file is None:
            yield
            return
        path = self.database.file.with_name(f"{self.database.file.name}-turn")
        with path.open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def live_galleries(self, generation: int, fingerprint: str) -> set[int]:
        """Return the keys of galleries whose generation has a recognizer with this fingerprint prefix."""
        query = sa.select(generations.c.gallery_pk).where(
            generations.c.generation == generation,
            generations.c.fingerprint.startswith(fingerprint, autoescape=True),
            generations.c.state != "dropped",
        )
        with self.database.read() as connection:
            return set(connection.execute(query).scalars())


class Turn:
    """Exclusive turn of one node to update one index."""

    def __init__(self, read: Begin, write: Begin, gallery: Gallery, engine: str) -> None:
        self._read, self._write = read, write
        self._gallery, self._row = gallery, _is(gallery, engine)
        with read() as connection:
            self.position = _position(connection, gallery, engine)

    def next(self) -> Batch:
        """Return the next changes of the log, or during a scan the next subjects.

        Raises StorageBusyError: the index was abandoned for days, and the log trimmed; the next turn starts a scan.
        """
        after, applied, last = self.position.scanned, self.position.applied, self.position.last
        if applied is not None:
            with self._read() as connection:
                try:
                    changed, now, _ = read_changes(connection, self._gallery, applied, LINES_PER_TURN)
                except LogTrimmedError as error:
                    raise StorageBusyError("the change log was trimmed meanwhile") from error
            return Batch(now, changed)
        if not after:  # a new index, or one that the log was trimmed past: follow from here on
            self._update(sequence=last, scanned=0)
        own = subjects.c.gallery_pk == self._gallery.pk
        following = sa.select(subjects.c.pk).where(own, subjects.c.pk > after).order_by(subjects.c.pk)
        with self._read() as connection:
            pks = connection.execute(following.limit(SUBJECTS_PER_TURN)).scalars().all()
            now = read_snapshot(connection, self._gallery, last, templates.c.subject_pk.in_(pks))
        return Batch(now, None, after, pks[-1] if len(pks) == SUBJECTS_PER_TURN else None)

    def record(self, batch: Batch) -> None:
        """Record that the index has applied a batch. At the end of a scan it begins to follow the log."""
        if batch.changed is None:
            self._update(scanned=batch.until)
        else:
            self._update(sequence=batch.now.sequence)

    def _update(self, **values: int | None) -> None:
        changing = index_states.update().where(self._row).values(**values, updated_at=datetime.now(UTC))
        with self._write() as connection:
            if not connection.execute(changing).rowcount:
                raise deleted_meanwhile(self._gallery)


def _lock_row(connection: Connection, gallery: Gallery, engine: str) -> bool:
    new: dict[str, Any] = {"gallery_pk": gallery.pk, "generation": gallery.generation, "engine": engine}
    new |= {"sequence": _position(connection, gallery, engine).last, "scanned": 0, "updated_at": datetime.now(UTC)}
    insert_missing(connection, index_states, **new)
    # Waits for the end of the turn of a node whose row the insertion found.
    row = sa.select(index_states.c.sequence).where(_is(gallery, engine)).with_for_update()
    return connection.execute(row).first() is not None


def _position(connection: Connection, gallery: Gallery, engine: str) -> Position:
    states = galleries.outerjoin(index_states, (index_states.c.gallery_pk == galleries.c.pk) & _is(gallery, engine))
    query = sa.select(galleries.c.log_floor, last_change().label("last"), *index_states.c).select_from(states)
    row = connection.execute(query.where(galleries.c.pk == gallery.pk)).first()
    if row is None:
        raise deleted_meanwhile(gallery)
    if row.sequence is None or row.sequence < row.log_floor:
        return Position(None, 0, row.last)
    return Position(row.sequence if row.scanned is None else None, row.scanned or 0, row.last)


def _is(gallery: Gallery, engine: str) -> sa.ColumnElement[bool]:
    return (
        (index_states.c.gallery_pk == gallery.pk)
        & (index_states.c.generation == gallery.generation)
        & (index_states.c.engine == engine)
    )
