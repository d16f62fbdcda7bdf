"""Limits of request bodies: per route, for all requests together, and of JSON before it is parsed."""

from __future__ import annotations

import base64
import json
import os
import socket
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2 as httpx
import pytest

from kith import Kith
from service import wiring
from service.api.http.access import needs_of
from service.api.http.bodies import max_body_bytes
from service.api.http.gate import DEFAULT_BODY_BYTES
from service.app import create_app
from service.core.json_limits import MAX_VALUES, check_json
from service.server import embedded
from service.settings import Settings, load_settings
from tests.conftest import is_eventually
from tests.faults.servers import serving
from tests.refusals import check

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
LIMITS: dict[str, Any] = {"max_upload_bytes": 4_000_000, "max_bodies_bytes": 1_500_000, "log_level": "ERROR"}
WITHOUT_BODY = ("cancel", "calibrate", "roll-back", "test", "replay")
"""Ends of paths whose handlers read no body."""


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Settings]]:
    """Server that takes little, and two files of an archive."""
    settings = load_settings(data_dir=tmp_path_factory.mktemp("kith"), **LIMITS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wiring, "MAX_ENTRIES", 2)
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
        for subject in ("ada", "import", "identify"):
            names = dict.fromkeys(("template", "stranger", "album", "job", "webhook"), "0" * 32)
            names |= {"gallery": "import", "subject": subject, "group": "g1", "key": "0" * 12}
            kind = "application/x-ndjson" if path.endswith("/import") else "application/json"
            filled = quote(path.format(**names))
            assert first_status(url, method, filled, kind, limit) == 100, (route, subject)
            assert first_status(url, method, filled, kind, limit + 1) == 413, (route, subject)
            asked += 1
    assert not expected
    assert asked > 60


def first_status(url: str, method: str, path: str, kind: str, size: int) -> int:
    """Declare a body of this size, and return the status before any of it is sent: 100 if the server waits for it."""
    host, _, port = url.removeprefix("http://").partition(":")
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {size}\r\n"
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(f"{head}Expect: 100-continue\r\n\r\n".encode())
        return int(connection.recv(12).split()[1])


def test_an_archive_has_a_limit_of_files(limited: tuple[str, Settings], tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "people.zip", "w") as archive:
        for number in range(3):
            archive.writestr(f"ada/{number}.jpg", b"")
    with Kith(limited[0]) as kith:
        job = kith.wait_for(kith.enroll_archive("import", tmp_path / "people.zip").id, 60)
    assert job.problem is not None and job.problem.code == "archive_too_large"


def test_all_bodies_together_have_a_limit(limited: tuple[str, Settings]) -> None:
    url, body = httpx.URL(limited[0]), b"x" * 900_000
    head = f"POST /v1/detect HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()

    def status() -> int:
        return httpx.post(url.join("/v1/detect"), content=body, headers={"Content-Type": "image/jpeg"}).status_code

    assert status() == status() == 422, "a body that was answered no longer counts"
    with socket.create_connection((url.host, url.port or 80)) as first:
        first.sendall(head.replace(b"\r\n\r\n", b"\r\nContent-Type: image/jpeg\r\n\r\n") + body[:-1])
        is_eventually(lambda: status() == 503)
    is_eventually(lambda: status() == 422)


JSON = {"Content-Type": "application/json"}


def test_nested_metadata_are_stored_unchanged_or_refused(server: str, gallery: str) -> None:
    for depth in (50, 100, 101, 250, 1000, MAX_VALUES - 10):
        value = "[" * depth + "]" * depth
        subject = f"{server}/v1/galleries/{gallery}/subjects/deep{depth}"
        stored = httpx.put(subject, content=f'{{"metadata": {{"k": {value}}}}}', headers=JSON)
        if stored.status_code == 201:
            assert depth <= 100
            assert value in httpx.get(subject).text.replace(" ", "")
        else:
            check(stored, 422, "invalid_request")


def test_photos_and_embeddings_do_not_count_as_values() -> None:
    photos = [base64.b64encode(os.urandom(100_000)).decode()] * 16
    check_json(json.dumps({"images": photos, "embeddings": [[0.0] * 512] * 16}).encode(), 16 * 512)
    check_json(json.dumps({"metadata": {"k": "Commas, as in a long text, " * 1000}}).encode())


@pytest.mark.long
def test_the_memory_of_large_bodies_is_returned(tmp_path: Path) -> None:
    photos = b",".join([b'"' + b"A" * 26_000_000 + b'"'] * 16)
    with serving(tmp_path, None) as (server,), httpx.Client(base_url=server.url, timeout=120) as client:
        client.post("/v1/detect", content=b'{"images": ["AAAA"]}', headers=JSON)
        before = server.resident_bytes()
        for _ in range(3):
            assert client.post("/v1/detect", content=b'{"images": [%s]}' % photos, headers=JSON).is_success
            is_eventually(lambda: server.resident_bytes() - before < 50_000_000)
