"""Every list is paginated without gaps or repetitions, also under concurrent writes."""

from __future__ import annotations

import json
from typing import Any, Final

import httpx2 as httpx
import numpy as np
import pytest
from typer.testing import CliRunner

from kith import Kith
from models.runtime.network import Float
from service.app import create_app
from service.cli.main import app
from service.domain.gallery import SubjectRecord
from service.risk import hygiene
from service.security.sealing import Seal
from service.settings import load_settings
from service.storage.db import row_sealing
from service.storage.repositories import subjects
from service.usecases import hygiene as hygiene_usecase
from tests.packs import BUNDLED_DIMENSION

PAIRS: Final = 5
UNPAGED: Final = {
    "/v1/galleries/{gallery}/albums",
    "/v1/galleries/{gallery}/migrate",
    "/v1/galleries/{gallery}/risk",
    "/v1/galleries/{gallery}/subjects/{subject}/decoys",
    "/v1/models",
    "/v1/status",
    "/v1/webhooks",
}
"""Responses without pages: settings, constants or the request bound their length."""


def test_every_list_of_the_api_has_pages(tmp_path: Any) -> None:
    document = create_app(load_settings(data_dir=tmp_path)).openapi()
    lists = set()
    for path, operations in document["paths"].items():
        answer = operations.get("get", {}).get("responses", {}).get("200", {})
        schema = _resolved(document, answer.get("content", {}).get("application/json", {}).get("schema", {}))
        if path in UNPAGED or not _has_list(document, schema):
            continue
        lists.add(path.rpartition("/")[2])
        parameters = {parameter["name"] for parameter in operations["get"]["parameters"]}
        assert {"cursor", "limit"} <= parameters, path
        assert "next" in schema["properties"], path
    assert lists == {
        "galleries",
        "subjects",
        "templates",
        "strangers",
        "hygiene",
        "groups",
        "faces",
        "jobs",
        "items",
        "erasures",
        "audit",
        "keys",
    }


