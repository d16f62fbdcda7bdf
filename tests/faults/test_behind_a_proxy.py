"""The layout of docker/compose.scale.yaml on loopback: two nodes behind its HAProxy, PostgreSQL, and Milvus Lite for
Milvus. A node is killed while requests go on: what was acknowledged stays, who asks is answered, and the node agrees
when it is back."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest
import yaml
from numpy.typing import NDArray

from service.client import Kith, KithClientError
from tests.conftest import ROOT, jpeg
from tests.faults.servers import Server, free_port, serving
from tests.milvus_lite import MilvusLite
from tests.postgres import Postgres

KEY = "k" * 40
DEADLINE_S = 60
RISK = {"threshold": 0.92}


@contextmanager
def proxy(*nodes: str, **environment: str) -> Iterator[str]:
    """HAProxy by docker/haproxy.cfg before two nodes; its URL."""
    program = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin")
    if program is None:
        pytest.skip("HAProxy is not installed (Debian: apt-get install haproxy)")
    port = free_port()
    variables = {"KITH_LISTEN": f"127.0.0.1:{port}", "KITH_NODE_1": nodes[0], "KITH_NODE_2": nodes[1], **environment}
    process = subprocess.Popen(
        [program, "-db", "-f", str(ROOT / "docker" / "haproxy.cfg")],
        env=os.environ | variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline
        threading.Event().wait(0.05)


def status(url: str, **arguments: object) -> int | None:
    try:
        return httpx.get(url, **arguments).status_code  # type: ignore[arg-type]
    except httpx.TransportError:
        return None


@pytest.fixture
def scaled(
    postgres: Postgres, milvus_lite: MilvusLite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[list[Server], str]]:
    """Two nodes set as compose.scale.yaml sets them, as far as it says where and not what, and the proxy's URL."""
    database = postgres.create(f"scaled_{os.getpid()}")
    compose = yaml.safe_load((ROOT / "docker" / "compose.scale.yaml").read_text())
    for name, value in compose["x-kith"]["environment"].items():
        if name not in ("KITH_MASTER_KEY_FILE", "KITH_TRUSTED_PROXIES"):
            monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("KITH_DATABASE_URL", database)
    monkeypatch.setenv("KITH_MILVUS_URI", milvus_lite.uri)
    monkeypatch.setenv("KITH_API_KEY", KEY)
    with (
        serving(tmp_path, database, database) as nodes,
        proxy(*(node.url.removeprefix("http://") for node in nodes)) as url,
    ):
        until(lambda: status(f"{url}/readyz") == 200)
        yield nodes, url


class Writer(threading.Thread):
    """Enrols one made-up person after another, and keeps who was acknowledged."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.acknowledged: dict[str, NDArray[np.float32]] = {}
        self.enough = threading.Event()
        self.failure: BaseException | None = None
        self._kith = Kith(url, KEY)
        self._dimension = httpx.get(f"{url}/v1/models", headers={"X-API-Key": KEY}).json()["dimension"]
        self._rng = np.random.default_rng(3)

    def run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self.failure = error
        finally:
            self._kith.close()

    def _write(self) -> None:
        for number in itertools.count():
            if self.enough.is_set():
                return
            vector = self._rng.normal(size=self._dimension).astype(np.float32)
            self._enrol(f"p{number}", vector)
            self.acknowledged[f"p{number}"] = vector

    def _enrol(self, subject: str, vector: NDArray[np.float32]) -> None:
        """As the proxy's error asks: again, under the same key."""
        while True:
            try:
                key = f"key-of-{subject}"
                done = self._kith.enrol("g", subject, embeddings=[vector], allow_duplicate=True, idempotency_key=key)
                assert done.enrolled == 1
                return
            except KithClientError as error:
                if error.status not in (502, 504):
                    raise


def agrees(kith: Kith, people: dict[str, NDArray[np.float32]]) -> None:
    """Each is found by what they were enrolled with, through this server."""
    for name, vector in people.items():
        (found,) = kith.identify("g", embeddings=[vector], risk=RISK).results
        assert found.subject == name


def test_a_node_is_killed_and_comes_back(
    scaled: tuple[list[Server], str], astronaut: NDArray[np.uint8], group: NDArray[np.uint8]
) -> None:
    nodes, url = scaled
    with Kith(url, KEY) as kith:
        kith.create_gallery("g", fusion="max")
        kith.enrol("g", "collins", jpeg(astronaut))
        writer = Writer(url)
        writer.start()
        for killed in nodes:
            before = len(writer.acknowledged)
            until(lambda: len(writer.acknowledged) >= before + 10 or writer.failure is not None)  # noqa: B023
            killed.kill()
            since = len(writer.acknowledged)
            until(lambda: len(writer.acknowledged) >= since + 10 or writer.failure is not None)  # noqa: B023
            (found,) = kith.identify("g", jpeg(astronaut), risk=RISK).results
            assert found.subject == "collins"
            killed.launch()
            killed.wait_until_ready()
            until(lambda: len(writer.acknowledged) >= since + 20 or writer.failure is not None)  # noqa: B023
        writer.enough.set()
        writer.join(DEADLINE_S)
        assert writer.failure is None
        strangers = kith.identify("g", jpeg(group), risk=RISK).results
        assert {each.subject for each in strangers} == {None}
    for node in nodes:
        with Kith(node.url, KEY) as kith:
            agrees(kith, writer.acknowledged)
            assert len(list(kith.subjects("g"))) == len(writer.acknowledged) + 1, "and nobody else"
