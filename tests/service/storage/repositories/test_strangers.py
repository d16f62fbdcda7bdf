"""Strangers in the database: remembered once, by all servers, for a limited time, and erased without a trace."""

from __future__ import annotations

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import sqlalchemy as sa

from kith.wire.crops import CropIn
from models.runtime.network import Float
from service.core.errors import (
    GalleryMovedError,
    GalleryNotFoundError,
    InvalidRequestError,
    NotFoundError,
    SubjectErasedError,
)
from service.domain.gallery import Crop, Gallery, GallerySettings
from service.domain.outcomes import RiskTarget
from service.domain.strangers import SIGHTING_STEP, Nearest, Recalled, Stranger
from service.index.follower import Followers, in_process
from service.risk.strangers import recall
from service.storage.audit.log import AuditFilter, listed_lines
from service.storage.damage import damage
from service.storage.db.engine import Database
from service.storage.db.tables import galleries, subjects, templates, vectors
from service.storage.privacy.backup import back_up, restore
from service.storage.privacy.master_key_rotation import uses
from service.storage.privacy.retention import Retention
from service.storage.privacy.subject_access import everything_about_stranger
from service.storage.repositories import strangers as module
from service.storage.repositories.api_keys import KeyStore
from service.storage.repositories.bulk_templates import BulkStore
from service.storage.repositories.generations import GenerationStore
from service.storage.repositories.store import Store
from service.storage.repositories.strangers import Sighting
from tests.databases import ON_BOTH, change_recognizer, open_database
from tests.refusals import raises_code

DIMENSION = 8
NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)
SETTINGS = GallerySettings(risk=RiskTarget("threshold", 0.6), remember_strangers_days=30)
LANDMARKS = ((1.0, 2.0),) * 5
FOLLOWERS: WeakKeyDictionary[Store, Followers] = WeakKeyDictionary()
"""Indexes of each server."""


@pytest.fixture
def gallery(store: Store) -> Gallery:
    return store.galleries.create("g", "f" * 32, DIMENSION, SETTINGS)


def person(number: int, turned: float = 0.0) -> Float:
    """Return a face of a person: unlike all other people, and like the same person turned less."""
    vector = np.zeros(DIMENSION, np.float32)
    vector[number], vector[DIMENSION - 1] = np.cos(turned), np.sin(turned)
    return vector


def sighting(vector: Float, crop: bool = False) -> Sighting:
    kept = Crop(b"picture", LANDMARKS) if crop else None
    return Sighting(uuid.uuid4().hex, vector, "photo", {"score": 0.5}, 0.9, kept)


def rule(vector: Float, nearest: Nearest | None) -> Recalled:
    return recall(vector, nearest, None, SETTINGS)


def see(store: Store, gallery: Gallery, *faces: Float, at: datetime = NOW, crop: bool = False) -> list[Stranger]:
    followers = FOLLOWERS.setdefault(store, Followers(in_process(store)))
    faces_seen = [sighting(face, crop) for face in faces]
    seen, _ = store.strangers.remember(gallery, faces_seen, followers.nearest, rule, at)
    assert None not in seen
    return [one for one in seen if one is not None]


def listed(store: Store, gallery: Gallery) -> list[Stranger]:
    return store.strangers.list_page(gallery, None, 1000)


def lines(database: Database, gallery: Gallery) -> list[str]:
    return [row.event for row in listed_lines(database, AuditFilter(gallery=gallery.name), None, 99)]


def count(database: Database, table: sa.Table) -> int:
    with database.read() as connection:
        return int(connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one())


