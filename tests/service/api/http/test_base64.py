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

from kith.wire.base64_text import CHUNK_BYTES, decode_base64, unescape
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
    "byte order mark": lambda photo: "\ufeff" + base64.b64encode(photo).decode(),
    "data URL with a comma": lambda photo: "data:image/jpeg;name=a,b.jpg;base64," + base64.b64encode(photo).decode(),
    "data URL with later parameters": lambda photo: (
        "data:image/jpeg;base64;charset=utf-8," + base64.b64encode(photo).decode()
    ),
    "data URL": lambda photo: "data:image/jpeg;base64," + base64.b64encode(photo).decode(),
    "data URL with parameters": lambda photo: "DATA:image/jpeg;name=a.jpg;BASE64," + base64.b64encode(photo).decode(),
    "data URL, escaped": lambda photo: "data:;base64," + base64.b64encode(photo).decode().replace("=", "%3D"),
    "data URL, unpadded lines": lambda photo: "data:;base64,\n" + base64.encodebytes(photo).decode().rstrip("=\n"),
}


@given(st.binary(max_size=100), st.sampled_from(sorted(FORMS)))
def test_every_form_of_base64(content: bytes, form: str) -> None:
    assert decode_base64(FORMS[form](content).encode()) == content


@pytest.mark.parametrize("form", FORMS)
def test_long_text_is_decoded_in_parts(form: str) -> None:
    content = np.random.default_rng(0).bytes(2 * CHUNK_BYTES + 1)
    assert decode_base64(bytearray(FORMS[form](content).encode())) == content


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_a_photo_in_every_form(server: str, astronaut: Photo, form: str, large: bool) -> None:
    """Small photos are parsed with the document, large ones are set aside."""
    photo = jpeg(astronaut, 98 if large else 30)
    assert (len(photo) > 100_000) == large
    text = FORMS[form](photo)
    found = httpx.post(f"{server}/v1/detect", json={"images": [text]})
    assert (found.status_code, len(found.json()["images"][0]["faces"])) == (200, 1)
    pair = {"a": {"image": text}, "b": {"image": text}}
    assert httpx.post(f"{server}/v1/verify", json=pair).json()["outcome"] == "same"


@pytest.mark.parametrize("size", [40, 200_000])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: "+/" + text[2:-4] + "-_==", "alphabet"),
        (lambda text: text[:20] + " " + text[21:], "spaces"),
        (lambda text: text[: len(text) // 4 * 4 - 3], "length"),
        (lambda text: text[:20] + "!" + text[21:], "characters"),
        (lambda text: text[:20] + "=" + text[21:], "padding|ends early"),
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
    assert any(word in refused.json()["detail"] for word in reason.split("|"))


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


def test_padding_within_the_text_is_refused_in_every_place() -> None:
    text = base64.b64encode(bytes(2 * CHUNK_BYTES))
    for place in (1, CHUNK_BYTES - 1, CHUNK_BYTES):
        with pytest.raises(ValueError, match="ends early"):
            decode_base64(text[:place] + b"=" + text[place + 1 :])


@pytest.mark.parametrize("between", [b"\n", b"\r\n", b"\n  ", b" \r\n\t"])
def test_long_text_is_decoded_piece_by_piece(between: bytes) -> None:
    """Replacements in 25 MB at once held the GIL for 1.8 s, and no other request was answered."""
    photo = bytes(range(256)) * 10_000
    text = base64.b64encode(photo)
    lines = between.join(text[at : at + 76] for at in range(0, len(text), 76))
    assert decode_base64(lines) == photo
    escaped = lines.replace(b"/", rb"\/").replace(b"\n", rb"\n").replace(b"\r", rb"\r").replace(b"\t", rb"\u0009")
    assert unescape(escaped) == lines
