"""Transactions on SQLite and PostgreSQL, and the order of a gallery's writers.

SQLite runs in WAL mode with full synchronisation: a commit is flushed before it is acknowledged; PostgreSQL does so by
default. A reading transaction sees one moment of the database, however many statements it has.
"""

from __future__ import annotations

import logging
import os
import random
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import alembic.command
import alembic.config
import sqlalchemy as sa
from alembic.util import CommandError
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError, IntegrityError, PendingRollbackError, SQLAlchemyError

from service.errors import (
    GalleryMovedError,
    GalleryNotFoundError,
    KithError,
    StorageBusyError,
    StorageDamagedError,
    StorageError,
    StorageFullError,
)
from service.gallery.disk_reserve import DiskReserve
from service.gallery.subjects import Gallery
from service.gallery.tables import galleries
from service.gallery.vault import Vault
from service.security.master import MasterKeys
from service.security.sealing import SealBrokenError

BUSY_TIMEOUT_MS: Final = 10_000
PAGE_BYTES: Final = 16_384
"""Of SQLite: a vector of 512 numbers fills its default of 4096 by half, and bulk writes would cost twice as much."""
NETWORK: Final = {
    "connect_timeout": 5,
    # Where the other side is gone without a word, a statement fails after half a minute, not after the kernel's two
    # hours; no limit on statements themselves, for an export or a migration may take long (docs/faults.md).
    "tcp_user_timeout": 30_000,
    "keepalives_idle": 10,
    "keepalives_interval": 10,
    "keepalives_count": 2,
}
"""Of PostgreSQL (libpq's parameters: seconds, the second in milliseconds)."""
# What a database says by number: SQLite's primary result codes (sqlite.org/rescode.html), one extended one for its
# memory-mapped index, and PostgreSQL's SQLSTATEs.
SQLITE_ERRORS: Final[dict[int, type[StorageError]]] = {
    5: StorageBusyError,  # SQLITE_BUSY
    6: StorageBusyError,  # SQLITE_LOCKED
    11: StorageDamagedError,  # SQLITE_CORRUPT
    13: StorageFullError,  # SQLITE_FULL
    26: StorageDamagedError,  # SQLITE_NOTADB
    4874: StorageFullError,  # SQLITE_IOERR_SHMSIZE
}
POSTGRESQL_ERRORS: Final[dict[str, type[StorageError]]] = {
    "40001": StorageBusyError,  # serialization_failure
    "40P01": StorageBusyError,  # deadlock_detected
    "55P03": StorageBusyError,  # lock_not_available
    "53100": StorageFullError,  # disk_full
    "XX001": StorageDamagedError,  # data_corrupted
    "XX002": StorageDamagedError,  # index_corrupted
}
UNOPENED: Final = (
    "Check that the database is where KITH_DATA_DIR or KITH_DATABASE_URL says: that the folder may be written, or that "
    "the PostgreSQL server can be reached."
)
MIGRATIONS: Final = Path(__file__).parent / "migrations"
SEALED: Final = 7
"""SQLite's user_version of a file that holds nothing in clear, not in free pages either: the migration's number."""
UNUSABLE: Final = (DBAPIError, PendingRollbackError, sa.exc.TimeoutError)
"""The database said no, broke off in the middle, or had no connection to spare."""
MIGRATION_LOCK: Final = 0x4B697468
"""Of PostgreSQL's advisory locks, the one that a start holds while it brings the tables up to date."""
log = logging.getLogger(__name__)


def open_database(url: str, master: MasterKeys) -> Database:
    """Open the database and bring its tables up to date; of several processes that start at once, one does.

    Raises:
        StorageError: it cannot be opened or migrated.
        MasterKeyError: its keys are of another master key.
    """
    vault = Vault(master)
    database = Database(_up_to_date(url, vault), vault)
    try:
        with database.read() as connection:
            vault.check(connection)
    except BaseException:
        database.close()
        raise
    return database


