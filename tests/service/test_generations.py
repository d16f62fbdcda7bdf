"""Two generations of vectors in SQL: each transition whole, repeatable, and overtaken by nobody."""

from __future__ import annotations

import threading
import uuid
from datetime import UTC, datetime

import numpy as np
import pytest

from models.network import Float
from models.recognition import unit
from service.decision import RiskTarget
from service.errors import GalleryMovedError, MigrationIncompleteError, MigrationStateError, StorageDamagedError
from service.gallery import tables
from service.gallery.audit_reading import AuditReader, Chosen
from service.gallery.check import open_check
from service.gallery.database import Database
from service.gallery.evidence import impostor_evidence
from service.gallery.follower import Followers
from service.gallery.generations import DROP, FILL, Coverage, Disagreement, Generations
from service.gallery.job_store import ItemOutcome, Job, JobStore
from service.gallery.replicas import in_process
from service.gallery.risks import GalleryRisks
from service.gallery.sealed_rows import lookup_of, open_crop
from service.gallery.store import Store
from service.gallery.subjects import Crop, Gallery, GallerySettings, NewTemplate, StoredEvidence
from tests.databases import open_database

OLD, NEW, THIRD = "a" * 32, "b" * 32, "c" * 32
OLD_D, NEW_D = 16, 12
CROP = Crop(b"a picture", ((1.0, 2.0),) * 5)


@pytest.fixture
def store(database: Database) -> Store:
    return Store(database)


@pytest.fixture
def generations(database: Database) -> Generations:
    return Generations(database)


@pytest.fixture
def gallery(store: Store) -> Gallery:
    return store.create_gallery("g", OLD, OLD_D, GallerySettings(fusion="max"))


def vector(rng: np.random.Generator, dimension: int) -> Float:
    (made,) = unit(rng.normal(size=(1, dimension)))
    return np.asarray(made, np.float32)


def template(rng: np.random.Generator, crop: Crop | None = CROP) -> NewTemplate:
    return NewTemplate(uuid.uuid4().hex, vector(rng, OLD_D), "photo", crop=crop)


def now(store: Store) -> Gallery:
    return store.gallery("g")


def started(store: Store, generations: Generations) -> int:
    generations.start(now(store), NEW, NEW_D, "new", on_sight=True)
    other = now(store).other
    assert other is not None
    return other.number


def job(database: Database, kind: str = FILL) -> Job:
    taken = JobStore(database).claim("p", 60, lambda job: job.kind == kind)
    assert taken is not None
    return taken


def fill(database: Database, generations: Generations, gallery: Gallery, generation: int, seed: int = 3) -> None:
    """As the job does it."""
    rng = np.random.default_rng(seed)
    owned = job(database)
    waiting = generations.waiting(gallery, generations.waiting_keys(gallery, generation))
    made = {one.pk: vector(rng, NEW_D) for one in waiting}
    generations.add(gallery, generation, made, owned, [ItemOutcome(one.id, "embedded") for one in waiting], 1.0)


def test_the_shadow_is_searched_like_any_gallery(
    database: Database, store: Store, generations: Generations, gallery: Gallery, rng: np.random.Generator
) -> None:
    followers = Followers(in_process(store))
    for i in range(6):
        store.enrol(gallery, f"s{i}", [template(rng)], None)
    n = started(store, generations)
    view = now(store).under(n)
    assert (view.fingerprint, view.dimension, view.current_generation) == (NEW, NEW_D, 0)
    probe = vector(rng, NEW_D)[None]
    assert followers.of(view).search(probe, 3) == ([[]], 0)
    fill(database, generations, view, n)
    assert generations.coverage(view, n) == Coverage(6, 6, 0)
    seen = store.snapshot(view)
    (hits,), compared = followers.of(view).search(probe, 6)
    assert compared == 6
    assert [h.similarity for h in hits] == pytest.approx(
        sorted((seen.vectors @ probe[0]).tolist(), reverse=True), abs=1e-5
    )
    # The present index is none the wiser.
    (hits,), compared = followers.of(now(store)).search(store.snapshot(gallery).vectors[:1], 1)
    assert compared == 6 and hits[0].similarity == pytest.approx(1, abs=1e-5)
    # A deletion and a move are of both.
    store.delete_subject(now(store), "s5")
    assert [
        followers.of(now(store).under(k)).search(np.eye(1, d, dtype=np.float32), 9)[1]
        for k, d in ((0, OLD_D), (n, NEW_D))
    ] == [5, 5]
    followers.close()


