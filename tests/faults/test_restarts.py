"""The database stops under load and returns: clear errors, no restart of the service, and no acknowledged write is
lost.
"""

from __future__ import annotations

import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest

from kith import KithClientError
from models.runtime.network import Float
from models.vision.recognition import l2_normalize
from service.server import SHUTDOWN_CLOSE_S, SHUTDOWN_REQUESTS_S
from tests.faults import LONG
from tests.faults.servers import Server, serving
from tests.postgres import Postgres
from tests.soundness import problems

pytestmark = pytest.mark.long

CLIENTS = 3
DOWN_S = 0.5
PROBES = 32
KEY = "operator-" * 4
TOLD_S = 15
"""Generous, for busy machines."""


@pytest.mark.parametrize("mode", ["immediate", "fast"] if LONG else ["immediate"])
def test_postgresql_restarts_under_load(tmp_path: Path, postgres: Postgres, mode: str) -> None:
    """Restart PostgreSQL. ``immediate`` is a crash with log recovery; ``fast`` closes every connection."""
    url = postgres.create(f"kith_{uuid.uuid4().hex}")
    acknowledged: dict[str, str] = {}
    vectors: dict[str, Float] = {}
    repeated: list[str] = []
    unforeseen: list[str] = []
    stopping = threading.Event()
    searched = threading.Semaphore(0)
    with serving(tmp_path, url) as (server,):
        with server.client() as kith:
            dimension = kith.model().dimension
            kith.create_gallery("g")

        def enroll(client: int) -> None:
            """Repeat each request under one idempotency key until it is answered."""
            rng = np.random.default_rng(client)
            with server.client() as kith:
                for i in range(100_000):
                    if stopping.is_set():
                        return
                    subject = f"c{client}-{i}"
                    (vectors[subject],) = l2_normalize(rng.normal(size=(1, dimension)))
                    key = uuid.uuid4().hex
                    give_up = time.monotonic() + 120
                    while True:
                        try:
                            answer = kith.enroll(
                                "g",
                                subject,
                                embeddings=[vectors[subject]],
                                idempotency_key=key,
                                allow_duplicate=True,
                                allow_inconsistent=True,
                            )
                        except KithClientError as error:
                            note(error)
                            repeated.append(subject)
                            if time.monotonic() > give_up:
                                unforeseen.append(f"{subject} was never answered")
                                return
                            threading.Event().wait(0.05)
                            continue
                        acknowledged[subject] = answer.results[0].template or ""
                        break

        def identify() -> None:
            rng = np.random.default_rng(99)
            with server.client() as kith:
                while not stopping.is_set():
                    known = list(acknowledged)
                    if not known:
                        continue
                    subject = known[rng.integers(len(known))]
                    try:
                        (result,) = kith.identify("g", embeddings=[vectors[subject]], risk={"threshold": 0.99}).results
                    except KithClientError as error:
                        note(error)
                        continue
                    if result.subject != subject:
                        unforeseen.append(f"{subject} is acknowledged and not found")
                    searched.release()

        def note(error: KithClientError) -> None:
            if (error.status, error.code) not in ((503, "storage_unavailable"), (503, "storage_busy")):
                unforeseen.append(str(error))

        clients = [threading.Thread(target=enroll, args=(c,), daemon=True) for c in range(CLIENTS)]
        clients.append(threading.Thread(target=identify, daemon=True))
        for thread in clients:
            thread.start()
        try:
            for _ in range(6 if LONG else 2):
                for _ in range(10):
                    assert searched.acquire(timeout=60), unforeseen
                postgres.stop(mode)
                try:
                    assert server.readiness() == 503
                    threading.Event().wait(DOWN_S)
                finally:
                    postgres.start()
                deadline = time.monotonic() + 60
                while server.readiness() != 200:
                    assert time.monotonic() < deadline, "not ready again"
                while searched.acquire(blocking=False):
                    pass
        finally:
            stopping.set()
            for thread in clients:
                thread.join(60)
        assert unforeseen == []
        assert repeated, "nothing was interrupted: the restarts prove nothing"
        with server.client() as kith:
            stored = {s.id: s.template_count for s in kith.subjects("g")}
            # A repeated request is stored once, whether its first commit or only the answer was lost.
            assert stored == dict.fromkeys(acknowledged, 1)
            for subject, template in acknowledged.items():
                assert [t.id for t in kith.templates("g", subject)] == [template]
    assert problems(url) == []


def test_postgresql_halts_and_goes_on(tmp_path: Path, postgres: Postgres) -> None:
    url = postgres.create(f"kith_{uuid.uuid4().hex}")
    # The operator's key works without the database, which holds the other keys.
    server = Server(tmp_path, url, KITH_API_KEY=KEY)
    with closing(server), ThreadPoolExecutor(PROBES) as probes:
        server.wait_until_ready()
        with httpx.Client(headers={"X-API-Key": KEY}, timeout=TOLD_S) as http:
            assert http.get(f"{server.url}/v1/status").json()["ready"] is True
        with postgres.halted():
            asked = time.monotonic()
            # More than the size of asyncio's thread pool.
            answers = list(probes.map(lambda _: server.readiness(), range(PROBES)))
            assert set(answers) == {503}
            assert httpx.get(f"{server.url}/readyz", timeout=TOLD_S).json()["code"] == "readiness_unknown"
            with httpx.Client(headers={"X-API-Key": KEY}, timeout=TOLD_S) as http:
                assert http.get(f"{server.url}/v1/status").json()["ready"] is False
                assert http.get(f"{server.url}/metrics").is_success
            assert time.monotonic() - asked < 3 * TOLD_S
        deadline = time.monotonic() + TOLD_S
        while server.readiness() != 200:
            assert time.monotonic() < deadline, "not ready again"
        with postgres.halted():
            assert server.readiness() == 503
            assert server.terminate(patient_s=SHUTDOWN_REQUESTS_S + SHUTDOWN_CLOSE_S + 5) == 1
