"""Hostile JSON, vectors, names and forms are rejected with 4xx, or stored and returned unchanged."""

from __future__ import annotations

import base64
import json
import unicodedata
from typing import Any
from urllib.parse import quote

import httpx2 as httpx
import numpy as np
import pytest

from kith import Kith
from tests.service.api.http.test_malformed_input import ENROLL, IDENTIFY, check

JSON = {"Content-Type": "application/json"}
DEEP = b"[" * 400_000
HARMFUL = {
    "nested": b'{"metadata": {"k": ' + DEEP + b"}}",
    "nested and closed": b'{"metadata": {"k": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
    "nested objects": b'{"metadata": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    "a number of 100,000 digits": b'{"metadata": {"k": ' + b"9" * 100_000 + b"}}",
    "no UTF-8": b'{"name": "\xff\xfe"}',
    "half a pair": b'{"name": "\\ud800"}',
    "half a pair in a tag": b'{"tags": ["\\udfff"]}',
    "a NUL": b'{"name": "a\\u0000b"}',
    "an escape": b'{"name": "\\u001b[2J"}',
    "two lines": b'{"name": "a\\nerror: b"}',
    "a C1 control": b'{"tags": ["\\u009b2J"]}',
    "two lines in a tag": b'{"tags": ["a\\u2028b"]}',
    "an override": b'{"name": "\\u202eada"}',
    "two documents": b"{}{}",
    "a comment": b"{/**/}",
    "a million spaces": b" " * 900_000 + b"{",
}


@pytest.mark.parametrize("case", HARMFUL)
def test_hostile_json_is_rejected(server: str, gallery: str, case: str) -> None:
    url = f"{server}/v1/galleries/{gallery}/subjects/a"
    check(httpx.put(url, content=HARMFUL[case], headers=JSON), 422, "invalid_request")
    check(httpx.get(url), 404, "subject_not_found")


@pytest.mark.parametrize("path", ["/v1/detect", "/v1/verify", IDENTIFY, ENROLL])
@pytest.mark.parametrize(
    "body", [DEEP, b'{"images": ' + DEEP, b'{"a":' * 100_000, b'{"top_k": ' + b"9" * 100_000 + b"}"]
)
def test_deep_json_beside_photos(server: str, gallery: str, path: str, body: bytes) -> None:
    url = server + path.format(gallery=gallery)
    check(httpx.post(url, content=body, headers=JSON), 422, "invalid_request")
    form = b'--b\r\nContent-Disposition: form-data; name="request"\r\n\r\n' + body[:900_000] + b"\r\n--b--\r\n"
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    check(httpx.post(url, content=form, headers=headers), 422, "invalid_request")


@pytest.mark.parametrize("path", ["/v1/detect", IDENTIFY, ENROLL, "/v1/verify"])
def test_options_stand_once_in_a_form(server: str, gallery: str, path: str) -> None:
    """Each part was parsed while every other request waited: seventeen of 1 MB took a second."""
    options = ("request", ("options.json", b"{}", "application/json"))
    photo = ("a" if path == "/v1/verify" else "images", ("a.jpg", b"no photo"))
    answer = httpx.post(server + path.format(gallery=gallery), files=[options, options, photo])
    assert "once" in check(answer, 422, "invalid_request")["detail"]


@pytest.mark.parametrize(
    "metadata",
    [
        {"__proto__": {"admin": True}, "constructor": 1, "$where": "1", "'; DROP TABLE subjects; --": "x"},
        {"k": 2**63}, {"k": -(2**63) - 1}, {"k": 10**300}, {"k": 1e308}, {"k": 5e-324}, {"": ""},
        {"k": "\u202eevil\u2066\u200b"}, {"k": "\U0001f600" * 1000}, {"a" * 10_000: 1},
    ],
)  # fmt: skip
def test_unusual_text_is_returned_unchanged(kith: Kith, gallery: str, server: str, metadata: dict[str, Any]) -> None:
    url = f"{server}/v1/galleries/{gallery}/subjects/a"
    response = httpx.put(url, content=json.dumps({"metadata": metadata}), headers=JSON)
    assert response.status_code in (201, 422), response.text
    if response.status_code == 201:
        assert httpx.get(url).json()["metadata"] == metadata


@pytest.mark.parametrize(
    ("identifier", "status"),
    [
        ("..", 404), (".", 404), ("a/../b", 404), ("a\\b", 422), ("a\0b", 422), ("\u202eada", 422), ("a\u200bb", 422),
        ("a\ud800"[:1] + "\u2028", 422), (" ada", 422), ("\u00a0", 422), ("CON", 201), ("ada.", 201), ("-rf", 201),
        ("$(id)", 201), ("'; DROP TABLE subjects; --", 201), ("\U0001f600", 201), ("\u00e9", 201), ("e\u0301", 201),
        ("%2e%2e", 201), ("x" * 128, 201), ("\U0001f600" * 129, 422), ("None", 201), ("__proto__", 201),
    ],
)  # fmt: skip
def test_similar_identifiers_stay_distinct(server: str, gallery: str, identifier: str, status: int) -> None:
    """Identifiers that look alike are not normalized to one, except canonical equivalents, which NFC composes."""
    url = f"{server}/v1/galleries/{gallery}/subjects/{quote(identifier, safe='')}"
    response = httpx.put(url, json={})
    assert response.status_code in ((status, 405, 422) if status == 404 else (status,)), response.text
    if status == 201:
        stored = unicodedata.normalize("NFC", identifier)
        assert httpx.get(url).json()["id"] == stored
        found = httpx.get(f"{server}/v1/galleries/{gallery}/subjects").json()["data"]
        assert [subject["id"] for subject in found] == [stored]


VECTORS = {
    "denormal": 5e-324,
    "of float32 denormal": 1e-45,
    "tiny": 1e-30,
    "huge": 1e38,
    "beyond float32": 1e39,
    "largest": 1.7e308,
}


@pytest.mark.parametrize("name", VECTORS)
@pytest.mark.parametrize("sign", [1, -1])
def test_vectors_of_any_length_are_unit_vectors_or_refused(
    kith: Kith, gallery: str, server: str, name: str, sign: int
) -> None:
    """No vector gives another face a similarity outside -1 to 1."""
    d = kith.model().dimension
    ordinary = np.random.default_rng(0).normal(size=d).tolist()
    vector = [sign * VECTORS[name]] + [-0.0] * (d - 1)
    assert httpx.post(server + ENROLL.format(gallery=gallery), json={"embeddings": [ordinary]}).status_code == 201
    asked = {"embeddings": [vector], "risk": {"threshold": 0.5}, "top_k": 1}
    for response in (
        httpx.post(server + IDENTIFY.format(gallery=gallery), json=asked),
        httpx.post(
            f"{server}/v1/verify",
            json={"a": {"embedding": vector}, "b": {"embedding": ordinary}, "risk": {"threshold": 0.5}},
        ),
        httpx.post(
            f"{server}/v1/galleries/{gallery}/subjects/odd/templates",
            json={"embeddings": [vector], "allow_duplicate": True},
        ),
    ):
        assert response.status_code in (200, 201, 422), response.text
        assert "NaN" not in response.text and "Infinity" not in response.text
    found = httpx.post(
        server + IDENTIFY.format(gallery=gallery), json={"embeddings": [ordinary], "risk": {"threshold": 0.5}}
    ).json()["results"][0]
    assert (found["outcome"], found["subject"]) == ("identified", "x")


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "0", "5e-324", "3.4e38"])
def test_vectors_in_files(kith: Kith, gallery: str, server: str, number: str) -> None:
    model = kith.model()
    vector = np.full(model.dimension, float(number), np.float32)
    lines = [{"kith": "gallery", "version": 1, "recognizer": model.recognizer, "dimension": model.dimension}]
    lines.append({"subject": "odd", "embedding": base64.b64encode(vector.tobytes()).decode()})
    lines.append(
        {"subject": "ada", "embedding": base64.b64encode(np.eye(1, model.dimension, dtype="<f4").tobytes()).decode()}
    )
    body = "\n".join(map(json.dumps, lines)).encode()
    report = httpx.post(
        f"{server}/v1/galleries/{gallery}/import", content=body, headers={"Content-Type": "application/x-ndjson"}
    ).json()
    assert report["template_count"] == (2 if number == "3.4e38" else 1)
    assert kith.gallery(gallery).template_count == report["template_count"]


