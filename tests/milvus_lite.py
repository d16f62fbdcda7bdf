"""Milvus Lite in a separate process behind a port, which can be killed, halted and restarted."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

START_TIMEOUT_S: Final = 60.0


class MilvusLite:
    def __init__(self, folder: Path) -> None:
        """Milvus Lite server. ``folder``: its data directory, created if absent."""
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port: int = free.getsockname()[1]

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start the server, and wait until it accepts connections."""
        command = [sys.executable, "-m", "milvus_lite", "server", "--host", "127.0.0.1", "--port", str(self._port)]
        self._process = subprocess.Popen(
            [*command, "--data-dir", str(self._folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("Milvus Lite did not start")

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self._port), timeout=0.05).close()
        except OSError:
            time.sleep(0.02)
            return False
        return True

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def halt(self) -> None:
        """Halt the server: it keeps its connections and does not answer."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
