"""A corrected mistake is not repeated, and a correction identifies no one who was not identified before."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from kith import Kith
from kith.options import Risk
from models.vision.recognition import l2_normalize
from service.domain.gallery import Hit, SubjectFaces
from service.risk.decision import (
    KNOWN_STRANGER,
    Decision,
    compare_with_subject,
    decide,
    decide_pair,
    without_known_stranger,
)
from service.risk.one_face import one_face_per_person
from service.risk.search import Identification
from service.risk.threshold import Candidate, Thresholds
from tests.commands import run_kith
from tests.conftest import jpeg
from tests.packs import BUNDLED_DIMENSION
from tests.refusals import refusal

AT = Thresholds(accept=0.5, review=0.4, source="pack", extrapolated=False)
ADA, BO, CY = 1, 2, 3


def found_at(ada: float, bo: float = 0.1) -> Decision:
    ranked = sorted((Candidate(pk, s, s) for pk, s in ((ADA, ada), (BO, bo), (CY, 0.0))), key=lambda c: -c.score)
    return decide(ranked, AT)


def beside(decision: Decision, outsiders: dict[int, float]) -> tuple[Decision, tuple[str, ...]]:
    """Return the decision beside one outsider of each subject with this similarity."""
    hits = [Hit(100 + owner, similarity) for owner, similarity in outsiders.items()]
    return without_known_stranger(decision, hits, {100 + owner: owner for owner in outsiders})


@pytest.mark.parametrize(
    ("ada", "bo", "outsiders", "known"),
    [
        (0.7, 0.1, {ADA: 0.71}, True),
        (0.45, 0.1, {ADA: 0.46}, True),
        (0.8, 0.6, {ADA: 0.9}, True),  # and becomes no one else
        (0.7, 0.1, {}, False),
        (0.7, 0.1, {ADA: 0.7}, False),
        (0.7, 0.1, {ADA: -0.2}, False),
        # An outsider rules out only the person that it was mistaken for.
        (0.5, 0.7, {ADA: 0.69, CY: 0.69}, False),
        (0.5, 0.7, {ADA: 1.0, CY: 1.0}, False),
    ],
)
def test_a_face_nearer_to_an_outsider_is_unknown_and_keeps_its_numbers(
    ada: float, bo: float, outsiders: dict[int, float], known: bool
) -> None:
    found = found_at(ada, bo)
    expected = (replace(found, outcome="unknown"), (KNOWN_STRANGER,)) if known else (found, ())
    assert beside(found, outsiders) == expected


def test_a_known_stranger_does_not_take_a_person_from_another_face() -> None:
    def answer(decision: Decision, reasons: tuple[str, ...] = ()) -> Identification:
        return Identification(decision, [], AT, reasons=reasons)

    found = one_face_per_person([answer(*beside(found_at(0.8), {ADA: 0.9})), answer(found_at(0.6))])
    assert [one.decision.outcome for one in found] == ["unknown", "identified"]
    assert [one.reasons for one in found] == [(KNOWN_STRANGER,), ()]


def test_a_comparison_with_the_subject_knows_the_stranger_too() -> None:
    vectors = l2_normalize(np.array([[1.0, 0.2, 0.0]])).astype(np.float32)
    stranger = l2_normalize(np.array([[0.9, 0.0, 0.5]])).astype(np.float32)
    subject = SubjectFaces(vectors, np.ones(1, np.float32), stranger)
    alone = replace(subject, decoys=None)
    for face, of, expected in (
        (stranger[0], subject, ("different", [KNOWN_STRANGER])),
        (vectors[0], subject, ("same", [])),
        (-vectors[0], subject, ("different", [])),
        (stranger[0], alone, ("same", [])),
    ):
        pair = compare_with_subject(face, of, None)
        assert decide_pair(pair.similarity, AT, pair.decoy) == expected


def flipped(image: NDArray[np.uint8]) -> bytes:
    """Another photo of the same person, for a recognizer."""
    return jpeg(Image.fromarray(image[:, ::-1]).rotate(4), 60)


def test_not_this_person(
    kith: Kith,
    server: str,
    gallery: str,
    astronaut: NDArray[np.uint8],
    actor: NDArray[np.uint8],
    group: NDArray[np.uint8],
    tmp_path: Path,
) -> None:
    kith.update_gallery(gallery, risk={"threshold": -0.5})
    kith.enroll(gallery, "ada", jpeg(astronaut), face="largest")
    (tmp_path / "stranger.jpg").write_bytes(jpeg(actor))

    def run(*words: str) -> str:
        ended = run_kith("decoy", *words, "-g", gallery, cwd=tmp_path, environment={"KITH_URL": server})
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def asked(photo: bytes) -> tuple[str, str | None, list[str]]:
        (result,) = kith.identify(gallery, photo, faces="largest", check_quality=False).results
        return result.outcome, result.subject, result.reasons

    assert asked(jpeg(actor)) == ("identified", "ada", [])
    told = run("add", "ada", "stranger.jpg", "--largest-face", "--allow-low-quality")
    (decoy,) = kith.decoys(gallery, "ada")
    assert (decoy.kind, decoy.in_use) == ("photo", True)
    assert f"stranger.jpg is not ada. Undo: kith decoy delete ada {decoy.id} -g" in told
    assert kith.add_decoy(gallery, "ada", jpeg(actor), face="largest", allow_low_quality=True) == decoy
    assert [one["id"] for one in json.loads(run("list", "ada", "--json"))["decoys"]] == [decoy.id]
    assert asked(jpeg(actor)) == ("unknown", None, ["known_stranger"])
    assert asked(flipped(actor)) == ("unknown", None, ["known_stranger"])
    assert asked(flipped(astronaut)) == ("identified", "ada", [])
    assert kith.subject(gallery, "ada").template_count == 1

    risk: Risk = {"threshold": -0.5}
    verdict = kith.verify((gallery, "ada"), jpeg(actor), risk=risk)
    assert (verdict.outcome, verdict.reasons) == ("different", ["known_stranger"])
    assert kith.verify((gallery, "ada"), flipped(astronaut), risk=risk).outcome == "same"

    assert "receipt" in run("delete", "ada", decoy.id)
    assert kith.decoys(gallery, "ada") == []
    assert asked(jpeg(actor)) == ("identified", "ada", [])
    assert kith.verify((gallery, "ada"), jpeg(actor), risk=risk).outcome == "same"

    refusals: list[tuple[list[bytes], list[float] | None, str]] = [
        ([jpeg(group)], None, "several_faces"),
        ([jpeg(actor)], [1.0] * BUNDLED_DIMENSION, "invalid_request"),
        ([], None, "invalid_request"),
    ]
    for photos, embedding, code in refusals:
        assert refusal(kith.add_decoy, gallery, "ada", *photos, embedding=embedding) == (422, code)


def test_a_person_who_was_mistaken_for_another_is_enrolled_and_found(
    kith: Kith, gallery: str, rng: np.random.Generator
) -> None:
    """Outsiders change neither the numbers of an answer nor what a search among some people finds."""
    people, strangers = l2_normalize(rng.normal(size=(4, BUNDLED_DIMENSION))), rng.normal(size=(50, BUNDLED_DIMENSION))
    kith.update_gallery(gallery, risk={"threshold": 0.4})
    for name, vector in zip(("ada", "bo", "cy"), people, strict=False):
        kith.put_subject(gallery, name, tags=[name])
        kith.enroll(gallery, name, embeddings=[vector.tolist()])
    face = people[1] + 0.5 * people[0] + 0.3 * people[3]
    probe = l2_normalize(face[None])[0].tolist()
    (before,) = kith.identify(gallery, embeddings=[probe]).results
    assert (before.outcome, before.subject) == ("identified", "bo")
    for vector in l2_normalize(face + 0.01 * strangers):
        assert kith.add_decoy(gallery, "ada", embedding=vector.tolist()).kind == "embedding"
    about = kith.gallery(gallery)
    assert (about.subject_count, about.template_count) == (3, 3)
    (after,) = kith.identify(gallery, embeddings=[probe]).results
    # All 50 outsiders of Ada are nearer.
    for name in ("outcome", "subject", "similarity", "threshold", "margin", "reasons"):
        assert getattr(after, name) == getattr(before, name)
    assert after.false_alarm_probability == pytest.approx(before.false_alarm_probability, rel=1e-4)
    assert [one.subject for one in after.candidates] == [one.subject for one in before.candidates]
    (among,) = kith.identify(gallery, embeddings=[probe], filter={"tags": ["ada"]}).results
    assert (among.outcome, among.reasons) == ("unknown", ["known_stranger"])
    (among,) = kith.identify(gallery, embeddings=[probe], filter={"tags": ["cy"]}).results
    assert (among.outcome, among.reasons, [one.subject for one in among.candidates]) == ("unknown", [], ["cy"])
    assert [one.id for one in kith.subjects(gallery)] == ["ada", "bo", "cy"]