def _resolved(document: Any, schema: Any) -> Any:
    return document["components"]["schemas"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def _has_list(document: Any, schema: Any) -> bool:
    """Return True for a list of objects. Lists of strings, such as tags, need no pages."""
    each = [_resolved(document, field) for field in schema.get("properties", {}).values()]
    arrays = [field["items"] for field in each if field.get("type") == "array" and "items" in field]
    return any(_resolved(document, item).get("type") == "object" for item in arrays)


def test_templates_come_in_pages(server: str, kith: Kith, gallery: str) -> None:
    vectors = _alike(101)
    answer = kith.enroll(gallery, "ada", embeddings=vectors)
    enrolled = [result.template for result in answer.results]
    kith.enroll(gallery, "bob", embeddings=[_axis(9)])
    assert [template.id for template in kith.templates(gallery, "ada")] == enrolled
    path = f"{server}/v1/galleries/{gallery}/subjects/ada/templates"
    first = httpx.get(path, params={"limit": 2}).json()
    kith.delete_template(gallery, "ada", first["data"][1]["id"])
    rest = httpx.get(path, params={"limit": 1000, "cursor": first["next"]}).json()
    assert [one["id"] for one in first["data"] + rest["data"]] == enrolled
    assert rest["next"] is None
    moved = kith.move_template(gallery, "bob", next(kith.templates(gallery, "bob")).id, "ada")
    assert (len(moved.data), moved.next is None) == (100, False)
    refused = httpx.get(path.replace("subjects/ada/templates", "hygiene"), params={"cursor": first["next"]})
    assert (refused.status_code, refused.json()["code"]) == (422, "invalid_request")


def test_findings_come_in_pages_of_one_report(
    server: str, kith: Kith, gallery: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inspected = []

    def inspect(*given: Any) -> Any:
        inspected.append(1)
        return hygiene.find_problems(*given)

    monkeypatch.setattr(hygiene_usecase, "find_problems", inspect)
    for pair in range(PAIRS):
        for name in ("a", "b"):
            kith.enroll(gallery, f"{name}{pair}", embeddings=[_axis(pair)], allow_duplicate=True)
    kith.calibrate(gallery)  # now, as a background calibration between two pages would change the report
    whole = kith.hygiene(gallery)
    assert (len(whole.data), whole.next, len(inspected)) == (PAIRS, None, 1)
    first = kith.hygiene(gallery, limit=2)
    second = kith.hygiene(gallery, limit=2, cursor=first.next)
    assert first.data + second.data == whole.data[:4]
    assert list(kith.findings(gallery)) == whole.data
    assert first.counts == second.counts == whole.counts
    assert len(inspected) == 1
    kith.put_subject(gallery, "a4", name="Ada")  # changes the gallery, so that the report is computed again
    kith.delete_subject(gallery, first.data[0].subjects[0].subject)
    third = kith.hygiene(gallery, cursor=second.next)
    assert len(inspected) == 2
    assert [finding.templates for finding in third.data] == [whole.data[4].templates]
    assert third.counts["duplicate_subjects"] == PAIRS - 1

    printed = _run("gallery", "hygiene", gallery, "--limit", "3", "--json", server=server)
    assert [len(json.loads(printed)["data"]), json.loads(printed)["next"] is None] == [3, False]
    assert len(json.loads(_run("gallery", "hygiene", gallery, "--json", server=server))["data"]) == PAIRS - 1


def test_subjects_are_listed_by_their_metadata(server: str, kith: Kith, gallery: str) -> None:
    kith.put_subject(gallery, "ada", metadata={"floor": 1, "team: b": "engine=1"}, tags=["night"])
    kith.put_subject(gallery, "bob", metadata={"floor": 1.0})
    kith.put_subject(gallery, "eve", metadata={"floor": "1"}, tags=["night"])

    def found(metadata: dict[str, Any], *tags: str) -> list[str]:
        return [subject.id for subject in kith.subjects(gallery, tags, metadata)]

    assert found({"floor": 1}) == ["ada", "bob"]
    assert found({"floor": "1"}) == ["eve"]
    assert found({"floor": 1}, "night") == found({"floor": 1, "team: b": "engine=1"}) == ["ada"]
    assert found({}) == ["ada", "bob", "eve"]
    path = f"{server}/v1/galleries/{gallery}/subjects"
    page = httpx.get(path, params={"metadata": '{"floor": 1}', "limit": 1}).json()
    after = httpx.get(path, params={"metadata": '{"floor": 1}', "cursor": page["next"]}).json()
    assert [subject["id"] for subject in page["data"] + after["data"]] == ["ada", "bob"]
    listed = _run("subject", "list", "-g", gallery, "--where", "floor=1", "--tag", "night", "--json", server=server)
    assert [subject["id"] for subject in json.loads(listed)] == ["ada"]


def test_subjects_are_found_by_parts_of_name_and_id(server: str, kith: Kith, gallery: str) -> None:
    people = {"s1": "José Ñandú", "s2": "Josephine Große", "s3": None, "maria-s4": "MARÍA del Mar", "s5": "김민수"}
    for subject, name in people.items():
        kith.put_subject(gallery, subject, name=name, tags=["night"] if subject in ("s1", "s3") else [])

    def found(text: str, *tags: str) -> list[str]:
        return [subject.id for subject in kith.subjects(gallery, tags, q=text)]

    assert found("jose") == found("JOSÉ") == found("Jose\u0301") == ["s1", "s2"]
    assert found("ñandu JOS") == ["s1"]
    assert found("GROSSE") == ["s2"]
    assert found("maria mar") == found("a-S4") == ["maria-s4"]
    assert found("민수") == ["s5"]
    assert found("s", "night") == ["s1", "s3"]
    assert found("nobody") == []
    listed = _run("subject", "list", "-g", gallery, "--find", "grosse", "--json", server=server)
    assert [subject["id"] for subject in json.loads(listed)] == ["s2"]
    assert "Nothing matches." in _run("subject", "list", "-g", gallery, "--find", "nobody", server=server)


def test_a_search_of_names_opens_a_bounded_number_of_subjects(
    server: str, kith: Kith, gallery: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(10):
        kith.put_subject(gallery, f"s{number}", name="even" if number % 2 == 0 else "odd")
    opened: list[bytes] = []

    def open_subject(seal: Seal, sealed: bytes) -> SubjectRecord:
        opened.append(sealed)
        return row_sealing.open_subject(seal, sealed)

    monkeypatch.setattr(subjects, "open_subject", open_subject)
    monkeypatch.setattr(subjects, "MAX_OPENED", 4)
    path = f"{server}/v1/galleries/{gallery}/subjects"

    def pages(**params: Any) -> list[list[str]]:
        listed, cursor = [], None
        while True:
            opened.clear()
            page = httpx.get(path, params=params | ({"cursor": cursor} if cursor else {})).json()
            assert len(opened) <= 4 + len(page["data"])
            listed.append([subject["id"] for subject in page["data"]])
            cursor = page["next"]
            if cursor is None:
                return listed

    assert pages(q="odd") == [["s1", "s3"], ["s5", "s7"], ["s9"]]
    assert pages(q="odd", limit=1) == [["s1"], ["s3"], ["s5"], ["s7"], ["s9"]]
    assert pages(q="s9") == [[], [], ["s9"]]
    assert pages(q="s8") == [[], [], ["s8"]]
    assert pages(q="s3") == [["s3"], [], []]


def _run(*command: str, server: str) -> str:
    done = CliRunner().invoke(app, [*command, "--url", server])
    assert done.exit_code == 0, done.output
    return done.output


def _axis(number: int) -> Float:
    return np.asarray(np.eye(BUNDLED_DIMENSION)[number], np.float32)


def _alike(count: int) -> list[Float]:
    """Return unit vectors of one subject."""
    vectors = np.tile(_axis(0), (count, 1)) + 0.1 * _axis(1) * np.linspace(-1, 1, count)[:, None]
    return list(np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), np.float32))
