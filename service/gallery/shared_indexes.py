"""How far an index outside this process, which all nodes share, has followed a gallery's log, and whose turn it is to
take it further.

One row says how far (``index_states``), and its lock is the turn: of all nodes, one changes the shared index of a
gallery at a time, and reads what to write only once it has the turn, so that nobody writes what is no longer true. A
node that dies gives its turn up with its connection; the next repeats what it had begun, which does no harm, as a step
makes the index equal to the database whatever the index held before.

SQLite knows no lock of a row, and its one writer must not wait for an index that does not answer: there, the lock of
a file beside the database is the turn, for all galleries, and a turn reads and records in transactions of its own.

An index that is begun, or that fell behind the log's floor, goes through all subjects first. Until it has been through,
a second row of the same gallery says how far it came, so that another node goes on from there.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

from service.errors import GalleryNotFoundError, StorageBusyError, StorageError
from service.gallery.database import BUSY_TIMEOUT_MS, Database
from service.gallery.store import ABANDONED, BEGUN, KEEP_LINES, Store, read_snapshot
from service.gallery.subjects import Gallery, Snapshot
from service.gallery.tables import changes, galleries, generations, index_states, subjects, templates

LINES_AT_ONCE: Final = 1000
"""Of the log, in one turn."""
SUBJECTS_AT_ONCE: Final = 1000
POLL_S: Final = 0.005
Begin = Callable[[], AbstractContextManager[Connection]]


@dataclass(frozen=True)
class Position:
    """How far an index has ``applied`` the log, None while it lacks what came before; when that was written; and the
    log's ``last`` number."""

    applied: int | None
    written_at: datetime | None
    last: int

    @property
    def behind(self) -> bool:
        return self.applied is None or self.applied < self.last


class Changed(NamedTuple):
    """Keys of the subjects and templates that some lines of the log name, and all the templates that these subjects
    have ``now``: as of the last of the lines, or later."""

    subjects: set[int]
    templates: set[int]
    now: Snapshot


