"""Database engine: transactions on SQLite and PostgreSQL, and the order of a gallery's writers.

SQLite runs in WAL mode with full synchronization: a commit is flushed before it is acknowledged. PostgreSQL does so by
default. A reading transaction sees one snapshot of the database.
"""

from __future__ import annotations

import os
import random
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import orjson
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError, IntegrityError, PendingRollbackError, SQLAlchemyError

from service.core.errors import (
    GalleryChangedError,
    GalleryMovedError,
    GalleryNotFoundError,
    KithError,
    StorageBusyError,
    StorageDamagedError,
    StorageError,
    StorageFullError,
)
from service.domain.gallery import Gallery
from service.security.master_keys import MasterKeys
from service.security.sealing import SealBrokenError
from service.storage.db.audit_chain import begin
from service.storage.db.file_system import (
    ACCOUNT_REMEDY,
    LOCAL_DISK_REMEDY,
    OPEN_REMEDY,
    OWNER_REMEDY,
    check_database_file,
)
from service.storage.db.key_vault import SERVICE_SECRETS, Vault
from service.storage.db.tables import api_key_versions, galleries, last_change, metadata
from service.storage.db.triggers import create_triggers

BUSY_TIMEOUT_MS: Final = 10_000
JITTER: Final = random.SystemRandom()
PAGE_BYTES: Final = 16_384
"""SQLite page size. A vector of 512 numbers fills half of a default page of 4,096: bulk writes would cost double."""
POSTGRESQL_TIMEOUTS: Final = {
    "connect_timeout": 5,
    # A statement fails 30 s after the server disappeared, not after the kernel's two hours. Statements themselves have
    # no limit, because an export or a migration may take long (docs/faults.md).
    "tcp_user_timeout": 30_000,
    "keepalives_idle": 10,
    "keepalives_interval": 10,
    "keepalives_count": 2,
}
"""libpq parameters, in seconds; ``tcp_user_timeout`` in milliseconds."""
# SQLite primary result codes (sqlite.org/rescode.html) with one extended code, and PostgreSQL SQLSTATEs.
SQLITE_ERRORS: Final[dict[int, type[StorageError]]] = {
    5: StorageBusyError,  # SQLITE_BUSY
    6: StorageBusyError,  # SQLITE_LOCKED
    11: StorageDamagedError,  # SQLITE_CORRUPT
    13: StorageFullError,  # SQLITE_FULL
    26: StorageDamagedError,  # SQLITE_NOTADB
    4874: StorageFullError,  # SQLITE_IOERR_SHMSIZE: no room for the memory-mapped WAL index
}
POSTGRESQL_ERRORS: Final[dict[str, type[StorageError]]] = {
    "40001": StorageBusyError,  # serialization_failure
    "40P01": StorageBusyError,  # deadlock_detected
    "55P03": StorageBusyError,  # lock_not_available
    "53100": StorageFullError,  # disk_full
    "XX001": StorageDamagedError,  # data_corrupted
    "XX002": StorageDamagedError,  # index_corrupted
}
READ_ONLY_STATES: Final = ("25006", "42501")
"""PostgreSQL's read_only_sql_transaction and insufficient_privilege."""
LOCKING_ERRORS: Final = frozenset({15, 2058, 2314, 3594, 3850, 4618, 5130, 5386})
"""SQLITE_PROTOCOL, and SQLITE_IOERR of UNLOCK, RDLOCK, CHECKRESERVEDLOCK, LOCK, SHMOPEN, SHMLOCK and SHMMAP."""
MIGRATIONS: Final = Path(__file__).parent / "migrations"
DATABASE_FAILURES: Final = (DBAPIError, PendingRollbackError, sa.exc.TimeoutError)
"""Rejected statement, broken connection or exhausted connection pool."""
MIGRATION_LOCK: Final = 0x4B697468
"""PostgreSQL advisory lock that a starting process holds while it prepares the tables."""
VERSION_TABLE: Final = "alembic_version"
"""Table in which Alembic keeps the revision of the tables."""
OTHER_VERSION_REMEDY: Final = (
    "Use the version of Kith that made the database, or an empty KITH_DATA_DIR or KITH_DATABASE_URL "
    "(docs/deployment.md)."
)


