"""Backup of a whole database in one file, and restore into an empty SQLite or PostgreSQL database.

The file is a zip with one Arrow stream per table and a manifest of checksums. It omits three kinds of state, which the
restored database creates again: progress of external indexes, leases and retention holds, and versions of API keys. It
also omits the outbox of events: a restored database must not report them again.
"""

from __future__ import annotations

import hashlib
import io
import json
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, Final, Self

import pyarrow as pa
import pyarrow.compute as pc
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from service.core.atomic_files import atomic_write
from service.core.errors import BackupError, MasterKeyError
from service.domain.gallery_items import from_microseconds, to_microseconds
from service.security.master_keys import MasterKeys
from service.storage.audit.log import record
from service.storage.db import bulk_rows
from service.storage.db.audit_triggers import audit_triggers_off
from service.storage.db.engine import Database
from service.storage.db.tables import (
    Utc,
    api_key_versions,
    audit,
    audit_heads,
    changes,
    deliveries,
    erasures,
    events,
    evidence,
    galleries,
    generations,
    index_states,
    jobs,
    leases,
    metadata,
    retention_holds,
    secrets,
    subjects,
    templates,
)
from service.storage.privacy import repeated_erasures
from service.storage.privacy.master_key_rotation import uses
from service.storage.repositories.api_keys import all_keys, keep_restrictions

FORMAT: Final = 1
MANIFEST: Final = "manifest.json"
BATCH_ROWS: Final = 2048
OMITTED_TABLES: Final = (api_key_versions, index_states, leases, retention_holds, events, deliveries)
TABLES: Final = [table for table in metadata.sorted_tables if table not in OMITTED_TABLES]
AUTOINCREMENT_TABLES: Final = [table for table in TABLES if table.dialect_options["sqlite"]["autoincrement"]]
"""Tables whose keys are never reused."""
REFERENCES: Final[dict[sa.Column[Any], sa.Table]] = {
    changes.c.template_pk: templates,
    changes.c.subject_pk: subjects,
    evidence.c.sequence: changes,
    galleries.c.log_floor: changes,
    galleries.c.erased: erasures,
    jobs.c.erased: erasures,
    subjects.c.erased: erasures,
    templates.c.erased: erasures,
    erasures.c.gallery_pk: galleries,
    audit.c.gallery_pk: galleries,
    audit.c.chain: galleries,
    audit_heads.c.chain: galleries,
}
"""Columns that refer to another table without a foreign key; 0 means none."""
TIME: Final = pa.timestamp("us", "UTC")


@dataclass(frozen=True)
class Manifest:
    """Description of a backup.

    ``revision``: of the schema. ``recognizers``: required to serve the galleries. ``highest``: highest key assigned, by
    table. ``rows``, ``sha256``: by table. ``master_keys``: ids of the keys that a restore needs; the keys are not
    included.
    """

    created_at: str
    kith: str
    database: str
    revision: str
    recognizers: list[dict[str, Any]]
    highest: dict[str, int]
    rows: dict[str, int]
    sha256: dict[str, str]
    master_keys: list[str] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        return {"kind": "kith-backup", "format": FORMAT, **asdict(self)}

    @classmethod
    def of(cls, document: Any) -> Self:
        """Parse a manifest. Raises BackupError."""
        if not isinstance(document, dict) or document.pop("kind", None) != "kith-backup":
            raise BackupError("the file is not a Kith backup")
        if (found := document.pop("format", None)) != FORMAT:
            raise BackupError(f"the backup has format {found!r}; this version reads format {FORMAT}")
        try:
            return cls(**document)
        except TypeError as error:
            raise BackupError("the backup's manifest is incomplete") from error


def back_up(database: Database, path: Path) -> Manifest:
    """Write a consistent snapshot to a file that only its owner may read. The file appears when it is complete.

    Raises:
      BackupError: the file cannot be written.
      StorageError: the database cannot be read.
    """
    try:
        with atomic_write(path) as file, zipfile.ZipFile(file, "w") as archive, database.read() as connection:
            return _write(connection, archive)
    except OSError as error:
        raise BackupError(f"cannot write {path}: {error.strerror or error}") from error


def _write(connection: Connection, archive: zipfile.ZipFile) -> Manifest:
    counts, sums = {}, {}
    # The first statement starts the snapshot. It contains everything written before this time.
    created_at = datetime.now(UTC).isoformat()
    revision = _revision(connection)
    recognizers = sa.select(generations.c.fingerprint, generations.c.dimension, generations.c.model).distinct()
    for table in TABLES:
        with archive.open(_entry(table.name), "w", force_zip64=True) as entry:
            summed = _HashingFile(entry)
            counts[table.name] = _write_table(connection, table, summed)
            sums[table.name] = summed.sum.hexdigest()
    manifest = Manifest(
        created_at,
        version("kith-face"),
        connection.dialect.name,
        revision,
        [dict(row._mapping) for row in connection.execute(recognizers)],
        # PostgreSQL's sequences are outside the snapshot, but never lower than the keys in it.
        {table.name: bulk_rows.highest_key(connection, table) for table in AUTOINCREMENT_TABLES},
        counts,
        sums,
        list(uses(connection)),
    )
    archive.writestr(MANIFEST, json.dumps(manifest.document(), indent=1))
    return manifest


