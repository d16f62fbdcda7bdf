"""Strangers in the database: remembered once, by all servers, for a limited time, and erased without a trace."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
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
from service.domain.gallery import Crop, Gallery, GallerySettings, SubjectFilter
from service.domain.outcomes import RiskTarget
from service.domain.strangers import MAX_TEMPLATES, SIGHTING_STEP, VISIT_GAP, Nearest, Recalled, Stranger
from service.index.follower import Followers, in_process
from service.risk.strangers import recall
from service.security.sealing import Seal
from service.storage.audit.log import AuditFilter, listed_lines
from service.storage.damage import damage
from service.storage.db.engine import Database
from service.storage.db.tables import crops, data_keys, events, galleries, subjects, templates, vectors
from service.storage.events.log import EventLog
from service.storage.privacy.backup import back_up, restore
from service.storage.privacy.master_key_rotation import uses
from service.storage.privacy.retention import Retention
from service.storage.privacy.subject_access import everything_about, everything_about_stranger
from service.storage.repositories import strangers as module
from service.storage.repositories.api_keys import KeyStore
from service.storage.repositories.bulk_templates import BulkStore
from service.storage.repositories.generations import GenerationStore
from service.storage.repositories.store import Store
from service.storage.repositories.strangers import Recall, Sighting
from tests.databases import ON_BOTH, change_recognizer, open_database
from tests.refusals import raises_code
from tests.service.storage.events.test_outbox import pending, subscribe

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


def sighting(vector: Float, score: float = 0.5, crop: bool = False) -> Sighting:
    kept = Crop(b"picture", LANDMARKS) if crop else None
    return Sighting(uuid.uuid4().hex, vector, "photo", {"score": score}, 0.9, kept)


def rule(vector: Float, nearest: Nearest | None) -> Recalled:
    return recall(vector, nearest, None, SETTINGS)


def diverse(vector: Float, nearest: Nearest | None) -> Recalled:
    found = rule(vector, nearest)
    return replace(found, is_diverse=found.is_met and nearest is not None and len(nearest.own()) < MAX_TEMPLATES)


def remember(
    store: Store, gallery: Gallery, faces: list[Sighting], chosen: Recall = rule, at: datetime = NOW
) -> tuple[list[Stranger | None], bool]:
    followers = FOLLOWERS.setdefault(store, Followers(in_process(store)))
    return store.strangers.remember(gallery, faces, followers.nearest, chosen, at)


def see(store: Store, gallery: Gallery, *faces: Float, at: datetime = NOW) -> list[Stranger]:
    seen, _ = remember(store, gallery, [sighting(face) for face in faces], at=at)
    assert None not in seen
    return [one for one in seen if one is not None]


def listed(store: Store, gallery: Gallery) -> list[Stranger]:
    return store.strangers.list_page(gallery, None, 1000)


def lines(database: Database, gallery: Gallery) -> list[str]:
    return [row.event for row in listed_lines(database, AuditFilter(gallery=gallery.name), None, 99)]


def count(database: Database, table: sa.Table) -> int:
    with database.read() as connection:
        return int(connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one())


def test_a_person_keeps_the_id(store: Store, gallery: Gallery) -> None:
    (first, other) = see(store, gallery, person(0), person(1))
    assert first.id != other.id
    (again,) = see(store, gallery, person(0, 0.3), at=NOW + timedelta(days=1))
    assert (again.id, again.seen_count, again.first_seen) == (first.id, 2, NOW)
    assert again.last_seen == NOW + timedelta(days=1)
    assert store.strangers.get(gallery, first.id) == again
    assert [one.id for one in listed(store, gallery)] == [other.id, first.id]
    assert [one.id for one in store.strangers.list_page(gallery, other.pk, 1)] == [first.id]


def test_two_faces_of_one_photo_are_two_people(store: Store, gallery: Gallery) -> None:
    """Two faces of a request in different photos, or in none, may be of one."""
    first, second = see(store, gallery, person(1), person(1, 0.1))
    assert first.id == second.id
    faces = [replace(sighting(person(0, turn)), photo=photo) for photo, turn in ((0, 0.0), (0, 0.1), (1, 0.0))]
    seen, _ = remember(store, gallery, faces)
    ids = [one and one.id for one in seen]
    assert ids[0] != ids[1] and ids[2] == ids[0] and None not in ids
    again, _ = remember(store, gallery, faces)
    assert [one and one.id for one in again] == ids


def test_the_gallery_of_strangers_is_hidden(database: Database, store: Store, gallery: Gallery) -> None:
    see(store, gallery, person(0))
    see(store, gallery, person(1))
    after = store.galleries.get("g")
    assert (after.version, after.subjects, after.templates, after.last_change) == (gallery.version, 0, 0, 0)
    assert store.subjects.list_page(after, None, 9, SubjectFilter()) == []
    assert len(store.changes.snapshot(after).template_pks) == 0
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


def test_sightings_within_a_minute_write_nothing(database: Database, store: Store, gallery: Gallery) -> None:
    (first,) = see(store, gallery, person(0))
    before = lines(database, gallery)
    with database.write(InvalidRequestError("locked")) as connection:  # a writer would wait for this one
        connection.execute(galleries.update().values(dimension=galleries.c.dimension))
        (again,) = see(store, gallery, person(0), at=NOW + SIGHTING_STEP / 2)
    assert again == first
    assert lines(database, gallery) == before


def test_diverse_templates_are_kept_up_to_the_limit(database: Database, store: Store, gallery: Gallery) -> None:
    for turn in range(MAX_TEMPLATES + 2):
        (found,), _ = remember(store, gallery, [sighting(person(0, turn / 20))], diverse, NOW)
    assert found is not None and found.template_count == MAX_TEMPLATES
    assert count(database, templates) == MAX_TEMPLATES
    # The second face is like the first one only by way of the templates in between.
    assert see(store, gallery, person(0, 1.0))[0].id == found.id


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


def nearest_to(store: Store, gallery: Gallery, vector: Float) -> Nearest | None:
    """Return what this process compares a face with, without a write."""
    compared: list[Nearest | None] = []

    def nothing(_: Float, nearest: Nearest | None) -> Recalled:
        compared.append(nearest)
        return Recalled()

    remember(store, gallery, [sighting(vector)], nothing)
    return compared[0]


def test_a_process_knows_what_it_wrote_as_if_it_had_read_it(
    url: str, store: Store, gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(*stores: Store) -> None:
        with closing(open_database(url)) as fresh:
            anew = Store(fresh)
            for number in range(DIMENSION):
                face = person(number, 0.2)
                expected = nearest_to(anew, gallery, face)
                for each in stores:
                    assert listed(each, gallery) == listed(anew, gallery)
                    found = nearest_to(each, gallery, face)
                    assert found is not None and expected is not None
                    assert found.similarity == pytest.approx(expected.similarity, abs=1e-6)
                    assert (found.strangers, found.mean_templates) == (expected.strangers, expected.mean_templates)
                    if found.similarity > 0.5:  # others are equally unlike
                        np.testing.assert_array_equal(found.own(), expected.own())

    monkeypatch.setattr(module, "MAX_STRANGERS", 5)
    with closing(open_database(url)) as second:
        other = Store(second)
        for photo, numbers in enumerate([(0, 1, 2), (1, 2, 0), (3, 0, 4, 1), (5, 1, 6), (2, 5)]):
            faces = [replace(sighting(person(each, photo / 10), score=0.1 + each / 10), photo=0) for each in numbers]
            writer = (store, other)[photo % 2]
            remember(writer, gallery, faces, diverse, NOW + timedelta(hours=photo))
            check(store, other)
        *_, third, last, first = listed(store, gallery)
        assert len(listed(store, gallery)) == 5
        store.strangers.merge(gallery, last.id, first.id)
        other.strangers.forget(gallery, third.id)
        check(store, other)
        # A visit that another server noted is not counted again.
        gallery, arrival = store.galleries.get("g"), NOW + timedelta(days=1)
        (one,), (again,) = (see(each, gallery, person(1), at=arrival) for each in (other, store))
        assert (one.id, one.seen_count) == (again.id, again.seen_count)


def test_new_strangers_do_not_read_the_known_ones_again(
    url: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be read within the write transaction: 4,900 of them, once for each of 25 faces, in 20 seconds."""
    faces, opened, open_vectors = np.eye(80, dtype=np.float32), list[int](), Seal.open_vectors
    gallery = store.galleries.create("wide", "f" * 32, len(faces), SETTINGS)
    see(store, gallery, *faces[:40])

    def noted(self: Seal, sealed: Sequence[bytes], generation: int, dimension: int) -> Float:
        opened.append(len(sealed))
        return open_vectors(self, sealed, generation, dimension)

    monkeypatch.setattr(Seal, "open_vectors", noted)
    with closing(Store(open_database(url))) as other:
        for each, seen, read in (
            (store, faces[:1], 1),
            (other, faces[:1], 40),
            (store, faces[40:50], 9),  # before each face, what the face before it founded
            (other, faces[50:60], 10 + 9),
            (store, faces[60:70], 1 + 10 + 9),
        ):
            opened.clear()
            see(each, gallery, *seen)
            assert sum(opened) == read


