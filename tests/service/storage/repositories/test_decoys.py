"""Decoys are sealed, bounded, seen by every process, exported, and erased with their subject or by themselves."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa

from kith.wire.fields import MAX_DECOYS
from models.runtime.network import Float
from models.vision.recognition import l2_normalize
from service.core.errors import (
    DecoyEnrolledError,
    DecoyNotFoundError,
    InvalidRequestError,
    SubjectNotFoundError,
    TemplateNotFoundError,
    TooManyDecoysError,
)
from service.domain.gallery import Gallery, GallerySettings, NewTemplate
from service.storage.audit.reader import AuditFilter, listed_lines
from service.storage.db import tables
from service.storage.db.engine import Database
from service.storage.privacy.backup import back_up, restore
from service.storage.privacy.retention import Retention
from service.storage.privacy.subject_access import everything_about
from service.storage.repositories.generations import GenerationStore
from service.storage.repositories.store import Store
from tests.databases import change_recognizer, open_database

D = 16


@pytest.fixture
def store(database: Database, rng: np.random.Generator) -> Store:
    made = Store(database)
    gallery = made.galleries.create("g", "a" * 32, D, GallerySettings())
    for name in ("ada", "bo"):
        made.templates.enroll(gallery, name, [NewTemplate(uuid.uuid4().hex, drawn(rng), "photo")], None)
    return made


@pytest.fixture
def other(url: str, store: Store) -> Iterator[Store]:
    """Another process on the same database."""
    with closing(open_database(url)) as opened:
        yield Store(opened)


def drawn(rng: np.random.Generator) -> Float:
    return np.asarray(l2_normalize(rng.normal(size=D)[None])[0], np.float32)


def now(store: Store) -> Gallery:
    return store.galleries.get("g")


def of(store: Store, name: str) -> Float | None:
    return store.decoys.of_subject(now(store), name)


def test_a_decoy_is_stored_once_and_no_template(store: Store, rng: np.random.Generator) -> None:
    vector = drawn(rng)
    before = now(store)
    assert not before.has_decoys
    decoy, created = store.decoys.add(before, "ada", vector, "photo")
    assert created
    assert store.decoys.add(now(store), "ada", vector, "embedding") == (decoy, False)
    assert np.allclose(of(store, "ada"), vector, atol=1e-6)  # type: ignore[arg-type]
    assert of(store, "bo") is None
    after = now(store)
    assert after.has_decoys
    # Neither a template nor evidence: followers and the risk see no change.
    assert (after.templates, after.last_change) == (before.templates, before.last_change)
    enrolled = store.templates.vectors(after, "ada")[0]
    with pytest.raises(DecoyEnrolledError):
        store.decoys.add(after, "ada", enrolled[0], "photo")
    store.decoys.add(after, "bo", enrolled[0], "photo")  # of another subject: the photo of Ada is not Bo
    with pytest.raises(SubjectNotFoundError):
        store.decoys.add(after, "cy", vector, "photo")


def test_other_processes_see_it_in_their_cached_gallery(store: Store, other: Store, rng: np.random.Generator) -> None:
    seen = now(other)
    assert not seen.has_decoys
    store.decoys.add(now(store), "ada", drawn(rng), "photo")
    cached = other.galleries.get_cached("g")
    assert cached is None or cached.has_decoys
    assert now(other).has_decoys
    assert now(other).version != seen.version
    assert of(other, "ada") is not None


def test_their_number_is_bounded(store: Store) -> None:
    gallery = now(store)
    angles = np.linspace(0, np.pi, MAX_DECOYS + 1)
    each = np.zeros((MAX_DECOYS + 1, D), np.float32)
    each[:, 0], each[:, 1] = np.cos(angles) * 0.5, np.sin(angles) * 0.5
    each[np.arange(MAX_DECOYS + 1), 2 + np.arange(MAX_DECOYS + 1) % (D - 2)] = np.sqrt(0.75)
    for vector in each[:MAX_DECOYS]:
        assert store.decoys.add(gallery, "ada", vector, "photo")[1]
    with pytest.raises(TooManyDecoysError):
        store.decoys.add(gallery, "ada", each[-1], "photo")
    store.decoys.add(gallery, "bo", each[-1], "photo")
    with pytest.raises(InvalidRequestError, match=f"{MAX_DECOYS + 1} decoys"):
        store.subjects.merge(gallery, "bo", "ada")


def test_it_is_erased_alone_with_a_receipt(database: Database, store: Store, rng: np.random.Generator) -> None:
    decoy, _ = store.decoys.add(now(store), "ada", drawn(rng), "photo")
    with pytest.raises(DecoyNotFoundError):
        store.decoys.delete(now(store), "bo", decoy.id)
    receipt = store.decoys.delete(now(store), "ada", decoy.id)
    assert (receipt.kind, receipt.template, receipt.removed) == ("decoy", decoy.id, {"decoys": 1})
    assert store.decoys.delete(now(store), "ada", decoy.id).id == receipt.id
    assert not now(store).has_decoys
    with pytest.raises(DecoyNotFoundError):
        store.decoys.delete(now(store), "ada", "0" * 32)
    with pytest.raises(SubjectNotFoundError):
        store.decoys.delete(now(store), "cy", decoy.id)
    with pytest.raises(TemplateNotFoundError):  # its receipt is of another kind
        store.templates.delete(now(store), "ada", decoy.id)
    events = [each.line.event for each in listed_lines(database, AuditFilter(now(store).pk), None, 2)]
    assert events == ["decoy_deleted", "decoy_added"]


def test_it_goes_with_its_subject_or_gallery_and_the_receipt_counts_it(
    database: Database, store: Store, rng: np.random.Generator
) -> None:
    for name in ("ada", "ada", "bo"):
        store.decoys.add(now(store), name, drawn(rng), "photo")
    assert store.subjects.delete(now(store), "ada").removed["decoys"] == 2
    _, receipt = store.galleries.delete("g")
    assert receipt.removed["decoys"] == 1
    with database.read() as connection:
        assert connection.execute(sa.select(tables.decoys)).all() == []


def test_a_merge_moves_it(store: Store, rng: np.random.Generator) -> None:
    vector = drawn(rng)
    store.decoys.add(now(store), "bo", vector, "photo")
    assert "decoys" not in store.subjects.merge(now(store), "bo", "ada").receipt.removed
    assert np.allclose(of(store, "ada"), vector, atol=1e-6)  # type: ignore[arg-type]


def test_it_is_sealed_and_exported(database: Database, store: Store, rng: np.random.Generator) -> None:
    vector = drawn(rng)
    decoy, _ = store.decoys.add(now(store), "ada", vector, "photo")
    with database.read() as connection:
        row = connection.execute(sa.select(tables.decoys)).one()
    assert vector.tobytes() not in row.sealed
    (exported,) = everything_about(database, now(store), "ada")["decoys"]
    assert (exported["id"], exported["recognizer"]) == (decoy.id, "a" * 32)
    assert "embedding" not in exported  # of another person


def test_it_counts_for_the_recognizer_that_made_it_only(
    database: Database, store: Store, rng: np.random.Generator
) -> None:
    generations = GenerationStore(database)
    store.decoys.add(now(store), "ada", drawn(rng), "photo")
    change_recognizer(database, "g", "b" * 32, D)
    assert not now(store).has_decoys
    assert of(store, "ada") is None
    (kept,) = store.decoys.list_all(now(store), "ada")
    assert not kept.in_use
    generations.roll_back(now(store))
    assert now(store).has_decoys
    assert of(store, "ada") is not None
    change_recognizer(database, "g", "b" * 32, D)
    generations.finish(now(store), force=True)
    assert store.decoys.list_all(now(store), "ada") == []
    last = listed_lines(database, AuditFilter(now(store).pk), None, 1)[0].line
    assert (last.event, last.details["decoys"]) == ("migration_finished", 1)


def test_retention_erases_it(database: Database, store: Store, rng: np.random.Generator) -> None:
    store.decoys.add(now(store), "ada", drawn(rng), "photo")
    gallery = now(store)
    store.galleries.update("g", lambda _: GallerySettings(retention_days=10))
    old = datetime.now(UTC) - timedelta(days=11)
    with database.change(now(store)) as connection:
        connection.execute(tables.decoys.update().values(created_at=old))
    Retention(database).sweep(datetime.now(UTC))
    assert store.decoys.list_all(now(store), "ada") == []
    assert now(store).templates == gallery.templates
    last = listed_lines(database, AuditFilter(gallery.pk), None, 1)[0].line
    assert (last.event, last.details["removed"]) == ("retention_applied", {"decoys": 1})


def test_a_backup_has_it_and_a_restore_repeats_its_erasure(
    database: Database, store: Store, rng: np.random.Generator, tmp_path: Path
) -> None:
    vector = drawn(rng)
    gone, _ = store.decoys.add(now(store), "ada", drawn(rng), "photo")
    store.decoys.add(now(store), "ada", vector, "photo")
    back_up(database, tmp_path / "backup")
    store.decoys.delete(now(store), "ada", gone.id)
    restore(database, tmp_path / "backup", replace=True)
    anew = Store(database)
    assert np.allclose(of(anew, "ada"), vector, atol=1e-6)  # type: ignore[arg-type]
    assert len(anew.decoys.list_all(now(anew), "ada")) == 1
