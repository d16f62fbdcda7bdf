"""HTTP server on loopback with prepared answers, to simulate a failing service."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Answer:
    """Prepared answer. ``breaks`` resets the connection after the request. ``late`` delays the answer until ``go``."""

    status: int = 200
    body: bytes = b'{"status": "ok", "version": "1"}'
    headers: dict[str, str] = field(default_factory=dict)
    breaks: bool = False
    late: bool = False


@dataclass
class Script:
    """Prepared answers and recorded requests.

    Attributes:
        asked: method, path, headers and body of each request.
        arrived: set when a request arrives.
        go: releases late answers.
        gone: set when a client closes its connection while its answer is late.
    """

    url: str
    answers: list[Answer]
    asked: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)
    arrived: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)
    gone: threading.Event = field(default_factory=threading.Event)


@contextmanager
def answering(*answers: Answer) -> Iterator[Script]:
    """Serve the answers in order, then repeat the last one."""
    script = Script("", list(answers))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            script.asked.append((self.command, self.path, dict(self.headers), body))
            script.arrived.set()
            answer = script.answers.pop(0) if len(script.answers) > 1 else script.answers[0]
            if answer.late:
                self._wait()
            if answer.breaks:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.close_connection = True
                self.connection.close()
                return
            with suppress(OSError):
                self.send_response(answer.status)
                for name, value in {"Content-Length": str(len(answer.body)), **answer.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(answer.body)

        def _wait(self) -> None:
            self.connection.settimeout(0.01)
            while not script.go.is_set():
                with suppress(TimeoutError):
                    if not self.connection.recv(1, socket.MSG_PEEK):
                        script.gone.set()
                        return
            self.connection.settimeout(None)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer

        def log_message(self, *_: Any) -> None:
            pass

        def finish(self) -> None:
            with suppress(OSError, ValueError):
                super().finish()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        script.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield script
        script.go.set()
        server.shutdown()
        thread.join()
