"""docker/haproxy.cfg in front of real nodes, in the layout of docker/compose.scale.yaml on loopback: two nodes,
PostgreSQL, and Milvus Lite instead of Milvus. A node is killed while requests continue: acknowledged writes persist,
clients get answers, and the restarted node agrees.
"""

from __future__ import annotations

import os
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest
import yaml
from numpy.typing import NDArray

from kith import Kith, Risk
from service.server import embedded
from service.settings import load_settings
from tests.certificates import certify
from tests.conftest import ROOT, is_eventually, jpeg
from tests.faults.servers import Server, free_port, serving
from tests.milvus_lite import MilvusLite
from tests.postgres import Postgres
from tests.reverse_proxies import haproxy_of

pytestmark = pytest.mark.long

KEY = "k" * 40
DEADLINE_S = 60
RISK: Risk = {"threshold": 0.92}


def status(url: str, **arguments: object) -> int | None:
    try:
        return httpx.get(url, **arguments).status_code  # type: ignore[arg-type]
    except httpx.TransportError:
        return None


@pytest.fixture
def scaled(
    postgres: Postgres, milvus_lite: MilvusLite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[list[Server], str]]:
    """Start two nodes with the settings of compose.scale.yaml except addresses; yield them and the proxy's URL."""
    database = postgres.create(f"scaled_{os.getpid()}")
    compose = yaml.safe_load((ROOT / "docker" / "compose.scale.yaml").read_text())
    for name, value in compose["x-kith"]["environment"].items():
        if name != "KITH_MASTER_KEY_FILE":
            monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("KITH_DATABASE_URL", database)
    monkeypatch.setenv("KITH_MILVUS_URI", milvus_lite.uri)
    monkeypatch.setenv("KITH_API_KEY", KEY)
    with (
        serving(tmp_path, database, database) as nodes,
        haproxy_of(*(node.url for node in nodes)) as url,
    ):
        is_eventually(lambda: status(f"{url}/readyz") == 200)
        yield nodes, url


def test_a_node_is_killed_and_comes_back(
    scaled: tuple[list[Server], str], astronaut: NDArray[np.uint8], group: NDArray[np.uint8]
) -> None:
    nodes, url = scaled
    acknowledged: dict[str, NDArray[np.float32]] = {}
    enough = threading.Event()

    def enroll(dimension: int) -> None:
        rng = np.random.default_rng(3)
        with Kith(url, KEY) as kith:
            while not enough.is_set():
                name, vector = f"p{len(acknowledged)}", rng.normal(size=dimension).astype(np.float32)
                assert kith.enroll("g", name, embeddings=[vector], allow_duplicate=True).enrolled_count == 1
                acknowledged[name] = vector

    def until_further(count: int) -> None:
        before = len(acknowledged)
        is_eventually(lambda: len(acknowledged) >= before + count or writer.done())

    with Kith(url, KEY) as kith, ThreadPoolExecutor(1) as thread:
        kith.create_gallery("g")
        kith.enroll("g", "collins", jpeg(astronaut))
        writer = thread.submit(enroll, kith.model().dimension)
        for killed in nodes:
            until_further(10)
            killed.kill()
            until_further(10)
            (found,) = kith.identify("g", jpeg(astronaut), risk=RISK).results
            assert found.subject == "collins"
            killed.launch()
            killed.wait_until_ready()
            until_further(10)
        enough.set()
        writer.result(DEADLINE_S)
        strangers = kith.identify("g", jpeg(group), risk=RISK).results
        assert {each.subject for each in strangers} == {None}
    for node in nodes:
        with Kith(node.url, KEY) as kith:
            for name, vector in acknowledged.items():
                (found,) = kith.identify("g", embeddings=[vector], risk=RISK).results
                assert found.subject == name
            assert len(list(kith.subjects("g"))) == len(acknowledged) + 1, "and nobody else"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of one node that requires a key."""
    folder = tmp_path_factory.mktemp("node")
    settings = load_settings(data_dir=folder, api_key=KEY, log_level="ERROR")
    with embedded(settings) as url:
        yield url


def test_no_node_is_said_in_words() -> None:
    with haproxy_of(*(f"127.0.0.1:{free_port()}" for _ in range(2))) as url:
        is_eventually(lambda: status(f"{url}/readyz") is not None)
        answer = httpx.get(f"{url}/readyz")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "2"
    assert answer.json()["code"] == "no_node"


def test_one_node_of_two_is_enough_and_a_key_has_a_rate(node: str, astronaut: NDArray[np.uint8]) -> None:
    """However the key is sent. Keys do not share a rate."""
    with haproxy_of(f"127.0.0.1:{free_port()}", node, KITH_REQUESTS_PER_MINUTE="5") as url:
        is_eventually(lambda: status(f"{url}/readyz") == 200)
        with Kith(url, KEY, attempts=1) as kith:
            assert kith.detect(jpeg(astronaut)).images
        same = [{"X-API-Key": KEY}, {"Authorization": f"Bearer {KEY}"}, {"Authorization": f"bearer   {KEY}"}] * 3
        answers = [httpx.get(f"{url}/v1/models", headers=headers) for headers in same]
        assert [answer.status_code for answer in answers] == [200] * 4 + [429] * 5
        assert answers[-1].json()["code"] == "rate_limited"
        assert answers[-1].headers["retry-after"] == "20"
        assert [status(f"{url}/v1/models", headers={"X-API-Key": "wrong"}) for _ in range(7)] == [401] * 5 + [429] * 2
        assert status(f"{url}/readyz") == 200


def test_tls_ends_at_the_proxy(node: str, tmp_path: Path) -> None:
    file, port = tmp_path / "proxy.pem", free_port()
    certify(file)
    trusted = ssl.create_default_context(cafile=str(file))
    with (
        haproxy_of(node, node, KITH_TLS_LISTEN=f"127.0.0.1:{port}", KITH_TLS_FILE=str(file)) as url,
        httpx.Client(verify=trusted, headers={"X-API-Key": KEY}) as client,
    ):
        is_eventually(lambda: status(f"{url}/readyz") == 308)
        is_eventually(lambda: client.get(f"https://127.0.0.1:{port}/readyz").status_code == 200)
        answer = client.get(f"https://127.0.0.1:{port}/v1/models")
        assert answer.status_code == 200
        assert answer.headers["strict-transport-security"]
