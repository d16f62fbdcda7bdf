"""One question, two engines: FAISS in this process and Milvus answer as brute force does, whatever was changed, by
whichever node."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from models.network import Float
from models.recognition import unit
from service.gallery.fusion import Fusion
from service.gallery.milvus_index import IndexKind
from service.gallery.subjects import GallerySettings, NewTemplate
from tests.nodes import Model, Nodes
from tests.service.test_fusion import RULES
from tests.service.test_gallery import of_some_quality, template

DIMENSION = 8
STEPS = [
    *("enrol", "enrol", "delete subject", "delete template", "move", "merge"),
    *("change the fusion", "search", "search"),
]


@pytest.mark.usefixtures("database_url")
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
            here.store.enrol(here.store.gallery("g"), subject, new, None)
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
        elif step == "merge" and owned is not None and (others := [name for name in model.enrolled if name != subject]):
            to = others[rng.integers(len(others))]
            there.store.merge_subject(there.store.gallery("g"), subject, to)
            model.enrolled[to] += model.enrolled.pop(subject)
        elif step == "change the fusion":
            model.fusion = RULES[rng.integers(len(RULES))]
            gallery = there.store.update_gallery("g", lambda now, rule=model.fusion: replace(now, fusion=rule))  # type: ignore[misc]
        elif step == "search":
            probes = unit(rng.normal(size=(3, DIMENSION)))
            among = None if rng.random() < 0.5 else {f"s{i}" for i in range(4)}
            for node in (here, there):
                model.check(node, probes, int(rng.integers(1, 6)), among)


def at(cosine: float, probe: Float, rng: np.random.Generator) -> NewTemplate:
    """A template of this similarity to the probe."""
    aside = rng.normal(size=len(probe))
    aside -= (aside @ probe) * probe
    return template((cosine * probe + np.sqrt(1 - cosine**2) * aside / np.linalg.norm(aside)).astype(np.float32))


@pytest.mark.parametrize("engine", ["faiss", "milvus lite", "milvus server"])
@pytest.mark.parametrize("fusion", ["max", "mean_top_k"])
def test_subjects_are_found_below_one_persons_many_templates(
    engine: str, fusion: Fusion, nodes: Nodes, rng: np.random.Generator
) -> None:
    node = nodes(engine)
    gallery = node.store.create_gallery("g", "f" * 32, DIMENSION, GallerySettings(fusion=fusion))
    (probe,) = unit(rng.normal(size=(1, DIMENSION)))
    model = Model(fusion)
    model.enrolled["often"] = [at(0.8 + 0.0005 * i, probe, rng) for i in range(300)]
    for i in range(20):
        model.enrolled[f"once{i}"] = [at(c, probe, rng) for c in (0.7 + 0.003 * i, 0.0, 0.1)]
    model.enrolled["steady"] = [at(c, probe, rng) for c in (0.55, 0.6, 0.65)]
    for name, templates in model.enrolled.items():
        node.store.enrol(gallery, name, templates, None)
    for k in (1, 2, 5, 22, 50):
        model.check(node, probe[None], k)
        model.check(node, probe[None], k, {"steady", "once3", "often"})


@pytest.mark.parametrize("kind", ["HNSW", "IVF_FLAT", "IVF_SQ8", "AUTOINDEX"])
@pytest.mark.parametrize("fusion", ["max", "quality_weighted"])
def test_similarities_are_those_of_whole_vectors_in_every_index(
    kind: IndexKind, fusion: Fusion, nodes: Nodes, rng: np.random.Generator
) -> None:
    """Of so few vectors, an index that lists or links them finds all."""
    node = nodes(kind=kind)
    gallery = node.store.create_gallery("g", "f" * 32, DIMENSION, GallerySettings(fusion=fusion))
    model = Model(fusion)
    for i in range(60):
        model.enrolled[f"s{i}"] = [template(v) for v in unit(rng.normal(size=(3, DIMENSION)))]
        node.store.enrol(gallery, f"s{i}", model.enrolled[f"s{i}"], None)
    model.check(node, unit(rng.normal(size=(4, DIMENSION))), 3)
    model.check(node, unit(rng.normal(size=(4, DIMENSION))), 3, {f"s{i}" for i in range(0, 60, 7)})


@pytest.mark.parametrize("kind", ["IVF_SQ8", "AUTOINDEX"])
@pytest.mark.parametrize(("fusion", "templates"), [("max", 12), ("mean_top_k", 36)])
def test_subjects_are_found_below_what_similarities_by_the_vectors_leave_out(
    kind: IndexKind, fusion: Fusion, templates: int, nodes: Nodes, rng: np.random.Generator
) -> None:
    """All rows are found at once, and the best of them are of one person."""
    node = nodes(kind=kind)
    gallery = node.store.create_gallery("g", "f" * 32, DIMENSION, GallerySettings(fusion=fusion))
    (probe,) = unit(rng.normal(size=(1, DIMENSION)))
    model = Model(fusion)
    for name, cosine in (("near", 0.9), ("far", 0.5)):
        model.enrolled[name] = [at(cosine - 0.01 * i, probe, rng) for i in range(templates)]
        node.store.enrol(gallery, name, model.enrolled[name], None)
    model.check(node, probe[None], 2)


def test_filters_longer_than_an_expression(
    nodes: Nodes, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.gallery.milvus_index.KEYS_AT_ONCE", 4)
    node = nodes()
    gallery = node.store.create_gallery("g", "f" * 32, DIMENSION, GallerySettings(fusion="max"))
    model = Model("max")
    for i in range(30):
        model.enrolled[f"s{i}"] = [template(v) for v in unit(rng.normal(size=(2, DIMENSION)))]
        node.store.enrol(gallery, f"s{i}", model.enrolled[f"s{i}"], None)
    for k in (1, 3, 20):
        model.check(node, unit(rng.normal(size=(3, DIMENSION))), k, {f"s{i}" for i in range(17)} | {"nobody"})
    model.check(node, unit(rng.normal(size=(3, DIMENSION))), 3, set())
