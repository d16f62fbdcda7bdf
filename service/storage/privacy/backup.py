"""Backup of a whole database in one file, and restore into an empty SQLite or PostgreSQL database.

The file is a zip with the rows of each table (service.storage.privacy.backup_rows) and a manifest. It omits what the
restored database creates again: progress of external indexes, leases and versions of API keys; and the log of events
with the built-in receivers, which a restored database must not report again.
"""

from __future__ import annotations

import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, Final, Literal

import sqlalchemy as sa
from pydantic import BaseModel
from sqlalchemy.engine import Connection

from kith.wire.fields import rfc3339
from service.core.atomic_files import atomic_write
from service.core.errors import LocalError, MasterKeyError
from service.security.master_keys import MasterKeys
from service.storage.audit.log import note
from service.storage.db import bulk_rows
from service.storage.db.engine import Database
from service.storage.db.tables import (
    Utc,
    api_key_versions,
    audit,
    audit_head,
    changes,
    erasures,
    events,
    evidence,
    galleries,
    generations,
    index_states,
    jobs,
    leases,
    metadata,
    receivers,
    secrets,
    subjects,
    templates,
)
from service.storage.db.triggers import triggers_off
from service.storage.events.outbox import BUILT_IN, end_of_log
from service.storage.privacy import repeated_erasures
from service.storage.privacy.backup_rows import read_rows, write_rows
from service.storage.privacy.master_key_rotation import uses
from service.storage.repositories.api_keys import all_keys, keep_restrictions
from service.storage.repositories.jobs import fail_archive_jobs

MANIFEST: Final = "manifest.json"
BATCH_ROWS: Final = 2048
OMITTED_TABLES: Final = (api_key_versions, index_states, leases, events)
TABLES: Final = [table for table in metadata.sorted_tables if table not in OMITTED_TABLES]
AUTOINCREMENT_TABLES: Final = [table for table in TABLES if table.dialect_options["sqlite"]["autoincrement"]]
"""Tables whose keys are never reused."""
REFERENCES: Final[dict[sa.Column[Any], sa.Table]] = {
    changes.c.template_pk: templates,
    changes.c.subject_pk: subjects,
    evidence.c.sequence: changes,
    galleries.c.log_floor: changes,
    jobs.c.erased: erasures,
    erasures.c.gallery_pk: galleries,
    audit.c.gallery_pk: galleries,
}
"""Columns that refer to another table without a foreign key; 0 means none."""


class Manifest(BaseModel):
    """Description of a backup.

    ``revision``: of the schema. ``recognizers``: required to serve the galleries. ``highest``: highest key assigned, by
    table. ``rows``: by table. ``master_keys``: ids of the keys that a restore needs; the keys are not included.
    """

    kind: Literal["kith-backup"] = "kith-backup"
    format: Literal[3] = 3
    created_at: str
    kith: str
    database: str
    revision: str
    recognizers: list[dict[str, Any]]
    highest: dict[str, int]
    rows: dict[str, int]
    master_keys: list[str]


def back_up(database: Database, path: Path) -> Manifest:
    """Write a snapshot to a file for its owner only, which appears when complete. Raises backup, StorageError."""
    try:
        with atomic_write(path) as file, zipfile.ZipFile(file, "w") as archive, database.read() as connection:
            return _write(connection, archive)
    except OSError as error:
        raise LocalError("backup", f"cannot write {path}: {error.strerror or error}") from error


