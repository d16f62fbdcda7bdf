"""The hygiene report tells duplicates, mislabeled templates and lookalikes apart."""

from __future__ import annotations

import json
from itertools import count

import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from kith import Kith
from models.risk.calibration import Calibration
from models.runtime.network import Float
from service.cli.main import app
from service.domain.findings import HygieneFinding, HygieneReport
from service.domain.gallery import Snapshot
from service.risk import hygiene
from service.risk.hygiene import LOOKALIKE_ODDS, MAX_NEAREST, find_problems
from tests.conftest import jpeg

DIMENSION = 256
OTHERS = 40
"""Other people in the gallery, whose similarities spread as in the calibration."""


def person(number: int) -> Float:
    """(d,) unit vector; different people's are orthogonal."""
    return np.asarray(np.eye(DIMENSION)[number], np.float32)


def photo(of: Float, number: int, likeness: float = 0.9) -> Float:
    """A unit vector of cosine ``likeness`` to ``of``; what else is in it is in no other photo."""
    other = np.eye(DIMENSION, dtype=np.float32)[100 + number]
    return np.asarray(likeness * of + np.sqrt(1 - likeness**2) * other, np.float32)


def report(calibration: Calibration, *subjects: list[Float]) -> list[HygieneFinding]:
    """Subjects are numbered from 0; so are templates, in order. Others follow."""
    return list(inspected(calibration, *subjects).findings)


def inspected(calibration: Calibration, *subjects: list[Float]) -> HygieneReport:
    others = np.random.default_rng(0).normal(size=(OTHERS, DIMENSION)).astype(np.float32)
    others[:, :100] = 0
    others /= np.linalg.norm(others, axis=1, keepdims=True)
    return find_problems(snapshot_of([*subjects, *([vector] for vector in others)]), calibration)


def snapshot_of(subjects: list[list[Float]]) -> Snapshot:
    vectors = np.stack([vector for subject in subjects for vector in subject])
    pks = np.array([pk for pk, subject in enumerate(subjects) for _ in subject])
    return Snapshot(1, np.arange(len(pks)), pks, vectors, np.full(len(pks), np.nan, np.float32))


A, B, C = person(0), person(1), person(2)


def test_an_empty_gallery_has_nothing(calibration: Calibration) -> None:
    empty = np.empty(0, np.int64)
    snapshot = Snapshot(0, empty, empty, np.empty((0, DIMENSION), np.float32), np.empty(0, np.float32))
    assert find_problems(snapshot, calibration) == HygieneReport([], [], None)


@pytest.mark.parametrize(("left", "right"), [(1, 1), (1, 3), (2, 4)])
def test_a_person_under_two_ids_is_a_duplicate_and_nothing_else(
    calibration: Calibration, left: int, right: int
) -> None:
    (found,) = report(
        calibration,
        [photo(A, i) for i in range(left)],
        [photo(A, 10 + i) for i in range(right)],
        [photo(B, 20), photo(B, 21)],
    )
    assert (found.kind, found.subjects, found.belongs_to) == ("duplicate_subjects", (0, 1), None)
    assert found.similarity == pytest.approx(0.81, abs=1e-5)
    assert (found.chance or 0) < 1e-4
    assert (found.odds or 0) > 100
    assert found.templates[0] < left <= found.templates[1]


Wrong = tuple[tuple[int, ...], int | None]
"""Mislabeled templates, and the subject that they belong to."""


@pytest.mark.parametrize(
    ("shown", "wrong"),
    [
        # Each letter is a photo of a person; a word is a subject.
        ("AA BB C", set()),
        ("AA BBA", {((4,), 0)}),
        ("AAC B", {((2,), None)}),  # of no subject here
        # Of as many that disagree, those like another subject are wrong.
        ("AB BB", {((1,), 1)}),
        ("BA BB", {((0,), 1)}),
        ("AABB BB", {((2, 3), 1)}),
        ("BAAB BB", {((0, 3), 1)}),
        ("BCA BB C", {((0,), 1), ((1,), 2)}),
        ("AAB BBA", {((2,), 1), ((5,), 0)}),
        ("AAa B", set()),  # a poor photo is held by one that is like it
        ("AAp B", set()),  # a poorer one is more probably of its person than of another
        ("AAq B", {((2,), None)}),  # like another subject, and more probably of no subject here
    ],
)
def test_mislabeled_templates_are_told_and_make_no_duplicates(
    calibration: Calibration, shown: str, wrong: set[Wrong]
) -> None:
    found = report(calibration, *photos_of(shown))
    assert {each.kind for each in found} <= {"mislabeled_template"}
    assert {(each.templates, each.belongs_to) for each in found} == wrong
    for each in found:
        assert each.subjects[1:] == (() if each.belongs_to is None else (each.belongs_to,))
        assert (each.similarity is None) == (each.belongs_to is None)
        assert each.own_similarity == pytest.approx(0, abs=1e-6)


