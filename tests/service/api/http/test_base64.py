"""Photos in JSON are accepted in every usual form of base64; other text is refused with the reason."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from kith.wire.photos import Photos

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