def _write(connection: Connection, archive: zipfile.ZipFile) -> Manifest:
    # The first statement starts the snapshot. It contains everything written before this time.
    created_at = rfc3339(datetime.now(UTC))
    revision = _revision(connection)
    recognizers = sa.select(generations.c.fingerprint, generations.c.dimension, generations.c.model).distinct()
    counts = dict[str, int]()
    for table in TABLES:
        with archive.open(_entry(table), "w", force_zip64=True) as entry:
            counts[table.name] = _write_table(connection, table, entry)
    manifest = Manifest(
        created_at=created_at,
        kith=version("kith-face"),
        database=connection.dialect.name,
        revision=revision,
        recognizers=[dict(row._mapping) for row in connection.execute(recognizers)],
        # PostgreSQL's sequences are outside the snapshot, but never lower than the keys in it.
        highest={table.name: bulk_rows.highest_key(connection, table) for table in AUTOINCREMENT_TABLES},
        rows=counts,
        master_keys=list(uses(connection)),
    )
    archive.writestr(MANIFEST, manifest.model_dump_json(indent=1))
    return manifest


def _write_table(connection: Connection, table: sa.Table, to: IO[bytes]) -> int:
    # Read as text, which avoids parsing and serializing JSON.
    columns = [sa.cast(c, sa.Text).label(c.name) if isinstance(c.type, sa.JSON) else c for c in table.columns]
    query = sa.select(*columns).where(*_own_rows(table)).execution_options(yield_per=BATCH_ROWS)
    return write_rows(to, table, connection.execute(query))


def _own_rows(table: sa.Table) -> list[sa.ColumnElement[bool]]:
    """Return the condition of rows that a backup holds: servers create the built-in receivers of events again."""
    return [receivers.c.id.not_in(BUILT_IN)] if table is receivers else []


def read_manifest(path: Path, master: MasterKeys | None = None) -> Manifest:
    """Raises backup, also if a required key is not in ``master``."""
    with _opened(path) as (archive, manifest):
        if master is not None:
            _check_keys(archive, manifest, master)
        return manifest


def restore(
    database: Database, path: Path, replace: bool = False, report: Callable[[str], None] = lambda _: None
) -> None:
    """Restore a backup into an empty database, or replace all contents. Either all rows are restored or none.

    Restored keys are shifted above all that were assigned before; those of galleries also above keys of other
    databases, so that servers treat them as new and no index matches. Later erasures of the database are repeated.
    ``report`` receives messages. Raises backup, StorageError.
    """
    with _opened(path) as (archive, manifest):
        _check_keys(archive, manifest, database.vault.master)
        with (
            database.write(LocalError("backup", "the backup's rows are inconsistent")) as connection,
            bulk_rows.large_page_cache(connection),
        ):
            if connection.dialect.name == "postgresql":
                names = ", ".join(table.name for table in metadata.sorted_tables)
                connection.exec_driver_sql(f"LOCK TABLE {names} IN EXCLUSIVE MODE")
            if (revision := _revision(connection)) != manifest.revision:
                raise LocalError(
                    "backup",
                    f"the backup has schema revision {manifest.revision}, the database {revision}. Restore it "
                    f"with Kith {manifest.kith}, then start the newer version on that database",
                )
            erased = repeated_erasures.known(connection)
            ended = all_keys(connection, database.vault)
            with triggers_off(connection):
                _clear(connection, replace)
                offsets = _key_offsets(connection)
                for table in TABLES:
                    rows = _restored_rows(connection, table, _rows(archive, table), offsets)
                    bulk_rows.insert(connection, table, table.columns.keys(), rows)
                    report(f"{table.name}: {manifest.rows[table.name]:,} rows")
            for table in AUTOINCREMENT_TABLES:
                bulk_rows.raise_highest_key(connection, table, offsets[table.name] + manifest.highest[table.name])
            # A backup holds no events: those after the restore are sent.
            connection.execute(receivers.update().values(**end_of_log(connection)._asdict()))
            keep_restrictions(connection, database.vault, ended)
            if failed := fail_archive_jobs(database.vault, connection):
                report(f"failed jobs: {failed}, whose archives no backup holds")
            # after the restore of the secret that signs the audit
            note(database.vault, connection, "database_restored", as_of=manifest.created_at)
            as_of = datetime.fromisoformat(manifest.created_at)
            for receipt in repeated_erasures.repeat(database.vault, connection, erased, as_of):
                report(f"repeated erasure: {receipt.kind}, erased on {receipt.at:%Y-%m-%d %H:%M} UTC")
    database.truncate_wal()