def photos_of(shown: str) -> list[list[Float]]:
    numbers = count()
    people = {"A": (A, 0.9), "B": (B, 0.9), "C": (C, 0.9), "a": (A, 0.4), "p": (A, 0.22), "q": (B, 0.3)}
    return [[photo(people[one][0], next(numbers), people[one][1]) for one in subject] for subject in shown.split()]


def test_of_two_that_disagree_and_are_like_nobody_one_is_to_be_checked(calibration: Calibration) -> None:
    (found,) = report(calibration, *photos_of("AB C"))
    assert (found.kind, found.subjects, found.belongs_to) == ("mislabeled_template", (0,), None)
    assert found.templates in ((0,), (1,))


def test_duplicates_are_found_beside_mislabeled_templates(calibration: Calibration) -> None:
    (found,) = report(calibration, *photos_of("AA A"))  # its only photo may show another person
    assert found.kind == "duplicate_subjects" and "mislabeled" in found.action
    (found,) = report(calibration, *photos_of("AAB AAB"))  # no photo of one person needs to move to the other id
    assert (found.kind, found.subjects) == ("duplicate_subjects", (0, 1))
    first, second = report(calibration, *photos_of("AAB AA B"))
    assert (first.kind, first.subjects) == ("duplicate_subjects", (0, 1))
    assert (second.kind, second.templates, second.belongs_to) == ("mislabeled_template", (2,), 2)


def test_lookalikes_come_last_and_the_surest_first(calibration: Calibration) -> None:
    alike = np.asarray(0.33 * A + np.sqrt(1 - 0.33**2) * B, np.float32)
    found = report(calibration, [A], [alike], [photo(C, 0)], [photo(C, 1)], [person(3)], [photo(person(3), 2)])
    assert [(f.kind, f.subjects) for f in found] == [
        ("duplicate_subjects", (4, 5)),
        ("duplicate_subjects", (2, 3)),
        ("lookalikes", (0, 1)),
    ]


def test_blocks_do_not_change_the_report(calibration: Calibration, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    people: NDArray[np.float32] = rng.normal(size=(60, 64)).astype(np.float32)
    vectors = np.repeat(people, 3, 0) + 0.7 * rng.normal(size=(180, 64)).astype(np.float32)
    vectors = np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), np.float32)
    pks = rng.permutation(np.arange(180) // 2)  # every template is mislabeled
    pks.sort()
    snapshot = Snapshot(1, np.arange(180), pks, vectors, np.full(180, np.nan, np.float32))

    def found() -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        return [(f.kind, f.subjects, f.templates) for f in find_problems(snapshot, calibration).findings]

    whole = found()
    monkeypatch.setattr(hygiene, "BLOCK_ROWS", 7)
    assert whole
    assert found() == whole


def test_unlikely_pairs_are_listed_as_nearest(calibration: Calibration) -> None:
    found = inspected(calibration, [A], [B])
    assert found.findings == []
    assert len(found.nearest) == MAX_NEAREST
    odds = [pair.odds or 0 for pair in found.nearest]
    assert odds == sorted(odds, reverse=True)
    assert odds[0] < LOOKALIKE_ODDS


def test_over_http(
    kith: Kith, gallery: str, server: str, astronaut: NDArray[np.uint8], actor: NDArray[np.uint8]
) -> None:
    mirrored = jpeg((astronaut[:, ::-1] * 0.85).astype(np.uint8))
    kith.put_subject(gallery, "eileen", name="Eileen Collins")
    (enrolled,) = kith.enroll(gallery, "eileen", jpeg(astronaut)).results
    kith.enroll(gallery, "tom", jpeg(actor))
    before = kith.hygiene(gallery)
    assert before.data == []
    assert [{s.subject for s in pair.subjects} for pair in before.nearest] == [{"eileen", "tom"}]
    assert (before.expected_recall or 0) > 0
    kith.enroll(gallery, "twin", mirrored, allow_duplicate=True)
    report = kith.hygiene(gallery)
    (found,) = report.data
    assert (report.counts["duplicate_subjects"], found.kind) == (1, "duplicate_subjects")
    assert [(s.subject, s.name) for s in found.subjects] == [("eileen", "Eileen Collins"), ("twin", None)]
    assert found.templates[0].template == enrolled.template
    assert found.chance is not None
    assert found.chance < 0.001
    kith.delete_subject(gallery, "twin")
    (moved,) = kith.enroll(gallery, "tom", mirrored, allow_duplicate=True, allow_inconsistent=True).results
    (found,) = kith.hygiene(gallery).data
    assert (found.kind, found.belongs_to) == ("mislabeled_template", "eileen")
    assert [t.template for t in found.templates] == [moved.template]
    listed = CliRunner().invoke(app, ["gallery", "hygiene", gallery, "--url", server], env={"COLUMNS": "200"})
    assert listed.exit_code == 0 and "mislabeled template" in listed.output
    as_json = CliRunner().invoke(app, ["gallery", "hygiene", gallery, "--url", server, "--json"]).output
    assert json.loads(as_json)["data"][0]["belongs_to"] == "eileen"
