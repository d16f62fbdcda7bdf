"""JSON limits apply before parsing, and large bodies do not delay other requests."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import httpx2 as httpx
import pytest
from pydantic import BaseModel
from starlette.requests import Request

from kith.wire.faces import EmbedIn
from kith.wire.identification import IdentifyIn
from kith.wire.photos import MAX_PHOTOS
from service.api.http.bodies import read_json
from service.core.errors import InvalidRequestError
from service.core.json_limits import MAX_VALUES, check_json
from service.settings import Settings
from tests.refusals import check
from tests.service.api import test_refusals

JSON = {"Content-Type": "application/json"}
DENSE = test_refusals.DENSE | {"nulls": b'{"embeddings": [' + b"null," * 600_000 + b"null]}"}


def read(body: bytes, model: type[BaseModel] = EmbedIn, piece: int = 65_536, numbers: int = 0) -> Any:
    """Read a body that arrives in chunks, without a server."""
    pieces = [body[start : start + piece] for start in range(0, len(body), piece)] or [b""]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    request = Request({"type": "http", "method": "POST", "headers": []}, receive)
    return asyncio.run(read_json(request, model, numbers))


@pytest.mark.parametrize("case", DENSE)
def test_dense_documents_are_refused_before_they_are_parsed(case: str) -> None:
    numbers = 512_000 if case == "nulls" else 0
    with pytest.raises(ValueError, match="more than"):
        check_json(DENSE[case], numbers)
    with pytest.raises(InvalidRequestError, match="more than"):
        read(DENSE[case], IdentifyIn, numbers=numbers)


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


@pytest.mark.parametrize("piece", [997, 65_536])
@pytest.mark.parametrize("size", [10, 74_999, 75_000, 600_000])
@pytest.mark.parametrize("written", ["plain", "slashes", "lines"])
def test_photos_of_any_length_are_read_unchanged(piece: int, size: int, written: str) -> None:
    photos = [os.urandom(size), b"", os.urandom(size + 1)]
    encode = base64.encodebytes if written == "lines" else base64.b64encode
    document = json.dumps({"model": "m", "images": [encode(photo).decode() for photo in photos]})
    if written == "slashes":
        document = document.replace("/", "\\/")
    body = read(document.encode(), piece=piece)
    assert (body.images, body.model) == (photos, "m")


def test_the_schema_bounds_every_list_of_a_request(server: str) -> None:
    document = httpx.get(f"{server}/openapi.json").json()
    schemas, unbounded, seen = document["components"]["schemas"], [], set[str]()

    def walk(node: Any, where: str) -> None:
        if isinstance(node, list):
            for each in node:
                walk(each, where)
        elif isinstance(node, dict):
            if node.get("type") == "array" and "maxItems" not in node and "binary" not in json.dumps(node):
                unbounded.append(where)
            if (name := node.get("$ref", "").rpartition("/")[2]) and name not in seen:
                seen.add(name)
                walk(schemas[name], name)
            for key, value in node.items():
                walk(value, f"{where}.{key}")

    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            walk([operation.get("requestBody"), operation.get("parameters")], f"{method} {path}")
    assert {"IdentifyIn", "SubjectIn", "KeyIn"} <= seen
    assert not unbounded


def test_the_schema_allows_the_maximum_of_every_setting() -> None:
    def most(name: str) -> Any:
        return next(bound.le for bound in Settings.model_fields[name].metadata if hasattr(bound, "le"))

    assert most("max_images") == MAX_PHOTOS


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """Return address and process id of a server in its own process."""
    environment = os.environ | {"KITH_DATA_DIR": str(tmp_path_factory.mktemp("alone")), "KITH_PORT": "0"}
    process = subprocess.Popen(
        [sys.executable, "-m", "service.cli.entry", "serve"], env=environment, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    drain = threading.Thread(target=process.stderr.read, daemon=True)
    try:
        found = next(filter(None, (re.search("listening on (http://[^ ,]+)", line) for line in process.stderr)))
        drain.start()
        while True:
            try:
                httpx.get(f"{found[1]}/readyz", timeout=60).raise_for_status()
                break
            except httpx.HTTPError:
                continue
        yield found[1], process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        drain.join()
        process.stderr.close()


def resident_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1000


class Waits:
    """Maximum latency of /healthz in seconds while the block runs."""

    def __init__(self, url: str) -> None:
        self._url, self._done, self.longest_s, self.count = url, threading.Event(), 0.0, 0
        self._thread = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        with httpx.Client() as client:
            client.get(f"{self._url}/healthz")
            while not self._done.is_set():
                start = time.perf_counter()
                client.get(f"{self._url}/healthz", timeout=120)
                self.longest_s = max(self.longest_s, time.perf_counter() - start)
                self.count += 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


LARGE = {
    "20 MB of strings": b'{"images": [' + b'"",' * 6_600_000 + b'""]}',
    "100 MB of arrays": b'{"x": [' + b"[]," * 33_000_000 + b"[]]}",
    "16 photos of 20 MB": b'{"images": [' + b",".join([b'"' + b"A" * 26_000_000 + b'"'] * 16) + b"]}",
}


@pytest.mark.long
@pytest.mark.parametrize("case", LARGE)
def test_a_large_body_delays_no_other_request_and_its_memory_is_returned(alone: tuple[str, int], case: str) -> None:
    url, pid = alone
    with httpx.Client(timeout=120) as client:
        client.post(f"{url}/v1/detect", content=b'{"images": ["AAAA"]}', headers=JSON)
        before = resident_mb(pid)
        with Waits(url) as waits:
            begin = time.perf_counter()
            try:
                response = client.post(f"{url}/v1/detect", content=LARGE[case], headers=JSON)
                assert response.status_code in (200, 413, 422), response.text[:300]
            except httpx.TransportError:  # rejected while sending
                pass
            duration_s = time.perf_counter() - begin
        client.get(f"{url}/healthz")
    after = resident_mb(pid)
    print(f"{case}: /healthz {waits.longest_s * 1000:.0f} ms at most of {waits.count}, {before:.0f} -> {after:.0f} MB")
    # 0.1 s on idle cores. On busy cores, the request itself takes longer too.
    assert waits.longest_s < max(2, duration_s / 2), "the body was parsed on the event loop"
    assert after - before < 100
