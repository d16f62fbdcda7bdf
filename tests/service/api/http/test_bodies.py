"""Request bodies: equivalent ways to send a photo, content codings, forms of base64, and the limits of all."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import threading
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import httpx2 as httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import AfterValidator, create_model
from starlette.requests import Request

from kith import Kith
from kith.wire.photos import Photos
from service.api.http.bodies import read_form, read_json
from service.server import embedded
from service.settings import load_settings
from tests.conftest import jpeg
from tests.refusals import check
from tests.service.usecases.test_bulk_enrollment import as_gzip

Photo = NDArray[np.uint8]
JPEG = {"Content-Type": "image/jpeg"}
IDENTIFY = "/v1/galleries/{gallery}/identify"
ENROLL = "/v1/galleries/{gallery}/subjects/x/templates"
OPTIONS: dict[str, dict[str, Any]] = {
    "/v1/detect": {},
    "/v1/embed": {"model": "kith-compact"},
    IDENTIFY: {"risk": {"fpir": 0.01}, "top_k": 1, "faces": "largest", "filter": {"tags": ["nasa"]}},
    ENROLL: {"face": "largest", "allow_low_quality": True},
}


@pytest.mark.parametrize("path", OPTIONS)
def test_all_content_types_give_the_same_response(
    server: str, kith: Kith, gallery: str, group: Photo, path: str
) -> None:
    kith.put_subject(gallery, "ada", tags=["nasa"])
    kith.enroll(gallery, "ada", jpeg(group), face="largest")
    photo, options, url = jpeg(group), OPTIONS[path], server + path.format(gallery=gallery)
    if path == ENROLL:
        options = options | {"allow_duplicate": True}
    text, wire = json.dumps(options), {"images": [base64.b64encode(photo).decode()]}
    plain = {name: value for name, value in options.items() if name not in ("risk", "filter")} | options.get("risk", {})
    fields = {name: json.dumps(value).strip('"') for name, value in plain.items()}
    sent = {
        "json": httpx.post(url, json=wire | options),
        "multipart": httpx.post(url, files=[("images", ("p", photo))], data={"request": text}),
        "fields": httpx.post(url, files=[("images", ("p", photo))], data=fields),
        "jpeg": httpx.post(url, content=photo, headers={"Content-Type": "IMAGE/JPEG; q=1"}, params=plain),
        "bytes": httpx.post(url, content=photo, headers={"Content-Type": "application/octet-stream"}, params=plain),
        "chunks": httpx.post(url, content=_chunks(photo), headers=JPEG, params=plain),
    }
    answers = {}
    for way, response in sent.items():
        assert response.is_success, (way, response.text)
        answers[way] = response.json()
        for result in answers[way].get("results", []):
            assert result.pop("template", "") is not None  # each enrollment creates a new id
    assert all(answer == answers["json"] for answer in answers.values())


def test_plain_fields_of_a_form_join_its_json(server: str, kith: Kith, gallery: str, astronaut: Photo) -> None:
    for subject, floor in (("ada", 3), ("grace", 4)):
        kith.put_subject(gallery, subject, tags=["engine", subject], metadata={"floor": floor})
        kith.enroll(gallery, subject, jpeg(astronaut), face="largest", allow_duplicate=True)
    url, photo = server + IDENTIFY.format(gallery=gallery), jpeg(astronaut)

    def found(response: httpx.Response) -> set[str]:
        return {each["subject"] for each in response.raise_for_status().json()["results"][0]["candidates"]}

    for fields, expected in (
        ({"tag": "engine"}, {"ada", "grace"}),
        ({"tag": ["engine", "grace"]}, {"grace"}),
        ({"metadata": '{"floor": 3}'}, {"ada"}),
        ({"tag": "engine", "metadata": '{"floor": 4}', "request": '{"filter": {"tags": ["grace"]}}'}, {"grace"}),
    ):
        assert found(httpx.post(url, files=[("images", photo)], data=fields)) == expected
    assert found(httpx.post(url, params={"tag": "ada"}, content=photo, headers=JPEG)) == {"ada"}
    more = {"urls": ["https://a.example/1", "https://a.example/2"], "fpir": "0.1", "request": '{"faces": "largest"}'}
    first, *refused = httpx.post(url, files=[("images", photo)], data=more).json()["results"]
    assert first["risk"]["fpir"] == 0.1
    assert [each["error"]["code"] for each in refused] == ["url_refused", "url_refused"]
    sides = [("a", ("a", photo)), ("b", ("b", photo))]
    compared = httpx.post(f"{server}/v1/verify", files=sides, data={"threshold": "0.5", "detail": "low"}).json()
    assert (compared["outcome"], compared["threshold"]) == ("same", 0.5)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Server with a low photo size limit."""
    settings = load_settings(data_dir=tmp_path_factory.mktemp("narrow"), max_image_bytes=100_000, max_images=2)
    with embedded(settings) as url:
        yield url


