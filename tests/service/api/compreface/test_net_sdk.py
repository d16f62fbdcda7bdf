"""The requests of CompreFace's .NET SDK (Exadel.Compreface 1.0), byte for byte where they are unlike other clients'.

Its file parts have no content type, unset options are empty or absent, booleans have a capital letter, and a rename
sends a bare JSON string.
"""

from __future__ import annotations

import json
import uuid
from base64 import b64encode
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from tests.service.api.compreface.conftest import CompatServer

JSON = "application/json; charset=UTF-8"
UNSET = "det_prob_threshold=0&face_plugins=&status=False"
"""Query of options that the caller leaves as they are."""


@dataclass(frozen=True)
class NetSdk:
    address: str
    key: str

    def send(self, method: str, path: str, body: bytes | None = None, content_type: str | None = None) -> Any:
        headers = {"x-api-key": self.key} | ({} if content_type is None else {"Content-Type": content_type})
        connection = HTTPConnection(self.address, timeout=60)
        connection.request(method, f"/api/v1/{path}", body, headers)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        assert answer.status in (200, 201), content
        is_json = (answer.headers["Content-Type"] or "").startswith("application/json")
        return json.loads(content) if is_json else content

    def json(self, method: str, path: str, body: object) -> Any:
        return self.send(method, path, json.dumps(body).encode(), JSON)

    def files(self, path: str, **files: Path) -> Any:
        mark = str(uuid.uuid4())
        parts = b"".join(
            f'--{mark}\r\nContent-Disposition: form-data; name="{name}"; filename="{uuid.uuid4()}.jpg"\r\n\r\n'.encode()
            + file.read_bytes()
            + b"\r\n"
            for name, file in files.items()
        )
        return self.send("POST", path, parts + f"--{mark}--\r\n".encode(), f'multipart/form-data; boundary="{mark}"')


@pytest.fixture
def sdk(compat: CompatServer) -> NetSdk:
    key = compat.create_key(compat.create_gallery(keep_crops=True))
    return NetSdk(compat.url.removeprefix("http://"), key)


def in_base64(photo: Path) -> str:
    return b64encode(photo.read_bytes()).decode()


def test_subjects_and_their_photos(sdk: NetSdk, photos: Path) -> None:
    assert sdk.json("POST", "recognition/subjects", {"subject": "Ada"}) == {"subject": "Ada"}
    assert sdk.json("PUT", "recognition/subjects/Ada", "Ada Lovelace") == {"updated": True}
    assert sdk.send("GET", "recognition/subjects/") == {"subjects": ["Ada Lovelace"]}

    first = sdk.files("recognition/faces?subject=Ada%20Lovelace", file=photos / "astronaut.jpg")
    photo = {"file": in_base64(photos / "astronaut2.jpg")}
    second = sdk.json("POST", "recognition/faces?subject=Ada%20Lovelace&det_prob_threshold=0.81", photo)
    assert first["subject"] == second["subject"] == "Ada Lovelace"
    ids = [uuid.UUID(each["image_id"]) for each in (first, second)]

    page = sdk.send("GET", "recognition/faces?page=0&size=20")
    assert [uuid.UUID(face["image_id"]) for face in page["faces"]] == ids
    assert all(type(page[name]) is int for name in ("page_number", "page_size", "total_pages", "total_elements"))
    assert sdk.send("GET", f"recognition/faces/{ids[0]}/img")[8:12] == b"WEBP"

    erased = sdk.json("POST", "recognition/faces/delete", [str(ids[0])])
    assert erased == [{"image_id": str(ids[0]), "subject": "Ada Lovelace"}]
    assert sdk.send("DELETE", f"recognition/faces/{ids[1]}") == {"image_id": str(ids[1]), "subject": "Ada Lovelace"}
    assert sdk.send("DELETE", "recognition/faces?subject=Ada%20Lovelace") == {"deleted": 0}
    assert sdk.send("DELETE", "recognition/subjects/Ada%20Lovelace") == {"subject": "Ada Lovelace"}
    assert sdk.send("DELETE", "recognition/subjects") == {"deleted": 0}


def test_photos_are_recognized(sdk: NetSdk, photos: Path) -> None:
    sdk.files("recognition/faces?subject=Ada", file=photos / "astronaut.jpg")
    same = photos / "astronaut2.jpg"
    options = "limit=1&prediction_count=1&det_prob_threshold=0.8&face_plugins=landmarks,calculator&status=True"
    by_path = sdk.files(f"recognition/recognize?{options}", file=same)
    by_text = sdk.json("POST", f"recognition/recognize?{UNSET}", {"file": in_base64(same)})
    assert ("plugins_versions" in by_path, "plugins_versions" in by_text) == (True, False)
    (face,) = by_path["result"]
    assert all(type(face["box"][side]) is int for side in ("x_min", "y_min", "x_max", "y_max"))
    assert all(type(value) is int for point in face["landmarks"] for value in point)
    for answer in (by_path, by_text):
        assert answer["result"][0]["subjects"][0]["subject"] == "Ada"
