"""A real HTTP server on loopback that serves bytes from memory, with ranges and the faults of real networks."""

from __future__ import annotations

import re
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class File:
    """``answers``: statuses to give before the file itself. ``cuts``: after how many bytes each of the next answers
    breaks off. ``stated``: the answer's head says its length; else the end of the connection is the file's."""

    content: bytes
    content_type: str = "application/octet-stream"
    further: dict[str, str] = field(default_factory=dict)
    ranges: bool = True
    answers: list[int] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    location: str | None = None
    stated: bool = True


@dataclass
class Server:
    """``requests``: path and Range of each that came, in order."""

    url: str
    files: dict[str, File]
    requests: list[tuple[str, str | None]]
    headers: list[dict[str, str]]


@contextmanager
def serving(files: dict[str, File], tls: ssl.SSLContext | None = None) -> Iterator[Server]:
    """Serve until the block is left; files may be changed meanwhile."""
    server = Server("", files, [], [])

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            server.requests.append((self.path, self.headers.get("Range")))
            server.headers.append({name.lower(): value for name, value in self.headers.items()})
            found = server.files.get(self.path)
            if found is None:
                return self._head(404, b"", {})
            if found.location is not None:
                return self._head(302, b"", {"Location": found.location})
            if found.answers:
                return self._head(found.answers.pop(0), b"", {"Retry-After": "0"})
            self._send(found)
            return None

        def _send(self, found: File) -> None:
            headers = {"Content-Type": found.content_type} | found.further
            body, status = found.content, 200
            wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            if wanted and found.ranges:
                start = int(wanted[1])
                if start >= len(body):
                    return self._head(416, b"", {"Content-Range": f"bytes */{len(body)}"})
                headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
                body, status = body[start:], 206
            self._head(status, body, headers, found.cuts.pop(0) if found.cuts else None, found.stated)
            return None

        def _head(
            self, status: int, body: bytes, headers: dict[str, str], cut: int | None = None, stated: bool = True
        ) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if stated:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[:cut])
            if cut is not None or not stated:
                self.close_connection = True

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        server.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{http.server_port}"
        if tls is not None:
            http.socket = tls.wrap_socket(http.socket, server_side=True)
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()
