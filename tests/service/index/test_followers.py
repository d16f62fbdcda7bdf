"""Followers in step with the log, whether it is whole, shortened, or followed by many; and as many as memory allows."""

from __future__ import annotations

import uuid
import weakref
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest

from models.runtime.network import Float
from models.vision.recognition import l2_normalize
from service.core.errors import StorageError
from service.domain.gallery import Gallery, GallerySettings, Hit, NewTemplate, Snapshot, StoredEvidence
from service.index import follower as follower_module
from service.index.follower import Follower, Followers, MemoryFollower, in_process
from service.operations.housekeeping import Housekeeping
from service.risk.evidence import impostor_evidence
from service.storage.db.engine import Database
from service.storage.db.tables import changes, index_states
from service.storage.privacy.retention import Retention
from service.storage.repositories import change_log
from service.storage.repositories.change_log import INDEX_EXPIRY, MIN_KEPT_LINES, ROWS_PER_READ
from service.storage.repositories.store import Store

DIMENSION = 16


def searched(follower: Follower, probes: Float, k: int) -> tuple[list[list[Hit]], int]:
    """Search after catching up."""
    follower.catch_up()
    return follower.search(probes, k)


def enroll(store: Store, gallery: Gallery, subject: str, vectors: Float) -> None:
    store.templates.enroll(gallery, subject, [NewTemplate(uuid.uuid4().hex, v, "embedding") for v in vectors], None)


def test_a_long_log_is_followed_in_parts(
    store: Store, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower_module, "LINES_PER_BATCH", 5)
    gallery = store.galleries.create("g", "f" * 32, DIMENSION, GallerySettings())
    follower = Followers(in_process(store)).catch_up_blocking(gallery)
    for number, vector in enumerate(l2_normalize(rng.normal(size=(20, DIMENSION)))):
        enroll(store, gallery, f"s{number}", vector[None])
    read, read_snapshot = list[int](), change_log.read_snapshot

    def noted(*arguments: Any) -> Snapshot:
        taken = read_snapshot(*arguments)
        read.append(len(taken.template_pks))
        return taken

    monkeypatch.setattr(change_log, "read_snapshot", noted)
    assert searched(follower, np.eye(1, DIMENSION, dtype=np.float32), 1)[1] == sum(read) == 20
    assert max(read) == 5 and follower.sequence() == 20


def test_a_request_that_read_the_gallery_before_a_write_hides_it_from_no_other(
    store: Store, rng: np.random.Generator
) -> None:
    """Those that arrived after the write share its catch-up."""
    gallery, vectors = store.galleries.create("g", "f" * 32, DIMENSION, GallerySettings()), np.eye(2, DIMENSION)
    before = gallery.version
    follower = Followers(in_process(store)).catch_up_blocking(gallery, before)
    enroll(store, gallery, "a", l2_normalize(vectors[:1]))
    follower.catch_up(before)
    assert follower.search(l2_normalize(vectors[:1]), 1)[1] == 1


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
    store.evidence.put(gallery, StoredEvidence(7, 8, scores, gallery.created_at))
    assert store.changes.trim(gallery, keep=1) == 2
    assert store.changes.count_lags({gallery.pk: 7}, 99) == {gallery.pk: 9}
    store.evidence.put(gallery, StoredEvidence(16, 8, scores, gallery.created_at))
    assert store.changes.trim(gallery, keep=0) == 9
    # In batches, which end when the server stops.
    line = {"gallery_pk": gallery.pk, "template_pk": 1, "subject_pk": 1}
    with database.change(gallery) as connection:
        connection.execute(changes.insert(), [line] * (MIN_KEPT_LINES + ROWS_PER_READ + 50))
    store.evidence.put(gallery, StoredEvidence(10**9, 8, scores, gallery.created_at))
    stops = iter((False, True))
    assert store.changes.trim(gallery, stopped=lambda: next(stops)) == ROWS_PER_READ
    Housekeeping(store, Retention(database)).look()
    assert store.changes.count_lags({gallery.pk: 0}, 2 * MIN_KEPT_LINES) == {gallery.pk: MIN_KEPT_LINES}
    assert store.changes.trim(gallery, keep=0) == MIN_KEPT_LINES
    # An empty log after trimming is not a beginning.
    follower = Followers(in_process(store)).of(gallery)
    assert searched(follower, l2_normalize(rng.normal(size=(1, DIMENSION))), 1) == ([[]], 0)
    assert follower.sequence() == 16 + MIN_KEPT_LINES + ROWS_PER_READ + 50
