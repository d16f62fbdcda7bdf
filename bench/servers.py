"""Servers to measure, each in its own process with its own data."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import httpx2 as httpx

from bench.load import HOST
from kith import Kith
from models.pack.loading import load_pack
from models.runtime.network import Float
from tests.databases import ENVIRONMENT
from tests.faults.servers import free_port

GALLERY: Final = "people"
FPIR: Final = 0.01
START_S: Final = 120.0
STOP_S: Final = 30.0


@dataclass(frozen=True)
class Running:
    port: int
    pid: int

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def networks(self) -> str:
        """Return the networks in Kith's own words: ``detector openvino bf16, recognizer openvino int8``."""
        told = httpx.get(f"{self.url}/v1/models", timeout=10).raise_for_status().json()
        names = {"detector": told["detection"], "recognizer": told["recognition"]}
        return ", ".join(f"{name} {one['engine']} {one['precision']}" for name, one in names.items())


@contextmanager
def kith_server(pack: Path, settings: Mapping[str, str], people: Mapping[str, Float]) -> Iterator[Running]:
    """Start Kith like `kith serve`, with a gallery of ``people`` (name to unit vector)."""
    with TemporaryDirectory() as folder:
        given = {"KITH_DATA_DIR": folder, "KITH_PACK": str(pack), "KITH_LOG_LEVEL": "WARNING", **settings}
        port = free_port()
        command = [sys.executable, "-m", "service.cli.main", "serve"]
        with started(command, {"KITH_PORT": str(port), **given}, port, "/readyz") as running:
            enroll(running.url, pack, people, Path(folder) / "people.ndjson")
            yield running


@contextmanager
def naive_server(pack: Path, side_px: int = 640) -> Iterator[Running]:
    """Start the naive server; ``side_px`` is the side of its detector's canvas."""
    port = free_port()
    command = [sys.executable, "-W", "ignore", "-m", "uvicorn", "bench.peers.naive_server:app"]
    command += ["--port", str(port), "--log-level", "warning", "--no-access-log"]
    with started(command, {"NAIVE_PACK": str(pack), "NAIVE_SIDE": str(side_px)}, port, "/docs") as running:
        yield running


def enroll(url: str, pack: Path, people: Mapping[str, Float], file: Path) -> None:
    with Kith(url, timeout_s=300) as kith:
        kith.create_gallery(GALLERY, risk={"fpir": FPIR})
        if not people:
            return
        coded = {name: base64.b64encode(vector.astype("<f4").tobytes()).decode() for name, vector in people.items()}
        lines = (json.dumps({"subject": name, "embedding": vector}) for name, vector in coded.items())
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        kith.import_gallery(GALLERY, file, recognizer=load_pack(pack).recognition.fingerprint())
        # Otherwise the service calibrates in the background, during the measurement.
        kith.calibrate(GALLERY)


@contextmanager
def started(command: list[str], environment: Mapping[str, str], port: int, ready: str) -> Iterator[Running]:
    """Start a server and wait until its path ``ready`` answers."""
    process = subprocess.Popen(command, env={**os.environ, **ENVIRONMENT, **environment}, stdout=subprocess.DEVNULL)
    try:
        running = Running(port, process.pid)
        deadline = time.monotonic() + START_S
        while not _is_ready(running.url + ready):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{' '.join(command[1:4])} did not start")
            time.sleep(0.05)
        yield running
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(url, timeout=10).is_success
    except httpx.TransportError:
        return False
