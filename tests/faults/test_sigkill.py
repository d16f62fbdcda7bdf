"""Kills at any instant: acknowledged writes persist, other writes are absent or complete, and the index agrees with
SQL.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kith import KithClientError
from models.vision.recognition import l2_normalize
from service.core.errors import GalleryExistsError
from service.domain.gallery import GallerySettings, NewTemplate, SubjectFilter
from tests.faults import LONG
from tests.faults.judging import halves, operations_of, without_an_order
from tests.faults.killing import pause
from tests.faults.servers import serving
from tests.faults.test_model import after_all
from tests.faults.workers import CONTEXT, DIMENSION, Node, Task, Writer, template_id, vector_of
from tests.postgres import DatabaseUrl
from tests.soundness import problems

WRITERS = 3
MAX_KILL_DELAY_S = 0.25
"""Maximum delay between a writer's first message and its kill."""
WORK = {
    "enrollment": {"enroll": 1.0},
    "deletion": {"enroll": 1.0, "delete": 1.0, "delete subject": 0.5},
    "moving": {"enroll": 1.0, "move": 3.0},
    "trimming of the log": {"enroll": 1.0, "delete": 0.5, "trim": 2.0, "read": 1.0},
}


# Stores


@pytest.mark.parametrize("kind", WORK)
def test_writers_killed_at_work(database_url: DatabaseUrl, kind: str) -> None:
    """Kill all writers at once, like a power failure, or some while the others continue."""
    url, rng = database_url(), np.random.default_rng()
    for i in range(14 if LONG else 1):
        with Node(url) as node:
            node.store.galleries.create(f"g{i}", "f" * 32, DIMENSION, GallerySettings())
        counters = CONTEXT.Array("q", WRITERS, lock=False)
        writers = [Writer(Task(url, f"g{i}", w, WRITERS, 6, 60, WORK[kind]), counters) for w in range(WRITERS)]
        for writer in writers:
            writer.wait_for_a_word()
        pause(rng.uniform(0, MAX_KILL_DELAY_S))
        for writer in writers[: rng.integers(1, WRITERS + 1)]:
            writer.kill()
        histories = [writer.finished() for writer in writers]
        _judge(url, f"g{i}", histories)


def _judge(url: str, gallery: str, histories: list[list[Any]]) -> None:
    told = after_all(url, gallery, histories)
    assert without_an_order(operations_of(told)) == {}
    with Node(url) as node:
        assert halves(histories, node.templates(gallery)) == []
    assert problems(url, gallery) == []


# Server


def test_a_server_killed_at_work(tmp_path: Path, some_database_url: DatabaseUrl) -> None:
    """Clients know which HTTP requests were acknowledged, and a restarted server has those writes."""
    url, rng = some_database_url(), np.random.default_rng()
    per_request = 3
    acknowledged: dict[str, list[str]] = {}
    sent: dict[str, NDArray[np.float32]] = {}
    with serving(tmp_path, url) as (server,):
        with server.client() as kith:
            dimension = kith.model().dimension
            kith.create_gallery("g")
        for kill in range(12 if LONG else 1):
            alive, dead = threading.Semaphore(0), threading.Event()

            def write(writer: int, kill: int = kill, alive: Any = alive, dead: threading.Event = dead) -> None:
                drawn = np.random.default_rng((kill, writer))
                with server.client() as kith:
                    for i in range(1000):
                        subject = f"k{kill}-w{writer}-{i}"
                        vectors = l2_normalize(drawn.normal(size=(per_request, dimension)))
                        sent[subject] = vectors
                        try:
                            answer = kith.enroll(
                                "g", subject, embeddings=list(vectors), allow_inconsistent=True, allow_duplicate=True
                            )
                        except KithClientError:
                            dead.set()
                            return
                        acknowledged[subject] = [r.template for r in answer.results if r.template]
                        alive.release()

            writers = [threading.Thread(daemon=True, target=write, args=(w,)) for w in range(WRITERS)]
            for thread in writers:
                thread.start()
            for _ in range(5):
                assert alive.acquire(timeout=60)
            pause(rng.uniform(0, MAX_KILL_DELAY_S))
            server.kill()
            for thread in writers:
                thread.join(60)
            assert dead.is_set(), "every request succeeded: the kill came too late to prove anything"
            server.launch()
            server.wait_until_ready()
            with server.client() as kith:
                stored = {s.id: s.template_count for s in kith.subjects("g")}
                of_this_kill = [subject for subject in acknowledged if subject.startswith(f"k{kill}-")]
                for subject in of_this_kill:
                    assert [t.id for t in kith.templates("g", subject)] == acknowledged[subject]
                assert set(acknowledged) <= set(stored) <= set(sent)
                assert set(stored.values()) == {per_request}
                assert kith.gallery("g").template_count == sum(stored.values())
                for first in range(0, len(of_this_kill), 16):
                    batch = of_this_kill[first : first + 16]
                    probes = list(l2_normalize(np.stack([sent[subject].mean(0) for subject in batch])))
                    results = kith.identify("g", embeddings=probes, risk={"threshold": 0.99}).results
                    assert [r.subject for r in results] == batch
    assert problems(url) == []


def test_several_first_starts_at_once(database_url: DatabaseUrl) -> None:
    """Concurrent writers on an empty database create the same gallery and the same subject."""
    url = database_url()
    counters = CONTEXT.Array("q", 8, lock=False)
    processes = [CONTEXT.Process(target=_first_start, args=(url, i, counters), daemon=True) for i in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 8
    assert sorted(counters) == [0] * 7 + [1]
    with Node(url) as node:
        assert len(node.templates("g")) == 8
        assert [
            s.id for s in node.store.subjects.list_page(node.store.galleries.get("g"), None, 9, SubjectFilter())
        ] == ["a"]
    assert problems(url) == []


def _first_start(url: str, number: int, created: Any) -> None:
    with Node(url) as node:
        try:
            node.store.galleries.create("g", "f" * 32, DIMENSION, GallerySettings())
            created[number] = 1
        except GalleryExistsError:
            pass
        template = template_id(number, 0)
        node.enroll("g", "a", [NewTemplate(template, vector_of(template, DIMENSION), "embedding")])
