"""Transitions between generations are atomic, idempotent and safe against concurrent writers."""

from __future__ import annotations

import uuid
from dataclasses import replace

import numpy as np
import pytest

from models.runtime.network import Float
from models.vision.recognition import l2_normalize
from service.core.errors import GalleryMovedError
from service.domain.gallery import Crop, Gallery, GallerySettings, NewTemplate, StoredEvidence
from service.risk.evidence import impostor_evidence
from service.risk.gallery_risks import GalleryRisks
from service.storage.db.engine import Database
from service.storage.db.row_sealing import open_crop
from service.storage.repositories.generations import DROP, FILL, MAX_REST, GenerationStore, SealedCrops
from service.storage.repositories.jobs import ItemOutcome, Job, JobStore
from service.storage.repositories.store import Store
from tests.databases import ON_BOTH
from tests.refusals import raises_code

OLD, NEW, THIRD = "a" * 32, "b" * 32, "c" * 32
OLD_D, NEW_D = 16, 12
CROP = Crop(b"a picture", ((1.0, 2.0),) * 5)


@pytest.fixture
def generations(database: Database) -> GenerationStore:
    return GenerationStore(database)


@pytest.fixture
def gallery(store: Store) -> Gallery:
    return store.galleries.create("g", OLD, OLD_D, GallerySettings())


def vector(rng: np.random.Generator, dimension: int) -> Float:
    (made,) = l2_normalize(rng.normal(size=(1, dimension)))
    return np.asarray(made, np.float32)


def template(rng: np.random.Generator, crop: Crop | None = CROP) -> NewTemplate:
    return NewTemplate(uuid.uuid4().hex, vector(rng, OLD_D), "photo", crop=crop)


def now(store: Store) -> Gallery:
    return store.galleries.get("g")


def started(store: Store, generations: GenerationStore) -> int:
    generations.start(now(store), NEW, NEW_D, "new")
    other = now(store).other
    assert other is not None
    return other.number


def job(database: Database, kind: str = FILL) -> Job:
    taken = JobStore(database).claim("p", 60, lambda job: job.kind == kind and not job.cancel)
    assert taken is not None
    return taken


def view(store: Store, number: int) -> Gallery:
    return now(store).at_generation(number)


def embed(waiting: SealedCrops) -> tuple[dict[int, Float], list[ItemOutcome]]:
    rng = np.random.default_rng(3)
    return {one.pk: vector(rng, NEW_D) for one in waiting}, [ItemOutcome(one.id, "embedded") for one in waiting]


def fill(generations: GenerationStore, owned: Job, filled: Gallery) -> None:
    """Fill a generation like the job does."""
    waiting = generations.crops(filled, generations.missing_keys(filled))
    made, outcomes = embed(waiting)
    generations.add(filled, made, owned, outcomes, 1.0)


def switch(database: Database, generations: GenerationStore, number: int) -> None:
    """Run the job to its end."""
    owned = job(database)
    assert generations.switch(view(Store(database), number), owned, embed, (), 1.0)
    JobStore(database).finish(owned, "succeeded")


def test_repeated_steps_have_no_further_effect(
    database: Database, store: Store, generations: GenerationStore, gallery: Gallery, rng: np.random.Generator
) -> None:
    store.templates.enroll(gallery, "s", [template(rng)], None)
    n = started(store, generations)
    assert started(store, generations) == n
    with raises_code("migration_state"):
        generations.start(now(store), THIRD, 4, "third")
    with raises_code("migration_state"):
        generations.finish(now(store), force=True)
    switch(database, generations, n)
    assert (now(store).generation, now(store).fingerprint) == (n, NEW)
    for _ in range(2):
        generations.roll_back(now(store))
    other = now(store).other
    assert now(store).generation == 0
    assert other is not None and (other.number, other.state) == (n, "next")
    filled = view(store, n)
    keys = store.changes.snapshot(filled).template_pks.tolist()
    for _ in range(2):
        generations.finish(now(store), force=False)
    assert now(store).other is None
    generations.drop(now(store), n, lambda: None)
    assert store.changes.snapshot(now(store)).template_pks.tolist() == keys
    assert generations.embedded_count(replace(gallery, generation=n)) == 0
    kinds = [waiting.kind for waiting in JobStore(database).list_jobs(gallery, (), None, 100)]
    assert kinds.count(DROP) == 1
    # A number that was used stays used; a crop goes with its template.
    assert started(store, generations) == n + 1
    (waiting,) = generations.crops(view(store, n + 1), keys)
    kept = open_crop(gallery.seal, waiting.sealed)
    assert (kept.image, [tuple(point) for point in kept.landmarks_xy]) == (CROP.image, list(CROP.landmarks_xy))
    store.templates.delete(now(store), "s", waiting.id)
    assert generations.crops(view(store, n + 1), keys) == []
    assert generations.missing_keys(view(store, n + 1)) == []


