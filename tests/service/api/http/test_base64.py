"""Photos in JSON are accepted in every usual form of base64; other text is refused with the reason."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable

import httpx2 as httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kith.wire.photos import Photos
from tests.conftest import jpeg

Photo = NDArray[np.uint8]
FORMS: dict[str, Callable[[bytes], str]] = {
    "standard": lambda photo: base64.b64encode(photo).decode(),
    "unpadded": lambda photo: base64.b64encode(photo).decode().rstrip("="),
    "URL-safe": lambda photo: base64.urlsafe_b64encode(photo).decode(),
    "URL-safe and unpadded": lambda photo: base64.urlsafe_b64encode(photo).decode().rstrip("="),
    "lines": lambda photo: base64.encodebytes(photo).decode(),
    "Windows lines": lambda photo: base64.encodebytes(photo).decode().replace("\n", "\r\n"),
    "indented lines": lambda photo: base64.encodebytes(photo).decode().replace("\n", "\r\n    "),
    "data URL with a comma": lambda photo: "data:image/jpeg;name=a,b.jpg;base64," + base64.b64encode(photo).decode(),
    "data URL with later parameters": lambda photo: (
        "data:image/jpeg;base64;charset=utf-8," + base64.b64encode(photo).decode()
    ),
    "data URL": lambda photo: "data:image/jpeg;base64," + base64.b64encode(photo).decode(),
    "data URL with parameters": lambda photo: "DATA:image/jpeg;name=a.jpg;BASE64," + base64.b64encode(photo).decode(),
    "data URL, unpadded lines": lambda photo: "data:;base64,\n" + base64.encodebytes(photo).decode().rstrip("=\n"),
}


@given(st.binary(max_size=100), st.sampled_from(sorted(FORMS)))
def test_every_form_of_base64(content: bytes, form: str) -> None:
    assert Photos.model_validate_json(json.dumps({"images": [FORMS[form](content)]})).images == [content]


@pytest.mark.parametrize("form", FORMS)
def test_a_photo_in_every_form(server: str, astronaut: Photo, form: str) -> None:
    text = FORMS[form](jpeg(astronaut, 98))
    found = httpx.post(f"{server}/v1/detect", json={"images": [text]})
    assert (found.status_code, len(found.json()["images"][0]["faces"])) == (200, 1)
    pair = {"a": {"image": text}, "b": {"image": text}}
    assert httpx.post(f"{server}/v1/verify", json=pair).json()["outcome"] == "same"


@pytest.mark.parametrize("size", [40, 200_000])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: "+/" + text[2:-4] + "-_==", "characters"),
        (lambda text: text[:20] + " " + text[21:], "spaces"),
        (lambda text: text[: len(text) // 4 * 4 - 3], "ends early"),
        (lambda text: text[:20] + "!" + text[21:], "characters"),
        (lambda text: text[:20] + "=" + text[21:], "ends early"),
        (lambda text: text[:20] + "\u00e9" + text[22:], "characters"),
        (lambda text: "data:image/jpeg," + text, "data URL"),
        (lambda text: "https://example.org/" + text, "urls"),
    ],
    ids=["two alphabets", "a space", "truncated", "punctuation", "padding within", "a letter", "data URL", "URL"],
)
def test_other_text_is_refused_with_the_reason(
    server: str, size: int, change: Callable[[str], str], reason: str
) -> None:
    text = change(base64.b64encode(np.random.default_rng(1).bytes(size)).decode().replace("/", "A").replace("+", "B"))
    body = json.dumps({"images": [text]}, ensure_ascii=False).encode()
    refused = httpx.post(f"{server}/v1/detect", content=body, headers={"Content-Type": "application/json"})
    assert (refused.status_code, refused.json()["code"]) == (422, "invalid_request")
    assert [field["field"] for field in refused.json()["fields"]] == ["images.0"]
    assert reason in refused.json()["detail"]


@pytest.mark.parametrize("kind", ["data URL", "standard", "URL-safe"])
def test_base64_where_a_file_is_expected(server: str, astronaut: Photo, kind: str) -> None:
    text = FORMS[kind](jpeg(astronaut)).encode()
    body = httpx.post(f"{server}/v1/detect", content=text, headers={"Content-Type": "image/jpeg"})
    file = httpx.post(f"{server}/v1/detect", files={"images": ("photo.jpg", text)})
    for refused in (body, file):
        assert (refused.status_code, refused.json()["code"]) == (422, "image_format")
        assert "base64" in refused.json()["detail"]
    field = httpx.post(f"{server}/v1/detect", files={"images": (None, text)})
    assert (field.status_code, field.json()["code"]) == (422, "invalid_request")
    assert "as a file" in field.json()["detail"]
