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
from service.storage.db.row_sealing import open_crop
from service.storage.repositories.generations import DROP, FILL, MAX_REST, SealedCrops
from service.storage.repositories.jobs import ItemOutcome, Job
from service.storage.repositories.store import Store
from tests.databases import ON_BOTH
from tests.refusals import raises_code

OLD, NEW, THIRD = "a" * 32, "b" * 32, "c" * 32
OLD_D, NEW_D = 16, 12
CROP = Crop(b"a picture", ((1.0, 2.0),) * 5)


class Scene:
    """Gallery "g" of a store, and its migration to another recognizer."""

    def __init__(self, store: Store, rng: np.random.Generator) -> None:
        self.store, self.generations, self.jobs = store, store.generations, store.jobs
        self.rng = rng
        self.gallery = store.galleries.create("g", OLD, OLD_D, GallerySettings())

    @property
    def now(self) -> Gallery:
        return self.store.galleries.get("g")

    def view(self, number: int) -> Gallery:
        return self.now.at_generation(number)

    def enroll(self, subject: str = "s", count: int = 1, crop: Crop | None = CROP) -> None:
        self.store.templates.enroll(self.now, subject, self.new(count, crop), None)

    def new(self, count: int = 1, crop: Crop | None = CROP) -> list[NewTemplate]:
        drawn = (vector(self.rng, OLD_D) for _ in range(count))
        return [NewTemplate(uuid.uuid4().hex, each, "photo", crop=crop) for each in drawn]

    def start(self) -> int:
        self.generations.start(self.now, NEW, NEW_D, "new")
        other = self.now.other
        assert other is not None
        return other.number

    def job(self, kind: str = FILL) -> Job:
        taken = self.jobs.claim("p", 60, lambda job: job.kind == kind and not job.cancel)
        assert taken is not None
        return taken

    def fill(self, owned: Job, filled: Gallery) -> None:
        """Fill a generation like the job does."""
        waiting = self.generations.crops(filled, self.generations.missing_keys(filled))
        made, outcomes = embed(waiting)
        self.generations.add(filled, made, owned, outcomes, 1.0)

    def switch(self, number: int) -> None:
        """Run the job to its end."""
        owned = self.job()
        assert self.generations.switch(self.view(number), owned, embed, (), 1.0)
        self.jobs.finish(owned, "succeeded")


@pytest.fixture
def scene(store: Store, rng: np.random.Generator) -> Scene:
    return Scene(store, rng)


def vector(rng: np.random.Generator, dimension: int) -> Float:
    (made,) = l2_normalize(rng.normal(size=(1, dimension)))
    return np.asarray(made, np.float32)


def embed(waiting: SealedCrops) -> tuple[dict[int, Float], list[ItemOutcome]]:
    rng = np.random.default_rng(3)
    return {one.pk: vector(rng, NEW_D) for one in waiting}, [ItemOutcome(one.id, "embedded") for one in waiting]


def test_repeated_steps_have_no_further_effect(scene: Scene) -> None:
    scene.enroll()
    n = scene.start()
    assert scene.start() == n
    with raises_code("migration_state"):
        scene.generations.start(scene.now, THIRD, 4, "third")
    with raises_code("migration_state"):
        scene.generations.finish(scene.now, force=True)
    scene.switch(n)
    assert (scene.now.generation, scene.now.fingerprint) == (n, NEW)
    for _ in range(2):
        scene.generations.roll_back(scene.now)
    other = scene.now.other
    assert scene.now.generation == 0
    assert other is not None and (other.number, other.state) == (n, "next")
    filled = scene.view(n)
    keys = scene.store.changes.snapshot(filled).template_pks.tolist()
    for _ in range(2):
        scene.generations.finish(scene.now, force=False)
    assert scene.now.other is None
    scene.generations.drop(scene.now, n, lambda: None)
    assert scene.store.changes.snapshot(scene.now).template_pks.tolist() == keys
    assert scene.generations.embedded_count(replace(scene.gallery, generation=n)) == 0
    kinds = [waiting.kind for waiting in scene.jobs.list_jobs(scene.gallery, (), None, 100)]
    assert kinds.count(DROP) == 1
    # A number that was used stays used; a crop goes with its template.
    assert scene.start() == n + 1
    (waiting,) = scene.generations.crops(scene.view(n + 1), keys)
    kept = open_crop(scene.gallery.seal, waiting.sealed)
    assert (kept.image, [tuple(point) for point in kept.landmarks_xy]) == (CROP.image, list(CROP.landmarks_xy))
    scene.store.templates.delete(scene.now, "s", waiting.id)
    assert scene.generations.crops(scene.view(n + 1), keys) == []
    assert scene.generations.missing_keys(scene.view(n + 1)) == []