def open_database(url: str, master: MasterKeys) -> Database:
    """Open the database and create or upgrade its tables. Of several processes that start together, one does so.

    Raises StorageError, and MasterKeyError if the database belongs to another master key.
    """
    vault = Vault(master)
    return Database(_prepared_engine(url, vault), vault)


def _prepared_engine(url: str, vault: Vault) -> Engine:
    try:
        with ExitStack() as opened:
            engine = _engine(sa.make_url(url))
            opened.callback(engine.dispose)
            if engine.dialect.name == "sqlite":
                check_database_file(Path(engine.url.database or "").absolute())
            with engine.execution_options(write=True).begin() as connection:
                if engine.dialect.name == "postgresql":
                    connection.execute(sa.select(sa.func.pg_advisory_xact_lock(MIGRATION_LOCK)))
                _prepare_tables(connection, vault)
                # BEGIN succeeds without the right to write. A standby and a read-only file refuse this, too.
                connection.execute(sa.delete(galleries).where(sa.false()))
                for name in SERVICE_SECRETS:
                    vault.secret(connection, name)
            opened.pop_all()
            return engine
    except ModuleNotFoundError as error:
        raise StorageError("PostgreSQL needs a driver: pip install '.[postgres]' in a clone of Kith") from error
    except SQLAlchemyError as error:
        failure = storage_error("the database cannot be opened", error)
        if type(failure) is StorageError and failure.remedy == StorageError("").remedy:
            failure.remedy = OPEN_REMEDY
        if type(failure) is StorageBusyError:  # SQLite does not tell failing locks from those of other processes
            failure.remedy += f" If no other process uses the database: {LOCAL_DISK_REMEDY}"
        raise failure from error
    except OSError as error:
        raise StorageError(f"the database cannot be opened: {error}", OPEN_REMEDY) from error


def _prepare_tables(connection: Connection, vault: Vault) -> None:
    """Create the tables of a new database, or upgrade those of an earlier release.

    Raises:
        StorageError: the tables are those of an unreleased or a later version.
    """
    newest = max(path.name for path in (MIGRATIONS / "versions").glob("[0-9]*.py")).partition("_")[0]
    present = set(sa.inspect(connection).get_table_names())
    if not present & {VERSION_TABLE, *metadata.tables}:
        _create_tables(connection, vault, newest)
        return
    query = sa.text(f"SELECT version_num FROM {VERSION_TABLE}")  # noqa: S608 - a constant
    found = connection.execute(query).scalars().all() if VERSION_TABLE in present else []
    if found == [newest]:
        return
    if not found:
        raise StorageError("the database has tables, but not those of a release of Kith", OTHER_VERSION_REMEDY)
    _upgrade(connection, vault)


def _create_tables(connection: Connection, vault: Vault, revision: str) -> None:
    metadata.create_all(connection)
    create_triggers(connection)
    connection.execute(api_key_versions.insert().values(pk=1, version=new_version()))
    for name in SERVICE_SECRETS:
        vault.create_secret(connection, name)
    begin(vault, connection)
    connection.exec_driver_sql(
        f"CREATE TABLE {VERSION_TABLE} (version_num VARCHAR(32) CONSTRAINT alembic_version_pkc PRIMARY KEY)"
    )
    connection.exec_driver_sql(f"INSERT INTO {VERSION_TABLE} VALUES ('{revision}')")  # noqa: S608 - constants


def _upgrade(connection: Connection, vault: Vault) -> None:
    # Imported on demand: a start without an upgrade saves 12 MB and a tenth of a second.
    import alembic.command
    import alembic.config
    from alembic.util import CommandError

    config = alembic.config.Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes |= {"connection": connection, "vault": vault}
    try:
        alembic.command.upgrade(config, "head")
    except CommandError as error:
        raise StorageError(f"the database cannot be upgraded: {error}", OTHER_VERSION_REMEDY) from error


def storage_error(context: str, error: SQLAlchemyError) -> StorageError:
    """Translate a database error into a storage error by its code."""
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    code = getattr(cause, "sqlite_errorcode", 0)
    if code in LOCKING_ERRORS:
        problem = f"{context}, because the file system does not lock or share files: {cause}"
        return StorageError(problem, LOCAL_DISK_REMEDY)
    state = getattr(cause, "sqlstate", None) or ""
    if code & 0xFF == sqlite3.SQLITE_READONLY or state in READ_ONLY_STATES:
        return StorageError(f"{context}: {cause}", ACCOUNT_REMEDY if state else OWNER_REMEDY)
    kind = SQLITE_ERRORS.get(code) or SQLITE_ERRORS.get(code & 0xFF)
    kind = kind or POSTGRESQL_ERRORS.get(state) or StorageError
    return kind(f"{context}: {cause}")


