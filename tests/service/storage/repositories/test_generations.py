"""Transitions between generations are atomic, idempotent and safe against concurrent writers."""

from __future__ import annotations

import uuid

import numpy as np
import pytest

from models.runtime.network import Float
from models.vision.recognition import l2_normalize
from service.core.errors import GalleryMovedError, MigrationIncompleteError, MigrationStateError
from service.domain.gallery import Crop, Gallery, GallerySettings, NewTemplate, StoredEvidence
from service.domain.outcomes import RiskTarget
from service.index.follower import Followers, in_process
from service.risk.evidence import impostor_evidence
from service.risk.gallery_risks import GalleryRisks
from service.storage.audit.reader import AuditFilter, listed_lines
from service.storage.db.engine import Database
from service.storage.db.row_sealing import open_crop
from service.storage.repositories.generations import DROP, FILL, Coverage, GenerationStore
from service.storage.repositories.jobs import ItemOutcome, Job, JobStore
from service.storage.repositories.store import Store

OLD, NEW, THIRD = "a" * 32, "b" * 32, "c" * 32
OLD_D, NEW_D = 16, 12
CROP = Crop(b"a picture", ((1.0, 2.0),) * 5)


@pytest.fixture
def store(database: Database) -> Store:
    return Store(database)


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
    taken = JobStore(database).claim("p", 60, lambda job: job.kind == kind)
    assert taken is not None
    return taken


def fill(database: Database, generations: GenerationStore, gallery: Gallery, generation: int, seed: int = 3) -> None:
    """Fill a generation like the job does."""
    rng = np.random.default_rng(seed)
    owned = job(database)
    waiting = generations.crops(gallery, generations.missing_keys(gallery, generation))
    made = {one.pk: vector(rng, NEW_D) for one in waiting}
    generations.add(gallery, generation, made, owned, [ItemOutcome(one.id, "embedded") for one in waiting], 1.0)


def test_a_generation_in_preparation_is_searched_like_any_gallery(
    database: Database, store: Store, generations: GenerationStore, gallery: Gallery, rng: np.random.Generator
) -> None:
    followers = Followers(in_process(store))
    for i in range(6):
        store.templates.enroll(gallery, f"s{i}", [template(rng)], None)
    n = started(store, generations)
    view = now(store).at_generation(n)
    assert (view.fingerprint, view.dimension, view.current_generation) == (NEW, NEW_D, 0)
    probe = vector(rng, NEW_D)[None]
    assert followers.catch_up_blocking(view).search(probe, 3) == ([[]], 0)
    fill(database, generations, view, n)
    assert generations.coverage(view, n) == Coverage(6, 6, 0)
    seen = store.changes.snapshot(view)
    (hits,), compared = followers.catch_up_blocking(view).search(probe, 6)
    assert compared == 6
    assert [h.similarity for h in hits] == pytest.approx(
        sorted((seen.vectors @ probe[0]).tolist(), reverse=True), abs=1e-5
    )
    # The present index is none the wiser.
    (hits,), compared = followers.catch_up_blocking(now(store)).search(store.changes.snapshot(gallery).vectors[:1], 1)
    assert compared == 6 and hits[0].similarity == pytest.approx(1, abs=1e-5)
    # A deletion and a move are of both.
    store.subjects.delete(now(store), "s5")
    assert [
        followers.catch_up_blocking(now(store).at_generation(k)).search(np.eye(1, d, dtype=np.float32), 9)[1]
        for k, d in ((0, OLD_D), (n, NEW_D))
    ] == [5, 5]
    followers.close()


def test_transitions_and_their_repetitions(
    database: Database, store: Store, generations: GenerationStore, gallery: Gallery, rng: np.random.Generator
) -> None:
    store.templates.enroll(gallery, "s", [template(rng)], None)
    for call in (
        lambda g: generations.cut_over(g, 0, None),
        generations.roll_back,
        lambda g: generations.finish(g, force=True),
    ):
        with pytest.raises(MigrationStateError):
            call(now(store))
    with pytest.raises(MigrationStateError):
        generations.start(now(store), OLD, OLD_D, "old")
    n = started(store, generations)
    assert started(store, generations) == n
    with pytest.raises(MigrationStateError):
        generations.start(now(store), THIRD, 4, "third")
    with pytest.raises(MigrationIncompleteError):
        generations.cut_over(now(store), 0.5, None)
    fill(database, generations, now(store), n)
    for _ in range(2):
        generations.cut_over(now(store), 1, RiskTarget("fpir", 0.2))
    assert (now(store).generation, now(store).fingerprint, now(store).settings.risk.value) == (n, NEW, 0.2)
    with pytest.raises(MigrationStateError):  # rolling back is another thing
        generations.start(now(store), OLD, OLD_D, "old")
    for _ in range(2):
        generations.roll_back(now(store))
    assert (now(store).generation, now(store).settings.risk.value) == (0, gallery.settings.risk.value)
    other = now(store).other
    assert other is not None and (other.number, other.state) == (n, "set_aside")
    for _ in range(2):
        generations.finish(now(store), force=False)
    assert now(store).other is None
    keys = generations.embedded_keys(now(store), n)
    assert len(keys) == 1
    for generation in (n, 0):  # the other is not dropped
        generations.delete_vectors(now(store), generation, keys)
    assert [generations.embedded_keys(now(store), generation) for generation in (n, 0)] == [[], keys]
    lines = listed_lines(database, AuditFilter(gallery.pk), None, 100)
    events = [one.line.event for one in lines if "migration" in one.line.event][::-1]
    assert events == ["migration_started", "migration_cut_over", "migration_rolled_back", "migration_finished"]
    kinds = [waiting.kind for waiting in JobStore(database).list_jobs(gallery, (), None, 100)]
    assert kinds.count(DROP) == 1
    # A number that was used stays used.
    assert started(store, generations) == n + 1


