"""The contract of CompreFace's REST API, and what Kith adds to it."""

from __future__ import annotations

import gzip
import uuid
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2 as httpx
import numpy as np
import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from kith import Kith
from models.vision.detection import DEFAULT_MIN_SCORE
from service.api.compreface import faces, recognition, subjects
from service.api.compreface.similarity import (
    CLIENT_DETECTION,
    KNOWN,
    MAYBE,
    STEP,
    UNKNOWN,
    level_of,
    level_of_candidate,
    to_client,
    to_probability,
)
from service.api.http.access import needs_of
from tests.packs import BUNDLED_DIMENSION
from tests.service.api.compreface.conftest import CompatServer
from tests.service.api.conftest import KEY


@pytest.fixture
def collection(compat: CompatServer) -> str:
    return compat.create_gallery(keep_crops=True)


@pytest.fixture
def http(compat: CompatServer, collection: str) -> Iterator[httpx.Client]:
    with compat.client(compat.create_key(collection)) as client:
        yield client


def _post(http: httpx.Client, path: str, photo: Path, **params: Any) -> httpx.Response:
    return http.post(path, params=params, files={"file": (photo.name, photo.read_bytes(), "image/jpeg")})


def _add(http: httpx.Client, subject: str, photo: Path) -> str:
    response = _post(http, "/recognition/faces", photo, subject=subject)
    assert response.status_code == 201, response.text
    assert response.json()["subject"] == subject
    return str(uuid.UUID(response.json()["image_id"]))


def test_subjects(http: httpx.Client, photos: Path) -> None:
    """Names in any Unicode form are one subject."""
    nfc, nfd, emoji = "Jos\xe9", "Jose\u0301", "👩\u200d💻"
    assert http.get("/recognition/subjects").json() == {"subjects": []}
    added = http.post("/recognition/subjects", json={"subject": nfd})
    assert (added.status_code, added.json()) == (201, {"subject": nfc})
    again = http.post("/recognition/subjects", json={"subject": nfc})
    assert (again.status_code, again.json()["code"]) == (400, 43)
    face = _post(http, "/recognition/faces", photos / "astronaut.jpg", subject=nfd).json()
    assert face["subject"] == nfc
    assert http.get("/recognition/faces", params={"subject": nfd}).json()["faces"] == [face]
    renamed = [http.put(f"/recognition/subjects/{quote(nfd)}", json={"subject": name}).json() for name in (nfc, emoji)]
    assert renamed == [{"updated": False}, {"updated": True}]
    assert http.get("/recognition/subjects/").json() == {"subjects": [emoji]}
    http.post("/recognition/subjects", json={"subject": "Bo"})
    assert http.put(f"/recognition/subjects/{emoji}", json={"subject": "Bo"}).json() == {"updated": True}
    assert http.get("/recognition/faces").json()["faces"] == [face | {"subject": "Bo"}]
    missing = http.put("/recognition/subjects/Ada", json={"subject": "Cy"})
    assert (missing.status_code, missing.json()["code"]) == (404, 42)
    assert http.get("/recognition/subjects").json() == {"subjects": ["Bo"]}
    assert http.delete("/recognition/subjects/Bo").json() == {"subject": "Bo"}
    assert http.delete("/recognition/subjects/Bo").json()["code"] == 42
    for name in ("one", "two", "three"):
        http.post("/recognition/subjects", json={"subject": name})
    assert http.delete("/recognition/subjects").json() == {"deleted": 3}


