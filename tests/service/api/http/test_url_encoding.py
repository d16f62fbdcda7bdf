"""Ids and form fields that are not UTF-8 are rejected, because two names would become one."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2 as httpx
import pytest

from kith import Kith, KithClientError
from service.server import embedded
from service.settings import load_settings

KEY = "the-operator-s-key-of-this-file-and-more"
LATIN_1, SURROGATE, OVERLONG, TRUNCATED = "Ren%E9", "a%ED%A0%80", "a%C0%AE", "Ren%C3"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    settings = load_settings(
        data_dir=tmp_path_factory.mktemp("kith"), api_key=KEY, compat="compreface", log_level="ERROR"
    )
    with embedded(settings) as url, Kith(url, KEY) as kith:
        kith.create_gallery("g")
        token = kith.create_key("client", ["identify", "read", "enroll"], galleries=["g"]).token
        with httpx.Client(base_url=url, headers={"X-API-Key": token}) as opened:
            yield opened


@pytest.mark.parametrize("text", [LATIN_1, "Ren%E8", SURROGATE, OVERLONG, TRUNCATED])
@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("PUT", "/v1/galleries/g/subjects/{}"),
        ("GET", "/v1/galleries/g/subjects/{}/templates"),
        ("GET", "/v1/jobs?gallery={}"),
        ("DELETE", "/api/v1/recognition/subjects/{}"),
        ("POST", "/api/v1/recognition/faces?subject={}"),
    ],
)
def test_an_id_that_is_not_utf_8_is_refused(client: httpx.Client, method: str, target: str, text: str) -> None:
    answer = client.request(method, target.format(text), json={} if method == "PUT" else None)
    problem = answer.json()
    problem = problem.get("kith", problem)
    assert (problem["status"], problem["code"]) == (422, "invalid_request")
    assert client.get("/v1/galleries/g/subjects").json()["data"] == []


@pytest.mark.parametrize("text", ["Ren%C3%A9", "50%25", "a+b", "%F0%9F%98%80"])
def test_other_urls_are_accepted(client: httpx.Client, text: str) -> None:
    assert client.get(f"/v1/galleries/g/subjects/{text}").json()["code"] == "subject_not_found"
    assert client.get(f"/v1/galleries/g/subjects?tag={text}").json()["data"] == []


@pytest.mark.parametrize(
    "part",
    [
        b'name="request"\r\n\r\n{"filter": {"tags": ["Ren\xe9"]}}',
        b'name="request"\r\n\r\n{"filter": {"tags": ["\xed\xa0\x80"]}}',
        b'name="images"; filename="Ren\xe9.jpg"\r\n\r\nphoto',
        b'name="Ren\xe9"; filename="a.jpg"\r\n\r\nphoto',
    ],
)
def test_a_form_that_is_not_utf_8_is_rejected(client: httpx.Client, part: bytes) -> None:
    answer = client.post(
        "/v1/galleries/g/identify",
        content=b"--x\r\nContent-Disposition: form-data; " + part + b"\r\n--x--\r\n",
        headers={"Content-Type": "multipart/form-data; boundary=x"},
    )
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
    assert "UTF-8" in answer.json()["detail"]


@pytest.mark.parametrize("name", [b"Ren\xe9", b"\xed\xa0\x80", b"\\udce9"])
def test_json_that_is_not_utf_8_is_rejected(client: httpx.Client, name: bytes) -> None:
    answer = client.put(
        "/v1/galleries/g/subjects/ada",
        content=b'{"name": "' + name + b'"}',
        headers={"Content-Type": "application/json"},
    )
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
    assert client.get("/v1/galleries/g/subjects/ada").status_code == 404


def test_the_client_refuses_parameters_that_no_url_can_carry(client: httpx.Client) -> None:
    with Kith(str(client.base_url), KEY) as kith:
        for call in (
            lambda: list(kith.subjects("g", tags=["Ren\udce9"])),
            lambda: list(kith.erasures("g", "Ren\udce9")),
            lambda: kith.put_subject("g", "Ren\udce9"),
            lambda: kith.put_subject("g", "ada", name="Ren\udce9"),
        ):
            with pytest.raises(KithClientError, match="invalid_request"):
                call()