def test_a_job_that_runs_does_not_stand_for_one_that_is_needed(
    database: Database, store: Store, generations: GenerationStore, gallery: Gallery
) -> None:
    runs = JobStore(database)

    def fills() -> dict[str, str]:
        return {
            job.id: job.state for job in runs.list_jobs(gallery, ["queued", "running"], None, 9) if job.kind == FILL
        }

    started(store, generations)
    first = job(database)
    started(store, generations)
    assert fills() == {first.id: "running"}  # asked for again, it is under way
    # Called off and asked for again, it is not.
    runs.cancel(first.id)
    for _ in range(2):
        started(store, generations)
        assert sorted(fills().values()) == ["queued", "running"]
    runs.finish(first, "canceled")
    # One that is past its last template sees nothing of what was enrolled as the gallery moved, or moved back.
    for step in (
        lambda g: generations.cut_over(g, 0, None),
        generations.roll_back,
        lambda _: started(store, generations),
    ):
        running = job(database)
        step(now(store))
        assert sorted(fills().values()) == ["queued", "running"]
        runs.finish(running, "succeeded")


def test_what_was_read_before_a_cut_over_is_not_written_after_it(
    database: Database, store: Store, generations: GenerationStore, gallery: Gallery, rng: np.random.Generator
) -> None:
    n = started(store, generations)
    before = now(store)
    generations.cut_over(before, 0, None)
    owned = job(database)
    for late in (
        lambda: store.templates.enroll(before, "s", [template(rng)], None),
        lambda: store.subjects.put(before, "s", None, {}, []),
        lambda: generations.add(before, n, {}, owned, [], 0),
        lambda: generations.roll_back(before),
    ):
        with pytest.raises(GalleryMovedError):
            late()
    assert now(store).templates == 0


def test_the_log_is_shortened_by_who_read_the_gallery_before_the_cut_over(
    store: Store, generations: GenerationStore, gallery: Gallery, rng: np.random.Generator
) -> None:
    """A rollback derives the evidence again, which was not updated meanwhile."""
    for i in range(4):
        store.templates.enroll(gallery, f"s{i}", [template(rng)], None)
        store.subjects.delete(gallery, f"s{i}")
    n = started(store, generations)

    def derive(view: Gallery, sequence: int) -> None:
        scores = impostor_evidence(store.changes.snapshot(view))
        store.evidence.put(view, StoredEvidence(sequence, 0, scores, gallery.created_at), None, {})

    derive(now(store), 6)
    derive(now(store).at_generation(n), 4)
    before = now(store)
    assert store.changes.trim(before, keep=0) == 4  # the other generation is yet to count the others
    generations.cut_over(before, 0, None)
    derive(now(store), 8)
    assert store.changes.trim(before, keep=0) == 4  # searches from before the cut-over block nothing
    risks = GalleryRisks(store, {OLD: None, NEW: None})
    stored = store.evidence.get(now(store))
    assert stored is not None and not risks.is_stale(now(store), stored)
    generations.roll_back(now(store))
    stored = store.evidence.get(now(store))
    assert stored is not None and stored.sequence == 6 and risks.is_stale(now(store), stored)
    risks.close()


def test_vectors_of_a_dropped_generation_do_not_come_back(
    store: Store, generations: GenerationStore, gallery: Gallery, rng: np.random.Generator
) -> None:
    n = started(store, generations)
    examined = NewTemplate(uuid.uuid4().hex, vector(rng, OLD_D), "photo", others={n: vector(rng, NEW_D)})
    during = NewTemplate(uuid.uuid4().hex, vector(rng, OLD_D), "photo", others={n: vector(rng, NEW_D)})
    store.templates.enroll(now(store), "s", [during], None)
    assert generations.coverage(gallery, n).embedded == 1
    generations.roll_back(now(store))
    generations.finish(now(store), force=False)
    store.templates.enroll(now(store), "s", [examined], None)
    assert generations.coverage(gallery, n) == Coverage(2, 1, 0)


def test_nothing_is_finished_that_would_lose_somebody(
    store: Store, generations: GenerationStore, gallery: Gallery, rng: np.random.Generator
) -> None:
    store.templates.enroll(gallery, "s", [template(rng, crop=None)], None)
    started(store, generations)
    generations.cut_over(now(store), 0, None)
    with pytest.raises(MigrationIncompleteError):
        generations.finish(now(store), force=False)
    generations.finish(now(store), force=True)


def test_a_crop_goes_with_its_template(
    store: Store, generations: GenerationStore, gallery: Gallery, rng: np.random.Generator
) -> None:
    one = template(rng)
    store.templates.enroll(gallery, "s", [one], None)
    n = started(store, generations)
    keys = generations.missing_keys(gallery, n)
    (waiting,) = generations.crops(gallery, keys)
    kept = open_crop(gallery.seal, waiting.sealed)
    assert (waiting.id, kept.image) == (one.id, CROP.image)
    assert [tuple(point) for point in kept.landmarks_xy] == list(CROP.landmarks_xy)
    store.templates.delete(now(store), "s", one.id)
    assert generations.crops(gallery, keys) == []
    assert generations.missing_keys(gallery, n) == []
