"""Error rates are counted where enough pairs support them, are monotone, and invert."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from models.errors import PackError
from models.pack.manifest import ModelPack
from models.risk.calibration import (
    BIN_COUNT,
    MIN_SUPPORT,
    Calibration,
    FmrCurve,
    Tail,
    fit_tail,
    fmr_for_fpir,
    fpir_from_fmr,
)
from models.runtime.network import Float
from tests.models.risk.test_gallery_risk import people
from training.export.calibrate import calibrate


def test_fmr_is_the_share_of_impostors(calibration: Calibration) -> None:
    for t in (0.0, 0.1, 0.2, 0.3):
        assert calibration.curve.fmr(t).value == pytest.approx(stats.norm.sf(t, 0, 0.1), rel=0.05)
        assert not calibration.curve.fmr(t).extrapolated
    beyond = calibration.curve.fmr(0.5)
    assert beyond.extrapolated
    # The exponential tail overestimates by less than two orders of magnitude.
    assert 0.5 < beyond.value / stats.norm.sf(0.5, 0, 0.1) < 100


@given(st.floats(-1, 1), st.floats(0, 1), st.floats(0.001, 0.9))
def test_error_rates_are_monotone_in_the_threshold_and_met(
    calibration: Calibration, t: float, step: float, rate: float
) -> None:
    assert calibration.curve.fmr(min(1.0, t + step)).value <= calibration.curve.fmr(t).value
    assert calibration.fnmr(min(1.0, t + step)) >= calibration.fnmr(t)
    assert calibration.fnmr(calibration.threshold_at_fnmr(rate)) <= rate + 1e-9


def test_counts_and_tail_join_monotonically() -> None:
    counts = np.zeros(BIN_COUNT, np.int64)
    counts[900:1100] = 500
    counts[1500], counts[1501] = 15, 20
    calibration = Calibration(counts, counts, Tail(0.49, 0.0004, 0.3, 0.05))
    rates = [calibration.curve.fmr(t).value for t in np.linspace(0.4, 1, 5000)]
    assert all(a >= b for a, b in itertools.pairwise(rates))
    # Identical vectors exceed this rate, so the threshold is unreachable.
    assert calibration.curve.threshold_at_fmr(1e-9).value > 1


def test_errors_are_equal_at_the_equal_error_threshold(calibration: Calibration) -> None:
    t = calibration.equal_error_threshold()
    assert calibration.curve.fmr(t).value == pytest.approx(calibration.fnmr(t), rel=0.05)


@given(st.floats(1e-9, 0.99), st.integers(1, 10**7))
def test_fpir_and_fmr_invert(fpir: float, comparisons: int) -> None:
    assert fpir_from_fmr(fmr_for_fpir(fpir, comparisons), comparisons) == pytest.approx(fpir, rel=1e-6)


def test_fpir_is_that_of_independent_comparisons() -> None:
    assert fpir_from_fmr(0.01, 100) == pytest.approx(1 - 0.99**100)
    assert fpir_from_fmr(0.3, 0) == 0
    assert fpir_from_fmr(1.0, 5) == 1
    # 1 - (1 - x)^N would underflow to 0.
    assert fpir_from_fmr(1e-18, 1000) == pytest.approx(1e-15)


@pytest.mark.parametrize("shape", [-0.2, 0.0, 0.1])
def test_the_tail_is_scipys_generalized_pareto(shape: float) -> None:
    tail = Tail(0.3, 0.001, shape, 0.05)
    for t in (0.3, 0.35, 0.45):
        expected = 0.001 * stats.genpareto.sf(t - 0.3, shape, scale=0.05)
        assert tail.exceedances(np.array([t]))[0] == pytest.approx(expected)


def test_the_tail_never_ends() -> None:
    """Bounded scores would fit a negative shape, which is excluded."""
    rng = np.random.default_rng(2)
    scores = np.sort(rng.uniform(0, 0.5, 1_000_000))[::-1]
    beyond = scores[:20_000] - scores[20_000]
    tail = fit_tail(beyond, np.ones(len(beyond)), float(scores[20_000]), 0.02)
    assert tail.exceedances(np.array([0.51]))[0] > 0


def test_calibration_counts_each_pair_once() -> None:
    rng = np.random.default_rng(3)
    vectors = rng.normal(size=(300, 64))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    labels = [str(i // 2) for i in range(300)]
    document = calibrate(vectors.astype(np.float32), labels, "test")
    assert document["genuine_pairs"] == 150
    assert document["impostor_pairs"] == 300 * 299 // 2 - 150
    loop = [float(vectors[i] @ vectors[j]) for i in range(300) for j in range(i) if labels[i] != labels[j]]
    assert document["largest_impostors"][0] == pytest.approx(max(loop), abs=1e-4)
    read = Calibration.from_document(document)
    assert read.curve.fmr(0.2).value == pytest.approx(np.mean(np.array(loop) >= 0.2), rel=0.1)


@pytest.mark.parametrize("excesses", [[1e-4, 1e-4, 1e-4, 0.5], [0.3], [0.01] * 50])
def test_a_fit_of_few_excesses_is_finite(excesses: list[float]) -> None:
    tail = fit_tail(np.array(excesses), np.ones(len(excesses)), 0.3, 0.01)
    assert tail.scale > 0
    assert tail.exceedances(np.array([0.3 + max(excesses)]))[0] > 0


@pytest.mark.parametrize("shape", [0.0, 0.15])
def test_a_fit_recovers_the_true_tail(shape: float) -> None:
    excesses = stats.genpareto.rvs(shape, scale=0.04, size=20_000, random_state=5)
    tail = fit_tail(excesses, np.ones(len(excesses)), 0.3, 0.01)
    assert tail.scale == pytest.approx(0.04, rel=0.05)
    assert tail.shape == pytest.approx(shape, abs=0.03)
    # A repeated score equals a weight of 2.
    twice = fit_tail(np.repeat(excesses, 2), np.ones(2 * len(excesses)), 0.3, 0.01)
    weighed = fit_tail(excesses, np.full(len(excesses), 2.0), 0.3, 0.01)
    assert (twice.shape, twice.scale) == pytest.approx((weighed.shape, weighed.scale), rel=1e-3)


def test_intervals_have_their_nominal_coverage() -> None:
    rng = np.random.default_rng(11)

    def some(count: int, images: int) -> Float:
        """Some people are close to the common mean, so pairs are not independent."""
        return np.concatenate(people(rng, count, images, 32, rng.gamma(4, 0.12, (count, 1, 1))))

    names = [str(i) for i in range(5000)]
    truth = Calibration.from_document(calibrate(some(5000, 1), [*names[:-30], *names[:30]], "truth"))
    points = [truth.curve.threshold_at_fmr(r).value for r in (0.03, 0.003)]
    held = []
    for _ in range(60):
        found = Calibration.from_document(calibrate(some(150, 2), [str(i // 2) for i in range(300)], "sample"))
        held += [(r := found.curve.fmr(t)).low <= truth.curve.fmr(t).value <= r.high for t in points]
    assert 0.9 <= np.mean(held) <= 0.995


@pytest.mark.parametrize("broken", [{}, {"histograms": {"impostor": [1], "genuine": [1]}, "tail": {}}])
def test_a_malformed_calibration_is_rejected(broken: dict[str, object]) -> None:
    with pytest.raises(PackError, match="calibration"):
        Calibration.from_document(broken)


def test_the_bundled_calibration_has_enough_pairs(pack: ModelPack) -> None:
    assert pack.calibration is not None
    calibration = Calibration.from_document(pack.calibration)
    assert calibration.impostor_pairs > 1_000_000
    assert calibration.genuine_pairs > 1_000
    assert len(pack.calibration["histograms"]["impostor"]) == BIN_COUNT
    threshold = calibration.curve.threshold_at_fmr(1e-3)
    assert not threshold.extrapolated
    assert calibration.curve.fmr(threshold.value).value * calibration.impostor_pairs > MIN_SUPPORT
    assert math.isfinite(calibration.curve.threshold_at_fmr(1e-9).value)


@settings(max_examples=200)
@given(st.integers(0, 2**32 - 1), st.floats(1e-12, 1.0))
def test_thresholds_match_bisection(seed: int, rate: float) -> None:
    rng = np.random.default_rng(seed)
    steps = rng.exponential(1.0, BIN_COUNT) * (rng.random(BIN_COUNT) < rng.random())  # with flat stretches
    logs = np.minimum(0.0, -np.concatenate([[0.0], np.cumsum(steps)]) * rng.choice([1e-6, 1e-3, 1.0, 30.0]))
    curve = FmrCurve(np.exp(np.maximum(logs, -600)), np.zeros(BIN_COUNT + 1), 0.5)
    found = curve.threshold_at_fmr(rate).value
    if curve.fmr(1.0).value > rate:
        assert found > 1
        return
    low, high = -1.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if curve.fmr(middle).value > rate else (low, middle)
    assert curve.fmr(found).value <= rate
    assert found == pytest.approx(high, abs=1e-6)
