"""Limits on request bodies, per route and for all requests together."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx2 as httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from service.api.http.access import needs_of
from service.api.http.bodies import max_body_bytes
from service.api.http.gate import DEFAULT_BODY_BYTES, Gate
from service.app import create_app
from service.core.errors import OverloadedError
from service.observability.metrics import Metrics
from service.server import embedded
from service.settings import Settings, load_settings

GALLERY = "/v1/galleries/{gallery}"
PHOTOS = {
    "POST /v1/detect",
    "POST /v1/embed",
    "POST /v1/verify",
    f"POST {GALLERY}/identify",
    f"POST {GALLERY}/subjects/{{subject}}/templates",
    f"POST {GALLERY}/subjects/{{subject}}/decoys",
}
STREAMED = {f"POST {GALLERY}/{name}" for name in ("enrollments", "albums", "import")}
WITHOUT_BODY = ("cancel", "calibrate", "roll-back", "test", "replay")
"""Ends of paths whose handlers read no body."""


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Settings]]:
    settings = load_settings(data_dir=tmp_path_factory.mktemp("kith"), max_upload_bytes=4_000_000, log_level="ERROR")
    with embedded(settings) as url:
        httpx.post(f"{url}/v1/galleries", json={"name": "import"}).raise_for_status()
        yield url, settings


def test_body_limits_follow_the_route_whatever_the_names_in_the_path(limited: tuple[str, Settings]) -> None:
    url, settings = limited
    expected = dict.fromkeys(STREAMED, 4_000_000)
    expected |= dict.fromkeys(PHOTOS, max_body_bytes(settings, settings.max_images))
    expected["POST /v1/verify"] = max_body_bytes(settings, 2)
    asked = 0
    for route in needs_of(create_app(settings).routes):
        method, _, path = route.partition(" ")
        if method not in ("POST", "PUT", "PATCH") or path.endswith(WITHOUT_BODY):
            continue
        limit = expected.pop(route, DEFAULT_BODY_BYTES)
        for subject in ("ada", "import", "enrollments", "identify", "templates"):
            names = dict.fromkeys(("template", "stranger", "album", "job", "webhook"), "0" * 32)
            names |= {"gallery": "import", "subject": subject, "group": "g1", "key": "0" * 12}
            kind = "application/x-ndjson" if path.endswith("/import") else "application/json"
            filled = quote(path.format(**names))
            assert first_status(url, method, filled, kind, limit) == 100, (route, subject)
            assert first_status(url, method, filled, kind, limit + 1) == 413, (route, subject)
            asked += 1
    assert not expected
    assert asked > 100


def first_status(url: str, method: str, path: str, kind: str, size: int) -> int:
    """Declare a body of this size, and return the status before any of it is sent: 100 if the server waits for it."""
    host, _, port = url.removeprefix("http://").partition(":")
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {size}\r\n"
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(f"{head}Expect: 100-continue\r\n\r\n".encode())
        return int(connection.recv(12).split()[1])


@pytest.mark.parametrize("uploads", [20_000_000_000, DEFAULT_BODY_BYTES])
def test_all_bodies_together_have_a_limit(uploads: int) -> None:
    """Also if the limit of streamed bodies, which are not held in memory, has the same size."""
    most, ended = 1_500_000, asyncio.Event()

    refused: list[OverloadedError] = []

    async def slow(_scope: Scope, receive: Receive, _send: Send) -> None:
        try:
            while (await receive()).get("more_body"):
                pass
        except OverloadedError as error:
            refused.append(error)
            return
        await ended.wait()

    async def run() -> None:
        settings = load_settings(max_bodies_bytes=most, max_upload_bytes=uploads)
        gate = Gate(slow, settings, Metrics())

        async def ask(size: int) -> None:
            sent = iter([b"x" * (size // 2), b"x" * (size - size // 2)])

            async def receive() -> Message:
                body = next(sent)
                return {"type": "http.request", "body": body, "more_body": len(body) == size // 2 and size % 2 == 1}

            async def send(_message: Message) -> None: ...

            scope: dict[str, Any] = {
                "type": "http",
                "method": "POST",
                "path": "/healthz",
                "query_string": b"",
                "headers": [],
                "state": {},
            }
            await gate(scope, receive, send)

        first = asyncio.create_task(ask(900_001))
        await asyncio.sleep(0)
        await ask(900_001)
        assert len(refused) == 1
        second = asyncio.create_task(ask(500_001))  # a rejected body no longer counts
        await asyncio.sleep(0)
        ended.set()
        await asyncio.gather(first, second)
        await ask(999_999)
        assert len(refused) == 1

    asyncio.run(run())
