"""Personal data is stored sealed, and altered rows are detected."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from models.runtime.network import Float
from models.vision.recognition import l2_normalize
from service.core.actor import Actor, acting_as
from service.core.errors import GalleryNotFoundError, StorageDamagedError
from service.domain.gallery import Crop, Gallery, GallerySettings, IdempotentResponse, NewTemplate, SubjectFilter
from service.security.sealing import SealBrokenError
from service.storage.damage import damage
from service.storage.db.engine import Database
from service.storage.db.row_sealing import open_crop, open_cursor, seal_cursor, subject_lookup
from service.storage.db.tables import (
    crops,
    data_keys,
    idempotency,
    job_items,
    jobs,
    labels,
    metadata,
    subjects,
    vectors,
)
from service.storage.repositories.bulk_templates import BulkStore
from service.storage.repositories.generations import GenerationStore
from service.storage.repositories.jobs import ItemOutcome, JobStore
from service.storage.repositories.store import Store
from tests.databases import ON_BOTH, open_database
from tests.postgres import DatabaseUrl
from tests.refusals import raises_code

DIMENSION = 32
NAME, ID, TAG, VALUE = "Ada Lovelace", "ada-1815", "poetical science", "analytical engine"
KEY, DIGEST, ANSWER, FILE, PROBLEM = "retry 4711", "c0ffee" * 10, '{"enrolled": 1}', "ada-1815/at-home.jpg", "two faces"
IMAGE = b"a picture of Ada by Margaret Sarah Carpenter"
SECRETS = [text.encode() for text in (NAME, ID, TAG, VALUE, KEY, DIGEST, ANSWER, FILE, PROBLEM)]
POINTS = tuple((1.5 * i, 30720.25) for i in range(5))


def vector(seed: int = 0) -> Float:
    return np.asarray(l2_normalize(np.random.default_rng(seed).normal(size=(1, DIMENSION)))[0], np.float32)


def used(database: Database) -> Gallery:
    """Ada, by every way that leads into the database but imports."""
    store, job_store = Store(database), JobStore(database)
    gallery = store.galleries.create("g", "f" * 32, DIMENSION, GallerySettings(keep_crops=True))
    store.subjects.put(gallery, ID, NAME, {"work": VALUE}, [TAG])
    new = NewTemplate(uuid.uuid4().hex, vector(), "photo", {"score": 0.5}, 0.9, crop=Crop(IMAGE, POINTS))
    store.templates.enroll(gallery, ID, [new], IdempotentResponse(KEY, DIGEST, ANSWER))
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
    gallery = store.galleries.get("g")
    ada = store.subjects.get(gallery, ID)
    assert (ada.id, ada.name, ada.metadata, ada.tags, ada.template_count) == (ID, NAME, {"work": VALUE}, [TAG], 1)
    for chosen in (SubjectFilter((TAG,)), SubjectFilter(metadata=(("work", VALUE),))):
        assert [found.id for found in store.subjects.list_page(gallery, None, 9, chosen)] == [ID]
        assert store.subjects.matching_pks(gallery, chosen).tolist() == [ada.pk]
    taken = store.changes.snapshot(gallery)
    np.testing.assert_array_equal(taken.vectors, vector()[None])
    assert [t.subject for t in store.templates.by_pk(gallery, taken.template_pks.tolist()).values()] == [ID]
    (waiting,) = GenerationStore(database).crops(gallery, taken.template_pks.tolist())
    kept = open_crop(gallery.seal, waiting.sealed)
    assert (kept.image, [tuple(point) for point in kept.landmarks_xy]) == (IMAGE, list(POINTS))
    assert store.templates.stored_answer(gallery, KEY, DIGEST) == ANSWER
    with raises_code("idempotency_conflict"):
        store.templates.stored_answer(gallery, KEY, "another")
    (job,) = job_store.list_jobs(gallery, (), None, 9)
    assert job.problem == {"code": "archive_invalid", "detail": FILE}
    (item,) = job_store.items(job, None, 9, failed_only=True)
    assert (item.item, item.problem) == (FILE, {"detail": PROBLEM})
    assert FILE in job_store.done(job)


@ON_BOTH
def test_nothing_lies_in_clear(database: Database) -> None:
    gallery = used(database)
    is_there(database)
    stored = everything(database)
    assert b"several_faces" in stored  # what is searched for would be found
    for secret in (*SECRETS, IMAGE, vector().tobytes(), b"30720.25"):
        assert secret not in stored, secret
    with database.read() as connection:
        row = connection.execute(sa.select(job_items.c.subject, job_items.c.failed)).one()
        assert tuple(row) == (subject_lookup(gallery.seal, ID), True)
        assert connection.execute(sa.select(jobs.c.actor)).scalar() == "key:0123456789ab"


def test_galleries_have_nothing_in_common(database: Database) -> None:
    """Ids and tags do not reveal subjects of both galleries, and sealed values do not open in the other one."""
    store = Store(database)
    one, two = (store.galleries.create(name, "f" * 32, DIMENSION, GallerySettings()) for name in ("one", "two"))
    for gallery in (one, two):
        store.subjects.put(gallery, ID, NAME, {}, [TAG])
        store.templates.enroll(gallery, ID, [NewTemplate(uuid.uuid4().hex, vector(), "embedding")], None)
    with database.write(StorageDamagedError("unforeseen")) as connection:
        for column in (subjects.c.lookup, subjects.c.sealed, labels.c.label, vectors.c.vector):
            first, second = connection.execute(sa.select(column)).scalars()
            assert first != second, column
        sealed = connection.execute(sa.select(subjects.c.sealed)).scalars().first()
        connection.execute(subjects.update().values(sealed=sealed))
    broken = 0
    for gallery in (one, two):
        try:
            assert store.subjects.get(gallery, ID).name == NAME
        except StorageDamagedError:
            broken += 1
    assert broken == 1
    place = seal_cursor(one.seal, 7)
    assert open_cursor(one.seal, place) == (7,)
    with pytest.raises(SealBrokenError):
        open_cursor(two.seal, place)


def test_what_was_altered_is_damage_and_never_passed_over(database: Database) -> None:
    """Wherever it is read; and the doctor says in which gallery."""
    gallery = used(database)
    store, job_store = Store(database), JobStore(database)
    (job,) = job_store.list_jobs(gallery, (), None, 9)
    ada = store.subjects.get(gallery, ID).pk
    bulk = BulkStore(database)

    def exported() -> None:
        with bulk.open_export("g", with_crops=True) as reading:
            list(reading.blocks())

    reads: dict[sa.Column[Any], list[Callable[[], object]]] = {
        subjects.c.sealed: [
            lambda: store.subjects.get(gallery, ID),
            lambda: store.subjects.list_page(gallery, None, 9, SubjectFilter()),
            lambda: store.subjects.names(gallery, [ada]),
            lambda: store.subjects.patch(gallery, ID, {"tags": []}),
            exported,
        ],
        vectors.c.vector: [
            lambda: store.changes.snapshot(gallery),
            lambda: store.changes.changed_subjects(gallery, 0, 9),
            lambda: store.templates.vectors(gallery, ID),
            exported,
        ],
        crops.c.sealed: [exported],
        idempotency.c.sealed: [lambda: store.templates.stored_answer(gallery, KEY, DIGEST)],
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
            with pytest.raises(StorageDamagedError, match="cannot be decrypted"):
                way()
        (found,) = damage(database)
        assert found.startswith(f"gallery g: 1 values of {column} were altered")
        with database.write(StorageDamagedError("unforeseen")) as connection:
            connection.execute(sa.update(table).values({column.name: whole}))
    is_there(database)
    # The key of a row's own gallery opens it, wherever in the gallery it was put.
    store.subjects.put(gallery, "grace", None, {}, [])
    with database.write(StorageDamagedError("unforeseen")) as connection:
        anothers = connection.execute(sa.select(subjects.c.sealed).order_by(subjects.c.pk)).scalars().first()
        connection.execute(subjects.update().values(sealed=anothers))
    (found,) = damage(database)
    assert found.startswith("gallery g: 1 values of subjects.sealed were altered")


def test_a_deleted_gallerys_key_is_gone_everywhere(database_url: DatabaseUrl) -> None:
    url = database_url()
    here, asking, silent = (open_database(url) for _ in range(3))
    gallery = used(here)
    store = Store(asking)
    for known in (store, Store(silent)):
        assert known.galleries.get("g").pk == gallery.pk
    Store(here).galleries.delete("g")
    with pytest.raises(GalleryNotFoundError):
        store.galleries.get("g")
    assert gallery.pk not in asking.vault._seals
    with silent.read() as connection:
        assert connection.execute(sa.select(data_keys)).all() == []
        assert gallery.pk in silent.vault._seals
        silent.vault.evict_deleted(connection)
        assert gallery.pk not in silent.vault._seals
    for database in (here, asking, silent):
        database.close()
