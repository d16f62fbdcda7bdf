"""Followers in step with the log, whether it is whole, shortened, or followed by many; and as many as memory allows."""

from __future__ import annotations

import threading
import uuid
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from models.runtime.network import Float
from models.vision.recognition import l2_normalize
from service.core.errors import GalleryNotFoundError, StorageError
from service.domain.gallery import Gallery, GallerySettings, Hit, LogTrimmedError, NewTemplate, Snapshot, StoredEvidence
from service.index import follower as follower_module
from service.index.follower import TRIM_AFTER, Follower, Followers, MemoryFollower, in_process
from service.risk.evidence import impostor_evidence
from service.storage.db.engine import Database
from service.storage.db.tables import changes, galleries, index_states
from service.storage.repositories import change_log
from service.storage.repositories.change_log import INDEX_EXPIRY, MIN_KEPT_LINES, ROWS_PER_READ
from service.storage.repositories.store import Store
from tests.databases import ON_BOTH

DIMENSION = 16


@pytest.fixture
def store(database: Database) -> Store:
    return Store(database)


def searched(follower: Follower, probes: Float, k: int) -> tuple[list[list[Hit]], int]:
    """Search after catching up."""
    follower.catch_up()
    return follower.search(probes, k)


def enroll(store: Store, gallery: Gallery, subject: str, vectors: Float) -> None:
    store.templates.enroll(gallery, subject, [NewTemplate(uuid.uuid4().hex, v, "embedding") for v in vectors], None)


@ON_BOTH
def test_a_follower_behind_a_trimmed_log_starts_from_a_snapshot(store: Store, rng: np.random.Generator) -> None:
    gallery = store.galleries.create("g", "f" * 32, DIMENSION, GallerySettings())
    vectors = l2_normalize(rng.normal(size=(12, DIMENSION)))
    follower = Followers(in_process(store)).of(gallery)
    for number, vector in enumerate(vectors[:6]):
        enroll(store, gallery, f"s{number}", vector[None])
    assert searched(follower, vectors[:1], 1)[1] == 6
    for number, vector in enumerate(vectors[6:], 6):
        enroll(store, gallery, f"s{number}", vector[None])
    for number in range(9):
        store.subjects.delete(gallery, f"s{number}")
    assert store.changes.trim(gallery, keep=2) == 18
    assert store.changes.trim(gallery, keep=2) == 0
    with pytest.raises(LogTrimmedError):
        store.changes.changed_subjects(gallery, 6, 100)
    for later in (follower, Followers(in_process(store)).of(gallery)):
        found, compared = searched(later, vectors[9:10], 1)
        assert compared == 3 and found[0][0].similarity == pytest.approx(1, abs=1e-5)
        assert later.sequence() == 21
    enroll(store, gallery, "new", vectors[:1])
    assert searched(follower, vectors[:1], 1)[0][0][0].similarity == pytest.approx(1, abs=1e-5)