def test_faces(http: httpx.Client, compat: CompatServer, collection: str, photos: Path) -> None:
    first = _add(http, "Ada", photos / "astronaut.jpg")
    second = _add(http, "Ada", photos / "astronaut2.jpg")
    file = {"file": ("a.jpg", (photos / "actor.jpg").read_bytes(), "image/jpeg")}
    once = {"params": {"subject": "Tom"}, "files": file, "headers": {"Idempotency-Key": "one"}}
    added, again = (http.post("/recognition/faces", **once) for _ in range(2))  # type: ignore[arg-type]
    assert added.json() == again.json()
    third = added.json()["image_id"]
    page = http.get("/recognition/faces", params={"page": 1, "size": 2}).json()
    assert page == {
        "faces": [{"image_id": third, "subject": "Tom"}],
        "page_number": 1,
        "page_size": 2,
        "total_pages": 2,
        "total_elements": 3,
    }
    of_ada = http.get("/recognition/faces", params={"subject": "Ada"}).json()
    assert ([face["image_id"] for face in of_ada["faces"]], of_ada["total_elements"]) == ([first, second], 2)
    assert http.get("/recognition/faces", params={"subject": "no such"}).json()["total_elements"] == 0
    picture = http.get(f"/recognition/faces/{first}/img")
    assert (picture.headers["content-type"], picture.content[8:12]) == ("image/webp", b"WEBP")
    with Kith(compat.url, KEY) as kith:
        kith.update_gallery(collection, keep_crops=False)
    absent = str(uuid.uuid4())
    deleted = http.post("/recognition/faces/delete", json=[second, absent])
    assert deleted.json() == [{"image_id": second, "subject": "Ada"}]
    assert http.delete(f"/recognition/faces/{first}").json() == {"image_id": first, "subject": "Ada"}
    gone = http.delete(f"/recognition/faces/{first}")
    assert (gone.status_code, gone.json()["code"]) == (404, 44)
    assert http.delete("/recognition/faces", params={"subject": "no such"}).json() == {"deleted": 0}
    assert http.delete("/recognition/faces", params={"subject": "Tom"}).json() == {"deleted": 1}
    assert http.get("/recognition/subjects").json() == {"subjects": ["Ada", "Tom"]}
    bare = _add(http, "Tom", photos / "actor.jpg")
    none = http.get(f"/recognition/faces/{bare}/img")
    assert (none.status_code, none.json()["code"]) == (404, 11)
    assert "keep_crops" in none.json()["message"]
    assert http.delete("/recognition/faces").json() == {"deleted": 1}
    with Kith(compat.url, KEY) as kith:
        events = {entry.event for entry in kith.audit(collection)}
    assert {"templates_enrolled", "crop_read", "template_deleted"} <= events


