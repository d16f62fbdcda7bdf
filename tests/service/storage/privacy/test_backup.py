"""Backups are consistent snapshots. A restore into SQLite or PostgreSQL is complete, or changes nothing."""

from __future__ import annotations

import stat
import zipfile
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from service.cli.main import app
from service.core.atomic_files import atomic_write
from service.core.errors import LocalError
from service.domain.gallery import SubjectFilter
from service.storage.db.engine import Database
from service.storage.db.tables import (
    audit,
    audit_head,
    changes,
    erasures,
    galleries,
    jobs,
    templates,
)
from service.storage.privacy.backup import TABLES, back_up, restore
from service.storage.repositories.store import Store
from tests.databases import ON_BOTH, open_database
from tests.postgres import DatabaseUrl
from tests.refusals import raises_code
from tests.service.storage.audit.test_audit_log import report_of
from tests.service.storage.scene import DIMENSION, filled, made, some
from tests.soundness import problems


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[Database]:
    database = open_database(f"sqlite:///{tmp_path / 'other.db'}")
    yield database
    database.close()


def everything(database: Database) -> dict[str, list[Any]]:
    """Return all rows, with gallery names instead of keys, without audit lines of a restore."""
    with database.read() as connection:
        names = dict(connection.execute(sa.select(galleries.c.pk, galleries.c.name)).all())
        of_gallery = {t.name: "pk" if t is galleries else "gallery_pk" for t in TABLES}
        return {
            t.name: sorted(
                repr(
                    {
                        k: names.get(v, v) if k in (of_gallery[t.name], "companion_of") else v
                        for k, v in row._mapping.items()
                        if k not in ("xid", "event_pk")  # a restored receiver is at the end of the log
                    }
                )
                for row in connection.execute(sa.select(t))
                if t is not audit_head and not (t is audit and row.event == "database_restored")
            )
            for t in TABLES
        }


@ON_BOTH
def test_all_rows_are_restored_in_either_database(
    database: Database, database_url: DatabaseUrl, sqlite: Database, tmp_path: Path, rng: np.random.Generator
) -> None:
    filled(database, rng)
    manifest = back_up(database, file := tmp_path / "backup")
    assert manifest.recognizers[0] == {"fingerprint": "f" * 32, "dimension": DIMENSION, "model": None}
    assert all(manifest.rows.values())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with closing(open_database(url := database_url())) as empty:
        for target, its_url in ((empty, url), (sqlite, f"sqlite:///{sqlite.file}")):
            restore(target, file)
            assert everything(target) == everything(database)
            assert problems(its_url) == []
            assert report_of(target).faults == []
            with target.read() as connection:
                highest = connection.execute(sa.select(sa.func.max(templates.c.pk))).scalar_one()
                line = connection.execute(sa.select(sa.func.max(changes.c.sequence))).scalar_one()
            store = Store(target)
            store.templates.enroll(store.galleries.get("other"), "new", some(rng), None)
            with target.read() as connection:
                new = connection.execute(sa.select(changes.c.template_pk).where(changes.c.sequence > line)).scalar_one()
            assert new > highest + 1  # the deleted template's key is not reused
            restore(target, file, replace=True)  # keys are shifted, and what refers to them
            with target.read() as connection:
                lowest = [
                    connection.execute(sa.select(sa.func.min(t.c.pk))).scalar_one() for t in (templates, galleries)
                ]
                receipts = connection.execute(sa.select(erasures.c.pk)).scalars().all()
                begun = connection.execute(sa.select(jobs.c.erased).where(jobs.c.erased > 0)).scalars().all()
            assert begun and {*begun} <= {*receipts}
            # No index has them, not even one of another database for galleries.
            assert lowest[0] > new and lowest[1] > 1_700_000_000