def test_transitions_and_their_repetitions(
    database: Database, store: Store, generations: Generations, gallery: Gallery, rng: np.random.Generator
) -> None:
    store.enrol(gallery, "s", [template(rng)], None)
    for call in (
        lambda g: generations.cut_over(g, 0, None),
        generations.roll_back,
        lambda g: generations.finish(g, force=True),
    ):
        with pytest.raises(MigrationStateError):
            call(now(store))
    with pytest.raises(MigrationStateError):
        generations.start(now(store), OLD, OLD_D, "old", on_sight=False)
    n = started(store, generations)
    assert started(store, generations) == n
    with pytest.raises(MigrationStateError):
        generations.start(now(store), THIRD, 4, "third", on_sight=False)
    with pytest.raises(MigrationIncompleteError):
        generations.cut_over(now(store), 0.5, None)
    fill(database, generations, now(store), n)
    for _ in range(2):
        generations.cut_over(now(store), 1, RiskTarget("fpir", 0.2))
    assert (now(store).generation, now(store).fingerprint, now(store).settings.risk.value) == (n, NEW, 0.2)
    with pytest.raises(MigrationStateError):  # rolling back is another thing
        generations.start(now(store), OLD, OLD_D, "old", on_sight=False)
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
        generations.drop(now(store), generation, keys)
    assert [generations.embedded_keys(now(store), generation) for generation in (n, 0)] == [[], keys]
    lines = AuditReader(database).lines(Chosen(gallery.pk), None, 100)
    events = [one.line.event for one in lines if "migration" in one.line.event][::-1]
    assert events == ["migration_started", "migration_cut_over", "migration_rolled_back", "migration_finished"]
    kinds = [waiting.kind for waiting in JobStore(database).list_jobs(gallery, (), None, 100)]
    assert kinds.count(DROP) == 1
    # A number that was used stays used.
    assert started(store, generations) == n + 1


def test_a_job_that_runs_does_not_stand_for_one_that_is_needed(
    database: Database, store: Store, generations: Generations, gallery: Gallery
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
    runs.finish(first, "cancelled")
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
    database: Database, store: Store, generations: Generations, gallery: Gallery, rng: np.random.Generator
) -> None:
    n = started(store, generations)
    before = now(store)
    generations.cut_over(before, 0, None)
    owned = job(database)
    for late in (
        lambda: store.enrol(before, "s", [template(rng)], None),
        lambda: store.put_subject(before, "s", None, {}, []),
        lambda: generations.add(before, n, {}, owned, [], 0),
        lambda: generations.see(before, n, 1, vector(rng, NEW_D)),
        lambda: generations.roll_back(before),
    ):
        with pytest.raises(GalleryMovedError):
            late()
    assert now(store).templates == 0


def test_the_log_is_shortened_by_who_read_the_gallery_before_the_cut_over(
    store: Store, generations: Generations, gallery: Gallery, rng: np.random.Generator
) -> None:
    """And what is rolled back to, whose evidence nobody kept up meanwhile, has it derived anew."""
    for i in range(4):
        store.enrol(gallery, f"s{i}", [template(rng)], None)
        store.delete_subject(gallery, f"s{i}")
    n = started(store, generations)

    def derive(view: Gallery, sequence: int) -> None:
        scores = impostor_evidence(store.snapshot(view), "max")
        store.put_evidence(view, StoredEvidence(sequence, "max", 0, scores, gallery.created_at), None, {})

    derive(now(store), 6)
    derive(now(store).under(n), 4)
    before = now(store)
    assert store.trim_log(before, keep=0) == 4  # the shadow is yet to count the others
    generations.cut_over(before, 0, None)
    derive(now(store), 8)
    assert store.trim_log(before, keep=0) == 4  # whoever answered before the cut-over holds up nothing
    risks = GalleryRisks(store, {OLD: None, NEW: None})
    stored = store.evidence(now(store))
    assert stored is not None and not risks.is_stale(now(store), stored)
    generations.roll_back(now(store))
    stored = store.evidence(now(store))
    assert stored is not None and stored.sequence == 6 and risks.is_stale(now(store), stored)
    risks.close()


def test_vectors_of_a_dropped_generation_do_not_come_back(
    store: Store, generations: Generations, gallery: Gallery, rng: np.random.Generator
) -> None:
    n = started(store, generations)
    examined = NewTemplate(uuid.uuid4().hex, vector(rng, OLD_D), "photo", others={n: vector(rng, NEW_D)})
    during = NewTemplate(uuid.uuid4().hex, vector(rng, OLD_D), "photo", others={n: vector(rng, NEW_D)})
    store.enrol(now(store), "s", [during], None)
    assert generations.coverage(gallery, n).embedded == 1
    generations.roll_back(now(store))
    generations.finish(now(store), force=False)
    store.enrol(now(store), "s", [examined], None)
    assert generations.coverage(gallery, n) == Coverage(2, 1, 0)


def test_nothing_is_finished_that_would_lose_somebody(
    store: Store, generations: Generations, gallery: Gallery, rng: np.random.Generator
) -> None:
    store.enrol(gallery, "s", [template(rng, crop=None)], None)
    started(store, generations)
    generations.cut_over(now(store), 0, None)
    with pytest.raises(MigrationIncompleteError):
        generations.finish(now(store), force=False)
    generations.finish(now(store), force=True)


