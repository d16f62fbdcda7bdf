"""Every list is paginated without gaps or repetitions, also under concurrent writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import httpx2 as httpx
import numpy as np
import pytest

from kith import Kith
from models.runtime.network import Float
from service.risk import hygiene
from service.storage.repositories import subjects
from service.usecases import hygiene as hygiene_usecase
from tests.packs import BUNDLED_DIMENSION
from tests.service.cli.conftest import Program

PAIRS: Final = 5


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
    server: str, kith: Kith, gallery: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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

    run = Program(tmp_path, server)
    printed = json.loads(run("gallery", "hygiene", gallery, "--limit", "3", "--json"))
    assert [len(printed["data"]), printed["next"] is None] == [3, False]
    assert len(json.loads(run("gallery", "hygiene", gallery, "--json"))["data"]) == PAIRS - 1


def test_subjects_are_listed_by_their_metadata_and_name(server: str, kith: Kith, gallery: str) -> None:
    kith.put_subject(gallery, "ada", "José Ñandú", {"floor": 1, "team: b": "engine=1"}, ["night"])
    kith.put_subject(gallery, "bob", "Josephine Große", {"floor": 1.0, "desk": {"x": 1, "y": [2.0]}})
    kith.put_subject(gallery, "eve", metadata={"floor": "1"}, tags=["night"])

    def found(*tags: str, **options: Any) -> list[str]:
        return [subject.id for subject in kith.subjects(gallery, tags, **options)]

    assert found(metadata={"floor": 1}) == found(q="JOSE") == ["ada", "bob"]
    assert found(metadata={"floor": "1"}) == found(q="ve") == ["eve"]
    assert found("night", metadata={"floor": 1}) == found("night", q="jos") == ["ada"]
    assert found(metadata={"floor": 1, "team: b": "engine=1"}) == found(q="ñandu JOS") == ["ada"]
    assert found(metadata={}) == ["ada", "bob", "eve"]
    assert found(metadata={"desk": {"y": [2], "x": 1.0}}) == ["bob"] and found(metadata={"floor": True}) == []
    path = f"{server}/v1/galleries/{gallery}/subjects"
    page = httpx.get(path, params={"metadata": '{"floor": 1}', "limit": 1}).json()
    after = httpx.get(path, params={"metadata": '{"floor": 1}', "cursor": page["next"]}).json()
    assert [subject["id"] for subject in page["data"] + after["data"]] == ["ada", "bob"]


def test_a_search_of_names_opens_a_bounded_number_of_subjects(
    server: str, kith: Kith, gallery: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(10):
        kith.put_subject(gallery, f"s{number}", name="even" if number % 2 == 0 else "odd")
    monkeypatch.setattr(subjects, "MAX_OPENED", 4)
    path = f"{server}/v1/galleries/{gallery}/subjects"

    def pages(**params: Any) -> list[list[str]]:
        listed, cursor = [], None
        while True:
            page = httpx.get(path, params=params | ({"cursor": cursor} if cursor else {})).json()
            listed.append([subject["id"] for subject in page["data"]])
            cursor = page["next"]
            if cursor is None:
                return listed

    assert pages(q="odd") == [["s1", "s3"], ["s5", "s7"], ["s9"]]
    assert pages(q="odd", limit=1) == [["s1"], ["s3"], ["s5"], ["s7"], ["s9"]]
    assert pages(q="s8") == [[], [], ["s8"]]


def _axis(number: int) -> Float:
    return np.asarray(np.eye(BUNDLED_DIMENSION)[number], np.float32)


def _alike(count: int) -> list[Float]:
    """Return unit vectors of one subject."""
    vectors = np.tile(_axis(0), (count, 1)) + 0.1 * _axis(1) * np.linspace(-1, 1, count)[:, None]
    return list(np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), np.float32))