def test_the_gallery_of_strangers_is_hidden(database: Database, store: Store, gallery: Gallery) -> None:
    see(store, gallery, person(0))
    see(store, gallery, person(1))
    assert store.galleries.get("g").version == gallery.version
    assert count(database, galleries) == 2
    assert [each.name for each in store.galleries.list_page(None, 9)] == ["g"]
    sizes = store.galleries.sizes(9)
    assert (sizes.galleries, sizes.subjects, sizes.templates, sizes.by_gallery) == (1, 0, 0, {"g": (0, 0)})
    assert store.galleries.keys() == {gallery.pk}
    assert KeyStore(database).gallery_names() == {"g"}
    with database.read() as connection:
        (name,) = connection.execute(sa.select(galleries.c.name).where(galleries.c.companion_of == gallery.pk)).one()
        assert [use.galleries for use in uses(connection).values()] == [1]
    for refused in (store.galleries.get, store.galleries.delete, lambda name: store.galleries.update(name, replace)):
        with pytest.raises(GalleryNotFoundError):
            refused(name)
    with pytest.raises(GalleryNotFoundError), BulkStore(database).open_export(name):
        pass
    assert FOLLOWERS[store].sequences() == {}
    assert list(damage(database)) == []
    with database.engine.begin() as connection:
        connection.execute(vectors.update().values(vector=b"altered"))
    (found,) = damage(database)
    assert found.startswith("gallery g: 2 values of vectors.vector were altered")


def test_sightings_that_change_nothing_write_nothing(database: Database, store: Store, gallery: Gallery) -> None:
    (first,) = see(store, gallery, person(0))
    search = FOLLOWERS[store].nearest
    with database.write(InvalidRequestError("locked")) as connection:  # a writer would wait for this one
        connection.execute(galleries.update().values(dimension=galleries.c.dimension))
        (again,) = see(store, gallery, person(0), at=NOW + SIGHTING_STEP / 2)
        unclear = store.strangers.remember(gallery, [sighting(person(1))], search, lambda *_: "unclear", NOW)
    assert (again, unclear) == (first, ([None], False))
    (later,) = see(store, gallery, person(0), at=NOW + SIGHTING_STEP)
    assert (later.last_seen, later.template_count) == (NOW + SIGHTING_STEP, 1), "only a face unlike the others is kept"


@ON_BOTH
def test_servers_that_meet_one_person_at_once_agree(url: str, store: Store, gallery: Gallery) -> None:
    faces, start = [person(number) for number in range(6)], threading.Barrier(4)

    def meet(_: int) -> list[str]:
        with closing(Store(open_database(url))) as apart:
            there = apart.galleries.get("g")
            start.wait()
            return [see(apart, there, face)[0].id for face in faces]

    with ThreadPoolExecutor(4) as threads:
        (ids,) = {tuple(each) for each in threads.map(meet, range(4))}
    assert len(set(ids)) == len(faces)
    assert {one.id for one in listed(store, gallery)} == set(ids)


def test_strangers_are_of_their_gallery(store: Store, gallery: Gallery) -> None:
    other = store.galleries.create("other", "f" * 32, DIMENSION, SETTINGS)
    (here,), (there,) = see(store, gallery, person(0)), see(store, other, person(0))
    assert here.id != there.id
    export = partial(everything_about_stranger, store.database)
    for refused in (store.strangers.get, store.strangers.forget, export):
        with pytest.raises(NotFoundError):
            refused(other, here.id)
    with raises_code("stranger_not_found"):
        store.strangers.merge(gallery, here.id, there.id)
    with pytest.raises(InvalidRequestError, match="another"):
        store.strangers.merge(gallery, here.id, here.id)
    assert [one.id for one in store.strangers.list_page(other, there.pk + 1, 1)] == [there.id]
    assert store.strangers.list_page(other, there.pk, 1) == []


# Promotion and merging


def test_a_promoted_stranger_is_a_subject(database: Database, store: Store, gallery: Gallery) -> None:
    see(store, gallery, person(0), crop=True)
    see(store, gallery, person(1))
    two, one = listed(store, gallery)
    strangers = [CropIn(stranger=each) for each in (one.id, two.id, "0" * 32)]
    assert store.crops.read(gallery, strangers) == [b"picture", None, None]
    done = store.strangers.promote(gallery, one.id, "ada", "Ada", NOW)
    assert (done.subject.id, done.subject.name, done.template_count, done.receipt.kind) == ("ada", "Ada", 1, "moved")
    after = store.galleries.get("g")
    assert store.crops.read(after, [CropIn(subject="ada")]) == [b"picture"]
    with database.read() as connection:
        counts = sa.select(galleries.c.subject_count, galleries.c.template_count).order_by(galleries.c.pk)
        assert connection.execute(counts).all() == [(1, 1), (1, 1)]  # the second one is of strangers
    assert {"stranger_remembered", "templates_enrolled", "stranger_promoted"} <= set(lines(database, gallery))
    with raises_code("stranger_not_found") as gone:
        store.strangers.promote(after, one.id, "ada", None, NOW)
    assert gone.value.extra["receipt"]["id"] == done.receipt.id
    # A subject that exists gets templates and keeps its name. One that was erased meanwhile does not come back.
    store.subjects.delete(after, "ada")
    with pytest.raises(SubjectErasedError):
        store.strangers.promote(after, two.id, "ada", None, NOW)
    assert listed(store, after) == [two]
    store.subjects.put(store.galleries.get("g"), "bob", "Bob", {}, ["staff"])
    done = store.strangers.promote(store.galleries.get("g"), two.id, "bob", "Ada", NOW)
    assert (done.subject.name, done.subject.tags, done.subject.template_count) == ("Bob", ["staff"], 1)
    assert listed(store, after) == []


