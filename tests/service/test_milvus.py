"""Milvus as an index that may be away, halted, emptied, behind, or in the hands of another node."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import numpy as np
import pytest

from models.recognition import unit
from service.errors import SettingsError
from service.server import embedded
from service.settings import Settings, load_settings
from tests.milvus_lite import MilvusLite

DIMENSION = 128
HEALING_S = 30


@pytest.fixture
def own_lite(tmp_path: Path) -> Iterator[MilvusLite]:
    """Not started."""
    server = MilvusLite(tmp_path / "milvus")
    yield server
    server.kill()


def test_a_service_outlives_the_absence_of_milvus(
    tmp_path: Path, own_lite: MilvusLite, rng: np.random.Generator
) -> None:
    """It starts without Milvus and says so, works once Milvus is there, and again after Milvus was killed."""
    vectors = unit(rng.normal(size=(3, DIMENSION))).tolist()
    with (
        embedded(load_settings(data_dir=tmp_path, log_level="ERROR", milvus_uri=own_lite.uri)) as url,
        httpx2.Client(base_url=url, timeout=60) as http,
    ):

        def identify() -> httpx2.Response:
            body = {"embeddings": vectors[:1], "risk": {"threshold": 0.9}}
            return http.post("/v1/galleries/g/identify", json=body)

        assert http.get("/healthz").status_code == 200
        ready = http.get("/readyz")
        assert (ready.status_code, ready.json()["code"]) == (503, "index_unavailable")
        assert http.post("/v1/galleries", json={"name": "g"}).status_code == 201

        own_lite.start()
        _until_ready(http)
        for name, vector in zip("abc", vectors, strict=True):
            enrolled = http.post(f"/v1/galleries/g/subjects/{name}/templates", json={"embeddings": [vector]})
            assert enrolled.status_code == 201, enrolled.text
        assert identify().json()["results"][0]["subject"] == "a"

        own_lite.kill()
        refused = identify()
        assert (refused.status_code, refused.json()["code"]) == (503, "index_unavailable")
        assert http.get("/readyz").status_code == 503
        assert http.delete("/v1/galleries/g/subjects/a").status_code == 200

        own_lite.start()
        _until_ready(http)
        assert identify().json()["results"][0]["outcome"] == "unknown"
        assert http.delete("/v1/galleries/g").status_code == 200


def _until_ready(http: httpx2.Client) -> None:
    deadline = time.monotonic() + HEALING_S
    while http.get("/readyz").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_milvus_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymilvus", None)
    with pytest.raises(SettingsError, match=r"kith-face\[milvus\]"):
        Settings(milvus_uri="http://127.0.0.1:19530").check_extras()
