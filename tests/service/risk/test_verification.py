"""A face beside a subject: the same similarity, and the same judge, as in a search; and two faces."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from models.risk.calibration import Calibration
from models.risk.gallery_risk import GalleryRisk
from models.runtime.network import Float
from service.domain.fusion import fuse_similarities
from service.domain.gallery import Snapshot
from service.domain.outcomes import RiskTarget
from service.risk.decision import EnrolledSubject, compare_faces, compare_with_subject
from service.risk.evidence import impostor_evidence
from service.risk.threshold import ImpostorRisk, thresholds_for


def units(rng: np.random.Generator, count: int, dimension: int = 16) -> Float:
    vectors = rng.normal(size=(count, dimension))
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), np.float32)


@pytest.fixture
def of_pack(calibration: Calibration) -> ImpostorRisk:
    return ImpostorRisk(calibration.curve, "pack")


@pytest.fixture
def subject(rng: np.random.Generator, of_pack: ImpostorRisk) -> EnrolledSubject:
    return EnrolledSubject(
        units(rng, 5), np.array([0.9, 0.2, 0.5, 0.7, 0.4], np.float32), replace(of_pack, source="both")
    )


def by_hand(probe: Float, subject: EnrolledSubject) -> float:
    """Reference implementation in double precision."""
    mean = (subject.qualities[:, None] * subject.vectors.astype(np.float64)).sum(0)
    return float(mean @ probe / np.linalg.norm(mean))


def test_a_face_meets_a_subject_as_a_search_does(rng: np.random.Generator, subject: EnrolledSubject) -> None:
    for probe in units(rng, 20):
        assert compare_with_subject(probe, subject).similarity == pytest.approx(by_hand(probe, subject), abs=1e-6)


def test_each_template_is_a_chance_where_only_photos_were_compared(
    rng: np.random.Generator, subject: EnrolledSubject, of_pack: ImpostorRisk
) -> None:
    (probe,) = units(rng, 1)
    target = RiskTarget("fpir", 0.001)

    def threshold(enrolled: EnrolledSubject) -> float:
        found = compare_with_subject(probe, enrolled)
        return thresholds_for(target, found.model, 1).accept

    of_five = threshold(replace(subject, model=of_pack))
    assert of_five == pytest.approx(thresholds_for(target, of_pack, 5).accept)
    one = replace(subject, model=of_pack, vectors=subject.vectors[:1], qualities=subject.qualities[:1])
    assert of_five > threshold(one)


@pytest.mark.parametrize("usual", [1.0, 2.5, 20.0])
def test_who_has_more_templates_than_the_galleries_strangers_met_is_judged_by_more(
    usual: float, rng: np.random.Generator, subject: EnrolledSubject, of_pack: ImpostorRisk
) -> None:
    (probe,) = units(rng, 1)
    known = replace(of_pack, source="both", mean_templates=usual)
    found = compare_with_subject(probe, replace(subject, model=known))
    assert found.model is not None
    assert found.model.source == "both"
    assert found.model.comparisons_per_subject == max(1, 5 / usual)


def test_strangers_of_a_person_of_many_templates_are_within_the_rate(rng: np.random.Generator) -> None:
    """Gallery of people with one template, and a few with twenty."""
    centers = units(rng, 330, 64)
    counts = np.repeat([1, 20], [300, 30])
    pks = np.repeat(np.arange(330), counts)
    noise = units(rng, len(pks), 64)
    vectors = centers[pks] + 0.9 * noise
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    qualities = np.full(len(pks), 0.8, np.float32)
    strangers = units(rng, 1500, 64)
    evidence = impostor_evidence(Snapshot(0, np.arange(len(pks)), pks, vectors, qualities))
    known = ImpostorRisk(GalleryRisk(evidence, None).raw_curve, "gallery", mean_templates=len(pks) / 330)
    alarms = []
    for person in range(300, 330):
        own = pks == person
        enrolled = EnrolledSubject(vectors[own], qualities[own], known)
        found = compare_with_subject(strangers[0], enrolled)
        accept = thresholds_for(RiskTarget("fpir", 0.01), found.model, 1).accept
        fused = fuse_similarities(strangers, vectors[own], np.zeros(20, np.int64), qualities[own])
        alarms.append((fused >= accept).mean())
    assert np.mean(alarms) <= 0.0125


def test_two_faces_by_the_pack(rng: np.random.Generator, of_pack: ImpostorRisk) -> None:
    (face,) = units(rng, 1)
    found = compare_faces(face, face * 1.000001, of_pack)
    assert found.similarity == pytest.approx(1)
    assert found.similarity <= 1
    assert found.model == of_pack
