"""The database stops, hangs or has no space: clear errors, and no acknowledged write is lost. When it returns, the
service goes on without a restart.
"""

from __future__ import annotations

import errno
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest

from kith import KithClientError
from models.vision.recognition import l2_normalize
from service.server import SHUTDOWN_CLOSE_S, SHUTDOWN_REQUESTS_S
from tests.faults.killing import pause
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
PATIENCE_S = 120


def test_postgresql_restarts_under_load(tmp_path: Path, postgres: Postgres) -> None:
    url = postgres.create(f"kith_{uuid.uuid4().hex}")
    acknowledged: dict[str, str | None] = {}
    interrupted: list[str] = []
    stopping, searched = threading.Event(), threading.Semaphore(0)

    def repeat(request: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Repeat a request until it is answered."""
        give_up = time.monotonic() + PATIENCE_S
        while True:
            try:
                return request(*arguments, **options)
            except KithClientError as error:
                assert (error.status, error.code) in ((503, "storage_unavailable"), (503, "storage_busy"))
                assert time.monotonic() < give_up
                interrupted.append(error.code)
                pause(0.05)

    def work(client: int) -> None:
        """Enroll a subject, with one idempotency key, and search for it."""
        rng = np.random.default_rng(client)
        with server.client() as kith:
            while not stopping.is_set():
                subject, options = uuid.uuid4().hex, {"allow_duplicate": True, "idempotency_key": uuid.uuid4().hex}
                vectors = list(l2_normalize(rng.normal(size=(1, dimension))))
                answer = repeat(kith.enroll, "g", subject, embeddings=vectors, **options)
                acknowledged[subject] = answer.results[0].template
                found = repeat(kith.identify, "g", embeddings=vectors, risk={"threshold": 0.99})
                assert found.results[0].subject == subject
                searched.release()

    with serving(tmp_path, url) as (server,), ThreadPoolExecutor(CLIENTS) as threads:
        with server.client() as kith:
            dimension = kith.model().dimension
            kith.create_gallery("g")
        clients = [threads.submit(work, number) for number in range(CLIENTS)]
        try:
            for mode in ("immediate", "fast"):  # a crash with log recovery; a stop that closes every connection
                for _ in range(10):
                    assert searched.acquire(timeout=60)
                postgres.stop(mode)
                try:
                    assert server.readiness() == 503
                    pause(DOWN_S)
                finally:
                    postgres.start()
                server.wait_until_ready()
                while searched.acquire(blocking=False):
                    pass
        finally:
            stopping.set()
        for client in clients:
            client.result(PATIENCE_S)
        assert interrupted, "the restarts prove nothing"
        with server.client() as kith:
            # A repeated request is stored once, whether its first commit or only the answer was lost.
            assert {s.id: s.template_count for s in kith.subjects("g")} == dict.fromkeys(acknowledged, 1)
            for subject, template in acknowledged.items():
                assert [t.id for t in kith.templates("g", subject)] == [template]
    assert problems(url) == []


def test_postgresql_halts_and_goes_on(tmp_path: Path, postgres: Postgres) -> None:
    url = postgres.create(f"kith_{uuid.uuid4().hex}")
    # The operator's key works without the database, which holds the other keys.
    with (
        closing(Server(tmp_path, url, KITH_API_KEY=KEY)) as server,
        ThreadPoolExecutor(PROBES) as probes,
        httpx.Client(base_url=server.url, headers={"X-API-Key": KEY}, timeout=TOLD_S) as http,
    ):
        server.wait_until_ready()
        assert http.get("/v1/status").json()["ready"] is True
        with postgres.halted():
            asked = time.monotonic()
            # More than the size of asyncio's thread pool.
            assert set(probes.map(lambda _: server.readiness(), range(PROBES))) == {503}
            assert http.get("/readyz").json()["code"] == "readiness_unknown"
            assert http.get("/v1/status").json()["ready"] is False
            assert http.get("/metrics").is_success
            assert time.monotonic() - asked < 3 * TOLD_S
        server.wait_until_ready()
        with postgres.halted():
            assert server.readiness() == 503
            assert server.terminate(patient_s=SHUTDOWN_REQUESTS_S + SHUTDOWN_CLOSE_S + 5) == 1


# Full disks

SIZE_MB = 40


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of SIZE_MB. Skips if mounting is not permitted."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE_MB}m", "tmpfs", str(folder)], check=False)
    if mounted.returncode:
        pytest.skip("no file system may be mounted here: run as root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Fill the disk to the last byte."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 10, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                assert error.errno == errno.ENOSPC
    return filler


def test_a_full_disk(small_disk: Path) -> None:
    rng, refused = np.random.default_rng(0), list[str]()
    enrolled: dict[str, np.ndarray] = {}

    def enroll(subject: str, count: int) -> None:
        vectors = l2_normalize(rng.normal(size=(count, dimension)))
        answer = kith.enroll("g", subject, embeddings=list(vectors), allow_duplicate=True, allow_inconsistent=True)
        assert answer.enrolled_count == count
        enrolled[subject] = vectors

    def check() -> None:
        """Check that listing and searching return exactly these subjects."""
        assert {s.id: s.template_count for s in kith.subjects("g")} == {s: len(v) for s, v in enrolled.items()}
        for subject, vectors in enrolled.items():
            (result,) = kith.identify("g", embeddings=[vectors.mean(0)], risk={"threshold": 0.99}).results
            assert result.subject == subject

    with serving(small_disk, None) as (server,), server.client() as kith:
        dimension = kith.model().dimension
        kith.create_gallery("g")
        for number in range(20):
            enroll(f"s{number}", 1)
        filler = fill(small_disk)
        while len(refused) < 5:  # free space inside the database's last pages may hold a few more
            try:
                enroll(f"t{len(enrolled)}", 16)
            except KithClientError as error:
                assert (error.status, error.code) == (507, "storage_full"), str(error)
                refused.append(error.code)
        check()
        assert server.readiness() == 200  # searches work
        filler.unlink()
        for subject in [*enrolled][:10]:
            assert kith.delete_subject("g", subject).subject_count == 1
            del enrolled[subject]
        enroll(f"t{len(enrolled)}", 1)
        check()
    assert problems(f"sqlite:///{small_disk / 'kith.db'}") == []