def _up_to_date(url: str, vault: Vault) -> Engine:
    try:
        engine = _engine(sa.make_url(url))
        config = alembic.config.Config()
        config.set_main_option("script_location", str(MIGRATIONS))
        with _migrating(engine) as connection:
            config.attributes |= {"connection": connection, "vault": vault}
            alembic.command.upgrade(config, "head")
        _leave_nothing_in_clear(engine)
        return engine
    except ModuleNotFoundError as error:
        raise StorageError("PostgreSQL needs a driver: pip install 'kith-face[postgres]'") from error
    except SQLAlchemyError as error:
        failure = storage_error("the database cannot be opened", error)
        if type(failure) is StorageError:
            failure.remedy = UNOPENED
        raise failure from error
    except (CommandError, OSError) as error:
        raise StorageError(f"the database cannot be opened: {error}", UNOPENED) from error


@contextmanager
def _migrating(engine: Engine) -> Iterator[Connection]:
    """One transaction, alone, on a connection of its own."""
    with engine.execution_options(write=True).connect() as connection:
        if engine.dialect.name == "sqlite":
            # With them on, a table that is replaced by another takes along whatever refers to it
            # (sqlite.org/lang_altertable.html#otheralter).
            driver: Any = connection.connection.driver_connection
            driver.execute("PRAGMA foreign_keys=OFF")
        connection.detach()
        with connection.begin():
            if engine.dialect.name == "postgresql":
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(MIGRATION_LOCK)))
            yield connection


def _leave_nothing_in_clear(engine: Engine) -> None:
    """Once after everything was sealed: SQLite's file is written anew, and the log beside it is emptied, so that no
    page holds what was there before. What fails, as others are using the file, is tried again at the next start."""
    if engine.dialect.name != "sqlite":
        return
    with closing(sqlite3.connect(engine.url.database or "", BUSY_TIMEOUT_MS / 1000, isolation_level=None)) as file:
        try:
            ((done,),) = file.execute("PRAGMA user_version").fetchall()
            if done >= SEALED:
                return
            file.execute("VACUUM")
            ((busy, _, _),) = file.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            if busy:
                raise sqlite3.OperationalError("others are reading it")
            file.execute(f"PRAGMA user_version = {SEALED}")
        except sqlite3.Error as error:
            log.warning("what was stored in clear before may still lie in free pages of %s: %s", engine.url, error)


def storage_error(what: str, error: SQLAlchemyError) -> StorageError:
    """What the database's own words mean to whoever asked."""
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    code = getattr(cause, "sqlite_errorcode", 0)
    kind = SQLITE_ERRORS.get(code) or SQLITE_ERRORS.get(code & 0xFF)
    kind = kind or POSTGRESQL_ERRORS.get(getattr(cause, "sqlstate", None) or "") or StorageError
    return kind(f"{what}: {cause}")


def _engine(url: sa.URL, **pool: int) -> Engine:
    match url.get_backend_name():
        case "sqlite":
            if not url.database or url.database == ":memory:" or url.database.startswith("file:"):
                raise StorageError("SQLite's database is named by its file's path: sqlite:////var/lib/kith/kith.db")
            engine = sa.create_engine(url, **pool)
            _make_file(Path(url.database))
            sa.event.listen(engine, "connect", _prepare_sqlite)
            sa.event.listen(engine, "begin", _begin_sqlite)
            return engine
        case "postgresql":
            # A connection that a restart of the database broke is replaced before it is used.
            return sa.create_engine(
                url.set(drivername="postgresql+psycopg"),
                pool_pre_ping=True,
                connect_args=NETWORK,
                **pool,
            )
        case other:
            raise StorageError(f"{other} is no database that Kith knows: sqlite or postgresql")


