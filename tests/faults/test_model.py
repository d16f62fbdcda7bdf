"""Several processes on one database: every acknowledged write is seen by every process's next search."""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections import Counter
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from models.runtime.network import Float
from models.vision.recognition import l2_normalize
from service.domain.gallery import GallerySettings, NewTemplate, SubjectFilter
from service.security.sealing import Seal, new_key
from service.storage.db.row_sealing import labels_of
from service.storage.db.tables import templates
from tests.faults import LONG
from tests.faults.history import NEVER, Kind, Operation, has_an_order
from tests.faults.judging import operations_of, without_an_order
from tests.faults.workers import (
    CONTEXT,
    DIMENSION,
    Answered,
    Asked,
    Found,
    Node,
    Task,
    Worker,
    Writer,
    axis_of,
    seen,
    template_id,
)
from tests.postgres import DatabaseUrl
from tests.service.domain.test_fusion import fused_similarity

pytestmark = pytest.mark.long

SEAL = Seal(new_key())

SUBJECTS = 8
PATIENCE_S = 60
WRITERS = 4


# Sequential operations, against a model


class Model:
    """Model of a gallery, searched by brute force in float64."""

    def __init__(self) -> None:
        self.enrolled: dict[str, list[NewTemplate]] = {}
        self.said: dict[str, tuple[dict[str, Any], list[str]]] = {}

    def search(self, probes: Float, k: int, chosen: SubjectFilter | None) -> Found:
        return [self._nearest(probe, k, chosen) for probe in probes]

    def _nearest(self, probe: Float, k: int, chosen: SubjectFilter | None) -> list[tuple[str, float]]:
        fused = [
            (subject, fused_similarity(probe, [t.vector for t in owned], [_quality(t) for t in owned]))
            for subject, owned in self.enrolled.items()
            if owned and (chosen is None or self._passes(subject, chosen))
        ]
        return sorted(fused, key=lambda found: -found[1])[:k]

    def _passes(self, subject: str, chosen: SubjectFilter) -> bool:
        metadata, tags = self.said.get(subject, ({}, []))
        return labels_of(SEAL, chosen.tags, dict(chosen.metadata)) <= labels_of(SEAL, tags, metadata)


def _quality(template: NewTemplate) -> float:
    return template.quality["score"] if template.quality else math.nan


def play(actors: list[Worker], gallery: str, model: Model, steps: int, seed: int) -> Counter[str]:
    """Run random steps in random processes. After each step, the next search of every process must agree with the
    model.
    """
    rng = np.random.default_rng(seed)
    done: Counter[str] = Counter()
    for _ in range(steps):
        actor = actors[rng.integers(len(actors))]
        subject, other = (f"s{i}" for i in rng.choice(SUBJECTS, 2, replace=False))
        owned = model.enrolled.get(subject, [])
        step = str(
            rng.choice(
                ["enroll", "put subject", "delete subject", "delete template", "move"],
                p=[0.44, 0.16, 0.06, 0.16, 0.18],
            )
        )
        if step == "enroll":
            vectors = l2_normalize(rng.normal(size=(int(rng.integers(1, 5)), DIMENSION)))
            new = [_of_some_quality(vector, rng) for vector in vectors]
            actor.call("enroll", gallery, subject, new)
            model.enrolled.setdefault(subject, []).extend(new)
        elif step == "put subject":
            metadata, tags = {"floor": int(rng.integers(3))}, [str(rng.choice(["night", "day"]))]
            actor.call("put_subject", gallery, subject, metadata, tags)
            model.said[subject] = (metadata, tags)
            model.enrolled.setdefault(subject, [])
        elif step == "delete subject" and subject in model.enrolled:
            actor.call("delete_subject", gallery, subject)
            del model.enrolled[subject]
            model.said.pop(subject, None)
        elif step == "delete template" and owned:
            actor.call("delete_template", gallery, subject, owned.pop(int(rng.integers(len(owned)))).id)
        elif step == "move" and owned and other in model.enrolled:
            moved = owned.pop(int(rng.integers(len(owned))))
            actor.call("move_template", gallery, subject, moved.id, other)
            model.enrolled[other].append(moved)
        else:
            continue
        done[step] += 1
        probes = l2_normalize(rng.normal(size=(2, DIMENSION)))
        k = int(rng.integers(2, SUBJECTS + 1))
        for chosen in (None, _some_filter(rng)):
            expected = model.search(probes, k, chosen)
            for each in actors:
                _compare(each.call("search", gallery, probes, k, chosen), expected)
    return done


