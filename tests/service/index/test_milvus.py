"""Milvus index that is unavailable, halted, emptied, outdated, or held by another node."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import httpx2
import numpy as np
import pytest
import sqlalchemy as sa
from pydantic import ValidationError
from pymilvus import MilvusException

from models.runtime.network import Float
from models.vision.recognition import l2_normalize
from service.core.errors import GalleryNotFoundError, IndexUnavailableError, SettingsError
from service.domain.gallery import Gallery, GallerySettings
from service.index import milvus_follower
from service.index.milvus import NOT_LOADED, Collection, Milvus
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


def test_the_log_is_shortened_up_to_where_milvus_is(nodes: Nodes, rng: np.random.Generator) -> None:
    node = nodes()
    assert node.engine is not None
    gallery, model = filled(node, rng, "abcd")
    reached = node.follower().sequence()
    assert reached is not None
    line = {"gallery_pk": gallery.pk, "template_pk": 1, "subject_pk": 1}
    with sa.create_engine(node.url).begin() as connection:
        connection.execute(changes.insert(), [line] * (MIN_KEPT_LINES + 50))
    for floor in (reached, reached + 50):
        node.store.changes.trim_all()
        assert node.store.galleries.get("g").log_floor == floor
        model.check(node, probes(rng), 2)


# Faults of a collection, or of its row. Each returns whether searches are refused until it is mended.


def lose_the_log(node: Node, model: Model) -> bool:
    """The collection is behind the start of the log."""
    enroll(node, model, ["behind"], np.random.default_rng(0))
    with sa.create_engine(node.url).begin() as connection:
        last = connection.execute(sa.select(sa.func.max(changes.c.sequence))).scalar_one()
        connection.execute(changes.delete())
        connection.execute(galleries.update().values(log_floor=last))
    return False


def drop(node: Node, _: Model) -> bool:
    """A search that has caught up already does not take a new, empty collection for its own."""
    replica = node.replica()
    replica.catch_up()
    replica.opened().drop()
    for _request in range(2):
        with pytest.raises(IndexUnavailableError):
            replica.search(np.eye(1, SMALL, dtype=np.float32), 2, None)
    return True


def release(node: Node, _: Model) -> bool:
    assert node.engine is not None
    node.engine.milvus.call("release_collection", node.replica().opened()._name)
    return False


def make_it_twice(node: Node, _: Model) -> bool:
    """Another node makes one at the same time, and it is the first by name."""
    assert node.engine is not None
    milvus = node.engine.milvus
    milvus._create(f"{node.replica().opened()._name.rpartition('_')[0]}_000000000000", SMALL)
    assert len(milvus.collections()) == 2
    node.engine.sweep()
    assert len(milvus.collections()) == 1
    return True


def cut_its_filling_short(node: Node, model: Model) -> bool:
    """Changes behind the passage's back are found in the log afterwards."""
    node.replica().opened().drop()
    begun, gallery = node.replica(), node.store.galleries.get("g")
    for _ in range(2):
        with node.shared.turn(gallery, begun.opened().engine) as turn:
            begun.step(begun.opened(), turn)
    assert begun.opened().count(f"gallery == {gallery.pk}") == 2
    position = node.shared.position(gallery, begun.opened().engine)
    assert position.behind and position.applied is None
    node.store.subjects.delete(gallery, "a")
    del model.enrolled["a"]
    enroll(node, model, ["b", "a"], np.random.default_rng(1))
    assert problems(node.url, "g") == []
    return True


@pytest.mark.parametrize("settled_s", [15.0, -1.0])  # what was applied long ago is read without waiting
def test_whatever_happens_to_a_collection_a_search_is_right_or_refused_once(
    settled_s: float, nodes: Nodes, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(milvus_follower, "SETTLED_S", settled_s)
    monkeypatch.setattr(shared_indexes, "SUBJECTS_PER_TURN", 1)
    monkeypatch.setattr(shared_indexes, "LINES_PER_TURN", 1)
    node, there = nodes(), nodes()
    gallery, model = filled(node, rng, "abcd")
    model.check(there, probes(rng), 3)
    for fault in (lose_the_log, drop, release, make_it_twice, cut_its_filling_short, lose_the_log):
        may_refuse = fault(node, model)
        for each in (node, there):
            with suppress(IndexUnavailableError) if may_refuse else nullcontext():
                model.check(each, probes(rng), 4)
            model.check(each, probes(rng), 4)
        node.store.subjects.delete(gallery, "d")
        enroll(there, model, ["e"], rng)
        del model.enrolled["d"]
        enroll(node, model, ["d"], rng)
        model.check(there, probes(rng), 4)


class Cut:
    """Client of Milvus, whose collection was never loaded: the index that loading needs is missing."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, method: str) -> Callable[..., list[dict[str, int]]]:
        def call(*_: object, **__: object) -> list[dict[str, int]]:
            self.called.append(method)
            if method != "query":
                return []
            if self.called[-2:] != ["load_collection", "query"]:
                raise MilvusException(NOT_LOADED, "collection not loaded")
            return [{"count(*)": 7}]

        return call


def test_a_collection_whose_creation_was_cut_short_gets_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Milvus Lite loads a collection without one."""
    cut = Cut()
    monkeypatch.setattr(Milvus, "_connected", lambda _: cut)
    assert Collection(Milvus(""), "c", "", "", 0).count("gallery == 1") == 7
    assert cut.called == ["query", "list_indexes", "create_index", "load_collection", "query"]


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