def _key_offsets(connection: Connection) -> dict[str, int]:
    """Return the offset to add to the keys of each table.

    An external index is named by its gallery's key and may be newer than the backup: galleries always get one.
    """
    highest = {table.name: bulk_rows.highest_key(connection, table) for table in AUTOINCREMENT_TABLES}
    return highest | {galleries.name: max(highest[galleries.name], int(time.time()))}


def _clear(connection: Connection, replace: bool) -> None:
    counted = [table for table in TABLES if table not in (secrets, audit_head)]  # every database has these
    held = {
        table.name: connection.execute(sa.select(sa.func.count()).select_from(table).where(*_own_rows(table))).scalar()
        for table in counted
    }
    if any(held.values()) and not replace:
        raise LocalError(
            "backup",
            f"the database is not empty: it holds {held['templates']} templates of {held['subjects']} people. Restore "
            "into an empty database, or pass --replace to delete its contents",
        )
    if replace:
        for table in reversed(metadata.sorted_tables):
            connection.execute(table.delete())
    for table in (secrets, audit_head, receivers):
        connection.execute(table.delete())


def _restored_rows(
    connection: Connection, table: sa.Table, rows: Iterator[Sequence[Any]], offsets: dict[str, int]
) -> Iterator[list[Any]]:
    """Yield rows with shifted keys, as bulk_rows.insert takes them."""
    shifts = [offsets.get(_referenced_table(column), 0) for column in table.columns]
    times = [isinstance(column.type, Utc) for column in table.columns]
    for row in rows:
        yield [
            None
            if value is None
            else bulk_rows.as_time(connection, value)
            if time
            else value + shift
            if shift and value
            else value
            for value, shift, time in zip(row, shifts, times, strict=True)
        ]


def _referenced_table(column: sa.Column[Any]) -> str:
    """Return the table that a column's values refer to."""
    if column in REFERENCES:
        return REFERENCES[column].name
    for key in column.foreign_keys:
        return key.column.table.name
    return column.table.name if column.primary_key and column.table in AUTOINCREMENT_TABLES else ""


def _revision(connection: Connection) -> str:
    return str(connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one())


@contextmanager
def _opened(path: Path) -> Iterator[tuple[zipfile.ZipFile, Manifest]]:
    """Raises backup."""
    try:
        archive = zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise LocalError("backup", f"cannot read {path} as a backup: {error}") from error
    with archive:
        try:
            manifest = Manifest.model_validate_json(archive.read(MANIFEST))
        except (KeyError, ValueError, zipfile.BadZipFile) as error:
            raise LocalError("backup", "the file is not a Kith backup, or of another version") from error
        yield archive, manifest


def _rows(archive: zipfile.ZipFile, table: sa.Table) -> Iterator[list[Any]]:
    """Raises backup: they are damaged, which the zip's checksum tells."""
    try:
        with archive.open(_entry(table)) as entry:
            yield from read_rows(entry, table)
    except (KeyError, OSError, zipfile.BadZipFile) as error:
        raise LocalError("backup", f"table {table.name} of the backup is damaged: {error}") from error


def _check_keys(archive: zipfile.ZipFile, manifest: Manifest, master: MasterKeys) -> None:
    try:
        for key_id in manifest.master_keys:
            master.of(key_id)
        for row in _rows(archive, secrets):
            secret = dict(zip(secrets.columns.keys(), row, strict=True))
            master.unwrap(secret["wrapped"], secret["name"], secret["master_key"])
    except MasterKeyError as error:
        raise LocalError("backup", f"cannot decrypt the backup: {error.detail}") from error


def _entry(table: sa.Table) -> str:
    return f"{table.name}.ndjson.zst"