class SharedIndexes:
    """Positions and turns by gallery and engine: a name of at most 26 characters that says where the index is."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def position(self, gallery: Gallery, engine: str) -> Position:
        """Raises GalleryNotFoundError."""
        with self._database.read() as connection:
            return _position(connection, gallery, engine)

    @contextmanager
    def turn(self, gallery: Gallery, engine: str) -> Iterator[Turn]:
        """Wait for the turn to change the index, and hold it for the block. Record in it what the index holds already:
        what was recorded is kept at once, or when the block ends without an error.

        Raises:
            GalleryNotFoundError: the gallery was deleted.
            StorageBusyError: others had their turns for too long.
            StorageError: the database does not answer.
        """

        def write() -> AbstractContextManager[Connection]:
            return self._database.write(_deleted(gallery))

        with self._alone():
            with write() as connection:
                while not self._taken(connection, gallery, engine):
                    pass  # its row went as this one waited for it
                if self._database.file is None:
                    yield Turn(lambda: nullcontext(connection), lambda: nullcontext(connection), gallery, engine)
                    return
            yield Turn(self._database.read, write, gallery, engine)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """With SQLite, one block of all threads and processes at a time."""
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

    def _taken(self, connection: Connection, gallery: Gallery, engine: str) -> bool:
        start = _position(connection, gallery, engine).last
        key = {"gallery_pk": gallery.pk, "generation": gallery.generation, "updated_at": datetime.now(UTC)}
        if self._insert(connection, key | {"engine": engine, "sequence": start}):
            connection.execute(index_states.delete().where(_is(gallery, engine + BEGUN)))
            self._insert(connection, key | {"engine": engine + BEGUN, "sequence": 0})
        # A turn that another had when this one's insertion found its row has ended here.
        row = sa.select(index_states.c.sequence).where(_is(gallery, engine)).with_for_update()
        return connection.execute(row).first() is not None

    def _insert(self, connection: Connection, row: dict[str, object]) -> bool:
        insert = (sqlite if self._database.dialect == "sqlite" else postgresql).insert(index_states)
        added = insert.values(**row).on_conflict_do_nothing().returning(index_states.c.engine)
        return connection.execute(added).first() is not None

    def start_over(self, gallery: Gallery) -> None:
        """Let nothing be known of what shared indexes hold of a gallery: they go through all of its subjects again."""
        own = (index_states.c.gallery_pk == gallery.pk) & (index_states.c.generation == gallery.generation)
        with self._alone(), self._database.write(_deleted(gallery)) as connection:
            connection.execute(index_states.delete().where(own))

    def shorten_log(self, name: str) -> None:
        """Of a gallery's log, the lines that nobody has yet to follow: not for the sake of an index that nobody asks
        any more. Raises GalleryNotFoundError, StorageError."""
        store = Store(self._database)
        gallery, now = store.gallery(name), datetime.now(UTC)
        last = sa.select(sa.func.max(changes.c.sequence)).where(changes.c.gallery_pk == gallery.pk).scalar_subquery()
        abandoned = (
            index_states.delete()
            .where(index_states.c.gallery_pk == gallery.pk, ~index_states.c.engine.endswith(BEGUN))
            .where(~index_states.c.updated_at.between(now - ABANDONED, now + ABANDONED))
            .where(index_states.c.sequence < last - KEEP_LINES)
            .returning(index_states.c.engine)
        )
        with self._alone(), self._database.write(_deleted(gallery)) as connection:
            begun = [engine + BEGUN for engine in connection.execute(abandoned).scalars()]
            connection.execute(
                index_states.delete().where(index_states.c.gallery_pk == gallery.pk, index_states.c.engine.in_(begun))
            )
        store.trim_log(gallery)

    def living(self, generation: int, fingerprint: str) -> set[int]:
        """Keys of the galleries that have vectors of this generation by a recogniser whose fingerprint begins so."""
        query = sa.select(generations.c.gallery_pk).where(
            generations.c.generation == generation,
            generations.c.fingerprint.startswith(fingerprint, autoescape=True),
            generations.c.state != "dropped",
        )
        with self._database.read() as connection:
            return set(connection.execute(query).scalars())


class Turn:
    """One node's turn at one index. Everything is read as it stands now."""

    def __init__(self, read: Begin, write: Begin, gallery: Gallery, engine: str) -> None:
        self._read = read
        self._write = write
        self._gallery = gallery
        self._engine = engine
        with read() as connection:
            self.position = _position(connection, gallery, engine)

    def passed(self) -> int:
        """The subject up to which the passage through all subjects has come. If the log no longer reaches back to
        where the index is, it is begun here."""
        begun = _is(self._gallery, self._engine + BEGUN)
        applied = sa.select(index_states.c.sequence).where(_is(self._gallery, self._engine))
        floor = sa.select(galleries.c.log_floor).where(galleries.c.pk == self._gallery.pk)
        with self._write() as connection:
            come = connection.execute(sa.select(index_states.c.sequence).where(begun)).scalar()
            reached = connection.execute(applied).scalar()
            if reached is None:
                raise _deleted(self._gallery)
            if reached >= connection.execute(floor).scalar_one():
                return -int(come or 0)
            self._set(connection, self._engine, self.position.last)
            if come is None:
                connection.execute(
                    index_states.insert().values(
                        gallery_pk=self._gallery.pk,
                        generation=self._gallery.generation,
                        engine=self._engine + BEGUN,
                        sequence=0,
                        updated_at=datetime.now(UTC),
                    )
                )
            else:
                self._set(connection, self._engine + BEGUN, 0)
            return 0

    def next_subjects(self, after: int) -> tuple[int | None, Snapshot]:
        """The templates of the next subjects by key, and the key of the last of these; None: there are none beyond."""
        query = (
            sa.select(subjects.c.pk)
            .where(subjects.c.gallery_pk == self._gallery.pk, subjects.c.pk > after)
            .order_by(subjects.c.pk)
            .limit(SUBJECTS_AT_ONCE)
        )
        with self._read() as connection:
            pks = connection.execute(query).scalars().all()
            chosen = templates.c.subject_pk.in_(pks)
            last = pks[-1] if len(pks) == SUBJECTS_AT_ONCE else None
            return last, read_snapshot(connection, self._gallery, self.position.last, chosen)

    def pass_to(self, subject_pk: int | None) -> None:
        """Record that the passage has come to a subject, or with None, to its end: the index is as of its beginning,
        or later, and follows the log from there."""
        with self._write() as connection:
            if subject_pk is not None:
                self._set(connection, self._engine + BEGUN, -subject_pk)
            else:
                connection.execute(index_states.delete().where(_is(self._gallery, self._engine + BEGUN)))
                connection.execute(_touch(_is(self._gallery, self._engine)))

    def next_changes(self) -> Changed:
        """What the next lines of the log name. A template filed elsewhere concerns both of its subjects at once.

        Raises:
            StorageBusyError: they are gone.
        """
        assert self.position.applied is not None  # noqa: S101 - callers look first
        query = (
            sa.select(changes, templates.c.subject_pk.label("owner"))
            .outerjoin(templates, templates.c.pk == changes.c.template_pk)
            .where(changes.c.gallery_pk == self._gallery.pk, changes.c.sequence > self.position.applied)
            .order_by(changes.c.sequence)
            .limit(LINES_AT_ONCE)
        )
        floor = sa.select(galleries.c.log_floor).where(galleries.c.pk == self._gallery.pk)
        with self._read() as connection:
            lines = connection.execute(query).all()
            if (connection.execute(floor).scalar() or 0) > self.position.applied:
                # Nobody had asked this index for days, and it was not waited for: the next turn begins anew.
                raise StorageBusyError("the change log was shortened meanwhile")
            last = lines[-1].sequence if lines else self.position.last
            concerned = {line.subject_pk for line in lines} | {line.owner for line in lines if line.owner is not None}
            chosen = templates.c.subject_pk.in_(sorted(concerned))
            now = read_snapshot(connection, self._gallery, last, chosen)
        return Changed(concerned, {line.template_pk for line in lines}, now)

    def advance(self, sequence: int) -> None:
        """Record that the log was applied up to here."""
        with self._write() as connection:
            self._set(connection, self._engine, sequence)

    def _set(self, connection: Connection, engine: str, sequence: int) -> None:
        connection.execute(_touch(_is(self._gallery, engine)).values(sequence=sequence))