def test_a_full_gallery_forgets_who_was_not_seen_for_longest(
    database: Database, store: Store, gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_STRANGERS", 3)
    first, *_ = see(store, gallery, *(person(number) for number in range(3)))
    see(store, gallery, person(0), at=NOW + timedelta(hours=1))
    see(store, gallery, person(4), at=NOW + timedelta(hours=2))
    assert len(listed(store, gallery)) == 3
    assert first.id in {one.id for one in listed(store, gallery)}
    assert see(store, gallery, person(1), at=NOW + timedelta(hours=2))[0].first_seen == NOW + timedelta(hours=2)


def test_what_is_stored_of_a_face_is_sealed(database: Database, store: Store, gallery: Gallery) -> None:
    remember(store, gallery, [sighting(person(0), crop=True)])
    with database.read() as connection:
        (vector,) = connection.execute(sa.select(vectors.c.vector)).scalars()
        (crop,) = connection.execute(sa.select(crops.c.sealed)).scalars()
    assert person(0).tobytes() not in vector and b"picture" not in crop
    (opened,) = gallery.seal.open_vectors([vector], 0, DIMENSION)
    assert np.array_equal(opened, person(0))
    (other,) = see(store, gallery, person(1))
    strangers = (listed(store, gallery)[1].id, other.id, "0" * 32)
    assert store.crops.read(gallery, [CropIn(stranger=each) for each in strangers]) == [b"picture", None, None]


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


# Promotion and merging


def test_a_promoted_stranger_is_a_subject(database: Database, store: Store, gallery: Gallery) -> None:
    remember(store, gallery, [sighting(person(0), crop=True)])
    see(store, gallery, person(1))
    two, one = listed(store, gallery)
    done = store.strangers.promote(gallery, one.id, "ada", "Ada", NOW)
    assert (done.subject.id, done.subject.name, done.template_count, done.receipt.kind) == ("ada", "Ada", 1, "moved")
    after = store.galleries.get("g")
    assert (after.subjects, after.templates) == (1, 1)
    vectors, qualities = store.templates.vectors(after, "ada")
    assert np.array_equal(vectors, person(0)[None]) and qualities == [0.5]
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


@ON_BOTH
def test_a_merge_adds_visits_and_keeps_the_best_templates(database: Database, store: Store, gallery: Gallery) -> None:
    for number, better in ((0, 0.0), (1, 0.1)):
        for turn in range(MAX_TEMPLATES):
            face = sighting(person(number, turn / 20), score=turn / 10 + better / 2)
            remember(store, gallery, [face], diverse, NOW + timedelta(days=number))
    second, first = listed(store, gallery)
    merged, receipt = store.strangers.merge(gallery, second.id, first.id)
    assert (merged.id, merged.seen_count, merged.template_count) == (first.id, 2, MAX_TEMPLATES)
    assert (merged.first_seen, merged.last_seen) == (NOW, NOW + timedelta(days=1))
    with database.read() as connection:
        qualities = connection.execute(sa.select(templates.c.quality)).scalars().all()
    assert sorted(each["score"] for each in qualities) == pytest.approx([0.2, 0.25, 0.3, 0.35])
    assert see(store, store.galleries.get("g"), person(1), at=NOW + timedelta(days=1))[0].id == first.id
    assert (receipt.kind, receipt.moved_to) == ("moved", first.id)
    with pytest.raises(InvalidRequestError, match="another"):
        store.strangers.merge(gallery, first.id, first.id)


# Erasure


def test_a_forgotten_stranger_is_gone_with_a_receipt(database: Database, store: Store, gallery: Gallery) -> None:
    one, other = see(store, gallery, person(0), person(1))
    receipt = store.strangers.forget(gallery, one.id)
    assert (receipt.kind, receipt.subject) == ("subject", one.id)
    assert receipt.removed == {"subjects": 1, "templates": 1}
    assert store.strangers.forget(gallery, one.id).id == receipt.id
    seen, reported = remember(store, gallery, [sighting(person(0))])
    assert (seen, reported) == ([None], False), "a request from before an erasure founds nobody"
    assert [each.id for each in listed(store, gallery)] == [other.id]
    with raises_code("stranger_not_found"):
        store.strangers.forget(gallery, "0" * 32)
    everyone = store.strangers.forget_all(gallery)
    assert (everyone.kind, everyone.subject, everyone.removed["subjects"]) == ("subject", None, 1)
    assert listed(store, gallery) == [] and count(database, templates) == count(database, vectors) == 0
    assert nearest_to(store, store.galleries.get("g"), person(0)) is None
    see(store, store.galleries.get("g"), person(0))

    def erase_and_search(*given: Any) -> Any:
        store.subjects.delete(store.galleries.get("g"), "ada")
        return FOLLOWERS[store].nearest(*given)

    store.subjects.put(began := store.galleries.get("g"), "ada", None, {}, [])
    assert store.strangers.remember(began, [sighting(person(5))], erase_and_search, rule, NOW) == ([None], False)


@ON_BOTH
@pytest.mark.parametrize("erased", ["one", "everyone", "the people they became"])
def test_an_older_backup_does_not_bring_them_back(
    database: Database, store: Store, gallery: Gallery, tmp_path: Path, erased: str
) -> None:
    forgotten, promoted, merged, kept = see(store, gallery, *(person(number) for number in range(4)))
    store.subjects.put(gallery, "bob", None, {}, [])  # in PostgreSQL the gallery's row comes after its companion's
    back_up(database, file := tmp_path / "kith.backup")
    store.strangers.promote(gallery, promoted.id, "ada", None, NOW)
    store.strangers.merge(gallery, merged.id, kept.id)
    # A merge or a promotion is no erasure: in the backup they are strangers of their own.
    left = {promoted.id, merged.id, kept.id}
    if erased == "everyone":
        store.strangers.forget_all(gallery)
        left = set()
    elif erased == "one":
        store.strangers.forget(gallery, forgotten.id)
    else:
        store.subjects.delete(gallery, "ada")
        store.strangers.forget(gallery, kept.id)
        left = {forgotten.id}
    restore(database, file, replace=True)
    assert {one.id for one in listed(store, store.galleries.get("g"))} == left


def test_a_deleted_gallery_takes_its_strangers_along(database: Database, store: Store, gallery: Gallery) -> None:
    see(store, gallery, person(0), person(1))
    assert len(FOLLOWERS[store]) == 1
    deleted, receipt = store.galleries.delete("g")
    assert receipt.removed == {"subjects": 2, "templates": 2}
    FOLLOWERS[store].drop(deleted)
    assert len(FOLLOWERS[store]) == 0
    assert not any(count(database, table) for table in (galleries, data_keys, subjects, templates, vectors))
    with pytest.raises(GalleryNotFoundError):
        see(store, gallery, person(0))


def test_everything_about_a_stranger_is_exported(database: Database, store: Store, gallery: Gallery) -> None:
    subscribe(database)
    remember(store, gallery, [sighting(person(0), crop=True)])
    (one,) = listed(store, gallery)
    document = json.loads(json.dumps(everything_about_stranger(database, gallery, one.id)))
    about = document["subject"]
    (template,) = about["templates"]
    assert np.array_equal(template["vectors"][0]["vector"], person(0)) and template["crops"][0]["image"]
    assert (document["id"], about["seen_count"]) == (one.id, 1)
    assert [each["type"] for each in about["events"]] == ["stranger_first_seen"]
    assert [line["event"] for line in document["audit"]] == ["stranger_remembered"]
    assert lines(database, gallery)[0] == "stranger_exported"


# Retention


def test_strangers_expire_after_they_were_last_seen(database: Database, store: Store, gallery: Gallery) -> None:
    """Switching it off erases all."""
    other = store.galleries.create("other", "f" * 32, DIMENSION, SETTINGS)
    see(store, other, person(0), at=NOW + timedelta(days=30))
    old, young = see(store, gallery, person(0), person(1))
    see(store, gallery, person(1), at=NOW + timedelta(days=20))
    retention = Retention(database)
    assert retention.sweep(NOW + timedelta(days=29)).removed["subjects"] == 0
    assert retention.sweep(NOW + timedelta(days=31)).removed["subjects"] == 1
    assert [one.id for one in listed(store, gallery)] == [young.id]
    assert "retention_applied" in lines(database, gallery)
    assert see(store, store.galleries.get("g"), person(0), at=NOW + timedelta(days=31))[0].id != old.id
    store.galleries.update("g", lambda current: replace(current, remember_strangers_days=None))
    assert retention.sweep(NOW + timedelta(days=31)).removed["subjects"] == 2
    assert (len(listed(store, gallery)), len(listed(store, other))) == (0, 1)


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


# Events


def test_a_visit_is_one_event(database: Database, store: Store, gallery: Gallery) -> None:
    subscribe(database)
    for second in range(0, 3600, 20):
        (one,) = see(store, gallery, person(0), at=NOW + timedelta(seconds=second))
    see(store, gallery, person(0), at=NOW + timedelta(hours=1) + VISIT_GAP)
    sent = pending(EventLog(database))
    assert [event["type"] for event in sent] == ["stranger_first_seen", "stranger_seen_again"]
    assert [event["data"]["id"] for event in sent] == [one.id, one.id]
    assert [event["data"]["seen_count"] for event in sent] == [1, 2]
    assert sent[0]["data"] == {"gallery": "g", **one.model_copy(update={"last_seen": NOW}).sighting()}


def test_events_go_with_the_stranger(database: Database, store: Store, gallery: Gallery) -> None:
    subscribe(database, types=frozenset({"stranger_first_seen"}))
    forgotten, promoted, merged, kept = see(store, gallery, *(person(number) for number in range(4)))
    assert count(database, events) == 4
    store.strangers.forget(gallery, forgotten.id)
    assert count(database, events) == 3
    store.strangers.promote(gallery, promoted.id, "ada", None, NOW)
    store.strangers.merge(gallery, merged.id, kept.id)
    now = store.galleries.get("g")
    (about,) = everything_about(database, now, "ada")["subject"]["events"]
    assert about["data"]["id"] == promoted.id
    store.subjects.delete(store.galleries.get("g"), "ada")
    assert count(database, events) == 2
    store.strangers.forget(store.galleries.get("g"), kept.id)
    assert count(database, events) == 0
