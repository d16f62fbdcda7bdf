"""Outcomes follow from scores and risk, monotonically."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.risk.calibration import Calibration, fpir_from_fmr
from models.runtime.network import Float
from service.domain.gallery import SubjectFaces
from service.domain.outcomes import RiskTarget
from service.risk.decision import compare_with_subject, decide, decide_pair
from service.risk.threshold import (
    Candidate,
    ImpostorRisk,
    Thresholds,
    false_alarm_probability,
    thresholds_for,
)

AT = Thresholds(accept=0.5, review=0.4, source="pack", extrapolated=False)


def candidates(*similarities: float) -> list[Candidate]:
    return [Candidate(i, s, s) for i, s in enumerate(similarities)]


@pytest.mark.parametrize(
    ("similarities", "outcome"),
    [
        ((0.6, 0.2), "identified"),
        ((0.45, 0.2), "uncertain"),
        ((0.39, 0.05), "unknown"),
        ((), "unknown"),
        # Lookalikes: the runner-up exceeds the threshold by more than a quarter of what the best does.
        ((0.7, 0.56), "uncertain"),
        ((0.7, 0.54), "identified"),
    ],
)
def test_outcomes_and_the_best_candidate(similarities: tuple[float, ...], outcome: str) -> None:
    decision = decide(candidates(*similarities), AT)
    assert decision.outcome == outcome
    assert [each.similarity for each in (decision.best, decision.runner_up) if each] == [*similarities]
    assert decision.margin == (pytest.approx(similarities[0] - similarities[1]) if similarities else None)


@given(st.floats(-1, 1), st.floats(0, 0.5))
def test_more_alike_is_never_less_sure(similarity: float, more: float) -> None:
    order = ["unknown", "uncertain", "identified"]
    low, high = (decide(candidates(min(1.0, s)), AT).outcome for s in (similarity, similarity + more))
    assert order.index(low) <= order.index(high)
    pairs = ["different", "uncertain", "same"]
    assert pairs.index(decide_pair(similarity, AT)[0]) <= pairs.index(decide_pair(similarity + more, AT)[0])


@given(st.floats(1e-6, 0.2), st.integers(1, 10_000), st.integers(1, 10_000))
def test_a_larger_gallery_asks_for_more_likeness(of_pack: ImpostorRisk, fpir: float, a: int, b: int) -> None:
    small, large = (thresholds_for(RiskTarget("fpir", fpir), of_pack, n) for n in sorted((a, b)))
    assert small.accept <= large.accept + 1e-9
    assert small.review <= small.accept


def test_a_probability_below_the_evidence_is_shown_as_a_bound(calibration: Calibration) -> None:
    model = ImpostorRisk(calibration.curve, "pack", min_fmr=1e-6)
    assert false_alarm_probability(0.2, model, 100) == (fpir_from_fmr(calibration.curve.fmr(0.2).value, 100), False)
    assert false_alarm_probability(0.999, model, 100) == (fpir_from_fmr(1e-6, 100), True)
    assert false_alarm_probability(0.999, None, 100) == (None, None)


# A face beside a subject: the same similarity, and the same judge, as in a search; and two faces.


def units(rng: np.random.Generator, count: int, dimension: int = 16) -> Float:
    vectors = rng.normal(size=(count, dimension))
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), np.float32)


@pytest.fixture
def of_pack(calibration: Calibration) -> ImpostorRisk:
    return ImpostorRisk(calibration.curve, "pack")


@pytest.fixture
def subject(rng: np.random.Generator) -> SubjectFaces:
    return SubjectFaces(units(rng, 5), np.array([0.9, 0.2, 0.5, 0.7, 0.4], np.float32), None)


def test_a_face_meets_a_subject_as_a_search_does(rng: np.random.Generator, subject: SubjectFaces) -> None:
    mean = (subject.qualities[:, None] * subject.vectors).sum(0)
    for probe in units(rng, 20):
        expected = pytest.approx(float(mean @ probe / np.linalg.norm(mean)), abs=1e-6)
        assert compare_with_subject(probe, subject, None).similarity == expected


def test_each_template_is_a_chance_where_only_photos_were_compared(
    rng: np.random.Generator, subject: SubjectFaces, of_pack: ImpostorRisk
) -> None:
    (probe,) = units(rng, 1)
    target = RiskTarget("fpir", 0.001)

    def threshold(enrolled: SubjectFaces) -> float:
        found = compare_with_subject(probe, enrolled, of_pack)
        return thresholds_for(target, found.model, 1).accept

    of_five = threshold(subject)
    assert of_five == pytest.approx(thresholds_for(target, of_pack, 5).accept)
    assert of_five > threshold(replace(subject, vectors=subject.vectors[:1], qualities=subject.qualities[:1]))


@pytest.mark.parametrize("usual", [1.0, 2.5, 20.0])
def test_who_has_more_templates_than_the_galleries_strangers_met_is_judged_by_more(
    usual: float, rng: np.random.Generator, subject: SubjectFaces, of_pack: ImpostorRisk
) -> None:
    (probe,) = units(rng, 1)
    known = replace(of_pack, source="both", mean_templates=usual)
    found = compare_with_subject(probe, subject, known)
    assert found.model is not None
    assert found.model.source == "both"
    assert found.model.comparisons_per_subject == max(1, 5 / usual)
