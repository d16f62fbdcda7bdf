"""What is stored of people lies sealed: in new databases, in those of before, and where somebody meddled with them."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from models.network import Float
from models.recognition import unit
from service.decision import RiskTarget
from service.errors import GalleryNotFoundError, IdempotencyConflictError, StorageDamagedError
from service.gallery.bulk import BulkStore
from service.gallery.check import open_check
from service.gallery.consistency import quarantine
from service.gallery.database import Database
from service.gallery.generations import Generations
from service.gallery.job_store import ItemOutcome, JobStore
from service.gallery.sealed_rows import close_place, lookup_of, open_crop, open_place
from service.gallery.store import Store
from service.gallery.subjects import Crop, Gallery, GallerySettings, Idempotent, NewTemplate, SubjectFilter
from service.gallery.tables import crops, data_keys, idempotency, job_items, jobs, labels, metadata, subjects, vectors
from service.security.acting import Actor, acting_as
from service.security.sealing import Seal, SealBrokenError, new_key
from tests.databases import open_database
from tests.faults.old_databases import at_revision, engine_of
from tests.postgres import DatabaseUrl

DIMENSION = 32
NAME, ID, TAG, VALUE = "Ada Lovelace", "ada-1815", "poetical science", "analytical engine"
KEY, DIGEST, ANSWER, FILE, PROBLEM = "retry 4711", "c0ffee" * 10, '{"enrolled": 1}', "ada-1815/at-home.jpg", "two faces"
IMAGE = b"a picture of Ada by Margaret Sarah Carpenter"
SECRETS = [text.encode() for text in (NAME, ID, TAG, VALUE, KEY, DIGEST, ANSWER, FILE, PROBLEM)]
POINTS = tuple((1.5 * i, 30720.25) for i in range(5))


def vector(seed: int = 0) -> Float:
    return np.asarray(unit(np.random.default_rng(seed).normal(size=(1, DIMENSION)))[0], np.float32)


def used(database: Database) -> Gallery:
    """Ada, by every way that leads into the database but imports."""
    store, job_store = Store(database), JobStore(database)
    gallery = store.create_gallery("g", "f" * 32, DIMENSION, GallerySettings(keep_crops=True))
    store.put_subject(gallery, ID, NAME, {"work": VALUE}, [TAG])
    new = NewTemplate(uuid.uuid4().hex, vector(), "photo", {"score": 0.5}, 0.9, crop=Crop(IMAGE, POINTS))
    store.enrol(gallery, ID, [new], Idempotent(KEY, DIGEST, ANSWER))
    with acting_as(Actor("key:0123456789ab")):
        job_store.create(gallery, "work", {})
    job = job_store.claim("p", 60)
    assert job is not None
    job_store.record(job, [ItemOutcome(FILE, "several_faces", {"detail": PROBLEM}, ID)], 1.0)
    job_store.finish(job, "failed", {"code": "archive_invalid", "detail": FILE})
    return gallery


def everything(database: Database) -> bytes:
    """All rows of all tables, as they are stored."""
    with database.engine.connect() as connection:
        rows = [row for table in metadata.sorted_tables for row in connection.execute(sa.select(table))]
    return b"\n".join(
        bytes(value) if isinstance(value, bytes | memoryview) else str(value).encode() for row in rows for value in row
    )


def is_there(database: Database) -> None:
    """Everything that :func:`used` brought in is read again as it was."""
    store, job_store = Store(database), JobStore(database)
    gallery = store.gallery("g")
    ada = store.subject(gallery, ID)
    assert (ada.id, ada.name, ada.metadata, ada.tags, ada.templates) == (ID, NAME, {"work": VALUE}, [TAG], 1)
    for chosen in (SubjectFilter((TAG,)), SubjectFilter(metadata=(("work", VALUE),))):
        assert [found.id for found in store.list_subjects(gallery, None, 9, chosen)] == [ID]
        assert store.matching_subjects(gallery, chosen).tolist() == [ada.pk]
    taken = store.snapshot(gallery)
    np.testing.assert_array_equal(taken.vectors, vector()[None])
    assert [t.subject for t in store.templates_by_pk(gallery, taken.template_pks.tolist()).values()] == [ID]
    (waiting,) = Generations(database).waiting(gallery, taken.template_pks.tolist())
    kept = open_crop(gallery.seal, waiting.sealed)
    assert (kept.image, [tuple(point) for point in kept.landmarks_xy]) == (IMAGE, list(POINTS))
    assert store.answered(gallery, KEY, DIGEST) == ANSWER
    with pytest.raises(IdempotencyConflictError):
        store.answered(gallery, KEY, "another")
    (job,) = job_store.list_jobs(gallery, (), None, 9)
    assert job.problem == {"code": "archive_invalid", "detail": FILE}
    (item,) = job_store.items(job, None, 9, failed_only=True)
    assert (item.item, item.problem) == (FILE, {"detail": PROBLEM})
    assert FILE in job_store.done(job)


def test_nothing_lies_in_clear(database_url: DatabaseUrl) -> None:
    database = open_database(database_url())
    gallery = used(database)
    is_there(database)
    stored = everything(database)
    assert b"several_faces" in stored  # what is searched for would be found
    for secret in (*SECRETS, IMAGE, vector().tobytes(), b"30720.25"):
        assert secret not in stored, secret
    with database.read() as connection:
        row = connection.execute(sa.select(job_items.c.subject, job_items.c.failed)).one()
        assert tuple(row) == (lookup_of(gallery.seal, ID), True)
        assert connection.execute(sa.select(jobs.c.actor)).scalar() == "key:0123456789ab"
    database.close()


def test_galleries_have_nothing_in_common(database_url: DatabaseUrl) -> None:
    """Who is in both cannot be told, neither by ids nor by tags; what is cut out of one does not open in the other."""
    database = open_database(database_url())
    store = Store(database)
    one, two = (store.create_gallery(name, "f" * 32, DIMENSION, GallerySettings()) for name in ("one", "two"))
    for gallery in (one, two):
        store.put_subject(gallery, ID, NAME, {}, [TAG])
        store.enrol(gallery, ID, [NewTemplate(uuid.uuid4().hex, vector(), "embedding")], None)
    with database.write(StorageDamagedError("unforeseen")) as connection:
        for column in (subjects.c.lookup, subjects.c.sealed, labels.c.label, vectors.c.vector):
            first, second = connection.execute(sa.select(column)).scalars()
            assert first != second, column
        sealed = connection.execute(sa.select(subjects.c.sealed)).scalars().first()
        connection.execute(subjects.update().values(sealed=sealed))
    broken = 0
    for gallery in (one, two):
        try:
            assert store.subject(gallery, ID).name == NAME
        except StorageDamagedError:
            broken += 1
    assert broken == 1
    place = close_place(one.seal, 7)
    assert open_place(one.seal, place) == (7,)
    with pytest.raises(SealBrokenError):
        open_place(two.seal, place)
    database.close()


def test_what_was_altered_is_damage_and_never_passed_over(database_url: DatabaseUrl) -> None:
    """Wherever it is read; and the check says in which gallery."""
    url = database_url()
    database = open_database(url)
    gallery = used(database)
    store, job_store = Store(database), JobStore(database)
    (job,) = job_store.list_jobs(gallery, (), None, 9)
    ada = store.subject(gallery, ID).pk
    bulk = BulkStore(database)

    def exported() -> None:
        with bulk.reading("g", with_crops=True) as reading:
            list(reading.blocks())

    reads: dict[sa.Column[Any], list[Callable[[], object]]] = {
        subjects.c.sealed: [
            lambda: store.subject(gallery, ID),
            lambda: store.list_subjects(gallery, None, 9, SubjectFilter()),
            lambda: store.named(gallery, [ada]),
            lambda: store.patch_subject(gallery, ID, {"tags": []}),
            exported,
        ],
        vectors.c.vector: [
            lambda: store.snapshot(gallery),
            lambda: store.changes_after(gallery, 0),
            lambda: store.subject_vectors(gallery, ID),
            exported,
        ],
        crops.c.sealed: [exported],
        idempotency.c.sealed: [lambda: store.answered(gallery, KEY, DIGEST)],
        job_items.c.sealed: [lambda: job_store.items(job, None, 9)],
        jobs.c.problem: [lambda: job_store.job(job.id)],
    }
    for column, ways in reads.items():
        table = column.table
        with database.write(StorageDamagedError("unforeseen")) as connection:
            whole = connection.execute(sa.select(column)).scalar_one()
            flipped = whole[:20] + bytes([whole[20] ^ 1]) + whole[21:]
            connection.execute(sa.update(table).values({column.name: flipped}))
        for way in ways:
            with pytest.raises(StorageDamagedError, match="cannot be opened"):
                way()
        with open_check(open_database(url)) as check:
            found = [(finding.kind, finding.gallery) for finding in check.findings(None, repair=False)]
        assert found == [("vectors_damaged" if column is vectors.c.vector else "sealed", "g")], column
        with database.write(StorageDamagedError("unforeseen")) as connection:
            connection.execute(sa.update(table).values({column.name: whole}))
    is_there(database)
    database.close()


def test_a_row_that_bears_anothers_name_is_found(database_url: DatabaseUrl) -> None:
    """Its own gallery's key opens it, wherever in the gallery it was put."""
    url = database_url()
    database = open_database(url)
    store = Store(database)
    gallery = store.create_gallery("g", "f" * 32, DIMENSION, GallerySettings())
    for name in ("ada", "grace"):
        store.put_subject(gallery, name, None, {}, [])
    with database.write(StorageDamagedError("unforeseen")) as connection:
        anothers = connection.execute(sa.select(subjects.c.sealed).order_by(subjects.c.pk)).scalars().first()
        connection.execute(subjects.update().values(sealed=anothers))
    with open_check(open_database(url)) as check:
        assert [(finding.kind, finding.count) for finding in check.findings("g", True)] == [("sealed", 1)]
    database.close()