def _make_file(path: Path) -> None:
    """For its owner alone, if it is not there; SQLite gives its log the same mode. Folders that it needs likewise."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # transactions are begun below, not by the driver's guess
    connection.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
    connection.execute(f"PRAGMA page_size={PAGE_BYTES}")  # of a database that is yet to be made
    _write_ahead(connection)
    for pragma in ("synchronous=FULL", "foreign_keys=ON", "secure_delete=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _write_ahead(connection: Any) -> None:
    # Of several that turn a new file to WAL at once, each holds the lock that the others need: SQLite says busy
    # without waiting, whatever the timeout, and whoever asks again finds it done.
    deadline = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(random.uniform(0.001, 0.02))


def _begin_sqlite(connection: Connection) -> None:
    # A writer that takes the lock only at its first write may find that what it read is stale, and fails.
    write = connection.get_execution_options().get("write")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


def new_version() -> int:
    """For a gallery that is changed. It is drawn, not counted: what was read of a history that was lost since, as an
    older copy of the file was restored or a server that lagged took over, is not taken for what is written afterwards.
    """
    return secrets.randbits(63)


class Database:
    """Where the stores read and write. ``vault``: the keys in it. Safe to share between threads."""

    def __init__(self, engine: Engine, vault: Vault) -> None:
        self.engine, self.vault = engine, vault
        snapshots = {} if engine.dialect.name == "sqlite" else {"isolation_level": "REPEATABLE READ"}
        self._reader = engine.execution_options(**snapshots)
        self._writer = engine.execution_options(write=True)
        self.dialect: str = engine.dialect.name
        self.file = Path(engine.url.database or "") if self.dialect == "sqlite" else None
        """Of SQLite."""
        self._single = engine if self.file is not None else engine.execution_options(isolation_level="AUTOCOMMIT")
        self._reserve = None if self.file is None else DiskReserve(self.file.with_name(f"{self.file.name}-reserve"))
        self._watching = threading.Lock()
        self._watch: sqlite3.Connection | None = None

    def server_time(self) -> datetime | None:
        """The clock of the PostgreSQL server, which all Kith servers share; None: SQLite, which has none.

        Raises:
            StorageError: it cannot be read.
        """
        if self.file is not None:
            return None
        with self.read() as connection:
            return self.now(connection)

    def now(self, connection: Connection) -> datetime:
        """The time that leases are compared with: all servers of a database see the same."""
        if self.file is not None:
            return datetime.now(UTC)
        clock: datetime = connection.execute(sa.select(sa.func.clock_timestamp())).scalar_one()
        return clock.astimezone(UTC)

    def learn_secrets(self) -> None:
        """Unwrap what was wrapped anew, while no transaction waits for it.

        Raises:
            StorageError: it cannot be read.
            MasterKeyError.
        """
        with self.read() as connection:
            found = self.vault.wrapped_secrets(connection)
        self.vault.learn(found)

    def apart(self, connections: int) -> Database:
        """The same database by connections of its own, to be closed by itself: who holds them for long holds up nobody
        else."""
        return Database(_engine(self._writer.url, pool_size=connections, max_overflow=0), self.vault)

    def close(self) -> None:
        with self._watching:
            if self._watch is not None:
                self._watch.close()
        self._writer.dispose()

    def file_version(self, wait: bool = True) -> int | None:
        """Of SQLite: a number that is another one after every commit, of this process or another, in microseconds.
        None: it cannot be told, as of PostgreSQL, or, if not to ``wait``, while another thread asks."""
        if self.file is None or not self._watching.acquire(blocking=wait):
            return None
        try:
            if self._watch is None:
                # One connection for good, as the number is its own; it never writes, as it does not count its own
                # commits (sqlite.org/pragma.html#pragma_data_version).
                self._watch = sqlite3.connect(self.file, timeout=0, isolation_level=None, check_same_thread=False)
            # All rows, so that the statement ends, and with it the moment that it sees.
            ((version,),) = self._watch.execute("PRAGMA data_version").fetchall()
            return int(version)
        except sqlite3.Error:
            return None  # whoever reads instead is told what is wrong
        finally:
            self._watching.release()

    def empty_log(self) -> bool | None:
        """Of SQLite: write the pages of its write-ahead log back and cut it to nothing, so that what was deleted stands
        in no file any more; tells whether it could, which it cannot while somebody reads an earlier moment. None:
        PostgreSQL, which keeps its log by rules of its own."""
        if self.file is None:
            return None
        try:
            # Of its own, for it must not wait: while it waits for readers, no writer begins.
            with closing(sqlite3.connect(self.file, timeout=0, isolation_level=None)) as connection:
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()  # most of it, while others write
                ((busy, *_),) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.Error:
            return False
        if self._reserve is not None and self._reserve.released:
            self._reserve.keep()
        return not busy

    def keep_reserve(self) -> None:
        """Of SQLite: keep room on the disk that only erasures may use."""
        if self._reserve is not None:
            self._reserve.keep()

    def empty_log_if_written(self) -> None:
        """If anybody wrote since it was emptied, in this process or another: what they deleted stands in it. Where
        nobody did, it costs a look at the file's size, and nothing that was read is read again."""
        if self.file is None:
            return
        try:
            written = self.file.with_name(f"{self.file.name}-wal").stat().st_size > 0
        except OSError:  # there is none, or the next look finds it
            return
        if written:
            self.empty_log()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """One moment of the database.

        Raises:
            StorageError: it cannot be read.
        """
        try:
            with self._reader.begin() as connection:
                yield connection
        except UNUSABLE as error:
            raise storage_error("reading failed", error) from error
        except SealBrokenError as error:
            raise StorageDamagedError(str(error)) from error

    def first(self, query: sa.Select[Any], values: Mapping[str, Any]) -> sa.Row[Any] | None:
        """The first row of one statement, which sees one moment by itself: PostgreSQL is spared a transaction.

        Raises:
            StorageError: it cannot be read.
        """
        try:
            with self._single.connect() as connection:
                return connection.execute(query, values).first()
        except UNUSABLE as error:
            raise storage_error("reading failed", error) from error

    @contextmanager
    def write(self, conflict: KithError, erasing: bool = False) -> Iterator[Connection]:
        """One writing transaction, on disk when the block is left. ``erasing``: it may use the disk's reserve.

        Raises:
            conflict: a constraint refuses it.
            StorageError: it cannot be written.
        """
        reserve = self._reserve
        if reserve is not None and reserve.released and not erasing and not reserve.keep():
            raise StorageFullError("the room that is left on the disk is for erasures")
        try:
            with self._writer.begin() as connection:
                if reserve is not None and erasing:
                    reserve.release()  # no other writer of the database can take the room now
                yield connection
        except IntegrityError as error:
            raise conflict from error
        except UNUSABLE as error:
            raise storage_error("writing failed", error) from error
        except SealBrokenError as error:
            raise StorageDamagedError(str(error)) from error

    @contextmanager
    def change(self, gallery: Gallery, sealed: bool = True, erasing: bool = False) -> Iterator[Connection]:
        """One writing transaction on a gallery. Writers of one gallery commit one after the other, so that the numbers
        of its change log are in the order of the commits and a follower that knows the last one has missed none. It
        gets another version, so that who read it before knows that it is another by now. Its key is at hand before the
        transaction begins; not ``sealed``: nothing is to be opened, and it may be lost. ``erasing``: as
        :meth:`write`.

        Raises:
            MasterKeyError: it is to be opened, and cannot be.
            GalleryNotFoundError: it was deleted.
            GalleryMovedError: it moved to another recogniser since ``gallery`` was read.
            StorageError: it cannot be written.
        """
        deleted = GalleryNotFoundError(f"gallery {gallery.name!r} was deleted meanwhile")
        if sealed:
            gallery.seal.unlock()
        with self.write(deleted, erasing) as connection:
            another = galleries.update().where(galleries.c.pk == gallery.pk).values(version=new_version())
            generation = connection.execute(another.returning(galleries.c.current_generation)).scalar_one_or_none()
            if generation is None:
                raise deleted
            if generation != gallery.current_generation:
                raise GalleryMovedError(f"gallery {gallery.name!r} moved to another recogniser meanwhile")
            yield connection
