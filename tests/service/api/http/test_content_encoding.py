"""A body with a content coding that a path does not support gets 415, and Accept-Encoding names the supported ones."""

from __future__ import annotations

import gzip
import json
import socket

import httpx2 as httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from starlette.datastructures import Headers

from kith import Kith
from service.api.http.bodies import content_coding
from tests.conftest import jpeg
from tests.refusals import raises_code
from tests.service.usecases.test_bulk_enrollment import as_gzip

NDJSON = {"Content-Type": "application/x-ndjson"}
ARCHIVE = {"Content-Type": "application/octet-stream"}


@pytest.mark.parametrize("coding", ["identity", "Identity", "", "identity, identity"])
def test_a_body_without_a_coding_is_read(server: str, astronaut: NDArray[np.uint8], coding: str) -> None:
    headers = {"Content-Type": "image/jpeg", "Content-Encoding": coding}
    found = httpx.post(f"{server}/v1/detect", content=jpeg(astronaut), headers=headers)
    assert len(found.json()["images"][0]["faces"]) == 1


def test_a_request_without_a_body_has_no_coding(server: str, gallery: str) -> None:
    headers = {"Content-Encoding": "gzip"}
    assert httpx.get(f"{server}/v1/galleries/{gallery}", headers=headers).status_code == 200
    subject = f"{server}/v1/galleries/{gallery}/subjects/ada"
    assert httpx.put(subject, json={}).status_code == 201
    assert httpx.delete(subject, headers=headers).is_success


@pytest.mark.parametrize("coding", ["gzip", "X-GZIP", "identity, gzip"])
def test_an_import_in_gzip_is_read(server: str, gallery: str, kith: Kith, coding: str) -> None:
    model = kith.model()
    vector = np.eye(1, model.dimension)[0].tolist()
    body = gzip.compress(json.dumps({"subject": "ada", "embedding": vector}).encode() + b"\n")
    url = f"{server}/v1/galleries/{gallery}/import?recognizer={model.recognizer}"
    done = httpx.post(url, content=body, headers=NDJSON | {"Content-Encoding": coding})
    assert (done.status_code, done.json()["template_count"]) == (200, 1)


def test_the_compression_of_an_archive_may_be_named_as_a_coding(
    server: str, gallery: str, kith: Kith, astronaut: NDArray[np.uint8]
) -> None:
    url, packed = f"{server}/v1/galleries/{gallery}/enrollments", as_gzip({"ada/1.jpg": jpeg(astronaut)})
    started = httpx.post(url, content=packed, headers=ARCHIVE | {"Content-Encoding": "gzip"})
    assert started.status_code == 202
    assert kith.wait_for(started.json()["id"], timeout_s=120).state == "succeeded"
    assert kith.gallery(gallery).template_count == 1


def test_several_headers_are_one_list() -> None:
    headers = Headers(raw=[(b"content-encoding", b"identity"), (b"content-encoding", b"gzip")])
    assert content_coding(headers, ("gzip",)) == "gzip"
    with raises_code("unsupported_encoding"):
        content_coding(headers)


@pytest.mark.parametrize("coding", ["gzip, chunked", "gzip"])
def test_a_transfer_coding_is_not_taken_for_the_body(server: str, coding: str) -> None:
    url, body = httpx.URL(server), gzip.compress(b'{"images": []}')
    head = "POST /v1/detect HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    request = f"{head}Transfer-Encoding: {coding}\r\n\r\n{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
    with socket.create_connection((url.host, url.port or 80), timeout=60) as connection:
        connection.sendall(request)
        answer = connection.recv(10_000)
    assert answer.startswith(b"HTTP/1.1 400"), answer
