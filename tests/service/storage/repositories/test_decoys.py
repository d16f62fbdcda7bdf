"""Decoys are sealed, bounded, seen by every process, exported, and erased with their subject or by themselves."""

from __future__ import annotations

import uuid
from contextlib import closing
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from kith.wire.common import TemplateKind
from kith.wire.fields import MAX_DECOYS
from models.runtime.network import Float
from models.vision.recognition import l2_normalize
from service.core.errors import InvalidRequestError, SubjectNotFoundError
from service.domain.gallery import Crop, Gallery, GallerySettings, NewTemplate, SubjectFilter
from service.storage.audit.log import AuditFilter, listed_lines
from service.storage.db import tables
from service.storage.db.engine import Database
from service.storage.privacy.retention import Retention
from service.storage.repositories.bulk_templates import BulkStore
from service.storage.repositories.generations import GenerationStore
from service.storage.repositories.jobs import JobStore
from service.storage.repositories.store import Store
from tests.databases import ON_BOTH, change_recognizer, open_database
from tests.refusals import raises_code

D = 16


@pytest.fixture
def store(database: Database, rng: np.random.Generator) -> Store:
    made = Store(database)
    gallery = made.galleries.create("g", "a" * 32, D, GallerySettings())
    for name in ("ada", "bo"):
        made.templates.enroll(gallery, name, [NewTemplate(uuid.uuid4().hex, drawn(rng), "photo")], None)
    return made


def drawn(rng: np.random.Generator) -> Float:
    return np.asarray(l2_normalize(rng.normal(size=D)[None])[0], np.float32)


def template(vector: Float, kind: TemplateKind = "photo", crop: Crop | None = None) -> NewTemplate:
    return NewTemplate(uuid.uuid4().hex, vector, kind, crop=crop)


def now(store: Store) -> Gallery:
    return store.galleries.get("g")


def of(store: Store, name: str) -> Float:
    return store.decoys.vectors(now(store), name)


def test_a_decoy_is_stored_once_and_no_template(store: Store, url: str, rng: np.random.Generator) -> None:
    vector = drawn(rng)
    with closing(Store(open_database(url))) as other:
        before = now(other)
        assert not before.outsiders
        decoy, created = store.decoys.add(now(store), "ada", template(vector))
        assert created
        assert store.decoys.add(now(store), "ada", template(vector, "embedding")) == (decoy, False)
        after = now(other)  # of a process that cached the gallery
        assert list(after.outsiders.values()) == [store.subjects.get(after, "ada").pk]
        assert np.allclose(of(other, "ada"), vector, atol=1e-6) and not len(of(other, "bo"))
    assert (after.subjects, after.templates) == (before.subjects, before.templates) == (2, 2)
    enrolled = store.templates.vectors(after, "ada")[0]
    with raises_code("decoy_enrolled"):
        store.decoys.add(after, "ada", template(enrolled[0]))
    store.decoys.add(after, "bo", template(enrolled[0]))  # of another subject: the photo of Ada is not Bo
    with pytest.raises(SubjectNotFoundError):
        store.decoys.add(after, "cy", template(vector))


def test_callers_see_no_outsider(database: Database, store: Store, rng: np.random.Generator) -> None:
    """It is in the index and in no list, count, evidence or file, and its template is no template of a subject."""
    decoy, _ = store.decoys.add(now(store), "ada", template(drawn(rng)))
    gallery = now(store)
    ((outsider, ada),) = gallery.outsiders.items()
    assert store.subjects.get(gallery, "ada").pk == ada
    assert outsider in store.changes.snapshot(gallery).subject_pks
    assert outsider not in store.changes.snapshot(gallery, of_people=True).subject_pks
    everyone = SubjectFilter()
    assert [one.id for one in store.subjects.list_page(gallery, None, 10, everyone)] == ["ada", "bo"]
    assert [one.id for one in store.subjects.find_page(gallery, None, 10, everyone, ())[0]] == ["ada", "bo"]
    assert outsider not in store.subjects.matching_pks(gallery, everyone)
    assert store.subjects.names(gallery, [outsider]) == {}
    assert len(store.templates.list_page(gallery, None)) == 2
    assert store.templates.delete_many(gallery, [decoy.id]) == []
    assert store.galleries.sizes(1).by_gallery == {"g": (2, 2)}
    with raises_code("template_not_found"):
        store.templates.get(gallery, None, decoy.id)
    with BulkStore(database).open_export("g") as export:
        assert {item["subject"] for block in export.blocks() for item in block} == {"ada", "bo"}
    assert len(store.decoys.list_all(gallery, "ada")) == 1


