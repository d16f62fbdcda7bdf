"""Outcomes follow from scores and risk, monotonically."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.risk.calibration import Calibration
from service.core.errors import RiskUncalibratedError
from service.domain.outcomes import RiskTarget
from service.risk.decision import decide, decide_pair
from service.risk.threshold import (
    Candidate,
    ImpostorRisk,
    Thresholds,
    false_alarm_probability,
    shown_probability,
    thresholds_for,
)

AT = Thresholds(accept=0.5, review=0.4, source="pack", extrapolated=False)


def known(calibration: Calibration) -> ImpostorRisk:
    return ImpostorRisk(calibration.curve, "pack")


def candidates(*similarities: float) -> list[Candidate]:
    return [Candidate(i, s, s) for i, s in enumerate(similarities)]


def test_outcomes() -> None:
    assert decide(candidates(0.6, 0.2), AT).outcome == "identified"
    assert decide(candidates(0.45, 0.2), AT).outcome == "uncertain"
    assert decide(candidates(0.39), AT).outcome == "unknown"
    assert decide([], AT).outcome == "unknown"


def test_unknown_still_carries_the_best_candidate() -> None:
    decision = decide(candidates(0.1, 0.05), AT)
    assert decision.best is not None
    assert decision.best.similarity == 0.1
    assert decision.margin == pytest.approx(0.05)


def test_lookalikes_are_not_named() -> None:
    """The runner-up exceeds the threshold by more than a quarter of what the best does."""
    assert decide(candidates(0.7, 0.56), AT).outcome == "uncertain"
    assert decide(candidates(0.7, 0.54), AT).outcome == "identified"


@given(st.floats(-1, 1), st.floats(0, 0.5))
def test_more_alike_is_never_less_sure(similarity: float, more: float) -> None:
    order = ["unknown", "uncertain", "identified"]
    low, high = (decide(candidates(min(1.0, s)), AT).outcome for s in (similarity, similarity + more))
    assert order.index(low) <= order.index(high)
    pairs = ["different", "uncertain", "same"]
    assert pairs.index(decide_pair(similarity, AT)[0]) <= pairs.index(decide_pair(similarity + more, AT)[0])


@given(st.floats(1e-6, 0.2), st.integers(1, 10_000), st.integers(1, 10_000))
def test_a_larger_gallery_asks_for_more_likeness(calibration: Calibration, fpir: float, a: int, b: int) -> None:
    small, large = (thresholds_for(RiskTarget("fpir", fpir), known(calibration), n) for n in sorted((a, b)))
    assert small.accept <= large.accept + 1e-9
    assert small.review <= small.accept


@given(st.floats(1e-5, 0.2), st.integers(1, 1000))
def test_at_the_threshold_the_false_alarm_is_the_asked_risk(
    calibration: Calibration, fpir: float, comparisons: int
) -> None:
    threshold = thresholds_for(RiskTarget("fpir", fpir), known(calibration), comparisons).accept
    probability = false_alarm_probability(threshold, known(calibration), comparisons)
    assert probability is not None
    assert probability <= fpir * 1.0001


def test_a_probability_below_the_evidence_is_shown_as_a_bound(calibration: Calibration) -> None:
    model = ImpostorRisk(calibration.curve, "pack", min_fmr=1e-6)
    likely, strong = (false_alarm_probability(score, model, 100) for score in (0.2, 0.999))
    assert shown_probability(likely, model, 100) == (likely, False)
    shown, is_bound = shown_probability(strong, model, 100)
    assert is_bound
    assert shown is not None
    assert shown == pytest.approx(1e-4, rel=1e-3)
    assert shown_probability(None, model, 100) == shown_probability(None, None, 100) == (None, None)


def test_an_explicit_threshold_needs_no_calibration() -> None:
    assert thresholds_for(RiskTarget("threshold", 0.4), None, 10).accept == 0.4
    with pytest.raises(RiskUncalibratedError):
        thresholds_for(RiskTarget("fpir", 0.01), None, 10)