def test_a_restore_that_fails_changes_nothing(database: Database, tmp_path: Path, rng: np.random.Generator) -> None:
    filled(database, rng)
    file, version = tmp_path / "backup", sa.table("alembic_version", sa.column("version_num"))
    with database.read() as connection:
        own = connection.execute(sa.select(version)).scalar_one()
    for revision, path in (("0000", tmp_path / "old"), (own, file)):
        with database.write(LocalError("backup", "")) as connection:
            connection.execute(version.update().values(version_num=revision))
        back_up(database, path)
    with raises_code("backup", match="revision 0000"):
        restore(database, tmp_path / "old", replace=True)
    before, whole = everything(database), file.read_bytes()
    with raises_code("backup", match="holds 14 templates of 6 people"):
        restore(database, file)
    assert everything(database) == before

    def fail_at(line: str) -> None:
        if line.startswith("templates"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        restore(database, file, replace=True, report=fail_at)
    assert everything(database) == before
    with zipfile.ZipFile(file) as archive:
        offset = archive.getinfo("vectors.ndjson.zst").header_offset
    for damaged in (
        b"",
        b"no zip",
        whole[: len(whole) // 2],
        whole[: offset + 900] + bytes([whole[offset + 900] ^ 1]) + whole[offset + 901 :],
    ):
        file.write_bytes(damaged)
        with raises_code("backup"):
            restore(database, file, replace=True)
        assert everything(database) == before


@ON_BOTH
def test_a_backup_is_a_snapshot_during_concurrent_writes(
    database: Database, url: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    """It contains all writes before its time, and no half of one."""
    store, written = Store(database), list[datetime]()
    store.templates.enroll(gallery := made(database), "before", some(rng, 2), None)

    def write(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "FROM subjects" in statement and not written:
            written.append(datetime.now(UTC))
            with closing(Store(open_database(url))) as other:
                other.templates.enroll(gallery, "meanwhile", some(rng, 2), None)

    sa.event.listen(sa.engine.Engine, "before_cursor_execute", write)
    manifest = back_up(database, tmp_path / "backup")
    sa.event.remove(sa.engine.Engine, "before_cursor_execute", write)
    assert datetime.fromisoformat(manifest.created_at) <= written[0]
    assert store.galleries.get("g").templates == 4
    restore(database, tmp_path / "backup", replace=True)
    there = store.galleries.get("g")
    assert [s.id for s in store.subjects.list_page(there, None, 9, SubjectFilter())] == ["before"]
    assert there.templates == len(store.changes.snapshot(there).template_pks) == 2
    assert problems(url) == []


def test_concurrent_writers_of_one_file_do_not_mix(tmp_path: Path) -> None:
    file = tmp_path / "backup"
    (tmp_path / "backup.part").write_bytes(b"another's")
    with atomic_write(file) as one, atomic_write(file) as other:
        one.write(b"one")
        other.write(b"the other")
    assert file.read_bytes() == b"one", "the last one that ended"
    with pytest.raises(ZeroDivisionError), atomic_write(file) as failed:
        failed.write(b"%d" % (1 // 0))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "backup": b"one",
        "backup.part": b"another's",
    }


def test_the_command_line(
    sqlite: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    file, run = str(tmp_path / "kith.backup"), CliRunner().invoke
    filled(sqlite, rng)
    monkeypatch.setenv("KITH_DATABASE_URL", f"sqlite:///{tmp_path / 'other.db'}")
    assert "14 templates of 6 people" in run(app, ["backup", file]).stdout
    monkeypatch.setenv("KITH_DATABASE_URL", f"sqlite:///{tmp_path / 'there.db'}")
    done = run(app, ["restore", file])
    assert done.exit_code == 0, done.output
    assert "14 templates of 6 people" in done.stdout
    refusal = run(app, ["restore", file]).exception
    assert isinstance(refusal, LocalError) and refusal.code == "backup"


def test_a_restore_repeats_the_erasure_of_an_album_and_its_faces(
    database: Database, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Also of a face that stayed in the album when others of its group were enrolled."""
    (gallery, _), store, file = filled(database, rng), Store(database), tmp_path / "backup"
    back_up(database, file)
    store.subjects.delete(gallery, "ada")
    restore(database, file, replace=True)
    (album,) = store.albums.list_all(store.galleries.get("g"))
    assert album.face_count == 1  # of bob
    assert store.albums.delete(store.galleries.get("g"), album.id).kind == "album"
    restore(database, file, replace=True)
    assert store.albums.list_all(store.galleries.get("g")) == []