def test_their_number_is_bounded(store: Store, rng: np.random.Generator) -> None:
    gallery = now(store)
    for _ in range(MAX_DECOYS):
        assert store.decoys.add(gallery, "ada", template(drawn(rng)))[1]
    with raises_code("too_many_decoys"):
        store.decoys.add(gallery, "ada", template(drawn(rng)))
    store.decoys.add(gallery, "bo", template(drawn(rng)))
    with pytest.raises(InvalidRequestError, match=f"{MAX_DECOYS + 1} decoys"):
        store.subjects.merge(gallery, "bo", "ada")


def test_it_is_erased_alone_or_with_its_subject(database: Database, store: Store, rng: np.random.Generator) -> None:
    decoy, *_ = (store.decoys.add(now(store), name, template(drawn(rng)))[0] for name in ("ada", "ada", "bo"))
    with raises_code("decoy_not_found"):
        store.decoys.delete(now(store), "bo", decoy.id)
    receipt = store.decoys.delete(now(store), "ada", decoy.id)
    assert (receipt.kind, receipt.subject, receipt.removed) == ("subject", decoy.id, {})
    assert store.decoys.delete(now(store), "ada", decoy.id).id == receipt.id
    with raises_code("decoy_not_found"):
        store.decoys.delete(now(store), "ada", "0" * 32)
    with pytest.raises(SubjectNotFoundError):
        store.decoys.delete(now(store), "cy", "0" * 32)
    with raises_code("template_not_found"):  # its receipt is of another kind
        store.templates.delete(now(store), "ada", decoy.id)
    events = [each.event for each in listed_lines(database, AuditFilter(now(store).pk), None, 2)]
    assert events == ["decoy_deleted", "decoy_added"]
    assert store.subjects.delete(now(store), "ada").removed == {"subjects": 1, "templates": 1}


@ON_BOTH
def test_it_counts_for_the_recognizers_that_embedded_it(
    database: Database, store: Store, rng: np.random.Generator
) -> None:
    """A crop lets the next recognizer embed it, as any template. Without one, finishing the migration deletes it."""
    generations, jobs = GenerationStore(database), JobStore(database)
    store.galleries.update("g", lambda _: GallerySettings(keep_crops=True))
    without, _ = store.decoys.add(now(store), "ada", template(drawn(rng)))
    cropped, _ = store.decoys.add(now(store), "ada", template(drawn(rng), crop=Crop(b"face", ((1, 2.5),))))
    assert generations.without_crop(now(store), 10)[0] == 2  # of Ada and Bo
    generations.start(now(store), "b" * 32, D, "new", force=True)
    job, view = jobs.claim("here", 60), now(store).at_generation(1)
    assert job is not None
    (key,) = generations.missing_keys(view)
    generations.add(view, {key: drawn(rng)}, job, [], 1.0)
    assert generations.switch(view, job, lambda crops: ({}, []), (), 1.0)
    assert len(now(store).outsiders) == len(of(store, "ada")) == 1
    assert [(one.id, one.in_use) for one in store.decoys.list_all(now(store), "ada")] == [
        (without.id, False),
        (cropped.id, True),
    ]
    generations.roll_back(now(store))
    assert len(now(store).outsiders) == len(of(store, "ada")) == 2
    change_recognizer(database, "g", "b" * 32, D)
    generations.finish(now(store), force=True)
    assert [one.id for one in store.decoys.list_all(now(store), "ada")] == [cropped.id]
    assert (now(store).subjects, now(store).templates) == (2, 2)
    last = listed_lines(database, AuditFilter(now(store).pk), None, 1)[0]
    assert (last.event, last.details["decoys"]) == ("migration_finished", 1)


def test_retention_erases_it(database: Database, store: Store, rng: np.random.Generator) -> None:
    store.decoys.add(now(store), "ada", template(drawn(rng)))
    gallery = now(store)
    store.galleries.update("g", lambda _: GallerySettings(retention_days=10))
    old = datetime.now(UTC) - timedelta(days=11)
    with database.change(now(store)) as connection:
        of_outsiders = tables.templates.update().where(~tables.OF_PERSON)
        connection.execute(of_outsiders.values(created_at=old))
    Retention(database).sweep(datetime.now(UTC))
    assert store.decoys.list_all(now(store), "ada") == []
    assert (now(store).subjects, now(store).templates) == (gallery.subjects, gallery.templates)
    last = listed_lines(database, AuditFilter(gallery.pk), None, 1)[0]
    assert (last.event, last.details["removed"]) == ("retention_applied", {})
