"""Servers killed while they send events: none of an acknowledged request is lost, and each gallery keeps its order."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from kith import KithClientError
from models.vision.recognition import l2_normalize
from tests.faults import LONG
from tests.faults.killing import pause
from tests.faults.servers import Server
from tests.postgres import DatabaseUrl
from tests.receivers import Message, Receiver, receiving

GALLERIES = ("door", "gate")
MAX_KILL_DELAY_S = 0.5
ACKNOWLEDGED_BEFORE_KILL = 6
KILLS = 8


@pytest.mark.skipif(not LONG, reason="make test-faults")
def test_events_of_killed_servers_arrive(tmp_path: Path, some_database_url: DatabaseUrl) -> None:
    """One client per gallery enrolls a subject, then searches for it, until the server dies; again after a restart."""
    acknowledged: dict[str, list[tuple[str, str]]] = {gallery: [] for gallery in GALLERIES}
    with receiving() as receiver:
        server = Server(tmp_path, some_database_url(), KITH_WEBHOOK_HOSTS=receiver.origin)
        try:
            server.wait_until_ready()
            with server.client() as kith:
                made = kith.create_webhook(f"{receiver.origin}/", types=["decision", "enrollment"])
                for gallery in GALLERIES:
                    kith.create_gallery(gallery, risk={"threshold": 0.9})
            for kill in range(KILLS):
                # Some answers of the receiver come too late for the server that dies.
                receiver.answers += [503, 204, 500]
                _work_until_killed(server, kill, acknowledged)
                server.launch()
                server.wait_until_ready()
            with server.client() as kith:
                _wait_for_all(receiver, acknowledged)
                for gallery in GALLERIES:
                    _judge(receiver.messages, made.secret, gallery, acknowledged[gallery])
                assert not kith.webhook(made.id).off
        finally:
            server.close()


def _work_until_killed(server: Server, kill: int, acknowledged: dict[str, list[tuple[str, str]]]) -> None:
    alive = threading.Semaphore(0)

    def work(gallery: str) -> None:
        drawn = np.random.default_rng((kill, GALLERIES.index(gallery)))
        with server.client() as kith:
            dimension = kith.model().dimension
            for number in range(10_000):
                subject, vector = f"k{kill}-{number}", l2_normalize(drawn.normal(size=(1, dimension)))[0]
                try:
                    kith.enroll(gallery, subject, embeddings=[vector])
                    acknowledged[gallery].append(("enrollment", subject))
                    (found,) = kith.identify(gallery, embeddings=[vector]).results
                except KithClientError:
                    return
                assert found.subject == subject
                acknowledged[gallery].append(("decision", subject))
                alive.release()

    threads = [threading.Thread(target=work, args=(gallery,), daemon=True) for gallery in GALLERIES]
    for thread in threads:
        thread.start()
    for _ in range(ACKNOWLEDGED_BEFORE_KILL):
        assert alive.acquire(timeout=60)
    pause(np.random.default_rng().uniform(0, MAX_KILL_DELAY_S))
    server.kill()
    for thread in threads:
        thread.join(60)


def _told(messages: list[Message], gallery: str) -> list[tuple[str, str]]:
    """Return type and subject of a gallery's events in the order of their first arrival."""
    documents = {m.id: m.document for m in messages}  # a repeated message keeps its first place
    return [(d["type"], d["data"]["subject"]) for d in documents.values() if d["data"]["gallery"] == gallery]


def _wait_for_all(receiver: Receiver, acknowledged: dict[str, list[tuple[str, str]]]) -> None:
    def arrived() -> bool:
        return all(set(acknowledged[gallery]) <= set(_told(receiver.messages, gallery)) for gallery in GALLERIES)

    with receiver.changed:
        assert receiver.changed.wait_for(arrived, 120), "events of acknowledged requests are lost"


def _judge(messages: list[Message], secret: str, gallery: str, acknowledged: list[tuple[str, str]]) -> None:
    told = _told(messages, gallery)
    # Unacknowledged requests may be reported, too, but nothing out of order.
    assert [event for event in told if event in set(acknowledged)] == acknowledged
    assert len(told) == len(set(told))
    assert len(told) - len(acknowledged) <= len({subject.partition("-")[0] for _, subject in told})
    bodies = {(m.id, m.body) for m in messages}
    assert len(bodies) == len({m.id for m in messages})
    assert all(m.is_signed_by(secret) for m in messages[-20:])