def test_a_photo_beyond_the_limit(narrow: str, astronaut: Photo) -> None:
    url = f"{narrow}/v1/detect"
    check(httpx.post(url, content=b"x" * 100_001, headers=JPEG), 413, "image_too_large")
    check(httpx.post(url, content=b"x" * 100_000, headers=JPEG), 422, "image_format")
    # A file of a form fails alone.
    files = [("images", ("a", b"x" * 500_000)), ("images", ("b", jpeg(astronaut[:250, :250])))]
    large, whole = httpx.post(url, files=files).json()["images"]
    assert large["error"]["code"] == "image_too_large" and "error" not in whole


def test_files_of_a_form_stay_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.TemporaryFile", None)
    sizes = [0, 100_000, 5_000_000]
    head = b'--b\r\nContent-Disposition: form-data; name="images"; filename="p"\r\n\r\n'
    form = b"".join(head + b"x" * size + b"\r\n" for size in sizes) + b"--b--\r\n"
    parts = asyncio.run(read_form(request(form, b"multipart/form-data; boundary=b"), 4))
    assert [(name, len(part)) for name, part in parts] == [("images", size) for size in sizes]


def request(body: bytes, kind: bytes) -> Request:
    """Return a request whose body arrives in pieces."""
    pieces = list(_chunks(body, 65_536))

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    return Request({"type": "http", "method": "POST", "headers": [(b"content-type", kind)]}, receive)


def test_a_document_is_parsed_beside_the_event_loop() -> None:
    parsed_in: list[threading.Thread] = []

    def note(_text: str) -> None:
        parsed_in.append(threading.current_thread())

    model = create_model("Noting", text=Annotated[str, AfterValidator(note)])
    asyncio.run(read_json(request(b'{"text": "a"}', b"application/json"), model))
    assert len(parsed_in) == 1 and parsed_in != [threading.main_thread()]


def _chunks(body: bytes, size: int = 10_000) -> Iterator[bytes]:
    for start in range(0, len(body), size):
        yield body[start : start + size]


def test_supported_codings_are_read(server: str, gallery: str, kith: Kith, astronaut: Photo) -> None:
    model, home, gzipped = kith.model(), f"{server}/v1/galleries/{gallery}", {"Content-Encoding": "gzip"}
    for coding in ("Identity", ""):
        found = httpx.post(f"{server}/v1/detect", content=jpeg(astronaut), headers=JPEG | {"Content-Encoding": coding})
        assert len(found.json()["images"][0]["faces"]) == 1
    assert httpx.get(home, headers=gzipped).status_code == 200, "a request without a body has no coding"
    line = json.dumps({"subject": "ada", "embedding": np.eye(1, model.dimension)[0].tolist()}).encode() + b"\n"
    headers, url = {"Content-Type": "application/x-ndjson"} | gzipped, f"{home}/import?recognizer={model.recognizer}"
    assert httpx.post(url, content=gzip.compress(line), headers=headers).json()["template_count"] == 1
    # The compression of an archive may be named as a coding.
    archive = as_gzip({"tom/1.jpg": jpeg(astronaut)})
    started = httpx.post(f"{home}/enrollments", content=archive, headers=JPEG | gzipped)
    assert kith.wait_for(started.json()["id"], timeout_s=120).counts == {"enrolled": 1}


PREFIXES = (
    "",
    "data:image/jpeg;base64,",
    "DATA:image/jpeg;name=a,b.jpg;BASE64,",
    "data:image/jpeg;base64;charset=utf-8,",
    "data:;base64,\n",
)
ENCODERS = (base64.b64encode, base64.urlsafe_b64encode, base64.encodebytes)


@given(
    content=st.binary(max_size=100),
    prefix=st.sampled_from(PREFIXES),
    encode=st.sampled_from(ENCODERS),
    end=st.sampled_from(["\n", "\r\n", "\r\n    "]),
    padded=st.booleans(),
)
def test_every_form_of_base64(
    content: bytes, prefix: str, encode: Callable[[bytes], bytes], end: str, padded: bool
) -> None:
    text = encode(content).decode().replace("\n", end)
    sent = prefix + (text if padded else text.rstrip("= \r\n"))
    assert Photos.model_validate_json(json.dumps({"images": [sent]})).images == [content]