def test_a_deleted_gallerys_key_is_gone_everywhere(database_url: DatabaseUrl) -> None:
    url = database_url()
    here, asking, silent = (open_database(url) for _ in range(3))
    gallery = used(here)
    store = Store(asking)
    for known in (store, Store(silent)):
        assert known.gallery("g").pk == gallery.pk
    Store(here).delete_gallery("g")
    with pytest.raises(GalleryNotFoundError):
        store.gallery("g")
    assert gallery.pk not in asking.vault._open
    with silent.read() as connection:
        assert connection.execute(sa.select(data_keys)).all() == []
        assert gallery.pk in silent.vault._open
        silent.vault.forget_deleted(connection)
        assert gallery.pk not in silent.vault._open
        with pytest.raises(LookupError):
            silent.vault.of(connection, gallery.pk)
    for database in (here, asking, silent):
        database.close()


def test_damaged_vectors_beside_sound_ones_are_told_apart(database_url: DatabaseUrl) -> None:
    """Of a block only those that do not open are set aside."""
    url = database_url()
    database = open_database(url)
    store = Store(database)
    gallery = store.create_gallery("g", "f" * 32, DIMENSION, GallerySettings())
    store.enrol(gallery, ID, [NewTemplate(uuid.uuid4().hex, vector(i), "embedding") for i in range(9)], None)
    with database.write(StorageDamagedError("unforeseen")) as connection:
        last = sa.select(sa.func.max(vectors.c.template_pk)).scalar_subquery()
        (other,) = Seal(new_key()).close_vectors(vector()[None], 0)
        connection.execute(vectors.update().where(vectors.c.template_pk == last).values(vector=other))
    with open_check(open_database(url)) as check:
        told = {finding.kind: (finding.count, finding.repaired) for finding in check.findings("g", True)}
    assert told == {"vectors_damaged": (1, True), "vectors_missing": (1, False)}
    assert len(store.snapshot(gallery).vectors) == 8
    database.close()


