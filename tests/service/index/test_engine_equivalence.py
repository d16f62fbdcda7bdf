"""FAISS in this process and Milvus give the same results as brute force, after any change by any node."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from models.vision.recognition import l2_normalize
from service.core.errors import SubjectNotFoundError
from service.domain.gallery import GallerySettings
from service.index import follower, milvus
from service.index.follower import Followers, in_process
from service.index.segment_builder import Sizes
from service.storage.repositories import shared_indexes
from tests.databases import ON_BOTH
from tests.nodes import Model, Nodes
from tests.refusals import raises_code
from tests.service.index.test_gallery import of_some_quality, template

DIMENSION = 8
STEPS = [
    "enroll",
    "enroll",
    "delete subject",
    "delete template",
    "move",
    "merge",
    "trim",
    "search",
    "search",
]


@pytest.mark.usefixtures("database_url")
@ON_BOTH
@pytest.mark.parametrize(
    ("engine", "seed"), [*(("faiss", seed) for seed in range(3, 7)), ("milvus lite", 3), ("milvus server", 3)]
)
def test_two_nodes_answer_as_brute_force(engine: str, seed: int, nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reads the log in parts, or a snapshot where it was trimmed, and filters that are longer than allowed."""
    monkeypatch.setattr(milvus, "KEYS_PER_EXPRESSION", 2)
    monkeypatch.setattr(follower, "LINES_PER_BATCH", 3)
    monkeypatch.setattr(shared_indexes, "LINES_PER_TURN", 3)
    here, there = nodes(engine), nodes(engine)
    gallery = here.store.galleries.create("g", "f" * 32, DIMENSION, GallerySettings())
    model = Model()
    rng = np.random.default_rng(seed)
    for step in [*rng.choice(STEPS, 40), "search"]:
        subject = f"s{rng.integers(8)}"
        owned = model.enrolled.get(subject)
        if step == "enroll":
            new = [of_some_quality(v, rng) for v in l2_normalize(rng.normal(size=(int(rng.integers(1, 9)), DIMENSION)))]
            here.store.templates.enroll(here.store.galleries.get("g"), subject, new, None)
            model.enrolled.setdefault(subject, []).extend(new)
        elif step == "delete subject" and owned is not None:
            there.store.subjects.delete(gallery, subject)
            del model.enrolled[subject]
        elif step == "delete template" and owned:
            there.store.templates.delete(gallery, subject, owned.pop(0).id)
        elif step == "move" and owned and (others := [name for name in model.enrolled if name != subject]):
            moved, to = owned.pop(), others[rng.integers(len(others))]
            here.store.templates.move(gallery, subject, moved.id, to)
            model.enrolled[to].append(moved)
            with raises_code("template_not_found"):
                here.store.templates.move(gallery, subject, moved.id, to)
            with pytest.raises(SubjectNotFoundError):
                here.store.templates.move(gallery, to, moved.id, "nobody")
        elif step == "merge" and owned is not None and (others := [name for name in model.enrolled if name != subject]):
            to = others[rng.integers(len(others))]
            there.store.subjects.merge(there.store.galleries.get("g"), subject, to)
            model.enrolled[to] += model.enrolled.pop(subject)
        elif step == "trim":
            there.store.changes.trim(gallery, keep=2)
        elif step == "search":
            probes = l2_normalize(rng.normal(size=(3, DIMENSION)))
            among = (None, {"nobody", *(f"s{i}" for i in range(5))}, {"nobody"})[rng.integers(3)]
            for node in (here, there):
                model.check(node, probes, int(rng.integers(1, 6)), among)


@pytest.mark.usefixtures("database_url")
@ON_BOTH
@pytest.mark.parametrize("engine", ["faiss", pytest.param("milvus lite", marks=pytest.mark.long)])
def test_each_node_sees_at_once_what_the_others_write(engine: str, nodes: Nodes) -> None:
    """Many threads write, while small segments are rebuilt continuously."""
    several, model = [nodes(engine) for _ in range(3)], Model()
    gallery = several[0].store.galleries.create("g", "f" * 32, DIMENSION, GallerySettings(index="compact"))
    if engine == "faiss":
        for node in several:
            sizes = Sizes(seal=32, compact_from=64, max_length=128)
            node.followers = Followers(in_process(node.store, sizes=sizes))

    def work(number: int) -> None:
        store, own = several[number].store, np.random.default_rng(number)
        for step in range(10):
            vectors, name = l2_normalize(own.normal(size=(1, DIMENSION))), f"{number}-{step}"
            model.enrolled[name] = [template(vectors[0])]
            store.templates.enroll(gallery, name, model.enrolled[name], None)
            pk = store.subjects.get(gallery, name).pk
            for gone in (False, True) if step % 3 == 0 else (False,):
                if gone:
                    store.subjects.delete(gallery, name)
                    del model.enrolled[name]
                for node in several:
                    (hits,), _ = node.follower().search(vectors, 3)
                    assert (pk in [hit.subject_pk for hit in hits]) != gone

    with ThreadPoolExecutor(len(several)) as threads:
        list(threads.map(work, range(len(several))))
    for node in several:
        model.check(node, l2_normalize(np.random.default_rng(9).normal(size=(3, DIMENSION))), 5)