def _write_table(connection: Connection, table: sa.Table, to: _HashingFile) -> int:
    schema = pa.schema([pa.field(column.name, _arrow_type(column)) for column in table.columns])
    # Read as text, which avoids parsing and serializing JSON.
    columns = [sa.cast(c, sa.Text).label(c.name) if isinstance(c.type, sa.JSON) else c for c in table.columns]
    binary = any(isinstance(column.type, sa.LargeBinary) for column in table.columns)
    options = pa.ipc.IpcWriteOptions(compression=None if binary else "zstd")
    count = 0
    query = sa.select(*columns).execution_options(yield_per=BATCH_ROWS)
    with pa.ipc.new_stream(pa.PythonFile(to, "w"), schema, options=options) as stream:
        for part in connection.execute(query).partitions():
            values = zip(*part, strict=True)
            stream.write_batch(
                pa.record_batch([_packed(v, f.type) for v, f in zip(values, schema, strict=True)], schema=schema)
            )
            count += len(part)
    return count


def _packed(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if kind == TIME:
        return pa.array([None if at is None else to_microseconds(at) for at in values], pa.int64()).cast(TIME)
    return pa.array(values, kind)


def read_manifest(path: Path) -> Manifest:
    """Raises BackupError."""
    with _archive(path) as archive:
        return _manifest(archive)


def check_keys(path: Path, master: MasterKeys) -> None:
    """Raises BackupError if a required master key is missing."""
    with _archive(path) as archive:
        _check_keys(archive, _manifest(archive), master)


def restore(
    database: Database, path: Path, replace: bool = False, report: Callable[[str], None] = lambda _: None
) -> None:
    """Restore a backup into an empty database, or replace all contents. Either all rows are restored or none.

    ``report`` receives a message per table. Keys that the database has assigned before are not reused: restored keys
    are shifted above them. Keys of galleries are also shifted above any key assigned in another database. Running
    servers then treat restored galleries as new, and no existing index matches them. Erasures recorded in the database
    after the backup are repeated.

    Raises:
      BackupError: the file is damaged or of another version, a master key is missing, or the database is not empty.
      StorageError: the database cannot be written.
    """
    with _archive(path) as archive:
        manifest = _manifest(archive)
        _verify(archive, manifest)
        _check_keys(archive, manifest, database.vault.master)
        with (
            database.write(BackupError("the backup's rows are inconsistent")) as connection,
            bulk_rows.large_page_cache(connection),
        ):
            if connection.dialect.name == "postgresql":
                names = ", ".join(table.name for table in metadata.sorted_tables)
                connection.exec_driver_sql(f"LOCK TABLE {names} IN EXCLUSIVE MODE")
            if (revision := _revision(connection)) != manifest.revision:
                raise BackupError(
                    f"the backup has schema revision {manifest.revision}, the database {revision}. Restore it "
                    f"with Kith {manifest.kith}, then start the newer version on that database"
                )
            erased = repeated_erasures.known(connection)
            ended = all_keys(connection, database.vault)
            _clear(connection, replace)
            offsets = _key_offsets(connection)
            for table in TABLES:
                with archive.open(_entry(table.name)) as entry:
                    count = _read_table(connection, table, entry, offsets)
                if count != manifest.rows[table.name]:
                    raise BackupError(f"table {table.name} has {count} rows instead of {manifest.rows[table.name]}")
                report(f"{table.name}: {count:,} rows")
            for table in AUTOINCREMENT_TABLES:
                bulk_rows.raise_highest_key(connection, table, offsets[table.name] + manifest.highest[table.name])
            keep_restrictions(connection, database.vault, ended)
            # after the restore of the secret that signs the chains
            record(database.vault, connection, "database_restored", as_of=manifest.created_at)
            for receipt in repeated_erasures.repeat(database.vault, connection, erased):
                report(f"repeated erasure: {receipt.kind}, erased on {receipt.at:%Y-%m-%d %H:%M} UTC")
    database.truncate_wal()


def _key_offsets(connection: Connection) -> dict[str, int]:
    """Return the offset to add to the keys of each table.

    Galleries always get an offset, higher than any key of a lost database. An external index, in Milvus or on disk, is
    named by its gallery's key and may be newer than the backup.
    """
    highest = {table.name: bulk_rows.highest_key(connection, table) for table in AUTOINCREMENT_TABLES}
    # Without previous galleries, no index or cache refers to a key.
    offsets = highest if highest[galleries.name] else dict.fromkeys(highest, 0)
    return offsets | {galleries.name: max(highest[galleries.name], int(time.time()))}


def _clear(connection: Connection, replace: bool) -> None:
    counted = [table for table in TABLES if table is not secrets]  # every database has secrets from its creation on
    held = {table.name: connection.execute(sa.select(sa.func.count()).select_from(table)).scalar() for table in counted}
    if any(held.values()) and not replace:
        raise BackupError(
            f"the database holds {held['galleries']} galleries with {held['templates']} templates. Restore into an "
            "empty database, or pass --replace to delete its contents"
        )
    if replace:
        with audit_triggers_off(connection):
            for table in reversed(metadata.sorted_tables):
                connection.execute(table.delete())
    connection.execute(secrets.delete())


def _read_table(connection: Connection, table: sa.Table, entry: IO[bytes], offsets: dict[str, int]) -> int:
    count = 0
    names = [column.name for column in table.columns]
    with pa.ipc.open_stream(entry) as stream:
        if stream.schema.names != names:
            raise BackupError(f"table {table.name} of the backup has different columns")
        for batch in stream:
            columns = [_unpacked(connection, table.c[name], batch.column(name), offsets) for name in names]
            bulk_rows.insert(connection, table, names, zip(*columns, strict=True))
            count += len(batch)
    return count


def _unpacked(connection: Connection, column: sa.Column[Any], values: pa.Array, offsets: dict[str, int]) -> list[Any]:
    if isinstance(column.type, Utc):
        given = values.cast(pa.int64()).to_pylist()
        times = {us: bulk_rows.as_time(connection, from_microseconds(us)) for us in set(given) if us is not None}
        return [None if us is None else times[us] for us in given]
    if by := offsets.get(_referenced_table(column), 0):
        values = pc.if_else(pc.equal(values, 0), values, pc.add(values, by))
    return list(values.to_pylist())


def _referenced_table(column: sa.Column[Any]) -> str:
    """Return the table that a column's values refer to."""
    if column in REFERENCES:
        return REFERENCES[column].name
    for key in column.foreign_keys:
        return key.column.table.name
    return column.table.name if column.primary_key and column.table in AUTOINCREMENT_TABLES else ""


def _arrow_type(column: sa.Column[Any]) -> pa.DataType:
    kinds: dict[type[Any], pa.DataType] = {
        Utc: TIME,
        sa.LargeBinary: pa.large_binary(),
        sa.Boolean: pa.bool_(),
        sa.Integer: pa.int64(),
        sa.Float: pa.float64(),
    }
    return next((arrow for sql, arrow in kinds.items() if isinstance(column.type, sql)), pa.large_string())


def _revision(connection: Connection) -> str:
    return str(connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one())


def _archive(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise BackupError(f"cannot read {path} as a backup: {error}") from error


def _manifest(archive: zipfile.ZipFile) -> Manifest:
    try:
        return Manifest.of(json.loads(archive.read(MANIFEST)))
    except (KeyError, ValueError, zipfile.BadZipFile) as error:
        raise BackupError("the file is not a Kith backup") from error


def _verify(archive: zipfile.ZipFile, manifest: Manifest) -> None:
    if set(manifest.sha256) != {table.name for table in TABLES}:
        raise BackupError("the backup and this version have different tables")
    for name, expected in manifest.sha256.items():
        try:
            with archive.open(_entry(name)) as entry:
                found = hashlib.file_digest(entry, "sha256")  # type: ignore[arg-type]
        except (KeyError, OSError, zipfile.BadZipFile) as error:
            raise BackupError(f"table {name} of the backup is damaged: {error}") from error
        if found.hexdigest() != expected:
            raise BackupError(f"table {name} of the backup is damaged: checksum mismatch")


def _check_keys(archive: zipfile.ZipFile, manifest: Manifest, master: MasterKeys) -> None:
    try:
        for key_id in manifest.master_keys:
            master.of(key_id)
        with archive.open(_entry(secrets.name)) as entry, pa.ipc.open_stream(entry) as stream:
            for row in stream.read_all().to_pylist():
                master.unwrap(row["wrapped"], row["name"], row["master_key"])
    except MasterKeyError as error:
        raise BackupError(f"cannot decrypt the backup: {error.detail}") from error


def _entry(table: str) -> str:
    return f"{table}.arrow"


class _HashingFile(io.RawIOBase):
    """File wrapper that computes a checksum of the written bytes."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._size = 0
        self.sum = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, piece: Any, /) -> int:
        view = memoryview(piece)
        self.sum.update(view)
        self._file.write(view)
        self._size += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self._size
