"""Everything of a database in one file, and back into an empty one of either kind.

The file is a zip of one Arrow stream a table and a manifest with their checksums. Left out is only what says how far
indexes outside the database have come, who holds what at the moment, and which state API keys are in: made anew.
"""

from __future__ import annotations

import hashlib
import json
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
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
    erasures,
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
ROWS_AT_ONCE: Final = 2048
LEFT_OUT: Final = (api_key_versions, index_states, leases, retention_holds)
TABLES: Final = [table for table in metadata.sorted_tables if table not in LEFT_OUT]
COUNTED: Final = [table for table in TABLES if table.dialect_options["sqlite"]["autoincrement"]]
"""Those whose keys are never given twice."""
POINTERS: Final[dict[sa.Column[Any], sa.Table]] = {
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
"""Keys of other tables without a foreign key."""
ZERO_STAYS: Final = (
    *(galleries.c.log_floor, galleries.c.erased, jobs.c.erased, subjects.c.erased, templates.c.erased),
    *(erasures.c.gallery_pk, audit.c.chain, audit_heads.c.chain),
)
"""Of these, a key that none is: nothing was trimmed, or no gallery is concerned."""
TIME: Final = pa.timestamp("us", "UTC")


@dataclass(frozen=True)
class Manifest:
    """``revision``: of the tables. ``recognizers``: what is needed to serve the galleries. ``highest``: keys given so
    far. ``rows``, ``sha256``: by table. ``master_keys``: ids of those without which it is of no use; they themselves
    are not in it."""

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
        """Raises BackupError."""
        if not isinstance(document, dict) or document.pop("kind", None) != "kith-backup":
            raise BackupError("this is no backup of Kith")
        if (found := document.pop("format", None)) != FORMAT:
            raise BackupError(f"the backup's format is {found!r}, this version reads {FORMAT}")
        try:
            return cls(**document)
        except TypeError as error:
            raise BackupError("the backup's manifest is incomplete") from error


def back_up(database: Database, path: Path) -> Manifest:
    """Write everything, as of one moment, to a file that only its owner may read; it is there when it is complete.

    Raises:
        BackupError: it cannot be written.
        StorageError: the database cannot be read.
    """
    try:
        with atomic_write(path) as file, zipfile.ZipFile(file, "w") as archive, database.read() as connection:
            return _write(connection, archive)
    except OSError as error:
        raise BackupError(f"{path} cannot be written: {error.strerror or error}") from error


def _write(connection: Connection, archive: zipfile.ZipFile) -> Manifest:
    counts, sums = {}, {}
    # The moment begins with the first statement: whatever was written before this is in the backup.
    created_at = datetime.now(UTC).isoformat()
    revision = _revision(connection)
    recognizers = sa.select(generations.c.fingerprint, generations.c.dimension, generations.c.model).distinct()
    for table in TABLES:
        with archive.open(_entry(table.name), "w", force_zip64=True) as entry:
            summed = _Summed(entry)
            counts[table.name] = _write_table(connection, table, summed)
            sums[table.name] = summed.sum.hexdigest()
    manifest = Manifest(
        created_at,
        version("kith-face"),
        connection.dialect.name,
        revision,
        [dict(row._mapping) for row in connection.execute(recognizers)],
        # Not of the moment, where they are PostgreSQL's, but never lower than what it holds.
        {table.name: bulk_rows.highest_key(connection, table) for table in COUNTED},
        counts,
        sums,
        list(uses(connection)),
    )
    archive.writestr(MANIFEST, json.dumps(manifest.document(), indent=1))
    return manifest


def _write_table(connection: Connection, table: sa.Table, to: _Summed) -> int:
    schema = pa.schema([pa.field(column.name, _arrow_type(column)) for column in table.columns])
    # As text, so that JSON is not read and written on its way.
    columns = [sa.cast(c, sa.Text).label(c.name) if isinstance(c.type, sa.JSON) else c for c in table.columns]
    binary = any(isinstance(column.type, sa.LargeBinary) for column in table.columns)
    options = pa.ipc.IpcWriteOptions(compression=None if binary else "zstd")
    count = 0
    query = sa.select(*columns).execution_options(yield_per=ROWS_AT_ONCE)
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
    """Raises BackupError: a master key that the backup needs is not at hand."""
    with _archive(path) as archive:
        _check_keys(archive, _manifest(archive), master)


def restore(
    database: Database, path: Path, replace: bool = False, said: Callable[[str], None] = lambda _: None
) -> None:
    """Put everything of a backup into a database that holds nothing, or in place of all that it holds: wholly, or not
    at all. ``said`` is told of each table done.

    Keys that the database has given before are not given again: all of the backup's are moved beyond them, and those of
    galleries beyond any given elsewhere, so that a server that is running finds galleries it has not seen, and no index
    anywhere seems to fit. What the database knows to have been erased since the backup is erased from it.

    Raises:
        BackupError: the file is damaged, of another version or of a master key that is not at hand, or the database
            holds something.
        StorageError: the database cannot be written.
    """
    with _archive(path) as archive:
        manifest = _manifest(archive)
        _verify(archive, manifest)
        _check_keys(archive, manifest, database.vault.master)
        with (
            database.write(BackupError("the backup's rows contradict each other")) as connection,
            bulk_rows.large_page_cache(connection),
        ):
            if connection.dialect.name == "postgresql":
                names = ", ".join(table.name for table in metadata.sorted_tables)
                connection.exec_driver_sql(f"LOCK TABLE {names} IN EXCLUSIVE MODE")
            if (revision := _revision(connection)) != manifest.revision:
                raise BackupError(
                    f"the backup is of tables at revision {manifest.revision}, these are at {revision}: restore it "
                    f"with Kith {manifest.kith}, then start the newer version on it"
                )
            erased = repeated_erasures.known(connection)
            ended = all_keys(connection, database.vault)
            _make_room(connection, replace)
            moved = _beyond(connection)
            for table in TABLES:
                with archive.open(_entry(table.name)) as entry:
                    count = _read_table(connection, table, entry, moved)
                if count != manifest.rows[table.name]:
                    raise BackupError(f"table {table.name} has {count} rows, the manifest {manifest.rows[table.name]}")
                said(f"{table.name}: {count:,} rows")
            for table in COUNTED:
                bulk_rows.raise_highest_key(connection, table, moved[table.name] + manifest.highest[table.name])
            keep_restrictions(connection, database.vault, ended)
            # Not before the secret is there that the backup's chains are signed with.
            record(database.vault, connection, "database_restored", as_of=manifest.created_at)
            for receipt in repeated_erasures.repeat(database.vault, connection, erased):
                said(f"{receipt.kind} erased since, on {receipt.at:%Y-%m-%d %H:%M} UTC: stays so")
    database.truncate_wal()


def _beyond(connection: Connection) -> dict[str, int]:
    """By how much the keys of each table are moved.

    Galleries' always, and beyond any that a database which was lost can have given: an index outside the database, in
    Milvus or on disk, is known by its gallery's key and may be of later than the backup.
    """
    highest = {table.name: bulk_rows.highest_key(connection, table) for table in COUNTED}
    # Where there never was a gallery, nobody has met a key of anything in it.
    moved = highest if highest[galleries.name] else dict.fromkeys(highest, 0)
    return moved | {galleries.name: max(highest[galleries.name], int(time.time()))}


def _make_room(connection: Connection, replace: bool) -> None:
    counted = [table for table in TABLES if table is not secrets]  # which a database has from its beginning
    held = {table.name: connection.execute(sa.select(sa.func.count()).select_from(table)).scalar() for table in counted}
    if any(held.values()) and not replace:
        raise BackupError(
            f"the database holds {held['galleries']} galleries with {held['templates']} templates: restore into an "
            "empty one, or say --replace to delete all that it holds"
        )
    if replace:
        with audit_triggers_off(connection):
            for table in reversed(metadata.sorted_tables):
                connection.execute(table.delete())
    connection.execute(secrets.delete())


def _read_table(connection: Connection, table: sa.Table, entry: IO[bytes], moved: dict[str, int]) -> int:
    count = 0
    names = [column.name for column in table.columns]
    with pa.ipc.open_stream(entry) as stream:
        if stream.schema.names != names:
            raise BackupError(f"table {table.name} of the backup has other columns")
        for batch in stream:
            columns = [_unpacked(connection, table.c[name], batch.column(name), moved) for name in names]
            bulk_rows.insert(connection, table, names, zip(*columns, strict=True))
            count += len(batch)
    return count


def _unpacked(connection: Connection, column: sa.Column[Any], values: pa.Array, moved: dict[str, int]) -> list[Any]:
    if isinstance(column.type, Utc):
        given = values.cast(pa.int64()).to_pylist()
        times = {us: bulk_rows.as_time(connection, from_microseconds(us)) for us in set(given) if us is not None}
        return [None if us is None else times[us] for us in given]
    by = moved.get(_counted_by(column), 0)
    if by:
        shifted = pc.add(values, by)
        stays = any(column is one for one in ZERO_STAYS)
        values = pc.if_else(pc.equal(values, 0), values, shifted) if stays else shifted
    return list(values.to_pylist())


def _counted_by(column: sa.Column[Any]) -> str:
    """The table whose keys a column holds."""
    if column in POINTERS:
        return POINTERS[column].name
    for key in column.foreign_keys:
        return key.column.table.name
    return column.table.name if column.primary_key and column.table in COUNTED else ""


def _arrow_type(column: sa.Column[Any]) -> pa.DataType:
    kind = column.type
    kinds: list[tuple[type[Any], pa.DataType]] = [
        (Utc, TIME),
        (sa.LargeBinary, pa.large_binary()),
        (sa.Boolean, pa.bool_()),
        (sa.Integer, pa.int64()),
        (sa.Float, pa.float64()),
    ]
    return next((arrow for sql, arrow in kinds if isinstance(kind, sql)), pa.large_string())


def _revision(connection: Connection) -> str:
    return str(connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one())


def _archive(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise BackupError(f"{path} cannot be read as a backup: {error}") from error


def _manifest(archive: zipfile.ZipFile) -> Manifest:
    try:
        return Manifest.of(json.loads(archive.read(MANIFEST)))
    except (KeyError, ValueError, zipfile.BadZipFile) as error:
        raise BackupError("this is no backup of Kith") from error


def _verify(archive: zipfile.ZipFile, manifest: Manifest) -> None:
    if set(manifest.sha256) != {table.name for table in TABLES}:
        raise BackupError("the backup has other tables than this version")
    for name, expected in manifest.sha256.items():
        found = hashlib.sha256()
        try:
            with archive.open(_entry(name)) as entry:
                for piece in _pieces(entry):
                    found.update(piece)
        except (KeyError, OSError, zipfile.BadZipFile) as error:
            raise BackupError(f"table {name} of the backup is damaged: {error}") from error
        if found.hexdigest() != expected:
            raise BackupError(f"table {name} of the backup is damaged: its checksum is another")


def _check_keys(archive: zipfile.ZipFile, manifest: Manifest, master: MasterKeys) -> None:
    try:
        for key_id in manifest.master_keys:
            master.of(key_id)
        with archive.open(_entry(secrets.name)) as entry, pa.ipc.open_stream(entry) as stream:
            for row in stream.read_all().to_pylist():
                master.unwrap(row["wrapped"], row["name"], row["master_key"])
    except MasterKeyError as error:
        raise BackupError(f"the backup cannot be opened: {error.detail}") from error


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    while piece := file.read(1 << 20):
        yield piece


def _entry(table: str) -> str:
    return f"{table}.arrow"


class _Summed:
    """A file that knows the checksum of what was written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._size = 0
        self.sum = hashlib.sha256()
        self.closed = False

    def write(self, piece: Any) -> int:
        view = memoryview(piece)
        self.sum.update(view)
        self._file.write(view)
        self._size += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True
