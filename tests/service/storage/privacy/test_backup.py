"""Backups are consistent snapshots. A restore into SQLite or PostgreSQL is complete, or changes nothing."""

from __future__ import annotations

import stat
import uuid
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

from models.runtime.network import Float
from models.vision.recognition import l2_normalize
from service.cli.main import app
from service.core.atomic_files import atomic_write
from service.core.errors import LocalError
from service.domain.events import EventFilter
from service.domain.gallery import Crop, Gallery, GallerySettings, IdempotentResponse, NewTemplate, SubjectFilter
from service.domain.strangers import Recalled
from service.index.follower import Followers, in_process
from service.security.api_keys import Rights
from service.storage.audit.log import note
from service.storage.db.engine import Database
from service.storage.db.row_sealing import seal_crop
from service.storage.db.tables import (
    album_faces,
    audit,
    audit_head,
    changes,
    crops,
    galleries,
    index_states,
    templates,
)
from service.storage.privacy.backup import TABLES, back_up, read_manifest, restore
from service.storage.repositories.api_keys import KeyStore
from service.storage.repositories.jobs import ItemOutcome, JobStore
from service.storage.repositories.store import Store
from service.storage.repositories.strangers import Sighting
from service.storage.repositories.webhooks import WebhookStore
from tests.databases import ON_BOTH, claimed, open_database
from tests.postgres import DatabaseUrl
from tests.refusals import raises_code
from tests.service.storage.privacy.test_subject_access import make_album
from tests.soundness import problems

DIMENSION = 8
FACE = Crop(b"\0\xff", ((1, 2.5),))


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[Database]:
    database = open_database(f"sqlite:///{tmp_path / 'other.db'}")
    yield database
    database.close()


def enroll(store: Store, gallery: Gallery, subject: str, *vectors: Float, key: str | None = None) -> None:
    new = [NewTemplate(uuid.uuid4().hex, v, "photo", {"score": 0.5}, 0.75) for v in vectors]
    store.templates.enroll(gallery, subject, new, IdempotentResponse(key, "digest", "{}") if key else None)


def vectors(count: int, seed: int = 0) -> Float:
    return l2_normalize(np.random.default_rng(seed).normal(size=(count, DIMENSION)))


def filled(database: Database) -> Store:
    """Fill every table, and delete a template whose key must not be reused."""
    store = Store(database)
    WebhookStore(database).create("https://receiver.example/", None, EventFilter())
    one, two = (store.galleries.create(name, "f" * 32, DIMENSION, GallerySettings()) for name in ("one", "two"))
    for i, vector in enumerate(vectors(20)):
        store.subjects.put(one, f"s{i}", f"Name {i} \u00e9", {"i": i, "odd": [None, 1.5]}, [f"t{i % 3}"])
        enroll(store, one, f"s{i}", vector, key=f"key {i}")
    face = Sighting("5" * 32, vectors(1)[0], "photo", {"score": 0.5}, 0.9, FACE)
    search = Followers(in_process(store)).nearest
    store.strangers.remember(one, [face], search, lambda vector, known: Recalled(is_new=True), datetime.now(UTC))
    kept, deleted = vectors(2, 1)
    enroll(store, two, "last", kept)
    store.decoys.add(store.galleries.get("two"), "last", NewTemplate("d" * 32, vectors(1, 2)[0], "photo"))
    enroll(store, two, "last", deleted)
    last = store.templates.list_page(two, "last")[-1]
    store.templates.delete(two, "last", last.id)
    jobs = JobStore(database)
    make_album(store, jobs, two, {"ada": [*vectors(1)]})
    job = claimed(database, one)
    jobs.record(job, [ItemOutcome("photo", "no_face", {}, "s0")], 1)
    jobs.finish(job, "failed", {"code": "image_format"})
    with database.write(LocalError("backup", "")) as connection:
        key = connection.execute(sa.select(sa.func.min(templates.c.pk))).scalar()
        connection.execute(crops.insert().values(template_pk=key, sealed=seal_crop(one.seal, FACE)))
        note(database.vault, connection, "e", one, a=None)
        note(database.vault, connection, "of none")
        state = {"gallery_pk": one.pk, "generation": 0, "engine": "milvus", "sequence": 3}
        connection.execute(index_states.insert().values(**state, updated_at=sa.func.current_timestamp()))
    KeyStore(database).create("n", Rights(frozenset({"read"}), frozenset({"one"})))
    return store


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
    database: Database, database_url: DatabaseUrl, sqlite: Database, tmp_path: Path
) -> None:
    filled(database)
    manifest = back_up(database, file := tmp_path / "backup")
    assert manifest.recognizers == [{"fingerprint": "f" * 32, "dimension": DIMENSION, "model": None}]
    assert all(count for table, count in manifest.rows.items() if table != "evidence")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with closing(open_database(url := database_url())) as empty:
        for target, its_url in ((empty, url), (sqlite, f"sqlite:///{sqlite.file}")):
            restore(target, file)
            assert everything(target) == everything(database)
            assert problems(its_url) == []
            with target.read() as connection:
                highest = connection.execute(sa.select(sa.func.max(templates.c.pk))).scalar_one()
                line = connection.execute(sa.select(sa.func.max(changes.c.sequence))).scalar_one()
            enroll(store := Store(target), store.galleries.get("two"), "new", *vectors(1))
            with target.read() as connection:
                new = connection.execute(sa.select(changes.c.template_pk).where(changes.c.sequence > line)).scalar_one()
            assert new > highest + 1  # the deleted template's key is not reused


