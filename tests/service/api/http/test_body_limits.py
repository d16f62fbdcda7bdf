"""Limits on request bodies, per route and for all requests together."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from service.api.http.gate import DEFAULT_BODY_BYTES, Gate
from service.api.http.routing import body_kinds, needs_of
from service.app import ROUTES
from service.core.errors import OverloadedError
from service.observability.metrics import Metrics
from service.settings import load_settings

GALLERY = "/v1/galleries/{gallery}"
PHOTOS = {
    "POST /v1/detect",
    "POST /v1/embed",
    "POST /v1/verify",
    f"POST {GALLERY}/identify",
    f"POST {GALLERY}/subjects/{{subject}}/templates",
    f"POST {GALLERY}/subjects/{{subject}}/decoys",
}


async def nothing(*_given: object) -> None: ...


def test_body_limits_follow_the_route_whatever_the_names_in_the_path() -> None:
    settings = load_settings(max_upload_bytes=4_000_000)
    expected = dict.fromkeys((f"POST {GALLERY}/{name}" for name in ("enrollments", "albums", "import")), 4_000_000)
    expected |= dict.fromkeys(PHOTOS, settings.max_request_bytes(settings.max_images))
    expected["POST /v1/verify"] = settings.max_request_bytes(2)
    gate = Gate(nothing, settings, Metrics(), (), body_kinds(ROUTES))
    routes = needs_of(ROUTES)
    assert expected.keys() <= routes.keys()
    for route in routes:
        method, _, path = route.replace("{file:path}", "main.js").partition(" ")
        for name in ("ada", "import", "enrollments", "identify", "templates"):
            filled = path.format(
                gallery=name,
                subject=name,
                template=name,
                job=name,
                key=name,
                receipt=name,
                webhook=name,
                other=name,
                decoy=name,
                stranger=name,
                album=name,
                group=name,
                face=name,
            )
            assert gate._body_limit(method, filled).size == expected.get(route, DEFAULT_BODY_BYTES), (method, filled)
            assert gate._body_limit("PUT", filled).size == DEFAULT_BODY_BYTES


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
        gate = Gate(slow, settings, Metrics(), {"/healthz"}, body_kinds(()))

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