def _of_some_quality(vector: Float, rng: np.random.Generator) -> NewTemplate:
    if rng.random() < 0.3:
        return NewTemplate(uuid.uuid4().hex, vector, "embedding")
    return NewTemplate(uuid.uuid4().hex, vector, "photo", {"score": round(float(rng.random()), 3)})


def _some_filter(rng: np.random.Generator) -> SubjectFilter:
    metadata = (("floor", int(rng.integers(3))),) if rng.random() < 0.5 else ()
    return SubjectFilter((str(rng.choice(["night", "day"])),) if not metadata or rng.random() < 0.3 else (), metadata)


def _compare(found: Found, expected: Found) -> None:
    for hits, wanted in zip(found, expected, strict=True):
        assert [subject for subject, _ in hits] == [subject for subject, _ in wanted]
        np.testing.assert_allclose([s for _, s in hits], [s for _, s in wanted], rtol=0, atol=1e-5)


def test_four_processes_answer_as_the_model_after_every_write(database_url: DatabaseUrl) -> None:
    url = fresh(database_url())
    workers = [Worker(url) for _ in range(4)]
    try:
        done = play(workers, "g", Model(), 400 if LONG else 40, seed=3)
    finally:
        for worker in workers:
            worker.close()
    assert len(done) == 5 or not LONG, done


def fresh(url: str, *galleries: str) -> str:
    """Create empty galleries (default: one, "g") in the database at ``url``."""
    with Node(url) as node:
        for name in galleries or ("g",):
            node.store.galleries.create(name, "f" * 32, DIMENSION, GallerySettings())
    return url


# Concurrent operations, against every order that explains them


def at_once(url: str, gallery: str, shared_subjects: int, steps: int) -> list[list[Any]]:
    """Run writers on one gallery; return the requests and answers of each."""
    weights = {"enroll": 3.0, "delete": 1.0, "delete subject": 0.5, "trim": 0.3, "read": 5.0}
    if shared_subjects:
        weights["move"] = 3.0
    counters = CONTEXT.Array("q", WRITERS, lock=False)
    writers = [
        Writer(Task(url, gallery, i, WRITERS, shared_subjects, steps, weights), counters) for i in range(WRITERS)
    ]
    return [writer.finished() for writer in writers]


def after_all(url: str, gallery: str, histories: list[list[Any]]) -> list[list[Any]]:
    """Return the histories, plus that of a process that reads SQL and searches its index after all writers ended."""
    templates = tuple({t for h in histories for line in h if isinstance(line, Asked) for t in line.templates})
    with Node(url) as node:
        found = node.store.galleries.get(gallery)
        stored = node.templates(gallery)
        by_search = seen(node, found, templates)
    assert found.templates == len(stored)
    assert by_search == {template: stored.get(template) for template in templates}
    return [*histories, [Asked(1, "read", 1e15, templates, None), Answered(1, 1e15, dict(by_search))]]


@pytest.mark.parametrize("shared_subjects", [6, 0])
def test_concurrent_operations_are_linearizable(database_url: DatabaseUrl, shared_subjects: int) -> None:
    url = fresh(database_url())
    if not url.startswith("sqlite"):
        commit_late(url)
    histories = at_once(url, "g", shared_subjects, 1500 if LONG else 100)
    answered = Counter(line.kind for history in histories for line in history if isinstance(line, Asked))
    assert min(answered[kind] for kind in ("enroll", "delete", "delete subject", "read")) > 5
    by_template = operations_of(after_all(url, "g", histories))
    assert without_an_order(by_template) == {}


def test_many_galleries_at_once(database_url: DatabaseUrl) -> None:
    """Writers of one gallery are serialized. Writers of another gallery neither wait for them nor get numbers between
    theirs.
    """
    names = ["a", "b", "c"]
    url = fresh(database_url(), *names)
    if not url.startswith("sqlite"):
        commit_late(url)
    weights = {"enroll": 3.0, "move": 2.0, "read": 4.0}
    counters = CONTEXT.Array("q", 2, lock=False)
    running = {
        name: [Writer(Task(url, name, i, 2, 4, 400 if LONG else 40, weights), counters) for i in range(2)]
        for name in names
    }
    for name, writers in running.items():
        histories = after_all(url, name, [writer.finished() for writer in writers])
        assert without_an_order(operations_of(histories)) == {}


