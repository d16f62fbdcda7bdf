"""A real HTTP server on loopback that serves bytes from memory, with ranges and the faults of real networks."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.local_http import Handler, served_by


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

    class Files(Handler):
        protocol_version = "HTTP/1.1"

        def get(self) -> None:
            server.requests.append((self.path, self.headers.get("Range")))
            server.headers.append({name.lower(): value for name, value in self.headers.items()})
            found = server.files.get(self.path)
            if found is None:
                self.answer(404)
            elif found.location is not None:
                self.answer(302, headers={"Location": found.location})
            elif found.answers:
                self.answer(found.answers.pop(0), headers={"Retry-After": "0"})
            else:
                self.send(found)

        def send(self, found: File) -> None:
            headers = {"Content-Type": found.content_type} | found.further
            body, status = found.content, 200
            wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            if wanted and found.ranges:
                start = int(wanted[1])
                if start >= len(body):
                    return self.answer(416, headers={"Content-Range": f"bytes */{len(body)}"})
                headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
                body, status = body[start:], 206
            self.close_connection = bool(found.cuts) or not found.stated
            cut = found.cuts.pop(0) if found.cuts else None
            self.send_response(status)
            for name, value in (headers | ({"Content-Length": str(len(body))} if found.stated else {})).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body[:cut])
            return None

        do_GET = get

    with served_by(Files, tls) as server.url:
        yield server
