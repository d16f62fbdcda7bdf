"""Unusual text, names and vectors are stored and returned unchanged, or refused."""

from __future__ import annotations

import base64
import json
import unicodedata
from typing import Any
from urllib.parse import quote

import httpx2 as httpx
import numpy as np
import pytest

from kith import Kith, KithClientError

JSON = {"Content-Type": "application/json"}
IDENTIFY = "/v1/galleries/{gallery}/identify"
ENROLL = "/v1/galleries/{gallery}/subjects/x/templates"


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
        ("..", 404), (".", 404), ("a/../b", 404), ("CON", 201), ("ada.", 201), ("-rf", 201), ("$(id)", 201),
        ("'; DROP TABLE subjects; --", 201), ("\U0001f600", 201), ("\u00e9", 201), ("e\u0301", 201), ("%2e%2e", 201),
        ("x" * 128, 201), ("None", 201), ("__proto__", 201), ("50%", 201), ("a+b", 201),
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


def test_the_client_refuses_parameters_that_no_url_can_carry(kith: Kith, gallery: str) -> None:
    for call in (
        lambda: list(kith.subjects(gallery, tags=["Ren\udce9"])),
        lambda: list(kith.erasures(gallery, "Ren\udce9")),
        lambda: kith.put_subject(gallery, "Ren\udce9"),
        lambda: kith.put_subject(gallery, "ada", name="Ren\udce9"),
    ):
        with pytest.raises(KithClientError, match="invalid_request"):
            call()