def test_a_restore_that_fails_changes_nothing(database: Database, tmp_path: Path) -> None:
    filled(database)
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
    with raises_code("backup", match="holds 23 templates of 23 people"):
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
def test_a_backup_is_a_snapshot_during_concurrent_writes(database: Database, url: str, tmp_path: Path) -> None:
    """It contains all writes before its time, and no half of one."""
    store, written = Store(database), list[datetime]()
    gallery = store.galleries.create("g", "f" * 32, DIMENSION, GallerySettings())
    enroll(store, gallery, "before", *vectors(2))

    def write(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "FROM subjects" in statement and not written:
            written.append(datetime.now(UTC))
            with closing(Store(open_database(url))) as other:
                enroll(other, gallery, "meanwhile", *vectors(2, 1))

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


def test_the_command_line(sqlite: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, run = str(tmp_path / "kith.backup"), CliRunner().invoke
    filled(sqlite)
    monkeypatch.setenv("KITH_DATABASE_URL", f"sqlite:///{tmp_path / 'other.db'}")
    assert "23 templates of 23 people" in run(app, ["backup", file]).stdout
    monkeypatch.setenv("KITH_DATABASE_URL", f"sqlite:///{tmp_path / 'there.db'}")
    done = run(app, ["restore", file])
    assert done.exit_code == 0, done.output
    assert "23 templates of 23 people" in done.stdout
    refusal = run(app, ["restore", file]).exception
    assert isinstance(refusal, LocalError) and refusal.code == "backup"
    assert read_manifest(Path(file)).rows["galleries"] == 3  # one of strangers


def test_a_restore_repeats_the_erasure_of_an_album_and_its_faces(database: Database, tmp_path: Path) -> None:
    """Also of a face that stayed in the album when others of its group were enrolled."""
    store, file = filled(database), tmp_path / "backup"
    mona, _ = store.subjects.put(store.galleries.get("two"), "mona", None, {}, [])
    with database.write(LocalError("backup", "")) as connection:
        connection.execute(album_faces.update().values(subject_pk=mona.pk))
    back_up(database, file)
    receipt = store.subjects.delete(store.galleries.get("two"), "mona")
    assert (receipt.kind, receipt.removed) == ("subject", {"subjects": 1})
    restore(database, file, replace=True)
    gallery = store.galleries.get("two")
    (album,) = store.albums.list_all(gallery)
    assert album.face_count == 0
    assert store.albums.delete(gallery, album.id).kind == "album"
    restore(database, file, replace=True)
    assert store.albums.list_all(store.galleries.get("two")) == []
