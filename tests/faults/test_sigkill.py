"""Killed at any instant of enrolment, the service has every acknowledged template after restart, and nothing half."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from models.recognition import unit
from service.client import Kith, KithClientError

KILLS = 5
WRITERS = 3
PER_REQUEST = 3


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def start(folder: Path, port: int) -> subprocess.Popen[bytes]:
    environment = os.environ | {"KITH_DATA_DIR": str(folder), "KITH_PORT": str(port), "KITH_LOG_LEVEL": "ERROR"}
    process = subprocess.Popen([sys.executable, "-m", "service.cli", "serve"], env=environment)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, "the service ended by itself"
        try:
            if httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200:
                return process
        except httpx.TransportError:
            pass
        threading.Event().wait(0.05)
    raise AssertionError("the service did not become ready")


@pytest.mark.parametrize("kill", range(KILLS))
def test_every_acknowledged_template_is_there_after_sigkill(tmp_path: Path, kill: int) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = start(tmp_path, port)
    acknowledged: dict[str, list[str]] = {}
    sent: dict[str, NDArray[np.float32]] = {}
    dead = threading.Event()
    enough = threading.Event()

    def write(writer: int) -> None:
        rng = np.random.default_rng((kill, writer))
        with Kith(url, attempts=1) as kith:
            for i in range(1000):
                subject = f"w{writer}-{i}"
                vectors = unit(rng.normal(size=(PER_REQUEST, dimension)))
                sent[subject] = vectors
                try:
                    answer = kith.enrol(
                        "g", subject, embeddings=list(vectors), allow_inconsistent=True, allow_duplicate=True
                    )
                except KithClientError:
                    dead.set()
                    return
                acknowledged[subject] = [r.template for r in answer.results if r.template]
                if len(acknowledged) > 10 + 7 * kill:
                    enough.set()

    try:
        with Kith(url) as kith:
            dimension = kith.model().dimension
            # By max, a subject answers for each of its templates.
            kith.create_gallery("g", fusion="max")
        writers = [threading.Thread(target=write, args=(w,)) for w in range(WRITERS)]
        for thread in writers:
            thread.start()
        assert enough.wait(60)
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        for thread in writers:
            thread.join(60)
        assert dead.is_set(), "every request succeeded: the kill came too late to prove anything"

        process = start(tmp_path, port)
        with Kith(url) as kith:
            stored = {s.id: s.templates for s in kith.subjects("g")}
            for subject, templates in acknowledged.items():
                assert [t.id for t in kith.templates("g", subject).templates] == templates
            # What was cut off is there whole or not at all.
            assert set(stored) <= set(sent)
            assert set(stored.values()) == {PER_REQUEST}
            assert kith.gallery("g").templates == sum(stored.values())
            # And the index agrees with the database.
            probes = [sent[subject][0] for subject in stored]
            for start_row in range(0, len(probes), 50):
                batch = probes[start_row : start_row + 50]
                results = kith.identify("g", embeddings=batch, risk={"threshold": 0.99}).results
                assert [r.subject for r in results] == list(stored)[start_row : start_row + 50]
    finally:
        process.kill()
        process.wait(30)