# Databases of before


def before_0007(url: str) -> None:
    """What :func:`used` brings in, as it lay in clear; a gallery beside it; somebody who was deleted."""
    tables = at_revision(url, "0005").tables
    engine, now = engine_of(url), datetime.now(UTC)

    def insert(connection: sa.Connection, table: str, **values: Any) -> int:
        result = connection.execute(tables[table].insert().values(**values))
        return int(result.inserted_primary_key[0])  # type: ignore[index]

    with engine.begin() as connection:
        settings = {"risk": vars(RiskTarget("fpir", 0.001)), "fusion": "max", "quality_gate": {}, "keep_crops": True}
        about = {"fingerprint": "f" * 32, "dimension": DIMENSION, "settings": settings, "created_at": now}
        for name, count in (("other", 0), ("g", 1)):
            counts = {"subject_count": count, "template_count": count, "log_floor": 0, "version": 1}
            gallery = insert(connection, "galleries", name=name, **about, **counts, current_generation=0)
            of = {"gallery_pk": gallery, "created_at": now}
            kept = {"fingerprint": "f" * 32, "dimension": DIMENSION, "state": "current", "details": {}}
            insert(connection, "generations", **of, **kept, generation=0, updated_at=now)
        for who in (ID, "deleted"):
            named = {"id": who, "name": NAME, "metadata": {"work": VALUE}, "tags": [TAG]}
            subject = insert(connection, "subjects", **of, **named, updated_at=now)
            template = insert(
                connection,
                "templates",
                **of,
                id=uuid.uuid4().hex,
                subject_pk=subject,
                kind="photo",
                quality={"score": 0.5},
            )
            insert(connection, "changes", gallery_pk=gallery, template_pk=template, subject_pk=subject)
            if who == ID:
                for generation in (0, quarantine(0)):
                    stored = {"generation": generation, "vector": vector().tobytes()}
                    insert(connection, "vectors", template_pk=template, **stored)
                insert(connection, "crops", template_pk=template, image=IMAGE, landmarks=POINTS)
                answered = {"key": KEY, "digest": DIGEST, "response": ANSWER}
                insert(connection, "idempotency", **of, **answered, subject_pk=subject)
        for table, pk in (("templates", template), ("subjects", subject)):
            connection.execute(tables[table].delete().where(tables[table].c.pk == pk))
        insert(connection, "changes", gallery_pk=gallery, template_pk=template, subject_pk=subject)
        progress = {"total": 1, "done": 1, "failed": 1, "seconds": 1, "takeovers": 0, "counts": {}, "details": {}}
        state = {
            "id": "a" * 32,
            "kind": "work",
            "state": "failed",
            "cancel": False,
            "parameters": {},
            "updated_at": now,
        }
        problem = {"code": "archive_invalid", "detail": FILE}
        job = insert(connection, "jobs", **of, **state, progress=progress, problem=problem)
        insert(connection, "job_items", job_pk=job, item=FILE, problem={"detail": PROBLEM}, at=now)
    engine.dispose()


