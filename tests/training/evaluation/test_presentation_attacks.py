"""Error rates of presentation attack detection, derived again by counting (ISO/IEC 30107-3)."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.evaluation.presentation_attacks import measure_presentations, presentation_rows, threshold_at_apcer
from training.liveness.data import LIVE

Z_95 = 1.959964
Presentation = tuple[str, str, float]
SCORES = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.5000001, 0.9, 0.99]) | st.floats(0, 0.999)
PRESENTATIONS = st.lists(st.tuples(st.sampled_from([LIVE, "print", "screen"]), st.sampled_from("abcd"), SCORES)).map(
    lambda some: [*some, (LIVE, "a", 0.7), ("print", "a", 0.3), ("screen", "b", 0.2)]
)


def columns(some: list[Presentation]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    names, people, scores = zip(*some, strict=True)
    return np.array(scores, np.float64), np.array(names), np.array(people)


def accepted(some: list[Presentation], name: str, threshold: float) -> Fraction:
    judged = [score >= threshold for kind, _, score in some if kind == name]
    return Fraction(sum(judged), len(judged))


@given(some=PRESENTATIONS, percent=st.integers(0, 60))
def test_the_threshold_is_the_lowest_that_keeps_the_apcer_of_every_instrument(
    some: list[Presentation], percent: int
) -> None:
    scores, instruments, _ = columns(some)
    limit = Fraction(percent, 100)

    def allowed(threshold: float) -> bool:
        return all(accepted(some, name, threshold) <= limit for name in ("print", "screen"))

    threshold = threshold_at_apcer(scores, instruments, percent / 100)
    # The float 0.29 is below 29 %, so that 29 of 100 attacks are too many: stricter by at most one attack.
    assert allowed(threshold)
    lower = [score for score in {*scores.tolist()} if score < threshold]
    if percent % 25 == 0 and lower:
        assert not allowed(max(lower))


@given(some=PRESENTATIONS, threshold=SCORES)
def test_rates_are_shares_of_judged_presentations(some: list[Presentation], threshold: float) -> None:
    figures = measure_presentations(*columns(some), threshold)
    assert figures["bpcer"]["value"] == pytest.approx(float(1 - accepted(some, LIVE, threshold)))
    for name in ("print", "screen"):
        assert figures["apcer"][name]["value"] == pytest.approx(float(accepted(some, name, threshold)))
    for point, rate in figures["bpcer_at_apcer"].items():
        candidates = [*{score for _, _, score in some}, 2.0]
        fair = [t for t in candidates if all(accepted(some, n, t) <= Fraction(point) for n in ("print", "screen"))]
        assert rate["value"] == pytest.approx(float(min(1 - accepted(some, LIVE, t) for t in fair)))


@given(wrong=st.integers(0, 40), right=st.integers(0, 40))
def test_intervals_are_wilsons_over_people(wrong: int, right: int) -> None:
    """A bound p solves (p - share)^2 = z^2 p (1 - p) / people. Photos of known people add nothing."""
    count = wrong + right
    if not count:
        return
    one_each = [("print", f"p{i}", 0.9 if i < wrong else 0.1) for i in range(count)]
    scores, names, people = columns([(LIVE, "a", 0.8), *one_each, *one_each])
    rate = measure_presentations(scores, names, people, 0.5)["apcer"]["print"]
    assert (rate["presentations"], rate["people"]) == (2 * count, count)
    for bound in (rate["low"], rate["high"]):
        assert (bound - wrong / count) ** 2 == pytest.approx(Z_95**2 * bound * (1 - bound) / count, abs=1e-4)
    assert rate["low"] <= wrong / count <= rate["high"]
    if not wrong:
        assert rate["high"] == pytest.approx(Z_95**2 / (count + Z_95**2), abs=1e-4)  # no error is no proof of 0 %


def test_the_worst_instrument_comes_first() -> None:
    some = [(LIVE, "a", 0.8), ("mask", "a", 0.1), ("print", "a", 0.6), ("print", "b", 0.1), ("screen", "b", 0.2)]
    rows = presentation_rows(measure_presentations(*columns(some), 0.5), {LIVE: 0, "mask": 1, "print": 0, "screen": 2})
    assert rows[1][0] == "APCER, print, worst"
    assert rows[1][1].startswith("50.0% (95 %: ")
    assert {name for name, _ in rows} >= {"APCER, mask", "APCER, screen", "BPCER", "BPCER at APCER 5%"}
    assert dict(rows)["Photos not judged"] == "live 0, mask 1, print 0, screen 2"
    # Attacks that get the highest score leave no threshold.
    assert 1 < threshold_at_apcer(np.array([1.0, 0.9]), np.array(["print", LIVE]), 0.0) < 1.001
