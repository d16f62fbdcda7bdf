"""A corrected mistake is not repeated, and a correction identifies nobody who was not identified before."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from kith import AsyncKith, Kith, KithClientError
from kith.options import Risk
from models.risk.calibration import Calibration
from models.vision.recognition import l2_normalize
from service.risk.decision import (
    KNOWN_STRANGER,
    Candidate,
    EnrolledSubject,
    Thresholds,
    compare_with_subject,
    decide,
    decide_pair,
)
from service.risk.known_strangers import RANKS, without_known_stranger
from service.risk.one_face import one_face_per_person
from service.risk.search import Identification
from tests.commands import run_kith
from tests.conftest import jpeg
from tests.packs import BUNDLED_DIMENSION
from tests.service.risk.test_one_face import simulated

AT = Thresholds(accept=0.5, review=0.4, source="pack", extrapolated=False)
ADA, BO, CY = 1, 2, 3


def answer(ada: float, bo: float = 0.1, cy: float = 0.0) -> Identification:
    ranked = sorted((Candidate(pk, s, None, s) for pk, s in ((ADA, ada), (BO, bo), (CY, cy))), key=lambda c: -c.score)
    return Identification(decide(ranked, AT), ranked, AT, ranked=ranked)


def said(found: Identification) -> tuple[str, int | None, tuple[str, ...]]:
    return found.decision.outcome, found.decision.best.subject_pk if found.decision.best else None, found.reasons


def named(found: Identification) -> int | None:
    best = found.decision.best
    return best.subject_pk if found.decision.outcome == "identified" and best is not None else None


def test_a_face_nearer_to_a_decoy_is_unknown_and_keeps_its_numbers() -> None:
    found = answer(ada=0.7)
    again = without_known_stranger(found, {ADA: 0.71})
    assert said(again) == ("unknown", ADA, (KNOWN_STRANGER,))
    assert (again.decision.best, again.candidates) == (found.decision.best, found.candidates)
    assert said(without_known_stranger(answer(ada=0.45), {ADA: 0.6})) == ("unknown", ADA, (KNOWN_STRANGER,))


def test_a_face_nearer_to_the_person_stays_identified() -> None:
    found = answer(ada=0.7)
    for decoys in ({}, {ADA: 0.7}, {ADA: -0.2}, {CY: 0.9}):
        assert said(without_known_stranger(found, decoys)) == ("identified", ADA, ())


def test_the_next_person_is_named_only_at_the_same_threshold() -> None:
    def heir(bo: float, ada: float = 0.8) -> tuple[str, int | None, tuple[str, ...]]:
        return said(without_known_stranger(answer(ada=ada, bo=bo), {ADA: 0.9}))

    assert heir(0.52) == ("identified", BO, (KNOWN_STRANGER,))
    assert heir(0.49) == ("uncertain", BO, (KNOWN_STRANGER,))
    assert heir(0.39) == ("unknown", ADA, (KNOWN_STRANGER,))
    assert answer(ada=0.6, bo=0.58).decision.outcome == "uncertain"
    assert heir(0.58, ada=0.6) == ("uncertain", BO, (KNOWN_STRANGER,))  # two people as before, one of them excluded
    third = without_known_stranger(answer(ada=0.8, bo=0.7, cy=0.6), {ADA: 0.9, BO: 0.9})
    assert third.decision.outcome == "uncertain"
    assert said(third)[1] == CY


def test_a_known_stranger_does_not_take_a_person_from_another_face() -> None:
    stranger = without_known_stranger(answer(ada=0.8), {ADA: 0.9})
    found = one_face_per_person([stranger, answer(ada=0.6)])
    assert [one.decision.outcome for one in found] == ["unknown", "identified"]
    assert [one.reasons for one in found] == [(KNOWN_STRANGER,), ()]


Score = st.floats(-1, 1, allow_nan=False)


@given(st.tuples(Score, Score, Score), st.dictionaries(st.sampled_from([ADA, BO, CY]), Score))
def test_no_outcome_rises(scores: tuple[float, float, float], decoys: dict[int, float]) -> None:
    before = answer(*scores)
    after = without_known_stranger(before, decoys)
    assert RANKS.index(after.decision.outcome) <= RANKS.index(before.decision.outcome)
    best = after.decision.best
    if after.decision.outcome != "unknown":
        assert best is not None
        assert best.score >= (AT.accept if after.decision.outcome == "identified" else AT.review)
        assert decoys.get(best.subject_pk, -1) <= best.similarity
    assert (after.decision != before.decision) == (KNOWN_STRANGER in after.reasons) or before == after


def test_strangers_of_corrected_mistakes_are_known_at_their_next_photo(
    calibration: Calibration, rng: np.random.Generator
) -> None:
    """Ten thousand strangers against a hundred people. The mistakes among them become decoys; then new photos come."""
    gallery = l2_normalize(rng.normal(size=(100, 64)))

    def photos(people: NDArray[np.floating]) -> NDArray[np.floating]:
        return l2_normalize(people + 0.06 * rng.normal(size=people.shape))

    strangers = l2_normalize(rng.normal(size=(10_000, 64)))
    decoys: dict[int, list[NDArray[np.floating]]] = {}
    mistaken: list[tuple[int, int]] = []  # stranger, subject
    probes = photos(strangers)
    for i, found in enumerate(simulated(calibration, rng, gallery, probes)):
        if (subject := named(found)) is not None:
            decoys.setdefault(subject, []).append(probes[i])
            mistaken.append((i, subject))
    assert len(mistaken) > 100

    def corrected(probes: NDArray[np.floating]) -> tuple[list[Identification], list[Identification]]:
        before = simulated(calibration, rng, gallery, probes)
        nearest = [{pk: float((np.array(each) @ probe).max()) for pk, each in decoys.items()} for probe in probes]
        return before, [without_known_stranger(one, near) for one, near in zip(before, nearest, strict=True)]

    before, after = corrected(photos(strangers[[i for i, _ in mistaken]]))
    counts: Counter[str] = Counter()
    for (_, subject), one, other in zip(mistaken, before, after, strict=True):
        assert other.shown_thresholds == one.shown_thresholds
        assert named(one) is not None or named(other) is None
        counts["same before"] += named(one) == subject
        counts["same after"] += named(other) == subject
        counts["another before"] += named(one) not in (None, subject)
        counts["another after"] += named(other) not in (None, subject)
    assert counts["same before"] > 100
    assert counts["same after"] == 0
    assert counts["another after"] < counts["another before"] + 0.05 * counts["same before"]

    genuine, still = corrected(photos(gallery))
    assert [named(one) for one in still] == [named(one) for one in genuine]


def test_a_comparison_with_the_subject_knows_the_stranger_too() -> None:
    vectors = l2_normalize(np.array([[1.0, 0.2, 0.0]])).astype(np.float32)
    stranger = l2_normalize(np.array([[0.9, 0.0, 0.5]])).astype(np.float32)
    subject = EnrolledSubject(vectors, np.ones(1, np.float32), None, decoys=stranger)
    pair = compare_with_subject(stranger[0], subject)
    assert pair.decoy == pytest.approx(1, abs=1e-6)
    assert decide_pair(pair.similarity, AT, pair.decoy) == ("different", [KNOWN_STRANGER])
    itself = compare_with_subject(vectors[0], subject)
    assert decide_pair(itself.similarity, AT, itself.decoy) == ("same", [])
    assert decide_pair(0.3, AT, 0.9) == ("different", [])
    alone = EnrolledSubject(vectors, np.ones(1, np.float32), None)
    assert decide_pair(compare_with_subject(stranger[0], alone).similarity, AT) == ("same", [])


def flipped(image: NDArray[np.uint8]) -> bytes:
    """Another photo of the same person, for a recognizer."""
    return jpeg(Image.fromarray(image[:, ::-1]).rotate(4), 60)


def test_not_this_person(kith: Kith, gallery: str, astronaut: NDArray[np.uint8], actor: NDArray[np.uint8]) -> None:
    kith.update_gallery(gallery, risk={"threshold": -0.5})
    kith.enroll(gallery, "ada", jpeg(astronaut), face="largest")

    def asked(photo: bytes) -> tuple[str, str | None, list[str]]:
        (result,) = kith.identify(gallery, photo, faces="largest", check_quality=False).results
        return result.outcome, result.subject, result.reasons

    assert asked(jpeg(actor)) == ("identified", "ada", [])
    decoy = kith.add_decoy(gallery, "ada", jpeg(actor), face="largest", allow_low_quality=True)
    assert (decoy.kind, decoy.in_use) == ("photo", True)
    assert kith.add_decoy(gallery, "ada", jpeg(actor), face="largest", allow_low_quality=True).id == decoy.id
    assert kith.decoys(gallery, "ada") == [decoy]
    assert asked(jpeg(actor)) == ("unknown", None, ["known_stranger"])
    assert asked(flipped(actor)) == ("unknown", None, ["known_stranger"])
    assert asked(flipped(astronaut)) == ("identified", "ada", [])
    assert kith.subject(gallery, "ada").template_count == 1

    risk: Risk = {"threshold": -0.5}
    verdict = kith.verify((gallery, "ada"), jpeg(actor), risk=risk)
    assert (verdict.outcome, verdict.reasons) == ("different", ["known_stranger"])
    assert kith.verify((gallery, "ada"), flipped(astronaut), risk=risk).outcome == "same"

    kith.delete_decoy(gallery, "ada", decoy.id)
    assert kith.decoys(gallery, "ada") == []
    assert asked(jpeg(actor)) == ("identified", "ada", [])
    assert kith.verify((gallery, "ada"), jpeg(actor), risk=risk).outcome == "same"


def test_both_clients_and_embeddings(server: str, gallery: str, rng: np.random.Generator) -> None:
    ada, stranger = (v.tolist() for v in l2_normalize(rng.normal(size=(2, BUNDLED_DIMENSION))))

    async def corrected() -> None:
        async with AsyncKith(server) as kith:
            await kith.update_gallery(gallery, risk={"threshold": -0.9})
            await kith.enroll(gallery, "ada", embeddings=[ada])
            decoy = await kith.add_decoy(gallery, "ada", embedding=stranger)
            assert decoy.kind == "embedding"
            assert await kith.decoys(gallery, "ada") == [decoy]
            results = (await kith.identify(gallery, embeddings=[ada, stranger])).results
            assert [(r.outcome, r.reasons) for r in results] == [("identified", []), ("unknown", ["known_stranger"])]
            assert results[1].candidates[0].subject == "ada"  # whom the face resembles, as before
            assert (await kith.delete_decoy(gallery, "ada", decoy.id)).receipt.kind == "decoy"

    asyncio.run(corrected())


def test_the_commands(
    kith: Kith, server: str, gallery: str, astronaut: NDArray[np.uint8], actor: NDArray[np.uint8], tmp_path: Path
) -> None:
    kith.enroll(gallery, "ada", jpeg(astronaut), face="largest")
    (tmp_path / "stranger.jpg").write_bytes(jpeg(actor))

    def run(*words: str) -> str:
        ended = run_kith("decoy", *words, "-g", gallery, cwd=tmp_path, environment={"KITH_URL": server})
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    told = run("add", "ada", "stranger.jpg", "--largest-face", "--allow-low-quality")
    (decoy,) = kith.decoys(gallery, "ada")
    assert f"stranger.jpg is not ada. Undo: kith decoy delete ada {decoy.id} -g" in told
    (listed,) = json.loads(run("list", "ada", "--json"))["decoys"]
    assert (listed["id"], listed["in_use"]) == (decoy.id, True)
    assert decoy.id in run("list", "ada")
    assert "receipt" in run("delete", "ada", decoy.id)
    assert kith.decoys(gallery, "ada") == []


def test_refusals_say_what_to_do(
    kith: Kith, gallery: str, astronaut: NDArray[np.uint8], group: NDArray[np.uint8]
) -> None:
    def refusal(*photos: bytes, subject: str = "ada", **options: object) -> str:
        with pytest.raises(KithClientError) as refused:
            kith.add_decoy(gallery, subject, *photos, **options)  # type: ignore[arg-type]
        return refused.value.code

    photo = jpeg(astronaut)
    kith.enroll(gallery, "ada", photo, face="largest")
    assert refusal(photo, face="largest") == "decoy_enrolled"
    assert refusal(photo, face="largest", subject="bo") == "subject_not_found"
    assert refusal(jpeg(group)) == "several_faces"
    assert refusal(photo, embedding=[1.0] * BUNDLED_DIMENSION) == "invalid_request"
    assert refusal(embedding=[1.0, 0.0]) == "embedding_invalid"
    assert refusal() == "invalid_request"
    with pytest.raises(KithClientError) as missing:
        kith.delete_decoy(gallery, "ada", "0" * 32)
    assert missing.value.code == "decoy_not_found"
