"""Kith below a path prefix, through real reverse proxies: clients and command line (pages: tests/browser)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urljoin

import httpx2 as httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from kith import AsyncKith, Kith
from tests.commands import run_kith
from tests.conftest import jpeg
from tests.refusals import check
from tests.reverse_proxies import PROXIES
from tests.service.api.conftest import KEY, Guarded

ODD_IDS = ["Zoë 李", "50% off", "a+b=c&d", "what?#1", "semi;colon, comma", "%2e%2e", "%41"]


@pytest.fixture(scope="module", params=PROXIES)
def prefixed(
    guarded: Guarded, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[str]:
    """URL of the service below the prefix, without a last slash."""
    with PROXIES[request.param](guarded.url, tmp_path_factory.mktemp("proxy")) as url:
        yield url


def test_a_session(prefixed: str, tmp_path: Path, astronaut: NDArray[np.uint8]) -> None:
    name, headers = "behind-a-proxy", {"X-API-Key": KEY}
    with Kith(f"{prefixed}/", KEY) as kith:
        kith.create_gallery(name)
        kith.enroll(name, "ada", jpeg(astronaut))
        for subject in ODD_IDS:
            assert kith.put_subject(name, subject, tags=["a&b"]).id == subject
            assert kith.subject(name, subject).id == subject
        assert [each.id for each in kith.subjects(name, tags=["a&b"])] == ODD_IDS
        assert len(kith.identify(name, jpeg(astronaut)).results) == 1
        assert b"".join(kith.export_gallery(name)).count(b"\n") > len(ODD_IDS)
        kith.delete_gallery(name)

    async def awaited() -> str:
        async with AsyncKith(prefixed, KEY) as kith:
            return (await kith.health()).status

    assert asyncio.run(awaited()) == "ok"
    ran = run_kith("gallery", "list", "--json", "--url", prefixed, "--api-key", KEY, cwd=tmp_path, environment={})
    assert (ran.returncode, isinstance(json.loads(ran.stdout), list)) == (0, True)
    document = httpx.get(f"{prefixed}/openapi.json", headers=headers)
    (server,) = document.json()["servers"]
    assert urljoin(str(document.url), server["url"]).rstrip("/") == prefixed
    check(httpx.get(f"{prefixed}/v1/nothing", headers=headers), 404, "not_found")
    compatible = httpx.get(f"{prefixed}/api/v1/recognition/subjects", headers=headers)
    assert (compatible.status_code, compatible.json()["kith"]["code"]) == (403, "forbidden")
