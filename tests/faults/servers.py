"""Real servers in processes of their own, ended one by one, by what started them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import httpx2 as httpx

from service.client import Kith

START_TIMEOUT_S = 60


class Server:
    """``kith serve`` on a free port. ``log``: a file that has what it says, else it says it here."""

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
        command = [sys.executable, "-m", "service.cli", "serve"]
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
        """The status of /readyz; None: no answer."""
        try:
            return httpx.get(f"{self.url}/readyz", timeout=30).status_code
        except httpx.TransportError:
            return None

    def peak_bytes(self) -> int:
        """The most memory that the process has had."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(30)

    def close(self) -> None:
        if self._process.poll() is None:
            self.kill()

    def terminate(self, patient_s: float) -> int:
        """Asks it to end; its exit status. Raises subprocess.TimeoutExpired."""
        self._process.terminate()
        return self._process.wait(patient_s)

    def client(self, attempts: int = 1) -> Kith:
        return Kith(self.url, attempts=attempts)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


@contextmanager
def serving(folder: Path, *database_urls: str | None) -> Iterator[list[Server]]:
    """A ready server for each URL, None: SQLite in the folder."""
    servers = [Server(folder, url) for url in database_urls]
    try:
        for server in servers:
            server.wait_until_ready()
        yield servers
    finally:
        for server in servers:
            server.kill()
