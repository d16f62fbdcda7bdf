"""SQL is the truth; the index follows it and answers as brute force over it would."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from hypothesis import given, settings
from hypothesis import strategies as st

from models.recognition import unit
from models.runtime import Float
from service.errors import (
    GalleryExistsError,
    GalleryNotFoundError,
    IdempotencyConflictError,
    StorageError,
    SubjectNotFoundError,
    TemplateNotFoundError,
)
from service.gallery.faiss_index import FaissIndex
from service.gallery.follower import Followers
from service.gallery.store import Store, open_engine
from service.gallery.subjects import Gallery, GallerySettings, Idempotent, NewTemplate, SubjectFilter
from service.gallery.tables import metadata

DIMENSION = 8


def template(vector: Float) -> NewTemplate:
    return NewTemplate(uuid.uuid4().hex, vector, "embedding")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'kith.db'}"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    opened = Store(open_engine(url))
    yield opened
    opened.close()


@pytest.fixture
def gallery(store: Store) -> Gallery:
    return store.create_gallery("g", "f" * 32, DIMENSION, GallerySettings())


def test_migrations_make_the_tables(url: str) -> None:
    engine = open_engine(url)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    engine.dispose()


def test_a_commit_is_flushed_before_it_is_acknowledged(url: str) -> None:
    engine = open_engine(url)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2  # FULL
    engine.dispose()


def test_a_database_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError):
        open_engine(f"sqlite:///{tmp_path / 'file' / 'kith.db'}")


def test_names_are_unique_and_keys_never_return(store: Store, gallery: Gallery) -> None:
    with pytest.raises(GalleryExistsError):
        store.create_gallery("g", "f" * 32, DIMENSION, GallerySettings())
    store.delete_gallery("g")
    with pytest.raises(GalleryNotFoundError):
        store.gallery("g")
    assert store.create_gallery("g", "f" * 32, DIMENSION, GallerySettings()).pk != gallery.pk


def test_settings_return_as_they_were_stored(store: Store, gallery: Gallery) -> None:
    assert store.gallery("g").settings == gallery.settings


def test_pages_are_complete_and_in_order(store: Store, gallery: Gallery) -> None:
    for i in range(7):
        store.put_subject(gallery, f"s{i}", None, {}, ["even"] if i % 2 == 0 else [])
    first = store.list_subjects(gallery, None, 3, SubjectFilter())
    second = store.list_subjects(gallery, first[-1].id, 3, SubjectFilter())
    assert [s.id for s in first + second] == [f"s{i}" for i in range(6)]
    tagged = store.list_subjects(gallery, None, 10, SubjectFilter(tags=("even",)))
    assert [s.id for s in tagged] == ["s0", "s2", "s4", "s6"]


def test_a_snapshot_is_everybody_at_one_moment(store: Store, gallery: Gallery, rng: np.random.Generator) -> None:
    empty = store.snapshot(gallery)
    assert (empty.sequence, empty.vectors.shape) == (0, (0, DIMENSION))
    vectors = unit(rng.normal(size=(3, DIMENSION)))
    good = NewTemplate(uuid.uuid4().hex, vectors[0], "photo", {"score": 0.75})
    store.enrol(gallery, "b", [good], None)
    store.enrol(gallery, "a", [template(vectors[1])], None)
    store.enrol(gallery, "b", [template(vectors[2])], None)
    taken = store.snapshot(gallery)
    assert np.array_equal(taken.vectors, vectors[[0, 2, 1]])
    assert taken.subject_pks[0] == taken.subject_pks[1] != taken.subject_pks[2]
    np.testing.assert_allclose(taken.qualities, [0.75, np.nan, np.nan])
    assert taken.sequence == 3


def test_an_idempotency_key_stores_once(store: Store, gallery: Gallery, rng: np.random.Generator) -> None:
    (vector,) = unit(rng.normal(size=(1, DIMENSION)))
    keyed = Idempotent("k", "d", "first")
    assert store.enrol(gallery, "a", [template(vector)], keyed) is None
    assert store.enrol(gallery, "a", [template(vector)], Idempotent("k", "d", "second")) == "first"
    assert len(store.list_templates(gallery, "a")) == 1
    with pytest.raises(IdempotencyConflictError):
        store.enrol(gallery, "a", [template(vector)], Idempotent("k", "other", "third"))


def test_enrolling_into_a_deleted_gallery_leaves_nothing(
    store: Store, gallery: Gallery, rng: np.random.Generator
) -> None:
    store.delete_gallery("g")
    with pytest.raises(GalleryNotFoundError):
        store.enrol(gallery, "a", [template(unit(rng.normal(size=(1, DIMENSION)))[0])], None)
    assert store.changes_after(gallery.pk, 0) == []


def test_deleting_what_is_not_there(store: Store, gallery: Gallery) -> None:
    with pytest.raises(SubjectNotFoundError):
        store.delete_subject(gallery, "nobody")
    store.put_subject(gallery, "a", None, {}, [])
    with pytest.raises(TemplateNotFoundError):
        store.delete_template(gallery, "a", "0" * 32)


def test_a_deleted_vector_leaves_no_bytes_behind(tmp_path: Path, rng: np.random.Generator) -> None:
    store = Store(open_engine(f"sqlite:///{tmp_path / 'kith.db'}"))
    gallery = store.create_gallery("g", "f" * 32, 64, GallerySettings())
    (vector,) = unit(rng.normal(size=(1, 64)))
    store.enrol(gallery, "a", [template(vector)], None)
    store.delete_subject(gallery, "a")
    with sa.create_engine(f"sqlite:///{tmp_path / 'kith.db'}").connect() as connection:
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    store.close()
    assert vector.tobytes() not in (tmp_path / "kith.db").read_bytes()


def brute_force(
    enrolled: dict[str, list[Float]], probe: Float, k: int, among: set[str] | None
) -> list[tuple[str, float]]:
    best = {
        subject: max(float(probe @ v) for v in vectors)
        for subject, vectors in enrolled.items()
        if vectors and (among is None or subject in among)
    }
    return sorted(best.items(), key=lambda item: -item[1])[:k]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    steps=st.lists(st.sampled_from(["enrol", "delete subject", "delete template", "search"]), max_size=40),
    k=st.integers(1, 5),
)
def test_two_followers_answer_as_brute_force(seed: int, steps: list[str], k: int) -> None:
    """Random enrolment and deletion; two indexes over one database, as two processes would be."""
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        store = Store(open_engine(f"sqlite:///{folder}/kith.db"))
        gallery = store.create_gallery("g", "f" * 32, DIMENSION, GallerySettings())
        replicas = [Followers(store, FaissIndex), Followers(store, FaissIndex)]
        enrolled: dict[str, list[Float]] = {}
        ids: dict[str, list[str]] = {}
        for step in [*steps, "search"]:
            subject = f"s{rng.integers(6)}"
            if step == "enrol":
                vectors = unit(rng.normal(size=(int(rng.integers(1, 12)), DIMENSION)))
                new = [template(v) for v in vectors]
                store.enrol(gallery, subject, new, None)
                enrolled.setdefault(subject, []).extend(vectors)
                ids.setdefault(subject, []).extend(t.id for t in new)
            elif step == "delete subject" and subject in enrolled:
                store.delete_subject(gallery, subject)
                del enrolled[subject], ids[subject]
            elif step == "delete template" and ids.get(subject):
                store.delete_template(gallery, subject, ids[subject].pop(0))
                enrolled[subject].pop(0)
            elif step == "search":
                probes = unit(rng.normal(size=(3, DIMENSION)))
                among = None if rng.random() < 0.5 else {f"s{i}" for i in range(3)}
                names = {s.pk: s.id for s in store.list_subjects(gallery, None, 100, SubjectFilter())}
                keys = None if among is None else {pk for pk, name in names.items() if name in among}
                for follower in (r.of(gallery) for r in replicas):
                    results, _ = follower.search(probes, k, keys)
                    for probe, hits in zip(probes, results, strict=True):
                        expected = brute_force(enrolled, probe, k, among)
                        assert [names[h.subject_pk] for h in hits] == [name for name, _ in expected]
                        assert np.allclose([h.similarity for h in hits], [s for _, s in expected], atol=1e-5)
        store.close()
