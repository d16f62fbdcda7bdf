"""Milvus index that is unavailable, halted, emptied, outdated, or held by another node."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx2
import numpy as np
import pytest
import sqlalchemy as sa
from pydantic import ValidationError

from models.runtime.network import Float
from models.vision.recognition import l2_normalize
from service.core.errors import GalleryNotFoundError, IndexUnavailableError, SettingsError
from service.domain.gallery import Gallery, GallerySettings
from service.index import milvus_follower
from service.server import embedded
from service.settings import Settings, load_settings
from service.storage.db.tables import changes, galleries
from service.storage.repositories import shared_indexes
from service.storage.repositories.change_log import MIN_KEPT_LINES
from service.storage.repositories.generations import GenerationStore
from service.storage.repositories.jobs import JobStore
from tests.conftest import ROOT
from tests.databases import change_recognizer, open_database
from tests.milvus_lite import MilvusLite
from tests.nodes import Model, Node, Nodes
from tests.packs import BUNDLED_DIMENSION
from tests.service.index.test_gallery import template
from tests.soundness import problems

pytestmark = pytest.mark.long

HEALING_S = 60


@pytest.fixture
def own_lite(tmp_path: Path) -> Iterator[MilvusLite]:
    """Not started."""
    server = MilvusLite(tmp_path / "milvus")
    yield server
    server.kill()


def test_a_service_outlives_the_absence_of_milvus(
    tmp_path: Path, own_lite: MilvusLite, rng: np.random.Generator
) -> None:
    """It starts without Milvus and says so, works once Milvus is there, and again after Milvus was killed."""
    vectors = l2_normalize(rng.normal(size=(3, BUNDLED_DIMENSION))).tolist()
    with (
        embedded(
            load_settings(data_dir=tmp_path, log_level="ERROR", milvus_uri=own_lite.uri, milvus_plaintext=True)
        ) as url,
        httpx2.Client(base_url=url, timeout=60) as http,
    ):

        def identify() -> httpx2.Response:
            body = {"embeddings": vectors[:1], "risk": {"threshold": 0.9}}
            return http.post("/v1/galleries/g/identify", json=body)

        assert http.get("/healthz").status_code == 200
        ready = http.get("/readyz")
        assert (ready.status_code, ready.json()["code"]) == (503, "index_unavailable")
        assert http.post("/v1/galleries", json={"name": "g"}).status_code == 201

        own_lite.start()
        _until_ready(http)
        for name, vector in zip("abc", vectors, strict=True):
            enrolled = http.post(f"/v1/galleries/g/subjects/{name}/templates", json={"embeddings": [vector]})
            assert enrolled.status_code == 201, enrolled.text
        assert identify().json()["results"][0]["subject"] == "a"

        own_lite.kill()
        refused = identify()
        assert (refused.status_code, refused.json()["code"]) == (503, "index_unavailable")
        assert http.get("/readyz").status_code == 503
        assert http.delete("/v1/galleries/g/subjects/a").status_code == 200

        own_lite.start()
        _until_ready(http)
        assert identify().json()["results"][0]["outcome"] == "unknown"
        assert http.delete("/v1/galleries/g").status_code == 200


def _until_ready(http: httpx2.Client) -> None:
    deadline = time.monotonic() + HEALING_S
    while http.get("/readyz").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_milvus_needs_its_package_and_is_given_vectors_only_where_the_operator_vouches_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingsError, match="KITH_MILVUS_PLAINTEXT=true"):
        load_settings(data_dir=tmp_path, milvus_uri="http://127.0.0.1:19530")
    with pytest.raises(ValidationError, match="in plaintext"):
        Settings(data_dir=tmp_path, milvus_uri="http://127.0.0.1:19530")
    monkeypatch.setitem(sys.modules, "pymilvus", None)
    with pytest.raises(SettingsError, match="needs pymilvus"):
        load_settings(milvus_uri="http://127.0.0.1:19530", milvus_plaintext=True)


SMALL = 8


def enroll(node: Node, model: Model, names: list[str], rng: np.random.Generator, gallery: str = "g") -> None:
    for name in names:
        new = [template(vector) for vector in l2_normalize(rng.normal(size=(3, SMALL)))]
        node.store.templates.enroll(node.store.galleries.get(gallery), name, new, None)
        model.enrolled.setdefault(name, []).extend(new)


def probes(rng: np.random.Generator) -> Float:
    return l2_normalize(rng.normal(size=(3, SMALL)))


def filled(node: Node, rng: np.random.Generator, names: str = "abc") -> tuple[Gallery, Model]:
    """Create the gallery, with three templates of each subject, and search it."""
    gallery, model = node.store.galleries.create("g", "f" * 32, SMALL, GallerySettings()), Model()
    enroll(node, model, [*names], rng)
    model.check(node, probes(rng), 3)
    return gallery, model


@contextmanager
def dying_node(node: Node, milvus: MilvusLite, act: str) -> Iterator[None]:
    """Run another process of the same installation, which does ``act`` while it holds the lease. On exit it is killed
    before it releases the lease.
    """
    assert node.engine is not None
    script = f"""