@pytest.mark.parametrize(
    "query",
    [
        "risk?fpir=5e-324",
        "risk?fpir=1e-400",
        "risk?fpir=nan",
        "risk?fpir=inf",
        "subjects?cursor=%00",
        "subjects?limit=1e9",
    ],
)
def test_invalid_numbers_and_cursors_are_rejected(server: str, gallery: str, query: str) -> None:
    check(httpx.get(f"{server}/v1/galleries/{gallery}/{query}"), 422, "invalid_request")


@pytest.mark.parametrize("cursor", ["9" * 30, "-1", "x", "%00", "1e3", "9223372036854775808"])
def test_cursors_of_jobs(server: str, cursor: str) -> None:
    check(httpx.get(f"{server}/v1/jobs/{'0' * 32}/items?cursor={cursor}"), 422, "invalid_request")


def form(parts: bytes, boundary: bytes = b"b") -> tuple[bytes, dict[str, str]]:
    return parts, {"Content-Type": f"multipart/form-data; boundary={boundary.decode()}"}


PART = b'--b\r\nContent-Disposition: form-data; name="images"; filename="p"\r\n'


@pytest.mark.parametrize(
    "body",
    [
        PART + b"A: b\r\n" * 100_000 + b"\r\nx\r\n--b--\r\n",
        PART + b"A: " + b"b" * 1_000_000,
        PART * 5000,
        (PART + b"\r\nx\r\n") * 5000 + b"--b--\r\n",
        b"--b\r\n" * 100_000,
        b"\r\n" * 400_000,
        b"preamble " * 100_000,
        b'--b\r\nContent-Disposition: form-data; name="' + b"images" * 10_000 + b'"; filename="p"\r\n\r\nx\r\n--b--',
        b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n--b--\r\n",
        b"--b\r\n\r\nx\r\n--b--\r\n",
        PART + b"\r\n" + b"\r\n--" * 200_000 + b"\r\n--b--",
    ],
    ids=[
        "headers", "header", "heads", "parts", "boundaries", "empty lines", "preamble", "name", "no name", "no head",
        "all but boundaries",
    ],
)  # fmt: skip
def test_hostile_forms_are_rejected(server: str, body: bytes) -> None:
    content, headers = form(body)
    response = httpx.post(f"{server}/v1/detect", content=content, headers=headers)
    assert response.status_code in (413, 422), response.text[:300]


@pytest.mark.parametrize("name", ["../../../etc/passwd", "a\0.jpg", "C:\\x.jpg", "x" * 200, "\u202egpj.exe"])
def test_file_names_are_ignored(server: str, name: str) -> None:
    response = httpx.post(f"{server}/v1/detect", files=[("images", (name, b"no photo"))])
    assert response.status_code == 422
    assert "passwd" not in response.text


@pytest.mark.parametrize("key", ["", "x" * 10_000, "\u00ff", "a,b", '"quoted"', "../x", "%00"])
def test_idempotency_keys(server: str, gallery: str, kith: Kith, key: str) -> None:
    vector = np.eye(1, kith.model().dimension)[0].tolist()
    url = server + ENROLL.format(gallery=gallery)
    headers = {b"Idempotency-Key": key.encode("latin-1")}
    answers = [httpx.post(url, json={"embeddings": [vector]}, headers=headers) for _ in range(2)]
    assert {answer.status_code for answer in answers} <= {201, 422}
    assert len({answer.status_code for answer in answers}) == 1