@pytest.mark.parametrize("takes_turns", [True, False])
def test_without_taking_turns_a_write_is_lost_to_the_followers(postgres: Any, takes_turns: bool) -> None:
    """Mutation test: the checks fail when numbers are not in commit order.

    One move waits between its line of the change log and its commit. Another writes a later line and commits, unless
    writers take turns. A follower that reads then passes over the first line.
    """
    url = fresh(postgres.create(f"kith_{uuid.uuid4().hex}"))
    engine = sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    slow, quick = (template_id(0, number) for number in range(2))
    with Node(url, not takes_turns) as node, Node(url) as reader, engine.connect() as holding:
        gallery = node.store.galleries.get("g")
        for subject, template in (("from", slow), ("other", quick)):
            node.enroll("g", subject, [NewTemplate(template, axis_of(template, DIMENSION), "embedding")])
        node.put_subject("g", "to", {}, [])
        node.put_subject("g", "another", {}, [])
        waits_for_a_lock(engine, node, slow)
        holding.execute(HOLD)
        moving = [threading.Thread(target=node.move_template, args=("g", "from", slow, "to"), daemon=True)]
        moving[0].start()
        until(engine, WAITING)
        moving.append(threading.Thread(target=node.move_template, args=("g", "other", quick, "another"), daemon=True))
        moving[1].start()
        moving[1].join(1 if takes_turns else PATIENCE_S)
        assert moving[1].is_alive() == takes_turns
        during = seen(reader, gallery, (slow,))[slow]
        holding.execute(LET_GO)
        for thread in moving:
            thread.join(PATIENCE_S)
        after = seen(reader, gallery, (slow,))[slow]
    engine.dispose()
    history = [
        operation("enroll", 0, 1, "from"),
        operation("move", 2, 5, "from", "to"),
        operation("read", 3, 4, during),
        operation("read", 6, 7, after),
    ]
    assert has_an_order(history) == takes_turns


HOLD = sa.text("SELECT pg_advisory_lock(7)")
LET_GO = sa.text("SELECT pg_advisory_unlock(7)")
WAITING = sa.text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 7 AND NOT granted")


def waits_for_a_lock(engine: sa.Engine, node: Node, template: str) -> None:
    """Let the transactions that write a line about this template wait for HOLD's lock, after its number was drawn."""
    with node.database.read() as connection:
        key = connection.execute(sa.select(templates.c.pk).where(templates.c.id == template)).scalar_one()
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN PERFORM pg_advisory_xact_lock(7); RETURN NULL; END $$"
        )
        connection.exec_driver_sql(
            "CREATE TRIGGER waiting AFTER INSERT ON changes "
            f"FOR EACH ROW WHEN (new.template_pk = {key}) EXECUTE FUNCTION wait()"
        )


def until(engine: sa.Engine, statement: sa.TextClause) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        with engine.connect() as connection:
            if connection.execute(statement).scalar():
                return
        time.sleep(0.05)
    pytest.fail("nobody waits")


def commit_late(url: str) -> None:
    """Delay each commit of a transaction that wrote to the change log, by up to 10 ms a line."""
    engine = sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN PERFORM pg_sleep(random() * 0.01); RETURN NULL; END $$"
        )
        connection.exec_driver_sql(
            "CREATE CONSTRAINT TRIGGER late AFTER INSERT ON changes DEFERRABLE INITIALLY DEFERRED "
            "FOR EACH ROW EXECUTE FUNCTION dawdle()"
        )
    engine.dispose()


# The linearizability checker


def operation(kind: Kind, began: float, ended: float, subject: str | None, to: str | None = None) -> Operation:
    return Operation(kind, began, ended, subject, to)


@pytest.mark.parametrize(
    ("operations", "explained"),
    [
        ([operation("enroll", 0, 1, "a"), operation("read", 2, 3, "a")], True),
        ([operation("enroll", 0, 1, "a"), operation("read", 2, 3, None)], False),  # misses an acknowledged write
        ([operation("enroll", 0, 4, "a"), operation("read", 1, 2, "a"), operation("read", 3, 5, None)], False),
        ([operation("enroll", 0, NEVER, "a"), operation("read", 2, 3, None)], True),
        ([operation("enroll", 0, NEVER, "a"), operation("read", 2, 3, "a")], True),
        ([operation("enroll", 5, 6, "a"), operation("read", 2, 3, "a")], False),  # seen before its request
        (
            [operation("enroll", 0, 1, "a"), operation("move", 2, 6, "a", "b"), operation("read", 3, 4, "a")],
            True,
        ),
        (
            [operation("enroll", 0, 1, "a"), operation("move", 2, 3, "a", "b"), operation("read", 4, 5, "a")],
            False,
        ),
        (
            [operation("enroll", 0, 1, "a"), operation("delete", 2, 3, "a"), operation("delete", 4, 5, "a")],
            True,
        ),
        (
            [operation("enroll", 0, 1, "a"), operation("delete subject", 0, 2, "a"), operation("read", 3, 4, "a")],
            True,
        ),
    ],
)
def test_an_order_is_found_where_there_is_one(operations: list[Operation], explained: bool) -> None:
    assert has_an_order(operations) == explained