@contextmanager
def _translated(context: str) -> Iterator[None]:
    try:
        yield
    except DATABASE_FAILURES as error:
        raise storage_error(context, error) from error
    except SealBrokenError as error:
        raise StorageDamagedError(str(error)) from error


def deleted_meanwhile(gallery: Gallery) -> GalleryNotFoundError:
    return GalleryNotFoundError(f"gallery {gallery.name!r} was deleted meanwhile")


def _engine(url: sa.URL, **pool: int) -> Engine:
    match url.get_backend_name():
        case "sqlite":
            if not url.database or url.database == ":memory:" or url.database.startswith("file:"):
                raise StorageError("SQLite needs the path of a file, such as sqlite:////var/lib/kith/kith.db")
            engine = sa.create_engine(url, **JSON, **pool)
            _create_file(Path(url.database))
            sa.event.listen(engine, "connect", _prepare_sqlite)
            sa.event.listen(engine, "begin", _begin_sqlite)
            return engine
        case "postgresql":
            url = url.set(drivername="postgresql+psycopg")
            # The ping replaces connections that a restart of the database broke before they are used.
            return sa.create_engine(url, pool_pre_ping=True, connect_args=POSTGRESQL_TIMEOUTS, **JSON, **pool)
        case other:
            raise StorageError(f"{other} is not supported: use sqlite or postgresql")


def _create_file(path: Path) -> None:
    """Create a missing database file and its folders, private to their owner. SQLite copies the mode to the WAL."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # _begin_sqlite starts transactions, not the driver
    connection.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
    connection.execute(f"PRAGMA page_size={PAGE_BYTES}")  # applies to new files only
    _enable_wal(connection)
    for pragma in ("synchronous=FULL", "foreign_keys=ON", "secure_delete=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _enable_wal(connection: Any) -> None:
    # Processes that switch a new file to WAL together hold locks that the others need. SQLite reports busy at once,
    # whatever the timeout, and a retry finds the switch done.
    deadline = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(JITTER.uniform(0.001, 0.02))


def _begin_sqlite(connection: Connection) -> None:
    # A transaction that takes the write lock only at its first write fails if its snapshot is stale by then.
    write = connection.get_execution_options().get("write")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


def write_json(value: object) -> str:
    """Return the JSON of a column."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS).decode()


JSON: Final[dict[str, Any]] = {"json_serializer": write_json, "json_deserializer": orjson.loads}
"""Arguments of engines: columns of JSON, several times faster than by the standard library."""


def new_version() -> int:
    """Draw a version for a changed gallery.

    Not counted: after a restore or a failover, a cached version of the lost history must not equal a new one.
    """
    return secrets.randbits(63)