def test_a_database_of_before_is_sealed(database_url: DatabaseUrl) -> None:
    url = database_url()
    before_0007(url)
    database = open_database(url)
    is_there(database)
    stored = everything(database)
    for secret in (*SECRETS, IMAGE, vector().tobytes(), b"30720.25"):
        assert secret not in stored, secret
    store = Store(database)
    gallery = store.gallery("g")
    with database.read() as connection:
        assert connection.execute(sa.select(jobs.c.actor)).scalar() == "service"
        aside = sa.select(vectors.c.vector).where(vectors.c.generation == quarantine(0))
        opened = gallery.seal.open_vectors([connection.execute(aside).scalar_one()], 0, DIMENSION)
        np.testing.assert_array_equal(opened, vector()[None])
        first_free = connection.execute(sa.select(sa.func.max(subjects.c.pk))).scalar_one() + 2
    # The deleted subject's key does not return.
    assert store.put_subject(gallery, "next", None, {}, [])[0].pk == first_free
    with open_check(open_database(url)) as check:
        assert list(check.findings(None, repair=False)) == []
    database.close()


def test_no_page_of_the_file_keeps_what_lay_in_clear(tmp_path: Path) -> None:
    """Neither the pages that the sealed rows left, nor those that were free before, nor the log."""
    path = tmp_path / "kith.db"
    before_0007(f"sqlite:///{path}")
    engine = engine_of(f"sqlite:///{path}")
    with engine.begin() as connection:  # which overwrites nothing that it deletes
        connection.exec_driver_sql("PRAGMA secure_delete = OFF")
        connection.exec_driver_sql("CREATE TABLE gone AS SELECT name FROM subjects")
        connection.exec_driver_sql("DROP TABLE gone")
    engine.dispose()
    files = (path, tmp_path / "kith.db-wal")
    secrets = (*SECRETS, IMAGE, vector().tobytes())
    assert all(secret in path.read_bytes() for secret in secrets)
    database = open_database(f"sqlite:///{path}")
    for file in files:
        assert not [secret for secret in secrets if file.exists() and secret in file.read_bytes()], file
    is_there(database)
    database.close()


def test_a_file_that_others_are_reading_is_written_anew_by_the_next_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kith.db"
    url = f"sqlite:///{path}"
    before_0007(url)
    monkeypatch.setattr("service.gallery.database.BUSY_TIMEOUT_MS", 100)
    open_database(url).close()  # so that a reader has the tables of now
    with engine_of(url).begin() as connection:
        connection.exec_driver_sql("PRAGMA user_version = 0")
    reader = engine_of(url).connect()
    reader.exec_driver_sql("BEGIN")
    reader.exec_driver_sql("SELECT * FROM galleries").all()
    database = open_database(url)
    assert "may still lie in free pages" in caplog.text
    is_there(database)
    database.close()
    reader.close()
    caplog.clear()
    open_database(url).close()
    assert not caplog.text
    with engine_of(url).connect() as connection:
        assert connection.exec_driver_sql("PRAGMA user_version").scalar() == 7