def _lock(file: int, path: Path) -> None:
    deadline = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise StorageBusyError(f"{path} is locked: another process takes an index further") from error
        time.sleep(POLL_S)


def _position(connection: Connection, gallery: Gallery, engine: str) -> Position:
    state = sa.select(index_states.c.sequence).where
    last = sa.select(sa.func.max(changes.c.sequence)).where(changes.c.gallery_pk == gallery.pk)
    row = connection.execute(
        sa.select(
            galleries.c.log_floor,
            last.scalar_subquery().label("last"),
            state(_is(gallery, engine)).scalar_subquery().label("applied"),
            sa.select(index_states.c.updated_at).where(_is(gallery, engine)).scalar_subquery().label("written_at"),
            state(_is(gallery, engine + BEGUN)).scalar_subquery().label("begun"),
        ).where(galleries.c.pk == gallery.pk)
    ).first()
    if row is None:
        raise _deleted(gallery)
    followed = row.applied is not None and row.begun is None and row.applied >= row.log_floor
    return Position(row.applied if followed else None, row.written_at, max(row.last or 0, row.log_floor))


def _is(gallery: Gallery, engine: str) -> sa.ColumnElement[bool]:
    return (
        (index_states.c.gallery_pk == gallery.pk)
        & (index_states.c.generation == gallery.generation)
        & (index_states.c.engine == engine)
    )


def _touch(chosen: sa.ColumnElement[bool]) -> sa.Update:
    return index_states.update().where(chosen).values(updated_at=datetime.now(UTC))


def _deleted(gallery: Gallery) -> GalleryNotFoundError:
    return GalleryNotFoundError(f"gallery {gallery.name!r} was deleted meanwhile")