class Database:
    """Transactions on one database, and the ``vault`` with its keys. Thread-safe."""

    def __init__(self, engine: Engine, vault: Vault) -> None:
        self.engine, self.vault = engine, vault
        snapshots = {} if engine.dialect.name == "sqlite" else {"isolation_level": "REPEATABLE READ"}
        self._reader = engine.execution_options(**snapshots)
        self._writer = engine.execution_options(write=True)
        self.file = Path(engine.url.database or "") if engine.dialect.name == "sqlite" else None
        """SQLite database file; None for PostgreSQL."""
        self._single = engine if self.file is not None else engine.execution_options(isolation_level="AUTOCOMMIT")
        self._watching = threading.Lock()
        self._watch: sqlite3.Connection | None = None

    def server_time(self) -> datetime | None:
        """Return PostgreSQL's clock, which all Kith servers share; None for SQLite. Raises StorageError."""
        if self.file is not None:
            return None
        with self.read() as connection:
            return self.now(connection)

    def now(self, connection: Connection) -> datetime:
        """Return the time that leases are compared with, the same for all servers of a database."""
        if self.file is not None:
            return datetime.now(UTC)
        clock: datetime = connection.execute(sa.select(sa.func.clock_timestamp())).scalar_one()
        return clock.astimezone(UTC)

    def check_writable(self) -> None:
        """Check that the database responds, and takes writes from this process. Raises StorageError."""
        with self.read() as connection:
            connection.execute(sa.select(galleries.c.pk).limit(1)).all()
            if self.file is not None:
                try:
                    check_database_file(self.file)
                except OSError as error:
                    raise StorageError(f"the database is gone: {error}", OPEN_REMEDY) from error
            elif connection.execute(sa.select(sa.func.current_setting("transaction_read_only"))).scalar_one() == "on":
                raise StorageError("the PostgreSQL server is a standby, or its default is read-only", ACCOUNT_REMEDY)

    def with_own_pool(self, connections: int) -> Database:
        """Return the same database with its own connection pool, for long transactions. The caller closes it."""
        return Database(_engine(self._writer.url, pool_size=connections, max_overflow=0), self.vault)

    def close(self) -> None:
        with self._watching:
            if self._watch is not None:
                self._watch.close()
        self._writer.dispose()

    def file_version(self) -> int | None:
        """Return a number that changes with every commit to the SQLite file by any process, in microseconds.

        None: PostgreSQL, or an unreadable file.
        """
        if self.file is None:
            return None
        with self._watching, suppress(sqlite3.Error):  # the read that follows reports the error
            if self._watch is None:
                # The number is relative to one connection, and ignores that connection's own commits: keep one that
                # never writes (sqlite.org/pragma.html#pragma_data_version).
                self._watch = sqlite3.connect(self.file, timeout=0, isolation_level=None, check_same_thread=False)
            # Fetching all rows ends the statement, and with it its snapshot.
            ((version,),) = self._watch.execute("PRAGMA data_version").fetchall()
            return int(version)
        return None

    def truncate_wal(self) -> bool | None:
        """Checkpoint and truncate SQLite's write-ahead log, so that no file keeps deleted data.

        Return whether the log is empty: a reader of an older snapshot prevents it. None for PostgreSQL.
        """
        if self.file is None:
            return None
        try:
            # A connection without timeout: writers would queue behind a checkpoint that waits for readers.
            with closing(sqlite3.connect(self.file, timeout=0, isolation_level=None)) as connection:
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()  # most pages, while others write
                ((busy, *_),) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.Error:
            return False
        return not busy

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Open a reading transaction on one snapshot. Raises StorageError."""
        with _translated("reading failed"), self._reader.begin() as connection:
            yield connection

    def first(self, query: sa.Select[Any], values: Mapping[str, Any]) -> sa.Row[Any] | None:
        """Return the first row of one statement. PostgreSQL needs no transaction for it. Raises StorageError."""
        with _translated("reading failed"), self._single.connect() as connection:
            return connection.execute(query, values).first()

    @contextmanager
    def write(self, conflict: KithError) -> Iterator[Connection]:
        """Open a writing transaction, which is on disk when the block ends. Raises StorageError.

        ``conflict`` is raised when a constraint rejects a change.
        """
        with _translated("writing failed"):
            try:
                with self._writer.begin() as connection:
                    yield connection
            except IntegrityError as error:
                raise conflict from error

    @contextmanager
    def change(self, gallery: Gallery, as_read: bool = False) -> Iterator[Connection]:
        """Open a writing transaction on a gallery.

        It first gives the gallery's row a new version, which locks it. Writers of one gallery therefore commit one
        after the other, in the order of its change log: a follower that knows the last number missed no line.

        ``as_read``: require that no template was enrolled or removed since ``gallery`` was read (GalleryChangedError).

        Raises GalleryMovedError: another recognizer since ``gallery`` was read; GalleryNotFoundError.
        """
        deleted = deleted_meanwhile(gallery)
        with self.write(deleted) as connection:
            own = galleries.c.pk == gallery.pk
            changing = galleries.update().where(own).values(version=new_version())
            generation = connection.execute(changing.returning(galleries.c.current_generation)).scalar_one_or_none()
            if generation is None:
                raise deleted
            # Other writes, of metadata for example, do not count: a busy gallery would delay enrollments without end.
            if as_read and connection.execute(sa.select(last_change()).where(own)).scalar() != gallery.last_change:
                raise GalleryChangedError(f"templates of gallery {gallery.name!r} changed meanwhile")
            if generation != gallery.current_generation:
                raise GalleryMovedError(f"gallery {gallery.name!r} moved to another recognizer meanwhile")
            yield connection
