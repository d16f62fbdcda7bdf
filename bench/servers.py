"""Servers to measure, each in its own process with its own data."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from urllib.parse import urlsplit

import httpx2 as httpx

from kith import Kith
from models.pack.loading import load_pack
from models.runtime.network import Float
from tests.databases import ENVIRONMENT
from tests.faults.servers import Server

GALLERY: Final = "people"
STOP_S: Final = 30.0


class Running(Server):
    """Kith like `kith serve`."""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 0

    def networks(self) -> str:
        """Return the networks in Kith's own words: ``detector openvino bf16, recognizer openvino int8``."""
        told = httpx.get(f"{self.url}/v1/models", timeout=10).raise_for_status().json()
        names = {"detector": told["detection"], "recognizer": told["recognition"]}
        return ", ".join(f"{name} {one['engine']} {one['precision']}" for name, one in names.items())


class NaiveServer(Running):
    """The naive server of bench/peers."""

    def launch(self) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "uvicorn", "bench.peers.naive_server:app"]
        command += ["--port", str(self.port), "--log-level", "warning", "--no-access-log"]
        self._process = subprocess.Popen(command, env=self._environment)

    def readiness(self) -> int | None:
        with suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/docs", timeout=10).status_code
        return None


@contextmanager
def kith_server(pack: Path, settings: Mapping[str, str], people: Mapping[str, Float]) -> Iterator[Running]:
    """Start Kith with a gallery of ``people`` (name to unit vector)."""
    with TemporaryDirectory() as folder, running(Running, Path(folder), KITH_PACK=str(pack), **settings) as server:
        enroll(server.url, pack, people, Path(folder) / "people.ndjson")
        yield server


@contextmanager
def naive_server(pack: Path, side_px: int = 640) -> Iterator[Running]:
    """Start the naive server; ``side_px`` is the side of its detector's canvas."""
    with running(NaiveServer, Path(), NAIVE_PACK=str(pack), NAIVE_SIDE=str(side_px)) as server:
        yield server


@contextmanager
def running(kind: type[Running], folder: Path, **settings: str) -> Iterator[Running]:
    server = kind(folder, None, None, **ENVIRONMENT, **settings)
    try:
        server.wait_until_ready()
        yield server
        server.terminate(STOP_S)
    finally:
        server.close()


def enroll(url: str, pack: Path, people: Mapping[str, Float], file: Path) -> None:
    with Kith(url, timeout_s=300) as kith:
        kith.create_gallery(GALLERY, risk={"fpir": 0.01})
        if not people:
            return
        coded = {name: base64.b64encode(vector.astype("<f4").tobytes()).decode() for name, vector in people.items()}
        lines = (json.dumps({"subject": name, "embedding": vector}) for name, vector in coded.items())
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        kith.import_gallery(GALLERY, file, recognizer=load_pack(pack).recognition.fingerprint())
        # Otherwise the service calibrates in the background, during the measurement.
        kith.calibrate(GALLERY)
