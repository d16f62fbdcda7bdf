"""Malformed input gets a 4xx problem document with a stable code, and nothing is stored."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from kith import Kith
from tests.conftest import jpeg
from tests.service.inference.test_images import png_header

IDENTIFY = "/v1/galleries/{gallery}/identify"
ENROLL = "/v1/galleries/{gallery}/subjects/x/templates"


def check(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert response.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = response.json()
    assert (response.status_code, document["code"], document["status"]) == (status, code, status), document
    assert document["remedy"]
    assert document["title"]
    assert "Traceback" not in response.text
    return document


@pytest.mark.parametrize("path", ["/v1/detect", "/v1/embed", IDENTIFY, ENROLL])
@pytest.mark.parametrize(
    ("payload", "status", "code"),
    [
        (b"", 422, "image_empty"),
        (b"just text", 422, "image_format"),
        (None, 422, "image_damaged"),
        (png_header(10_000, 10_000), 413, "image_too_large"),
    ],
    ids=["empty", "text", "truncated JPEG", "100 megapixels"],
)
def test_bad_photos(
    server: str,
    gallery: str,
    kith: Kith,
    astronaut: NDArray[np.uint8],
    path: str,
    payload: bytes | None,
    status: int,
    code: str,
) -> None:
    photo = jpeg(astronaut)[:5000] if payload is None else payload
    url = server + path.format(gallery=gallery)
    check(httpx.post(url, files=[("images", ("photo.jpg", photo))]), status, code)
    check(httpx.post(url, json={"images": [base64.b64encode(photo).decode()]}), status, code)
    assert kith.gallery(gallery).template_count == 0


@pytest.mark.parametrize("path", ["/v1/detect", "/v1/verify", IDENTIFY, ENROLL])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"no_such_field": 1}',
        b'{"images": "x"}',
        b'{"images": [5]}',
        b"\xff\xfe",
        b"[" * 5000,
    ],
)
def test_bad_json(server: str, gallery: str, path: str, body: bytes) -> None:
    url = server + path.format(gallery=gallery)
    check(httpx.post(url, content=body, headers={"Content-Type": "application/json"}), 422, "invalid_request")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"risk": {}},
        {"risk": {"fpir": 0.1, "fmr": 0.1}},
        {"risk": {"fpir": 0}},
        {"risk": {"fpir": 1.5}},
        {"risk": {"preset": "lucky"}},
        {"top_k": 0},
        {"faces": "some"},
        {"filter": {"tag": ["x"]}},
        {"embeddings": [["a"]]},
    ],
)
def test_errors_name_invalid_fields(server: str, gallery: str, options: dict[str, Any]) -> None:
    response = httpx.post(server + IDENTIFY.format(gallery=gallery), json=options)
    document = check(response, 422, "invalid_request")
    if options:
        assert next(iter(options)) in document["detail"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "null"])
@pytest.mark.parametrize("path", [IDENTIFY, ENROLL])
def test_embeddings_that_are_not_finite(server: str, gallery: str, kith: Kith, path: str, number: str) -> None:
    numbers = ", ".join([number] * kith.model().dimension)
    response = httpx.post(
        server + path.format(gallery=gallery),
        content=f'{{"embeddings": [[{numbers}]]}}',
        headers={"Content-Type": "application/json"},
    )
    check(response, 422, "invalid_request")
    assert kith.gallery(gallery).template_count == 0


@pytest.mark.parametrize("length", [0, 1, 5000])
def test_embeddings_of_another_length(server: str, gallery: str, length: int) -> None:
    response = httpx.post(server + ENROLL.format(gallery=gallery), json={"embeddings": [[0.1] * length]})
    check(response, 422, "embedding_invalid")


def test_a_zero_embedding(server: str, gallery: str, kith: Kith) -> None:
    response = httpx.post(
        server + ENROLL.format(gallery=gallery), json={"embeddings": [[0.0] * kith.model().dimension]}
    )
    check(response, 422, "embedding_invalid")


def test_unknown_resources(server: str, gallery: str) -> None:
    base = f"{server}/v1/galleries"
    check(httpx.get(f"{base}/nowhere"), 404, "gallery_not_found")
    check(httpx.post(f"{base}/nowhere/identify", json={"embeddings": [[1.0]]}), 404, "gallery_not_found")
    check(httpx.get(f"{base}/{gallery}/subjects/nobody"), 404, "subject_not_found")
    check(httpx.get(f"{base}/{gallery}/subjects/nobody/templates/{'0' * 32}"), 404, "subject_not_found")
    httpx.put(f"{base}/{gallery}/subjects/a", json={})
    check(httpx.delete(f"{base}/{gallery}/subjects/a/templates/{'0' * 32}"), 404, "template_not_found")
    check(httpx.get(f"{server}/v1/nothing"), 404, "not_found")
    check(httpx.put(f"{server}/v1/detect"), 405, "method_not_allowed")


@pytest.mark.parametrize("name", ["", "a/b", "..", "a b", "x" * 65, "é"])
def test_gallery_names(server: str, name: str) -> None:
    check(httpx.post(f"{server}/v1/galleries", json={"name": name}), 422, "invalid_request")


@pytest.mark.parametrize("subject", ["%20x", "x%0Ay", "x" * 129, "%00"])
def test_subject_names(server: str, gallery: str, subject: str) -> None:
    check(httpx.put(f"{server}/v1/galleries/{gallery}/subjects/{subject}", json={}), 422, "invalid_request")


def test_content_types(server: str) -> None:
    check(httpx.post(f"{server}/v1/detect", content=b"x"), 415, "unsupported_media_type")
    xml = {"Content-Type": "application/xml"}
    check(httpx.post(f"{server}/v1/detect", content=b"<x/>", headers=xml), 415, "unsupported_media_type")
    broken = {"Content-Type": "multipart/form-data; boundary=x"}
    check(httpx.post(f"{server}/v1/detect", content=b"garbage", headers=broken), 422, "invalid_request")


def test_forms(server: str, astronaut: NDArray[np.uint8]) -> None:
    photo = jpeg(astronaut)
    url = f"{server}/v1/detect"
    check(httpx.post(url, files=[("picture", photo)]), 422, "invalid_request")
    check(httpx.post(url, files=[("images", photo)], data={"risk": "1"}), 422, "invalid_request")
    check(httpx.post(url, files=[("images", photo)], data={"request": "{"}), 422, "invalid_request")
    check(httpx.post(f"{server}/v1/verify", files=[("a", photo)]), 422, "invalid_request")
    check(httpx.post(f"{server}/v1/verify", files=[("a", photo), ("c", photo)]), 422, "invalid_request")
    options = {"a": {"image": "", "embedding": [1.0]}}
    check(
        httpx.post(f"{server}/v1/verify", files=[("b", photo)], data={"request": json.dumps(options)}),
        422,
        "invalid_request",
    )


def test_a_verification_with_more_than_two_sides_or_two_subjects(
    server: str, kith: Kith, gallery: str, astronaut: NDArray[np.uint8]
) -> None:
    kith.put_subject(gallery, "ada")
    photo, person = jpeg(astronaut), {"subject": {"gallery": gallery, "subject": "ada"}}
    url, files = f"{server}/v1/verify", [("a", photo), ("b", photo)]
    for letter in "ab":
        for side in (person, {"embedding": [1.0]}, None):
            form = {"request": json.dumps({letter: side})}
            problem = check(httpx.post(url, files=files, data=form), 422, "invalid_request")
            assert problem["detail"] == f"{letter}: may be sent once"
    image = {"image": base64.b64encode(photo).decode()}
    unclear: tuple[dict[str, Any], ...] = (
        {**image, **person},
        {**image, "url": None},
        {"image": None},
        {"embedding": None},
    )
    for refused in unclear:
        problem = check(httpx.post(url, json={"a": image, "b": refused}), 422, "invalid_request")
        assert "exactly one of image, url, embedding, subject" in problem["detail"]
    problem = check(httpx.post(url, json={"a": person, "b": person}), 422, "invalid_request")
    assert "one side may be a subject" in problem["detail"]


def test_too_many_photos(server: str) -> None:
    check(httpx.post(f"{server}/v1/detect", json={"images": ["AAAA"] * 17}), 422, "invalid_request")
    check(httpx.post(f"{server}/v1/detect", files=[("images", b"x")] * 18), 422, "invalid_request")


def test_a_body_beyond_the_limit_is_refused(server: str) -> None:
    """A client that declares 10 GB gets the response before it sends the body."""
    url = httpx.URL(server)
    with socket.create_connection((url.host, url.port or 80), timeout=60) as connection:
        connection.sendall(
            b"POST /v1/detect HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 10000000000\r\nConnection: close\r\n\r\n{"
        )
        answer = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    assert answer.startswith("HTTP/1.1 413")
    assert "request_too_large" in answer


@pytest.mark.parametrize(
    "metadata", ['{"k": "\\ud800"}', '{"k": NaN}', '{"k": 1e999}', '{"k": ' + "[" * 4000 + "]" * 4000 + "}"]
)
def test_metadata_that_cannot_be_encoded(server: str, gallery: str, metadata: str) -> None:
    url = f"{server}/v1/galleries/{gallery}/subjects/a"
    headers = {"Content-Type": "application/json"}
    check(httpx.put(url, content=f'{{"metadata": {metadata}}}', headers=headers), 422, "invalid_request")
    check(httpx.get(url), 404, "subject_not_found")


def test_bounds_that_are_not_finite(server: str) -> None:
    body = '{"name": "inf", "quality_gate": {"min_eye_distance_px": 1e999}}'
    response = httpx.post(f"{server}/v1/galleries", content=body, headers={"Content-Type": "application/json"})
    check(response, 422, "invalid_request")


def test_requests_without_photos_are_small(server: str, gallery: str) -> None:
    url = f"{server}/v1/galleries/{gallery}/subjects/a"
    check(httpx.put(url, json={"metadata": {"k": "x" * 1_100_000}}), 413, "request_too_large")

    def chunks() -> Iterator[bytes]:
        for _ in range(20):
            yield b" " * 100_000

    headers = {"Content-Type": "application/json"}
    check(httpx.put(url, content=chunks(), headers=headers), 413, "request_too_large")