def test_a_merge_keeps_the_best_templates(
    database: Database, store: Store, gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, score in enumerate((0.1, 0.9)):
        face = replace(sighting(person(number)), quality={"score": score})
        store.strangers.remember(gallery, [face], Followers(in_process(store)).nearest, rule, NOW)
    second, first = listed(store, gallery)
    monkeypatch.setattr(module, "MAX_TEMPLATES", 1)
    assert store.strangers.merge(gallery, second.id, first.id)[0].template_count == 1
    with database.read() as connection:
        assert connection.execute(sa.select(templates.c.quality)).scalars().all() == [{"score": 0.9}]


# Erasure


def test_an_erasure_before_a_face_is_written_lets_it_found_nobody(
    database: Database, store: Store, gallery: Gallery
) -> None:
    store.subjects.put(gallery, "ada", None, {}, [])

    def erase_and_search(*given: Any) -> Any:
        store.subjects.delete(store.galleries.get("g"), "ada")
        return FOLLOWERS[store].nearest(*given)

    see(store, gallery, person(0))
    began = store.galleries.get("g")
    assert store.strangers.remember(began, [sighting(person(5))], erase_and_search, rule, NOW) == ([None], False)


@ON_BOTH
def test_a_photo_that_is_erased_after_its_promotion_is_in_no_restored_backup(
    database: Database, store: Store, gallery: Gallery, tmp_path: Path
) -> None:
    (one,) = see(store, gallery, person(0))
    back_up(database, tmp_path / "backup")
    store.strangers.promote(gallery, one.id, "ada", None, NOW)
    (photo,) = store.templates.list_page(gallery, "ada")
    store.templates.delete(gallery, "ada", photo.id)
    restore(database, tmp_path / "backup", replace=True)
    assert count(database, subjects) == count(database, templates) == 0


def test_all_are_erased_when_the_gallery_remembers_none_any_more(
    database: Database, store: Store, gallery: Gallery
) -> None:
    other = store.galleries.create("other", "f" * 32, DIMENSION, SETTINGS)
    for each in (gallery, other):
        see(store, each, person(0))
    store.galleries.update("g", lambda current: replace(current, remember_strangers_days=None))
    assert Retention(database).sweep(NOW).removed["subjects"] == 1
    assert (len(listed(store, gallery)), len(listed(store, other))) == (0, 1)
    assert "retention_applied" in lines(database, gallery)


def test_another_recognizer_starts_anew_and_finishing_deletes_the_former_strangers(
    database: Database, store: Store, gallery: Gallery
) -> None:
    see(store, gallery, person(0), person(1))
    store.galleries.update("g", lambda current: replace(current, risk=RiskTarget("fpir", 0.01)))
    change_recognizer(database, "g", "b" * 32, DIMENSION)
    with pytest.raises(GalleryMovedError):
        see(store, gallery, person(2))
    moved = store.galleries.get("g")
    assert listed(store, moved) == [] and count(database, subjects) == 2
    (new,) = see(store, moved, person(0))
    assert listed(store, moved) == [new]
    GenerationStore(database).finish(store.galleries.get("g"), force=True)
    assert listed(store, store.galleries.get("g")) == [new]
    assert count(database, subjects) == count(database, templates) == count(database, vectors) == 1
    last = listed_lines(database, AuditFilter(gallery="g"), None, 1)[0]
    assert (last.event, last.details["strangers"]) == ("migration_finished", 2)
