"""What is refused, and how: a problem document with a stable code and a remedy, and nothing is stored.

Each row is a request. Refusals that need a state of their own stand with the tests of that state.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx2 as httpx
import numpy as np
import pytest

from kith import Kith
from service.api.http.openapi import bodies
from service.app import create_app
from service.core.json_limits import MAX_VALUES
from service.settings import load_settings
from tests.conftest import jpeg
from tests.packs import BUNDLED_DIMENSION
from tests.refusals import check
from tests.service.inference.image_files import png

NAME = "refusals"
HOME = f"/v1/galleries/{NAME}"
IDENTIFY, ENROLL, SUBJECT = f"{HOME}/identify", f"{HOME}/subjects/x/templates", f"{HOME}/subjects/a"
BULK, IMPORT = f"{HOME}/enrollments", f"{HOME}/import"
NOTHING = "0" * 32
JSON, JPEG = {"Content-Type": "application/json"}, {"Content-Type": "image/jpeg"}
FORM = {"Content-Type": "multipart/form-data; boundary=b"}
PHOTO = jpeg(np.random.default_rng(0).integers(0, 256, (96, 96, 3), np.uint8))
TEXT = b64encode(PHOTO).decode()
FILE = [("images", ("photo.jpg", PHOTO))]
BOTH = [(side, ("photo.jpg", PHOTO)) for side in "ab"]
ZERO = [0.0] * BUNDLED_DIMENSION


@pytest.fixture(scope="module")
def http(server: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server, timeout=60) as client:
        yield client


@pytest.fixture(scope="module", autouse=True)
def gallery(server: str) -> Iterator[None]:
    with Kith(server) as kith:
        kith.create_gallery(NAME)
        yield
        stored = kith.gallery(NAME)
        assert (stored.subject_count, stored.template_count) == (0, 0)
        kith.delete_gallery(NAME)


def ask(http: httpx.Client, request: str, **options: Any) -> httpx.Response:
    method, _, path = request.partition(" ")
    return http.request(method, path, **options)


# Photos


@pytest.mark.parametrize("path", ["/v1/detect", "/v1/embed", IDENTIFY, ENROLL])
@pytest.mark.parametrize(
    ("photo", "status", "code"),
    [
        (b"", 422, "image_empty"),
        (b"just text", 422, "image_format"),
        (PHOTO[: len(PHOTO) // 2], 422, "image_damaged"),
        (png(10_000, 10_000, rows=b""), 413, "image_too_large"),
    ],
    ids=["empty", "text", "truncated", "100 megapixels"],
)
def test_bad_photos_however_they_are_sent(http: httpx.Client, path: str, photo: bytes, status: int, code: str) -> None:
    check(http.post(path, files=[("images", ("photo.jpg", photo))]), status, code)
    check(http.post(path, json={"images": [b64encode(photo).decode()]}), status, code)
    check(http.post(path, content=photo, headers=JPEG), status, code)


@pytest.mark.parametrize("text", ["data:image/jpeg;base64," + TEXT, TEXT, urlsafe_b64encode(PHOTO).decode()])
def test_base64_where_a_file_is_expected(http: httpx.Client, text: str) -> None:
    body: dict[str, Any] = {"content": text.encode(), "headers": JPEG}
    for sent in (body, {"files": {"images": ("photo.jpg", text.encode())}}):
        assert "base64" in check(http.post("/v1/detect", **sent), 422, "image_format")["detail"]
    field = http.post("/v1/detect", files={"images": (None, text.encode())})
    assert "as a file" in check(field, 422, "invalid_request")["detail"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("+/" + "A" * 36 + "-_==", "characters"),  # two alphabets
        ("A" * 19 + " " + "A" * 20, "spaces"),
        ("A" * 37, "ends early"),
        ("A" * 20 + "\u00e9" + "A" * 19, "characters"),
        ("https://example.org/" + TEXT, "urls"),
    ],
)
def test_text_that_is_no_base64(http: httpx.Client, text: str, reason: str) -> None:
    problem = check(http.post("/v1/detect", json={"images": [text]}), 422, "invalid_request")
    assert [field["field"] for field in problem["fields"]] == ["images.0"]
    assert reason in problem["detail"]


# Bodies of every route

MANY = 3 * MAX_VALUES  # more than the embeddings of a request add
DEEP = b"[" * 400_000
DOCUMENTS = {
    "a list": b"[]",
    "null": b"null",
    "two documents": b"{}{}",
    "an unknown field": b'{"no_such_field": 1}',
    "no UTF-8": b"\xff\xfe",
    "no UTF-8 in a name": b'{"name": "\xff\xfe"}',
    "half a pair": b'{"name": "\\ud800"}',
    "a million spaces": b" " * 900_000 + b"{",
    "a number of 100,000 digits": b'{"top_k": ' + b"9" * 100_000 + b"}",
    "nested": b'{"metadata": {"k": ' + DEEP + b"}}",
    "nested and closed": b'{"metadata": {"k": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
    "nested objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "nested photos": b'{"images": ' + DEEP,
}
DENSE = {
    "strings": b'{"images": [' + b'"",' * MANY + b'""]}',
    "arrays": b'{"x": ' + b"[" * MANY + b"]" * MANY + b"}",
    "objects": b'{"x":' * MANY + b"1" + b"}" * MANY,
}
"""Documents of few bytes with more values than a request may have."""
OTHER_TYPES = ("application/x-www-form-urlencoded", None, "text/json", "json", "*/*")
"""curl -d sends the first."""
CODINGS = ("gzip", "br", "GZIP", "gzip, identity", "?")
ROUTES = {
    f"{next(iter(route.methods or ()))} {route.path}": body.takes_photos
    for route, body in bodies(create_app(load_settings(_env_file=None)))
}
"""Routes with a JSON body, and whether it may have photos."""


def filled(route: str) -> str:
    """Return the request of a route, with names of things that do not exist in a gallery that does."""
    known = {"gallery": NAME, "subject": "a", "group": "g1", "key": "0" * 12}
    return re.sub("{([a-z_]+)}", lambda name: known.get(name[1], NOTHING), route)


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_refuses_hostile_json(http: httpx.Client, route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.api.http.bodies.MAX_EMBEDDINGS", 16)  # not the tests' own
    empty = check(ask(http, filled(route), headers=JSON), 422, "invalid_request")
    assert empty["detail"] == "body: Field required"
    for body in DOCUMENTS.values():
        check(ask(http, filled(route), content=body, headers=JSON), 422, "invalid_request")
    for body in DENSE.values():
        problem = check(ask(http, filled(route), content=body, headers=JSON), 422, "invalid_request")
        assert "more than" in problem["detail"]


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_refuses_other_types_and_codings(http: httpx.Client, route: str) -> None:
    for kind in OTHER_TYPES:
        headers = {} if kind is None else {"Content-Type": kind}
        answer = ask(http, filled(route), content=b'{"name": "g"}', headers=headers)
        problem = check(answer, 415, "unsupported_media_type")
        assert (repr(kind) if kind else "Content-Type is missing") in problem["detail"]
        assert "Content-Type to application/json (curl: -H 'Content-Type: application/json')" in problem["remedy"]
    for coding in CODINGS:
        for content in (b"\x1f\x8b0123456789", iter([b"\x1f\x8b", b"0123456789"])):
            answer = ask(http, filled(route), content=content, headers=JSON | {"Content-Encoding": coding})
            assert "identity" in check(answer, 415, "unsupported_encoding")["detail"]
            assert answer.headers["Accept-Encoding"] == "identity"


@pytest.mark.parametrize("route", [route for route, takes_photos in ROUTES.items() if takes_photos])
def test_options_of_a_form_are_as_bounded_as_json(
    http: httpx.Client, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.api.http.bodies.MAX_EMBEDDINGS", 16)
    names = ("a", "b") if route.endswith("/verify") else ("images",)
    photos = [(name, ("photo.jpg", PHOTO)) for name in names]
    for options in (DENSE["arrays"], b"{", b"[]", DEEP):
        for file_name in (None, "options.json"):
            form = [*photos, ("request", (file_name, options))]
            check(ask(http, filled(route), files=form), 422, "invalid_request")
    twice = [*photos, *[("request", ("options.json", b"{}"))] * 2]
    assert "once" in check(ask(http, filled(route), files=twice), 422, "invalid_request")["detail"]
    for kind in ("image/jpeg", "application/octet-stream", FORM["Content-Type"]):
        answer = ask(http, filled(route), content=PHOTO, headers={"Content-Type": kind, "Content-Encoding": "deflate"})
        check(answer, 415, "unsupported_encoding")


# Rows: request, its options, what the detail says. All are 422, invalid_request.

Row = tuple[str, dict[str, Any], str]


def field_rows() -> Iterator[Row]:
    """Values of fields, as JSON."""
    options: dict[str, Any]
    wanted: Any
    for options in (
        {"risk": {}},
        {"risk": {"fpir": 0.1, "fmr": 0.1}},
        {"risk": {"fpir": 1.5}},
        {"risk": {"preset": "lucky"}},
        {"filter": {"tag": ["x"]}},
        {"images": ["AAAA"] * 17},
        {"images": ["AAAA"], "embeddings": [[1.0]] * 1001},
    ):
        yield f"POST {IDENTIFY}", {"json": options}, "" if "images" in options else next(iter(options))
    yield f"POST {IDENTIFY}", {"json": {}}, "at least one photo"
    for number in ("NaN", "Infinity", "-Infinity", "1e999", "null"):
        vector = f'{{"embeddings": [[{", ".join([number] * BUNDLED_DIMENSION)}]]}}'.encode()
        for path in (IDENTIFY, ENROLL):
            yield f"POST {path}", {"content": vector, "headers": JSON}, ""
    for detail in ("HIGH", "", "tiles", 3):
        for path in ("/v1/detect", "/v1/embed", IDENTIFY):
            yield f"POST {path}", {"json": {"urls": ["https://x/"], "detail": detail}}, "detail"
        yield f"POST {BULK}", {"params": {"detail": str(detail)}, "content": b"PK"}, "detail"
    yield f"POST {BULK}", {"params": {"names": "punycode"}, "content": b"PK"}, "names"
    for name in ("", "a/b", "..", "a b", "x" * 65, "\u00e9"):
        yield "POST /v1/galleries", {"json": {"name": name}}, "name"
    infinite = b'{"name": "inf", "quality_gate": {"min_eye_distance_px": 1e999}}'
    yield "POST /v1/galleries", {"content": infinite, "headers": JSON}, ""
    for wanted in (
        [],
        [{}],
        [{"template": NOTHING}],
        [{"subject": "ada", "stranger": NOTHING}],
        [{"subject": "ada", "face": NOTHING}],
        [{"album": NOTHING, "face": NOTHING, "stranger": NOTHING}],
        [{"subject": "ada"}] * 201,
    ):
        yield f"POST {HOME}/crops", {"json": {"crops": wanted}}, ""
    for key in (
        {"scopes": ["nope"]},
        {"name": "x" * 129},
        {"galleries": ["a b"]},
        {"expires_at": "2026-01-01T00:00:00Z"},
    ):
        yield "POST /v1/keys", {"json": {"name": "x", "scopes": ["admin"]} | key}, next(iter(key))


def header_rows() -> Iterator[Row]:
    yield f"PUT {SUBJECT}", {"json": {}, "headers": {"If-None-Match": '"an-etag"'}}, ""
    for position in ("1", "ab" * 40, "x" * 80):
        yield "GET /v1/events", {"headers": {"Last-Event-ID": position}}, ""
    for milliseconds in ("", "-1", "0", "000", "1.5", "soon"):
        yield "POST /v1/detect", {"files": FILE, "headers": {"X-Request-Timeout-Ms": milliseconds}}, ""


def text_rows() -> Iterator[Row]:
    """Texts that are no name, no tag, no metadata and no id."""
    for text in ("a\u202eb", "a\0b", "a\nb", "a" + "\u0301" * 31):  # all: tests/kith/test_identifiers.py
        yield f"PUT {HOME}/subjects/{quote(text)}", {"json": {}}, "must"
        for fields in ({"name": text}, {"tags": [text]}, {"metadata": {text: 1}}):
            yield f"PUT {SUBJECT}", {"json": fields}, "must"
        yield f"GET {HOME}/subjects", {"params": {"tag": text}}, "must"
        yield f"GET {HOME}/subjects", {"params": {"metadata": json.dumps({text: 1})}}, "must"
        yield "POST /v1/keys", {"json": {"name": text, "scopes": ["read"]}}, "must"
        yield "POST /v1/webhooks", {"json": {"url": "https://example.org", "name": text}}, "must"
    for value in ('"\\ud800"', "NaN", "1e999", "9" * 100_000, "[" * 4000 + "]" * 4000, '["\\udfff"]'):
        yield f"PUT {SUBJECT}", {"content": f'{{"metadata": {{"k": {value}}}}}', "headers": JSON}, ""
    for value in ("1", '"\u00e9"', "[]", '{"a": 1}'):
        dense = f'{{"metadata": {{"k": [{", ".join([value] * (MAX_VALUES + 1))}]}}}}'.encode()
        for method in ("PUT", "PATCH"):
            yield f"{method} {SUBJECT}", {"content": dense, "headers": JSON}, f"more than {MAX_VALUES} values"
    for subject in ("%20x", "x" * 129, "%00", "a%5Cb", quote("\U0001f600" * 129)):
        yield f"PUT {HOME}/subjects/{subject}", {"json": {}}, ""
    for text in ("Ren%E9", "Ren%E8", "a%ED%A0%80", "a%C0%AE", "Ren%C3"):  # not UTF-8: two names would become one
        yield f"PUT {HOME}/subjects/{text}", {"json": {}}, ""
        yield f"GET {HOME}/subjects/{text}/templates", {}, ""
        yield f"GET /v1/jobs?gallery={text}", {}, ""


def query_rows() -> Iterator[Row]:
    for query in (
        "risk?fpir=5e-324",
        "risk?fpir=nan",
        "subjects?cursor=%00",
        "subjects?cursor=s001",
        f"subjects?cursor={'0' * 80}",
        "subjects?metadata=floor=1",
        "subjects?metadata=[1]",
        'subjects?metadata={"floor": NaN}',
        "subjects?q=",
        "subjects?q=%CC%81",
        "subjects?q=a%00",
        f"subjects?q={'x' * 129}",
    ):
        yield f"GET {HOME}/{query}", {}, ""
    for cursor in ("9" * 30, "-1", "x", "%00", "1e3", "9223372036854775808"):
        yield f"GET /v1/jobs/{NOTHING}/items?cursor={cursor}", {}, ""
    for path in ("/v1/detect", "/v1/embed", IDENTIFY, ENROLL):
        for query in (
            "request={}",
            "no_such=1",
            "detail=low&detail=high",
            "urls=https://a/",
        ):
            yield f"POST {path}?{query}", {"content": PHOTO, "headers": JPEG}, ""
    yield f"POST {IDENTIFY}?top_k=1", {"files": FILE}, "query parameters"
    yield f"POST {IDENTIFY}?top_k=1", {"json": {"embeddings": []}}, "query parameters"


def form_rows() -> Iterator[Row]:
    for fields in (
        {"top_k": "0"},
        {"top_k": ["1", "2"]},
        {"top_k": "1", "request": '{"top_k": 1}'},
        {"fpir": "0.1", "preset": "strict"},
        {"fpir": "0.1", "request": '{"risk": {"preset": "strict"}}'},
        {"fpir": "0.1", "request": '{"risk": 1}'},
        {"filter": "{}"},
        {"metadata": "{"},
        {"metadata": ["{}", "{}"]},
        {"tag": ""},
        {"tag": "a", "request": '{"filter": 1}'},
        {"tag": "a", "request": '{"filter": {"tags": 1}}'},
        {"urls": "https://cdn.example.org/a.jpg", "request": '{"urls": 1}'},
        {"no_such": "1"},
        {"request": '{"images": []}'},
        {"request": ["{}"] * 5},
    ):
        yield f"POST {IDENTIFY}", {"files": FILE, "data": fields}, ""
    yield "POST /v1/detect", {"files": [("picture", PHOTO)]}, ""
    yield "POST /v1/detect", {"files": [("images", b"x")] * 18}, ""
    yield "POST /v1/detect", {"content": b"garbage", "headers": FORM}, ""
    whole = httpx.Request("POST", "http://x", files=FILE, headers=FORM).read()
    cut_short = whole.removesuffix(b"--b--\r\n") + b'--b\r\nContent-Disposition: form-data; name="request"\r\n\r\n{}'
    yield "POST /v1/detect", {"content": cut_short, "headers": FORM}, "ends early"
    yield "POST /v1/detect", {"content": whole, "headers": {"Content-Type": "multipart/form-data"}}, ""
    long_name = b'--b\r\nContent-Disposition: form-data; name="images"; filename="' + b"x" * 10_000
    yield "POST /v1/detect", {"content": long_name + b'"\r\n\r\nx\r\n--b--\r\n', "headers": FORM}, ""


def verification_rows() -> Iterator[Row]:
    path, image = "POST /v1/verify", {"image": TEXT}
    person = {"subject": {"gallery": NAME, "subject": "a"}}
    yield path, {"files": [("a", PHOTO)]}, ""
    yield path, {"files": [("a", PHOTO), ("c", PHOTO)]}, ""
    sides: list[Any] = [person, {"embedding": [1.0]}, None]
    for letter in "ab":
        for side in sides:
            form = {"request": json.dumps({letter: side})}
            yield path, {"files": [("a", PHOTO), ("b", PHOTO)], "data": form}, f"{letter}: may be sent once"
    both = {"request": json.dumps({"a": {"image": "", "embedding": [1.0]}})}
    yield path, {"files": [("b", PHOTO)], "data": both}, ""
    unclear: list[Any] = [{**image, **person}, {**image, "url": None}, {"image": None}, {"embedding": None}]
    for side in unclear:
        yield path, {"json": {"a": image, "b": side}}, "exactly one of image, url, embedding, subject"
    yield path, {"json": {"a": person, "b": person}}, "one side may be a subject"


ROWS = [*field_rows(), *header_rows(), *text_rows(), *query_rows(), *form_rows(), *verification_rows()]


@pytest.mark.parametrize("row", range(len(ROWS)))
def test_invalid_requests(http: httpx.Client, row: int) -> None:
    request, options, says = ROWS[row]
    problem = check(ask(http, request, **options), 422, "invalid_request")
    assert says in problem["detail"], (request, problem["detail"])
    assert "Value error" not in problem["detail"]


PART = b'--b\r\nContent-Disposition: form-data; name="images"; filename="p"\r\n'
FORMS = {
    "headers": PART + b"A: b\r\n" * 100_000 + b"\r\nx\r\n--b--\r\n",
    "header": PART + b"A: " + b"b" * 1_000_000,
    "parts": (PART + b"\r\nx\r\n") * 5000 + b"--b--\r\n",
    "preamble": b"preamble " * 100_000,
    "no name": b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n--b--\r\n",
    "no head": b"--b\r\n\r\nx\r\n--b--\r\n",
}


@pytest.mark.parametrize("case", FORMS)
def test_hostile_forms(http: httpx.Client, case: str) -> None:
    response = http.post("/v1/detect", content=FORMS[case], headers=FORM)
    assert response.status_code in (413, 422), response.text[:300]


def test_a_415_names_the_codings_of_the_path(http: httpx.Client) -> None:
    own = [(IMPORT, coding, "gzip, identity") for coding in ("br", "zstd", "gzip, gzip")]
    for path, coding, supported in (*own, (BULK, "br", "gzip, zstd, identity")):
        kind = "application/x-ndjson" if path == IMPORT else "application/octet-stream"
        answer = http.post(path, content=b"{}", headers={"Content-Type": kind, "Content-Encoding": coding})
        check(answer, 415, "unsupported_encoding")
        assert answer.headers["Accept-Encoding"] == supported


@pytest.mark.parametrize(
    ("request_", "options", "status", "code"),
    [
        ("GET /v1/galleries/nowhere", {}, 404, "gallery_not_found"),
        ("POST /v1/galleries/nowhere/identify", {"json": {"embeddings": [[1.0]]}}, 404, "gallery_not_found"),
        (f"GET {SUBJECT}", {}, 404, "subject_not_found"),
        (f"GET {SUBJECT}/templates/{NOTHING}", {}, 404, "subject_not_found"),
        ("GET /v1/nothing", {}, 404, "not_found"),
        ("GET /api/v1/recognition/subjects", {}, 404, "not_found"),  # CompreFace's API is off by default
        *((request, {}, 405, "method_not_allowed") for request in ("PUT /v1/detect", "OPTIONS /v1/galleries")),
        ("POST /v1/verify", {"content": PHOTO, "headers": JPEG}, 415, "unsupported_media_type"),
        (f"PUT {SUBJECT}", {"json": {"metadata": {"k": "x" * 1_100_000}}}, 413, "request_too_large"),
        (f"PUT {SUBJECT}", {"content": [*[b" " * 100_000] * 10, b" "], "headers": JSON}, 413, "request_too_large"),
        (f"PUT {SUBJECT}", {"content": [b" " * 100_000] * 10, "headers": JSON}, 422, "invalid_request"),  # the most
        *((f"POST {ENROLL}", {"json": {"embeddings": [[0.1] * n]}}, 422, "embedding_invalid") for n in (0, 1, 5000)),
        *((f"POST {BULK}", {"content": body}, 422, "archive_invalid") for body in (b"", b"%PDF-1.7", bytes(5000))),
        ("POST /v1/galleries/nowhere/enrollments", {"content": b"PK\3\4"}, 404, "gallery_not_found"),
        (f"GET {HOME}/albums/{NOTHING}", {}, 404, "album_not_found"),
        (f"GET {HOME}/strangers/{NOTHING}", {}, 404, "stranger_not_found"),
        ("POST /v1/webhooks", {"json": {"url": "https://receiver.example/"}}, 422, "webhook_refused"),
        # The bundled pack has no liveness model.
        ("POST /v1/galleries", {"json": {"name": "new", "liveness": "required"}}, 409, "liveness_unavailable"),
        (f"PATCH {HOME}", {"json": {"liveness": "required"}}, 409, "liveness_unavailable"),
        ("POST /v1/verify", {"files": BOTH, "data": {"require_liveness": "true"}}, 409, "liveness_unavailable"),
        (f"POST {ENROLL}", {"json": {"embeddings": [ZERO]}}, 422, "embedding_invalid"),
    ],
)
def test_other_refusals(http: httpx.Client, request_: str, options: dict[str, Any], status: int, code: str) -> None:
    check(ask(http, request_, **options), status, code)