def test_many_erasures_are_few_transactions(
    http: httpx.Client, compat: CompatServer, collection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has its receipt. One transaction for each would keep other writers away for minutes."""
    many = 40
    monkeypatch.setattr("service.api.compreface.subjects.MAX_ERASED", 15)
    with Kith(compat.url, KEY) as kith:
        vectors = np.random.default_rng(2).normal(size=(many, kith.model().dimension)).astype(np.float32)
        kith.enroll(collection, "s0", embeddings=list(vectors), allow_inconsistent=True)
        for number in range(many):
            kith.put_subject(collection, f"s{number}")
        for path in ("faces", "subjects"):
            before = len(list(kith.erasures(collection)))
            commits: list[object] = []
            count = commits.append  # one object, by which the listener is removed
            sa.event.listen(sa.Engine, "commit", count)
            assert http.delete(f"/recognition/{path}").json() == {"deleted": many}
            sa.event.remove(sa.Engine, "commit", count)
            assert len(commits) < many / 2, "background work may commit as well"
            assert len(list(kith.erasures(collection))) == before + many


def test_recognize(http: httpx.Client, compat: CompatServer, photos: Path, collection: str) -> None:
    empty = _post(http, "/recognition/recognize", photos / "astronaut.jpg").json()["result"]
    assert [face["subjects"] for face in empty] == [[]]
    _add(http, "Ada", photos / "astronaut.jpg")
    (known,) = _post(http, "/recognition/recognize", photos / "astronaut2.jpg").json()["result"]
    assert known["subjects"][0]["subject"] == "Ada"
    assert KNOWN <= known["subjects"][0]["similarity"] <= 1
    assert (known["kith"]["outcome"], known["kith"]["subject"]) == ("identified", "Ada")
    assert set(known) == {"box", "subjects", "kith"}
    assert set(known["box"]) == {"probability", "x_min", "y_min", "x_max", "y_max"}
    photo = "data:image/jpeg;base64," + b64encode((photos / "astronaut2.jpg").read_bytes()).decode()
    assert http.post("/recognition/recognize", json={"file": photo}).json()["result"] == [known]
    (stranger,) = _post(http, "/recognition/recognize", photos / "actor.jpg").json()["result"]
    assert stranger["kith"]["outcome"] == "unknown"
    assert [subject["similarity"] < UNKNOWN for subject in stranger["subjects"]] == [True]
    with compat.client(compat.create_key(collection, scopes=["admin"])) as admin:
        (face,) = _post(admin, "/recognition/recognize", photos / "actor.jpg").json()["result"]
    assert face["subjects"][0]["subject"] == "Ada", "admin keys see the exact order of strangers"
    assert 0 < face["subjects"][0]["similarity"] < UNKNOWN


def test_options(http: httpx.Client, photos: Path) -> None:
    _add(http, "Ada", photos / "astronaut.jpg")
    options = {
        "limit": 2,
        "prediction_count": 3,
        "det_prob_threshold": "0.8",
        "face_plugins": "landmarks, calculator,age,no-such-plugin",
        "status": "true",
        "detect_faces": "true",
    }
    document = _post(http, "/recognition/recognize", photos / "group.jpg", **options).json()
    first, second = document["result"]
    assert _area(first["box"]) >= _area(second["box"])
    assert [len(point) for point in first["landmarks"]] == [2] * 5
    assert len(first["embedding"]) == BUNDLED_DIMENSION
    assert set(document["plugins_versions"]) == {"detector", "calculator"}
    (largest,) = _post(http, "/recognition/recognize", photos / "group.jpg", limit=1).json()["result"]
    assert largest["box"] == first["box"]
    certain = _post(http, "/recognition/recognize", photos / "group.jpg", det_prob_threshold=1)
    assert (certain.status_code, certain.json()["code"]) == (400, 28)


def _area(box: dict[str, float]) -> float:
    return (box["x_max"] - box["x_min"]) * (box["y_max"] - box["y_min"])


GZIP = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
REFUSED: list[tuple[str, dict[str, Any], int, int, str]] = [
    ("POST recognize", {"photo": "nobody"}, 400, 28, "face"),
    ("POST faces?subject=Ada", {"photo": "nobody"}, 400, 28, "face"),
    ("POST faces?subject=Ada", {"photo": "group"}, 400, 31, "faces"),
    ("POST faces", {"photo": "astronaut"}, 400, 26, "subject"),
    ("POST recognize", {"files": {"file": ("a.jpg", b"no photo")}}, 400, 21, ""),
    ("POST recognize", {"files": {"photo": ("a.jpg", b"no photo")}}, 400, 26, "'file'"),
    ("POST recognize", {"content": gzip.compress(b'{"file": ""}'), "headers": GZIP}, 415, 0, "unsupported_encoding"),
    ("GET nothing", {}, 404, 0, ""),
    *(
        (f"{request}{text}", options, 400, 26, "U+FFFD")
        for text in ("Ren%E9", "a%ED%A0%80", "a%C0%AE", "Ren%C3")
        for request, options in (("DELETE subjects/", {}), ("POST faces?subject=", {"photo": "nobody"}))
    ),
]


@pytest.fixture(scope="module")
def empty(compat: CompatServer) -> Iterator[httpx.Client]:
    with compat.client(compat.create_key(compat.create_gallery())) as client:
        yield client


@pytest.mark.parametrize(("request_", "options", "status", "code", "said"), REFUSED)
def test_refusals(
    empty: httpx.Client, photos: Path, request_: str, options: dict[str, Any], status: int, code: int, said: str
) -> None:
    method, _, path = request_.partition(" ")
    if "photo" in options:
        options = {"files": {"file": ("a.jpg", (photos / f"{options['photo']}.jpg").read_bytes(), "image/jpeg")}}
    answer = empty.request(method, f"/recognition/{path}", **options)
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    assert answer.json()["message"] and said in answer.text


def test_keys(compat: CompatServer, collection: str, photos: Path) -> None:
    def status(token: str, path: str = "/recognition/subjects") -> tuple[int, int]:
        with compat.client(token) as http:
            response = http.get(path)
            return response.status_code, response.json()["code"]

    assert status("kith_wrong") == (401, 10)
    assert status(KEY) == (403, 1), "not bound to a gallery"
    assert status(compat.create_key()) == (403, 1)
    assert status(compat.create_key(collection, compat.create_gallery())) == (403, 1)
    assert status(compat.create_key("not-yet-created")) == (404, 10)
    assert httpx.get(f"{compat.url}/api/v1/recognition/subjects", timeout=60).json()["code"] == 10


def test_every_route_needs_a_scope() -> None:
    needs = needs_of(route for module in (faces, recognition, subjects) for route in module.routes.routes)
    for route, need in needs.items():
        scope = "read" if route.startswith("GET ") else "identify" if route.endswith("/recognize") else "enroll"
        assert need is not None and need.scope == scope, route


def test_photos_may_be_rotated_on_request(http: httpx.Client, photos: Path, tmp_path: Path) -> None:
    """Adding looks again by default."""
    rotated = tmp_path / "rotated.jpg"
    with Image.open(photos / "astronaut.jpg") as image:
        image.resize((179, 179)).rotate(270, expand=True).save(rotated, quality=95)  # a large sideways face is found
    _add(http, "Ada", rotated)
    path = "/recognition/recognize"
    assert _post(http, path, rotated).json()["code"] == 28
    assert len(_post(http, path, rotated, detail="medium").json()["result"]) == 1
    assert _post(http, path, rotated, detail="much").status_code == 400


def test_requests_of_the_net_sdk(http: httpx.Client, photos: Path) -> None:
    """Exadel.Compreface 1.0: file parts without a content type, unset options, capital booleans, a bare JSON string."""
    json_type = {"Content-Type": "application/json; charset=UTF-8"}

    def sent(path: str, name: str) -> Any:
        part = b'--mark\r\nContent-Disposition: form-data; name="file"; filename="x.jpg"\r\n\r\n'
        body = part + (photos / f"{name}.jpg").read_bytes() + b"\r\n--mark--\r\n"
        kind = {"Content-Type": 'multipart/form-data; boundary="mark"'}
        return http.post(f"/recognition/{path}", content=body, headers=kind).raise_for_status().json()

    http.post("/recognition/subjects", content=b'{"subject": "Ada"}', headers=json_type).raise_for_status()
    renamed = http.put("/recognition/subjects/Ada", content=b'"Ada Lovelace"', headers=json_type)
    assert renamed.json() == {"updated": True}
    added = sent("faces?subject=Ada%20Lovelace&det_prob_threshold=0&face_plugins=&status=False", "astronaut")
    assert added["subject"] == "Ada Lovelace"
    unset = sent("recognize?det_prob_threshold=0&face_plugins=&status=False", "astronaut2")
    options = "limit=1&prediction_count=1&det_prob_threshold=0.8&face_plugins=landmarks,calculator&status=True"
    chosen = sent(f"recognize?{options}", "astronaut2")
    assert ("plugins_versions" in unset, "plugins_versions" in chosen) == (False, True)
    (face,) = chosen["result"]
    assert all(type(face["box"][side]) is int for side in ("x_min", "y_min", "x_max", "y_max"))
    assert all(type(value) is int for point in face["landmarks"] for value in point)
    assert [each["result"][0]["subjects"][0]["subject"] for each in (unset, chosen)] == ["Ada Lovelace"] * 2


COSINES = st.floats(-1, 1)
THRESHOLDS = st.floats(-1, 1.5)
"""No similarity reaches a threshold above 1."""


@given(st.lists(COSINES, min_size=2, max_size=2), st.lists(THRESHOLDS, min_size=2, max_size=2))
def test_the_map_is_monotonic_and_keeps_the_thresholds_at_the_cutoffs(
    similarities: list[float], thresholds: list[float]
) -> None:
    """A client may have any cutoff from MAYBE to KNOWN: each accepts exactly the matches."""
    review, accept = sorted(thresholds)

    def mapped(similarity: float) -> float:
        outcome = "identified" if similarity >= accept else "uncertain" if similarity >= review else "unknown"
        return to_client(similarity, accept, review, level_of(outcome))

    low, high = sorted(similarities)
    assert 0 <= mapped(low) <= mapped(high) <= 1
    for similarity in similarities:
        assert (mapped(similarity) >= KNOWN) == (mapped(similarity) >= MAYBE) == (similarity >= accept)
        assert (mapped(similarity) >= UNKNOWN) == (similarity >= review)


@given(COSINES, COSINES)
def test_a_candidate_that_was_not_chosen_never_passes_for_a_match(similarity: float, review: float) -> None:
    level = level_of_candidate(similarity, review, "known")
    assert to_client(similarity, review, review, level) <= MAYBE - STEP
    assert level_of_candidate(similarity, review, "unknown") == "unknown"


def test_the_decision_counts_more_than_the_similarity() -> None:
    lookalike = to_client(0.8, 0.4, 0.3, level_of("uncertain"))
    assert UNKNOWN <= lookalike < KNOWN
    assert to_client(0.8, 0.4, 0.3, level_of("rejected_quality")) < UNKNOWN
    assert to_client(0.2, 0.4, 0.3, level_of("identified")) == KNOWN


@given(st.floats(0, 1))
def test_detection_scores(score: float) -> None:
    assert CLIENT_DETECTION <= to_probability(score) <= 1
    assert to_probability(DEFAULT_MIN_SCORE) == CLIENT_DETECTION
    assert to_probability(1) == 1
