"""Real servers in separate processes, which the starting test ends."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import httpx2 as httpx

from kith import Kith

START_TIMEOUT_S = 60


class Server:
    """Run ``kith serve`` on a free port. ``log``: file for its output; the default is the test's own output."""

    def __init__(self, folder: Path, database_url: str | None = None, log: Path | None = None, **settings: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        own = {"KITH_DATA_DIR": str(folder), "KITH_PORT": str(port), "KITH_LOG_LEVEL": "ERROR"}
        self._environment = os.environ | own | settings
        if database_url is not None:
            self._environment["KITH_DATABASE_URL"] = database_url
        self.launch()

    def launch(self) -> None:
        command = [sys.executable, "-m", "service.cli.main", "serve"]
        with nullcontext() if self._log is None else self._log.open("ab") as log:
            self._process = subprocess.Popen(command, env=self._environment, stdout=log, stderr=log)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self._process.poll() is None, "the service ended by itself"
            if self.readiness() == 200:
                return
            threading.Event().wait(0.05)
        raise AssertionError("the service did not become ready")

    def readiness(self) -> int | None:
        """Return the status of /readyz, or None without an answer."""
        try:
            return httpx.get(f"{self.url}/readyz", timeout=60).status_code
        except httpx.TransportError:
            return None

    def resident_bytes(self) -> int:
        """Memory of the process."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(60)

    def close(self) -> None:
        if self._process.poll() is None:
            self.kill()

    def terminate(self, patient_s: float) -> int:
        """Terminate the process and return its exit status. Raises subprocess.TimeoutExpired."""
        self._process.terminate()
        return self._process.wait(patient_s)

    def client(self, attempts: int = 1) -> Kith:
        return Kith(self.url, attempts=attempts)


def free_port() -> int:
    """Return a free port outside the range that the system assigns, from which another process could get it first."""
    while True:
        port = random.randrange(10_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@contextmanager
def serving(folder: Path, *database_urls: str | None) -> Iterator[list[Server]]:
    """Start a ready server for each URL; None means SQLite in the folder."""
    servers = [Server(folder, url) for url in database_urls]
    try:
        for server in servers:
            server.wait_until_ready()
        yield servers
    finally:
        for server in servers:
            server.kill()