def test_a_long_log_is_followed_in_parts(
    store: Store, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imported rows of another process are loaded in batches, and a search sees all of them."""
    monkeypatch.setattr(follower_module, "LINES_PER_BATCH", 5)
    gallery = store.galleries.create("g", "f" * 32, DIMENSION, GallerySettings())
    follower = Followers(in_process(store)).of(gallery)
    vectors = l2_normalize(rng.normal(size=(20, DIMENSION)))
    assert searched(follower, vectors[:1], 1) == ([[]], 0)
    for number, vector in enumerate(vectors):
        enroll(store, gallery, f"s{number % 12}", vector[None])
    store.subjects.delete(gallery, "s11")
    read: list[int] = []
    read_snapshot = change_log.read_snapshot

    def noted(*arguments: Any) -> Snapshot:
        taken = read_snapshot(*arguments)
        read.append(len(taken.template_pks))
        return taken

    monkeypatch.setattr(change_log, "read_snapshot", noted)
    found, compared = searched(follower, vectors, 1)
    assert compared == 11 and max(read, default=0) <= 10
    monkeypatch.undo()
    anew = Followers(in_process(store)).catch_up_blocking(gallery).search(vectors, 1)[0]
    assert [hits[0].subject_pk for hits in found] == [hits[0].subject_pk for hits in anew]
    similarities = [hits[0].similarity for hits in anew]
    assert [hits[0].similarity for hits in found] == pytest.approx(similarities, abs=1e-5)
    assert follower.sequence() == store.changes.snapshot(gallery).sequence


def test_a_gallery_loaded_again_is_in_memory_once_less(
    store: Store, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old index is released before the snapshot is read. If reading fails, the next search retries."""
    gallery = store.galleries.create("g", "f" * 32, DIMENSION, GallerySettings())
    follower = Followers(in_process(store)).of(gallery)
    first, vectors = l2_normalize(rng.normal(size=(2, 1, DIMENSION)))
    enroll(store, gallery, "a", first)
    searched(follower, vectors, 1)
    assert isinstance(follower, MemoryFollower)
    held, holding = weakref.ref(follower.index.view.segments[0]), list[bool]()
    enroll(store, gallery, "b", vectors)
    store.subjects.delete(gallery, "a")
    assert store.changes.trim(gallery, keep=1) == 2

    def broken(gallery: Gallery) -> Snapshot:
        holding.append(held() is not None)
        raise StorageError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(store.changes, "snapshot", broken)
        for _ in range(2):
            with pytest.raises(StorageError):
                searched(follower, vectors, 1)
    assert holding == [False, False]
    found, compared = searched(follower, vectors, 1)
    assert compared == 1 and found[0][0].similarity == pytest.approx(1, abs=1e-5)


@ON_BOTH
def test_closing_waits_for_no_database(
    database: Database, store: Store, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other galleries are not locked either, while another process writes to this one and its log is trimmed."""
    gallery, other = (store.galleries.create(name, "f" * 32, DIMENSION, GallerySettings()) for name in "gh")
    line = {"gallery_pk": gallery.pk, "template_pk": 1, "subject_pk": 1}
    lines = TRIM_AFTER + MIN_KEPT_LINES
    with database.change(gallery) as connection:
        connection.execute(changes.insert(), [line] * lines)
    shortening, done, trim, change = threading.Event(), threading.Event(), store.changes.trim, database.change

    def trimming(*arguments: Any, **named: Any) -> int:
        try:
            return trim(*arguments, **named)
        finally:
            done.set()

    def changing(at: Gallery) -> AbstractContextManager[sa.Connection]:
        shortening.set()
        return change(at)

    monkeypatch.setattr(store.changes, "trim", trimming)
    monkeypatch.setattr(database, "change", changing)
    followers = Followers(in_process(store))
    probe = l2_normalize(rng.normal(size=(1, DIMENSION)))
    followers.of(gallery)  # as of an empty log
    with database.write(GalleryNotFoundError("gone")) as connection:
        connection.execute(galleries.update().where(galleries.c.pk == gallery.pk).values(created_at=datetime.now(UTC)))
        followers.catch_up_blocking(gallery).search(probe, 1)
        assert shortening.wait(60)  # the background has chosen its lines, and waits to delete them
        with ThreadPoolExecutor(1) as threads:
            for step in (lambda: followers.drop(gallery), lambda: followers.of(other), followers.close):
                threads.submit(step).result(60)
    assert done.wait(60)
    # What had begun came to its end, and nothing was begun after it.
    with database.read() as connection:
        left = connection.execute(sa.select(sa.func.count()).select_from(changes)).scalar_one()
    assert left == lines - ROWS_PER_READ


def test_galleries_searched_least_lately_make_room(store: Store, rng: np.random.Generator) -> None:
    vectors = l2_normalize(rng.normal(size=(20, DIMENSION)))
    for name in "abcd":
        created = store.galleries.create(name, "f" * 32, DIMENSION, GallerySettings())
        enroll(store, created, "one", vectors)
    galleries = {name: store.galleries.get(name) for name in "abcd"}
    followers = Followers(in_process(store), memory=25_000)
    first = followers.of(galleries["a"])
    for name in "bacd":
        assert followers.catch_up_blocking(galleries[name]).search(vectors[:1], 1)[1] == 1
    assert len(followers) == 2
    assert followers.of(galleries["a"]) is not first
    followers.drop(galleries["a"])
    assert len(followers) == 1
    followers = Followers(in_process(store))  # two generations are searched side by side
    other = replace(galleries["a"], generation=1)
    compared = [followers.catch_up_blocking(each).search(vectors[:1], 1)[1] for each in (galleries["a"], other)]
    assert compared == [1, 0]
    assert followers.of(galleries["a"]) is followers.of(galleries["a"]) is not followers.of(other)


def test_the_log_keeps_what_the_evidence_and_living_indexes_have_not_read(
    database: Database, store: Store, rng: np.random.Generator
) -> None:
    gallery = store.galleries.create("g", "f" * 32, DIMENSION, GallerySettings())
    for number in range(8):
        enroll(store, gallery, f"s{number}", l2_normalize(rng.normal(size=(1, DIMENSION))))
    scores = impostor_evidence(store.changes.snapshot(gallery))
    for number in range(8):
        store.subjects.delete(gallery, f"s{number}")
    now = datetime.now(UTC)
    of = {"gallery_pk": gallery.pk, "generation": 0}
    states = [("milvus/gone", 3, now - 2 * INDEX_EXPIRY), ("milvus", 5, now)]
    with database.change(gallery) as connection:
        for engine, sequence, at in states:
            connection.execute(index_states.insert().values(engine=engine, sequence=sequence, updated_at=at, **of))
    assert store.changes.trim(gallery, keep=1) == 5  # an abandoned index holds nothing
    with database.change(gallery) as connection:
        connection.execute(index_states.delete())
    store.evidence.put(gallery, StoredEvidence(7, 8, scores, gallery.created_at), None, {})
    assert store.changes.trim(gallery, keep=1) == 2
    assert store.changes.count_after(gallery, 7) == 9
    store.evidence.put(gallery, StoredEvidence(16, 8, scores, gallery.created_at), None, {})
    assert store.changes.trim(gallery, keep=0) == 9
    # An empty log after shortening is not a beginning.
    follower = Followers(in_process(store)).of(gallery)
    assert searched(follower, l2_normalize(rng.normal(size=(1, DIMENSION))), 1) == ([[]], 0)
    assert follower.sequence() == 16