import sys
from service.index.milvus import Milvus
from service.index.milvus_follower import MilvusEngine
from service.storage.repositories.shared_indexes import SharedIndexes
from service.storage.repositories.store import Store
from tests.databases import open_database
database = open_database({node.url!r})
shared, gallery = SharedIndexes(database), Store(database).galleries.get("g")
replica = MilvusEngine(Milvus({milvus.uri!r}, prefix={node.engine.milvus.prefix!r}), shared).follower(gallery)
collection = replica.opened()
with shared.turn(gallery, collection.engine) as turn:
    {act}
    print("done", flush=True)
    sys.stdin.read()
"""
    command = [sys.executable, "-c", script]
    other = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None and other.stdin is not None
    assert other.stdout.readline() == "done\n"
    yield
    other.kill()
    other.wait()
    other.stdout.close()
    other.stdin.close()


@pytest.mark.usefixtures("database_url")
def test_a_node_that_dies_gives_its_turn_up(nodes: Nodes, milvus_lite: MilvusLite, rng: np.random.Generator) -> None:
    """The node is killed after it wrote to Milvus and before the database recorded it."""
    node = nodes()
    _, model = filled(node, rng)
    enroll(node, model, ["d"], rng)
    searched = threading.Event()

    def search() -> None:
        model.check(node, probes(np.random.default_rng(1)), 4)
        searched.set()

    act = "replica.apply(collection, turn.next())"
    with ThreadPoolExecutor(1) as threads:
        with dying_node(node, milvus_lite, act):
            waiting = threads.submit(search)
            assert not searched.wait(0.5)
        waiting.result(timeout=60)
    node.store.templates.delete(node.store.galleries.get("g"), "d", model.enrolled["d"].pop().id)
    model.check(node, probes(rng), 4)


@pytest.mark.usefixtures("database_url")
def test_many_nodes_write_and_search_at_once(nodes: Nodes, rng: np.random.Generator) -> None:
    """Each node finds its own writes at once; finally Milvus equals the database."""
    several = [nodes() for _ in range(3)]
    gallery, together = filled(several[0], rng)

    def work(number: int) -> None:
        node, rng = several[number], np.random.default_rng(number)

        def finds(name: str) -> bool:
            """Whether a search finds the subject, and as the mean of its templates."""
            (mean,) = l2_normalize(np.stack([each.vector for each in together.enrolled[name]]).mean(0, keepdims=True))
            (hits,), _ = node.follower().search(mean[None], 1)
            pk = node.store.subjects.get(gallery, name).pk
            return bool(hits) and hits[0].subject_pk == pk and hits[0].similarity > 0.9999

        for step in range(8):
            name = f"{number}-{step % 3}"
            enroll(node, together, [name], rng)
            assert finds(name)
            if step % 3 == 2:
                node.store.templates.delete(gallery, name, together.enrolled[name].pop().id)
                assert finds(name)

    with ThreadPoolExecutor(len(several)) as threads:
        list(threads.map(work, range(len(several))))
    for node in several:
        together.check(node, probes(rng), 5)
    stored = set(several[0].store.changes.snapshot(gallery).subject_pks.tolist())
    assert several[0].replica().opened().keys(f"gallery == {gallery.pk}") == stored


def test_a_passage_that_was_cut_short_is_gone_on_with(
    nodes: Nodes, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_indexes, "SUBJECTS_PER_TURN", 4)
    monkeypatch.setattr(shared_indexes, "LINES_PER_TURN", 1)
    here, there, model = nodes(), nodes(), Model()
    gallery = here.store.galleries.create("g", "f" * 32, SMALL, GallerySettings())
    enroll(here, model, [f"s{i}" for i in range(10)], rng)
    begun = here.replica()
    for _ in range(2):
        with here.shared.turn(gallery, begun.opened().engine) as turn:
            begun.step(begun.opened(), turn)
    assert begun.opened().count(f"gallery == {gallery.pk}") == 8
    position = there.shared.position(gallery, begun.opened().engine)
    assert position.behind and position.applied is None
    # Changed behind the passage's back: found in the log afterwards.
    here.store.subjects.delete(gallery, "s0")
    del model.enrolled["s0"]
    enroll(here, model, ["s1", "s11"], rng)
    with there.shared.turn(gallery, begun.opened().engine) as turn:
        assert turn.position.scanned > 0
    assert problems(there.url, "g") == []
    model.check(there, probes(rng), 5)


def test_the_log_is_shortened_up_to_where_milvus_is_and_an_index_behind_its_floor_starts_anew(
    nodes: Nodes, rng: np.random.Generator
) -> None:
    node = nodes()
    assert node.engine is not None
    gallery, model = filled(node, rng, "abcd")
    reached = node.follower().sequence()
    assert reached is not None
    line = {"gallery_pk": gallery.pk, "template_pk": 1, "subject_pk": 1}
    with sa.create_engine(node.url).begin() as connection:
        connection.execute(changes.insert(), [line] * (MIN_KEPT_LINES + 50))
    node.engine.shorten_logs()
    assert node.store.galleries.get("g").log_floor == reached  # not beyond
    model.check(node, probes(rng), 2)
    node.engine.shorten_logs()
    assert node.store.galleries.get("g").log_floor == reached + 50

    for name in "bd":
        node.store.subjects.delete(gallery, name)
        del model.enrolled[name]
    enroll(node, model, ["a", "e"], rng)
    with sa.create_engine(node.url).begin() as connection:
        last = connection.execute(sa.select(sa.func.max(changes.c.sequence))).scalar_one()
        connection.execute(changes.delete())
        connection.execute(galleries.update().values(log_floor=last))
    model.check(node, probes(rng), 4)
    enroll(node, model, ["f"], rng)
    model.check(node, probes(rng), 4)
    assert (node.follower().sequence() or 0) > last


def test_a_collection_dropped_before_a_search_is_not_taken_for_an_empty_one_and_is_filled_anew(
    nodes: Nodes, rng: np.random.Generator
) -> None:
    """One request has caught up; another finds that the collection was dropped since; then the first searches."""
    node, there = nodes(), nodes()
    _, model = filled(node, rng)
    model.check(there, probes(rng), 3)
    replica = node.replica()
    caught_up, found_out = threading.Event(), threading.Event()

    def first() -> None:
        replica.catch_up()
        caught_up.set()
        assert found_out.wait(60)
        replica.search(probes(rng), 2, None)

    with ThreadPoolExecutor(1) as threads:
        request = threads.submit(first)
        assert caught_up.wait(60)
        replica.catch_up()
        replica.search(probes(rng), 2, None)
        replica.opened().drop()
        with pytest.raises(IndexUnavailableError):
            replica.search(probes(rng), 2, None)
        found_out.set()
        with pytest.raises(IndexUnavailableError):
            request.result(timeout=60)
    replica.catch_up()
    assert replica.search(probes(rng), 2, None)[1] == 3
    with pytest.raises(IndexUnavailableError):
        model.check(there, probes(rng), 3)
    model.check(there, probes(rng), 3)


def test_a_collection_that_was_cut_short_or_made_twice_is_put_right(
    nodes: Nodes, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = nodes()
    assert node.engine is not None
    _, model = filled(node, rng)
    milvus, rows = node.engine.milvus, node.replica().opened()
    milvus.call("release_collection", rows._name)
    milvus.call("drop_index", rows._name, "vector")
    model.check(node, probes(rng), 3)
    milvus._create(f"{rows._name.rpartition('_')[0]}_000000000000", SMALL)  # by a node at the same time
    assert len(milvus.collections()) == 2
    node.engine.sweep()
    assert len(milvus.collections()) == 1
    with pytest.raises(IndexUnavailableError):
        model.check(node, probes(rng), 3)
    model.check(node, probes(rng), 3)
    monkeypatch.setattr(milvus_follower, "SETTLED_S", -1.0)  # what was applied long ago is read without waiting
    model.check(node, probes(rng), 3)


def test_galleries_do_not_meet_and_leave_nothing_behind(nodes: Nodes, rng: np.random.Generator) -> None:
    node, other = nodes(), Model()
    assert node.engine is not None
    second, third = (node.store.galleries.create(name, "f" * 32, SMALL, GallerySettings()) for name in "hi")
    for name in "hi":
        enroll(node, other, ["a", "c"], rng, name)
        node.follower(name).search(probes(rng), 1)
    first, model = filled(node, rng)
    rows = node.replica().opened()
    assert rows.galleries("gallery > 0") == {first.pk, second.pk, third.pk}

    node.engine.forget(node.store.galleries.delete("h")[0])
    assert rows.galleries("gallery > 0") == {first.pk, third.pk}
    stale = node.engine.follower(third)
    node.store.galleries.delete("i")  # by a node that then died
    with pytest.raises(GalleryNotFoundError):
        stale.catch_up()
    node.engine.sweep()
    assert rows.galleries("gallery > 0") == {first.pk}
    model.check(node, probes(rng), 5)


def test_generations_do_not_mix(nodes: Nodes, rng: np.random.Generator) -> None:
    """A gallery moves to another recognizer; what the one before left in Milvus goes when its generation does."""
    node = nodes()
    assert node.engine is not None
    gallery, model = filled(node, rng)
    database = open_database(node.url)
    generations = GenerationStore(database)
    generations.start(gallery, "e" * 32, 2 * SMALL, "another", force=True)
    moving = replace(gallery, generation=1, fingerprint="e" * 32, dimension=2 * SMALL)
    pk = node.store.subjects.get(gallery, "a").pk
    (vector,) = l2_normalize(rng.normal(size=(1, 2 * SMALL)))
    job = JobStore(database).claim("here", 60)
    assert job is not None
    stored = node.store.changes.snapshot(gallery)
    template_pk = int(stored.template_pks[stored.subject_pks == pk][0])
    generations.add(moving, {template_pk: vector}, job, [], 0)
    ((hit,),), compared = node.followers.catch_up_blocking(moving).search(vector[None], 3)
    assert (hit.subject_pk, compared) == (pk, 1)
    assert hit.similarity == pytest.approx(1, abs=1e-5)
    model.check(node, probes(rng), 5)

    before = node.replica().opened()
    change_recognizer(database, "g", "e" * 32, 2 * SMALL)
    generations.finish(node.store.galleries.get("g"), force=True)
    node.engine.sweep()
    assert before.galleries("gallery > 0") == set()
    ((hit,),), _ = node.follower().search(vector[None], 3)
    assert hit.subject_pk == pk
    database.close()


@pytest.mark.usefixtures("database_url")
def test_writers_do_not_wait_for_a_milvus_that_does_not_answer(
    own_lite: MilvusLite, nodes: Nodes, rng: np.random.Generator
) -> None:
    """Nor do searches wait for others that fail: each waits for one answer at most."""
    own_lite.start()
    node, waiting = nodes(uri=own_lite.uri, timeout_s=4), 5
    _, model = filled(node, rng)
    enroll(node, model, ["d"], rng)
    own_lite.halt()
    gallery = node.store.galleries.get("g")

    async def search() -> list[object]:
        return await asyncio.gather(*(node.followers.catch_up(gallery) for _ in range(waiting)), return_exceptions=True)

    with ThreadPoolExecutor(1) as threads:
        begun = time.monotonic()
        searching = threads.submit(lambda: asyncio.run(search()))
        time.sleep(0.3)
        enroll(node, model, ["e", "f"], rng)
        assert not searching.done()
        assert {type(each) for each in searching.result()} == {IndexUnavailableError}
        assert time.monotonic() - begun < 16  # one after another: 20
    own_lite.go_on()
    model.check(node, probes(rng), 5)
