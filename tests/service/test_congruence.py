"""One question, two engines: FAISS in this process and Milvus answer as brute force does, whatever was changed, by
whichever node."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from models.recognition import unit
from models.runtime import Float
from service.gallery.database import Database, open_engine
from service.gallery.follower import Follower, Followers
from service.gallery.fusion import Fusion
from service.gallery.milvus_index import IndexKind, MilvusOptions
from service.gallery.milvus_replica import MilvusEngine
from service.gallery.replicas import in_process
from service.gallery.shared_indexes import SharedIndexes
from service.gallery.store import Store
from service.gallery.subjects import GallerySettings, NewTemplate, SubjectFilter
from tests.postgres import DatabaseUrl
from tests.service.test_fusion import RULES
from tests.service.test_gallery import brute_force, of_some_quality

DIMENSION = 8
STEPS = ["enrol", "enrol", "delete subject", "delete template", "move", "change the fusion", "search", "search"]


class Node:
    """What one server process has: a database, and an engine for its indexes."""

    def __init__(self, url: str, milvus: MilvusOptions | None) -> None:
        database = Database(open_engine(url))
        self.store = Store(database)
        self.engine = None if milvus is None else MilvusEngine(milvus, SharedIndexes(database))
        self.followers = Followers(in_process(self.store) if self.engine is None else self.engine.replica)

    def follower(self, gallery: str = "g") -> Follower:
        return self.followers.of(self.store.gallery(gallery))

    def close(self) -> None:
        self.followers.close()
        if self.engine is not None:
            self.engine.close()
        self.store.close()


Nodes = Callable[..., Node]


@pytest.fixture
def nodes(request: pytest.FixtureRequest, database_url: DatabaseUrl) -> Iterator[Nodes]:
    """Makes nodes over one fresh database, and over collections of the test's own in Milvus."""
    url, prefix, made = database_url(), f"t{uuid.uuid4().hex[:12]}", list[Node]()

    def make(engine: str = "milvus lite", kind: IndexKind = "FLAT", timeout_s: float = 10) -> Node:
        options = None
        if engine != "faiss":
            lite = engine == "milvus lite"
            uri = request.getfixturevalue("milvus_lite").uri if lite else request.getfixturevalue("milvus_server")
            options = MilvusOptions(uri, index=kind, prefix=prefix, timeout_s=timeout_s)
        made.append(Node(url, options))
        return made[-1]

    yield make
    for node in made:
        node.close()


class Model:
    """Who is enrolled, in plain lists."""

    def __init__(self, fusion: Fusion) -> None:
        self.fusion = fusion
        self.enrolled: dict[str, list[NewTemplate]] = {}

    def check(self, node: Node, probes: Float, k: int, among: set[str] | None = None) -> None:
        gallery = node.store.gallery("g")
        names = {s.pk: s.id for s in node.store.list_subjects(gallery, None, 1000, SubjectFilter())}
        keys = None if among is None else {pk for pk, name in names.items() if name in among}
        results, compared = node.followers.of(gallery).search(probes, k, keys)
        assert compared == sum(bool(t) and (among is None or name in among) for name, t in self.enrolled.items())
        for probe, hits in zip(probes, results, strict=True):
            expected = brute_force(self.enrolled, probe, k, among, self.fusion)
            assert [names[hit.subject_pk] for hit in hits] == [name for name, _ in expected]
            assert np.allclose([hit.similarity for hit in hits], [s for _, s in expected], atol=1e-4)


@pytest.mark.parametrize("fusion", RULES)
@pytest.mark.parametrize("engine", ["faiss", "milvus lite", "milvus server"])
def test_two_nodes_answer_as_brute_force(engine: str, fusion: Fusion, nodes: Nodes) -> None:
    here, there = nodes(engine), nodes(engine)
    gallery = here.store.create_gallery("g", "f" * 32, DIMENSION, GallerySettings(fusion=fusion))
    model = Model(fusion)
    rng = np.random.default_rng(RULES.index(fusion))
    for step in [*rng.choice(STEPS, 40), "search"]:
        subject = f"s{rng.integers(8)}"
        owned = model.enrolled.get(subject)
        if step == "enrol":
            new = [of_some_quality(v, rng) for v in unit(rng.normal(size=(int(rng.integers(1, 9)), DIMENSION)))]
            here.store.enrol(gallery, subject, new, None)
            model.enrolled.setdefault(subject, []).extend(new)
        elif step == "delete subject" and owned is not None:
            there.store.delete_subject(gallery, subject)
            del model.enrolled[subject]
        elif step == "delete template" and owned:
            there.store.delete_template(gallery, subject, owned.pop(0).id)
        elif step == "move" and owned and (others := [name for name in model.enrolled if name != subject]):
            moved, to = owned.pop(), others[rng.integers(len(others))]
            here.store.move_template(gallery, subject, moved.id, to)
            model.enrolled[to].append(moved)
        elif step == "change the fusion":
            model.fusion = RULES[rng.integers(len(RULES))]
            gallery = there.store.update_gallery("g", lambda now, rule=model.fusion: replace(now, fusion=rule))  # type: ignore[misc]
        elif step == "search":
            probes = unit(rng.normal(size=(3, DIMENSION)))
            among = None if rng.random() < 0.5 else {f"s{i}" for i in range(4)}
            for node in (here, there):
                model.check(node, probes, int(rng.integers(1, 6)), among)