def test_a_sight_stands_for_one_template_without_crop(
    database: Database, store: Store, generations: Generations, gallery: Gallery, rng: np.random.Generator
) -> None:
    store.enrol(gallery, "s", [template(rng), template(rng, None), template(rng, None)], None)
    pk = store.subject(gallery, "s").pk
    n = started(store, generations)
    face = vector(rng, NEW_D)
    assert generations.unseen(gallery, n, pk)
    assert generations.see(now(store), n, pk, face)
    assert not generations.see(now(store), n, pk, face)  # the next frame
    assert generations.see(now(store), n, pk, vector(rng, NEW_D))
    assert not generations.unseen(gallery, n, pk)
    assert not generations.see(now(store), n, pk, vector(rng, NEW_D))
    assert generations.coverage(gallery, n) == Coverage(3, 2, 1)
    lines = AuditReader(database).lines(Chosen(gallery.pk, event="template_on_sight"), None, 100)
    seen = store.list_templates(gallery, "s")[1:]
    assert sorted(one.line.details["template"] for one in lines) == sorted(t.id for t in seen)
    # It is found where somebody asks what was done to the subject, and tells no score.
    assert {one.line.subject for one in lines} == {lookup_of(gallery.seal, "s")}
    assert all(one.line.details.keys() == {"template"} for one in lines)


def test_counts_of_several_servers_add_up(store: Store, generations: Generations, gallery: Gallery) -> None:
    pk = store.put_subject(gallery, "s", None, {}, [])[0].pk
    n = started(store, generations)
    found = now(store)

    def note() -> None:
        for _ in range(10):
            one = Disagreement(("identified", "unknown"), (pk, None), (0.9, None))
            generations.note(found, n, {"compared": 3, "agreed": 2}, [one])

    servers = [threading.Thread(daemon=True, target=note) for _ in range(4)]
    for server in servers:
        server.start()
    for server in servers:
        server.join()
    other = now(store).other
    assert other is not None
    assert other.details["counts"] == {"compared": 120, "agreed": 80}
    noted = generations.disagreements(gallery, other)
    assert noted == [Disagreement(("identified", "unknown"), (pk, None), (0.9, None))] * 20
    # In clear only whom it concerns, by a keyed hash.
    stored = other.details["disagreements"]
    assert {tuple(one) for one in stored} == {("subjects", "sealed")}
    assert {tuple(one["subjects"]) for one in stored} == {(lookup_of(gallery.seal, "s"), None)}


@pytest.mark.parametrize("sealed", ["00" * 40, "no digits"])
def test_a_disagreement_that_does_not_open_is_told(
    database: Database, store: Store, generations: Generations, gallery: Gallery, sealed: str
) -> None:
    n = started(store, generations)
    generations.note(
        now(store), n, {"compared": 1}, [Disagreement(("unknown", "identified"), (None, None), (None, 0.9))]
    )
    details = {"on_sight": True, "counts": {}, "disagreements": [{"subjects": [None, None], "sealed": sealed}]}
    of_other = tables.generations.c.generation == n
    with database.engine.begin() as connection:
        connection.execute(tables.generations.update().where(of_other).values(details=details))
    _, other = generations.kept(gallery)
    with pytest.raises(StorageDamagedError):
        generations.disagreements(gallery, other)
    with open_check(database) as checked:
        assert [(one.kind, one.count) for one in checked.findings(None, False)] == [("sealed", 1)]


def test_a_database_of_before_keeps_no_search_in_clear_and_no_time_to_come(
    database: Database, store: Store, generations: Generations, gallery: Gallery, rng: np.random.Generator
) -> None:
    n, late = started(store, generations), datetime(2199, 1, 1, tzinfo=UTC)
    store.enrol(gallery, "s", [template(rng)], None)
    before = datetime.now(UTC)
    shown = [{"outcomes": ["identified", "unknown"], "subject_pks": [1, None], "similarities": [0.9, None]}]
    with database.engine.begin() as connection:
        details = {"on_sight": True, "counts": {"compared": 3}, "disagreements": shown}
        connection.execute(
            tables.generations.update().where(tables.generations.c.generation == n).values(details=details)
        )
        connection.execute(tables.templates.update().values(created_at=late))
        connection.execute(tables.subjects.update().values(updated_at=late))
        connection.exec_driver_sql("ALTER TABLE templates DROP COLUMN moved")
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0010'")
    reopened = open_database(database.engine.url.render_as_string(hide_password=False))
    store = Store(reopened)
    other = now(store).other
    assert other is not None and other.details == {"on_sight": True, "counts": {"compared": 3}}
    assert before <= store.list_templates(gallery, "s")[0].created_at <= datetime.now(UTC)
    subject = store.subject(gallery, "s")
    assert subject.created_at <= before <= subject.updated_at <= datetime.now(UTC)
    reopened.close()


def test_a_crop_goes_with_its_template(
    store: Store, generations: Generations, gallery: Gallery, rng: np.random.Generator
) -> None:
    one = template(rng)
    store.enrol(gallery, "s", [one], None)
    n = started(store, generations)
    keys = generations.waiting_keys(gallery, n)
    (waiting,) = generations.waiting(gallery, keys)
    kept = open_crop(gallery.seal, waiting.sealed)
    assert (waiting.id, kept.image) == (one.id, CROP.image)
    assert [tuple(point) for point in kept.landmarks_xy] == list(CROP.landmarks_xy)
    store.delete_template(now(store), "s", one.id)
    assert generations.waiting(gallery, keys) == []
    assert generations.waiting_keys(gallery, n) == []