def test_a_start_replaces_the_unfinished_job(scene: Scene) -> None:
    n = scene.start()
    first = scene.job()
    scene.start()
    assert not scene.generations.switch(scene.view(n), first, embed, (), 0)  # canceled
    assert scene.now.generation == 0
    scene.jobs.finish(first, "canceled")
    killed = scene.job()
    assert scene.generations.switch(scene.view(n), killed, embed, (), 0)
    scene.generations.roll_back(scene.now)
    # The job that switched and could not say so does not switch again; another one embeds what was enrolled since.
    assert not scene.generations.switch(scene.view(n), killed, embed, (), 0)
    assert scene.job().parameters["generation"] == scene.now.generation == 0


@ON_BOTH
def test_the_last_batch_embeds_the_rest_or_leaves_it_to_another_pass(scene: Scene) -> None:
    scene.enroll(count=MAX_REST + 1)
    n = scene.start()
    owned = scene.job()
    assert not scene.generations.switch(scene.view(n), owned, embed, (), 0)
    damaged = scene.generations.missing_keys(scene.view(n))
    with raises_code("migration_incomplete"):  # another pass would leave them damaged
        scene.generations.switch(scene.view(n), owned, embed, damaged, 0)
    scene.fill(owned, scene.view(n))
    scene.enroll("t", MAX_REST)
    scene.enroll("bare", crop=None)
    with raises_code("migration_incomplete"):
        scene.generations.switch(scene.view(n), owned, embed, (), 0)
    assert scene.now.generation == 0
    scene.store.subjects.delete(scene.now, "bare")
    assert scene.generations.switch(scene.view(n), owned, embed, (), 0)
    assert scene.generations.embedded_count(scene.now) == scene.now.templates == 2 * MAX_REST + 1


def test_what_was_read_before_a_switch_is_not_written_after_it(scene: Scene) -> None:
    n = scene.start()
    before, filled = scene.now, scene.view(n)
    scene.switch(n)
    scene.jobs.create(scene.now, FILL, {})
    owned = scene.job()
    for late in (
        lambda: scene.store.templates.enroll(before, "s", scene.new(), None),
        lambda: scene.store.subjects.put(before, "s", None, {}, []),
        lambda: scene.generations.add(filled, {}, owned, [], 0),
        lambda: scene.generations.roll_back(before),
    ):
        with pytest.raises(GalleryMovedError):
            late()
    assert scene.now.templates == 0


def test_the_log_is_shortened_by_who_read_the_gallery_before_the_switch(scene: Scene) -> None:
    """A rollback derives the evidence again, which was not updated meanwhile."""
    for i in range(4):
        scene.enroll(f"s{i}")
        scene.store.subjects.delete(scene.gallery, f"s{i}")
    n = scene.start()

    def derive(view: Gallery, sequence: int) -> None:
        scores = impostor_evidence(scene.store.changes.snapshot(view))
        scene.store.evidence.put(view, StoredEvidence(sequence, 0, scores, scene.gallery.created_at))

    derive(scene.now, 4)
    derive(scene.view(n), 6)
    before = scene.now
    assert scene.store.changes.trim(before, keep=0) == 4  # the evidence is yet to count the others
    scene.switch(n)
    derive(scene.now, 8)
    assert scene.store.changes.trim(before, keep=0) == 4  # searches from before the switch block nothing
    risks = GalleryRisks(scene.store, {OLD: None, NEW: None})
    stored = scene.store.evidence.get(scene.now)
    assert stored is not None and not risks.is_stale(scene.now, stored)
    scene.generations.roll_back(scene.now)
    stored = scene.store.evidence.get(scene.now)
    assert stored is not None and stored.sequence == 4 and risks.is_stale(scene.now, stored)
    risks.close()


def test_vectors_of_a_dropped_generation_do_not_come_back(scene: Scene) -> None:
    scene.enroll()
    n = scene.start()
    late, filled = scene.job(), scene.view(n)
    scene.generations.roll_back(scene.now)
    scene.generations.finish(scene.now, force=False)
    scene.fill(late, filled)
    assert scene.generations.embedded_count(filled) == 0