def test_a_start_replaces_the_unfinished_job(
    database: Database, store: Store, generations: GenerationStore, gallery: Gallery
) -> None:
    n = started(store, generations)
    first = job(database)
    started(store, generations)
    assert not generations.switch(view(store, n), first, embed, (), 0)  # canceled
    assert now(store).generation == 0
    JobStore(database).finish(first, "canceled")
    killed = job(database)
    assert generations.switch(view(store, n), killed, embed, (), 0)
    generations.roll_back(now(store))
    # The job that switched and could not say so does not switch again; another one embeds what was enrolled since.
    assert not generations.switch(view(store, n), killed, embed, (), 0)
    assert job(database).parameters["generation"] == now(store).generation == 0


@ON_BOTH
def test_the_last_batch_embeds_the_rest_or_leaves_it_to_another_pass(
    database: Database, store: Store, generations: GenerationStore, gallery: Gallery, rng: np.random.Generator
) -> None:
    store.templates.enroll(gallery, "s", [template(rng) for _ in range(MAX_REST + 1)], None)
    n = started(store, generations)
    owned = job(database)
    assert not generations.switch(view(store, n), owned, embed, (), 0)
    fill(generations, owned, view(store, n))
    store.templates.enroll(now(store), "t", [template(rng) for _ in range(MAX_REST)], None)
    store.templates.enroll(now(store), "bare", [template(rng, crop=None)], None)
    with raises_code("migration_incomplete"):
        generations.switch(view(store, n), owned, embed, (), 0)
    assert now(store).generation == 0
    store.subjects.delete(now(store), "bare")
    assert generations.switch(view(store, n), owned, embed, (), 0)
    assert generations.embedded_count(now(store)) == now(store).templates == 2 * MAX_REST + 1


def test_what_was_read_before_a_switch_is_not_written_after_it(
    database: Database, store: Store, generations: GenerationStore, gallery: Gallery, rng: np.random.Generator
) -> None:
    n = started(store, generations)
    before, filled = now(store), view(store, n)
    switch(database, generations, n)
    JobStore(database).create(now(store), FILL, {})
    owned = job(database)
    for late in (
        lambda: store.templates.enroll(before, "s", [template(rng)], None),
        lambda: store.subjects.put(before, "s", None, {}, []),
        lambda: generations.add(filled, {}, owned, [], 0),
        lambda: generations.roll_back(before),
    ):
        with pytest.raises(GalleryMovedError):
            late()
    assert now(store).templates == 0


def test_the_log_is_shortened_by_who_read_the_gallery_before_the_switch(
    database: Database, store: Store, generations: GenerationStore, gallery: Gallery, rng: np.random.Generator
) -> None:
    """A rollback derives the evidence again, which was not updated meanwhile."""
    for i in range(4):
        store.templates.enroll(gallery, f"s{i}", [template(rng)], None)
        store.subjects.delete(gallery, f"s{i}")
    n = started(store, generations)

    def derive(view: Gallery, sequence: int) -> None:
        scores = impostor_evidence(store.changes.snapshot(view))
        store.evidence.put(view, StoredEvidence(sequence, 0, scores, gallery.created_at), None, {})

    derive(now(store), 4)
    derive(view(store, n), 6)
    before = now(store)
    assert store.changes.trim(before, keep=0) == 4  # the evidence is yet to count the others
    switch(database, generations, n)
    derive(now(store), 8)
    assert store.changes.trim(before, keep=0) == 4  # searches from before the switch block nothing
    risks = GalleryRisks(store, {OLD: None, NEW: None})
    stored = store.evidence.get(now(store))
    assert stored is not None and not risks.is_stale(now(store), stored)
    generations.roll_back(now(store))
    stored = store.evidence.get(now(store))
    assert stored is not None and stored.sequence == 4 and risks.is_stale(now(store), stored)
    risks.close()


def test_vectors_of_a_dropped_generation_do_not_come_back(
    database: Database, store: Store, generations: GenerationStore, gallery: Gallery, rng: np.random.Generator
) -> None:
    store.templates.enroll(now(store), "s", [template(rng)], None)
    n = started(store, generations)
    late, filled = job(database), view(store, n)
    generations.roll_back(now(store))
    generations.finish(now(store), force=False)
    fill(generations, late, filled)
    assert generations.embedded_count(filled) == 0
