"""Kills at random instants of a migration. The service is before or after each step and keeps every template, with a
vector of each recognizer that its crop or enrollment provided.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kith import Kith, KithClientError
from kith.wire.migration import MigrationOut
from models.pack.manifest import ModelPack
from models.runtime.network import Float
from models.runtime.onnx_runtime import OnnxNetwork
from models.vision.alignment import align
from models.vision.detection import Detector
from models.vision.recognition import Recognizer
from service.core.errors import StorageError
from service.domain.gallery import Crop, GallerySettings, NewTemplate
from service.inference import crops
from service.storage.db.tables import jobs
from service.storage.repositories.generations import GenerationStore
from service.storage.repositories.store import Store
from tests.databases import open_database
from tests.faults import LONG
from tests.faults.servers import Server
from tests.faults.tally import Tally
from tests.packs import projected_pack
from tests.postgres import Postgres
from tests.soundness import problems

pytestmark = pytest.mark.long

TEMPLATES = 300 if LONG else 100
KILLS = 12 if LONG else 1
WAIT_S = 120
Step = Callable[[Kith], MigrationOut]


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> ModelPack:
    return projected_pack(tmp_path_factory.mktemp("packs"))


@pytest.fixture(params=["sqlite", "postgresql"] if LONG else ["sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'kith.db'}"
    cluster: Postgres = request.getfixturevalue("postgres")
    return cluster.create(f"kith_{uuid.uuid4().hex}")


@pytest.fixture(scope="module")
def theirs(second: ModelPack) -> Recognizer:
    return Recognizer(OnnxNetwork(second.recognition.path), second.recognition)


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    opened = Store(open_database(url))
    yield opened
    opened.close()


@pytest.fixture
def people(
    store: Store, detector: Detector, recognizer: Recognizer, astronaut: NDArray[np.uint8]
) -> dict[str, tuple[Float, Crop]]:
    """Create a gallery ``g`` of one photo in many lights, each with its crop; return vector and crop by subject."""
    (faces,) = detector.detect([astronaut])
    gallery = store.galleries.create(
        "g", recognizer.fingerprint, recognizer.dimension, GallerySettings(keep_crops=True)
    )
    rng = np.random.default_rng(1)
    made: dict[str, tuple[Float, Crop]] = {}
    photos = [(astronaut * rng.uniform(0.4, 1, 3)).astype(np.uint8) for _ in range(TEMPLATES)]
    for start in range(0, TEMPLATES, 50):
        some = photos[start : start + 50]
        vectors = recognizer.embed(np.concatenate([align(photo, faces.landmarks_xy[:1]) for photo in some]))
        for i, (photo, vector) in enumerate(zip(some, vectors, strict=True), start):
            crop = crops.cut_crop(photo, faces.boxes_xyxy[0], faces.landmarks_xy[0])
            store.templates.enroll(gallery, f"s{i}", [NewTemplate(uuid.uuid4().hex, vector, "photo", crop=crop)], None)
            made[f"s{i}"] = vector, crop
    return made


def killed(server: Server, step: Step, delay_s: float) -> bool:
    """Kill the server this long after a step was requested; return whether the step was acknowledged before."""
    told: list[MigrationOut] = []

    def ask() -> None:
        with server.client() as kith, suppress(KithClientError):
            told.append(step(kith))

    asking = threading.Thread(daemon=True, target=ask)
    asking.start()
    time.sleep(delay_s)
    server.kill()
    asking.join(WAIT_S)
    acknowledged = bool(told)
    server.launch()
    server.wait_until_ready()
    return acknowledged


def settled(server: Server) -> MigrationOut:
    deadline = time.monotonic() + WAIT_S
    with server.client() as kith:
        while (told := kith.migration("g")).jobs:
            assert time.monotonic() < deadline, told
            time.sleep(0.1)
    return told


def switch(server: Server) -> None:
    """Migrate, unless the gallery already has, and check that all templates did."""
    with server.client() as kith:
        if kith.migration("g").state != "switched":
            kith.migrate("g", "projected")
    told = settled(server)
    assert told.state == "switched" and told.current.embedded_count == told.current.template_count == TEMPLATES


def expire_leases(store: Store) -> None:
    """Expire the dead process's leases without waiting."""
    with store.database.write(StorageError("unforeseen")) as connection:
        connection.execute(jobs.update().values(lease_until=datetime(2000, 1, 1, tzinfo=UTC)))


def check_sound(url: str, store: Store, people: dict[str, tuple[Float, Crop]], theirs: Recognizer) -> None:
    """Check that the gallery's row, its generations and their vectors agree."""
    assert problems(url, "g") == []
    gallery = store.galleries.get("g")
    kept = GenerationStore(store.database).list_live(gallery)
    assert [one.state == "current" for one in kept] == [True] + [False] * (len(kept) - 1)
    current = kept[0]
    assert (gallery.generation, gallery.fingerprint) == (current.number, current.fingerprint)
    assert gallery.dimension == current.dimension
    assert gallery.templates == len(people)
    for one in kept:
        view = gallery.at_generation(one.number)
        stored = store.changes.snapshot(view)
        names = {pk: subject.id for pk, subject in store.subjects.by_pk(view, stored.subject_pks.tolist()).items()}
        chosen = np.random.default_rng(2).permutation(len(stored.subject_pks))[:20]
        for row in chosen.tolist():
            vector, crop = people[names[int(stored.subject_pks[row])]]
            if one.fingerprint == theirs.fingerprint:
                image, points = crops.decode_crop(crop)
                (vector,) = theirs.embed(align(image, points[None]))
            assert float(stored.vectors[row] @ vector) > 0.9999


def test_killed_at_every_step_nothing_is_lost(
    url: str,
    store: Store,
    people: dict[str, tuple[Float, Crop]],
    second: ModelPack,
    theirs: Recognizer,
    tmp_path: Path,
    tally: Tally,
) -> None:
    rng = np.random.default_rng(4)
    first, new = store.galleries.get("g").fingerprint, theirs.fingerprint
    server = Server(tmp_path, url, KITH_EXTRA_PACKS=str(second.directory))
    try:
        server.wait_until_ready()
        # In the middle of re-embedding: the next server continues.
        for _ in range(KILLS):
            killed(server, lambda kith: kith.migrate("g", "projected"), float(rng.uniform(0.05, 0.6)))
            tally.kills["re-embedding"] += 1
            check_sound(url, store, people, theirs)
            expire_leases(store)
        switch(server)
        check_sound(url, store, people, theirs)

        # At each transition: the state is before or after, never between.
        steps: tuple[tuple[Step, tuple[str, str], tuple[str, str]], ...] = (
            (lambda kith: kith.roll_back("g"), ("switched", new), ("stopped", first)),
            (lambda kith: kith.finish_migration("g"), ("stopped", first), ("none", first)),
        )
        for _ in range(max(1, KILLS // 4)):
            for step, before, after in steps:
                acknowledged = killed(server, step, float(rng.uniform(0, 0.05)))
                tally.kills["migration's transitions"] += 1
                expire_leases(store)
                with server.client() as kith:
                    told = kith.migration("g")
                    state = told.state, told.current.recognizer
                    assert state == after if acknowledged else state in (before, after)
                    assert told.current.embedded_count == len(people)
                    check_sound(url, store, people, theirs)
                    told = step(kith)  # the interrupted client retries
                    assert (told.state, told.current.recognizer) == after
                    (found,) = kith.identify(
                        "g",
                        embeddings=[_probe(store)],
                        recognizer=store.galleries.get("g").fingerprint,
                        risk={"threshold": 0.9},
                    ).results
                    assert found.similarity is not None and found.similarity > 0.999
            check_sound(url, store, people, theirs)
            settled(server)
            assert store.galleries.get("g").other is None
            switch(server)
    finally:
        server.kill()


def _probe(store: Store) -> Float:
    """Return a current vector of the gallery."""
    gallery = store.galleries.get("g")
    return np.asarray(store.changes.snapshot(gallery).vectors[0], np.float32)
