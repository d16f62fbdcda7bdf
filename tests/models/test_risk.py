"""Error rates are counted where counting can support them, never rise with the threshold, and invert."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from models.errors import PackError
from models.network import Float
from models.pack import ModelPack
from models.recognition import unit
from models.risk import (
    BIN_COUNT,
    MIN_SUPPORT,
    Calibration,
    FmrCurve,
    fmr_for_fpir,
    fpir_from_fmr,
)
from models.tails import Tail, fit_tail
from training.calibrate import calibrate


def test_fmr_is_the_share_of_impostors(calibration: Calibration) -> None:
    for t in (0.0, 0.1, 0.2, 0.3):
        assert calibration.fmr(t).value == pytest.approx(stats.norm.sf(t, 0, 0.1), rel=0.05)
        assert not calibration.fmr(t).extrapolated


def test_beyond_the_evidence_it_says_so_and_stays_of_the_right_order(calibration: Calibration) -> None:
    rate = calibration.fmr(0.5)
    assert rate.extrapolated
    truth = stats.norm.sf(0.5, 0, 0.1)
    # The exponential tail errs on the side of caution, by less than two orders.
    assert truth / 2 < rate.value < truth * 100


@given(st.floats(-1, 1), st.floats(0, 1))
def test_a_higher_threshold_never_admits_more(calibration: Calibration, t: float, step: float) -> None:
    assert calibration.fmr(min(1.0, t + step)).value <= calibration.fmr(t).value
    assert calibration.fnmr(min(1.0, t + step)) >= calibration.fnmr(t)


@given(st.floats(1e-9, 0.9))
def test_the_threshold_of_a_rate_keeps_to_the_rate(calibration: Calibration, rate: float) -> None:
    threshold = calibration.threshold_at_fmr(rate)
    assert calibration.fmr(threshold.similarity).value <= rate * (1 + 1e-9)
    assert calibration.fmr(threshold.similarity - 0.002).value >= rate * 0.999


@given(st.floats(0.001, 0.9))
def test_the_threshold_of_misses_keeps_to_them(calibration: Calibration, rate: float) -> None:
    assert calibration.fnmr(calibration.threshold_at_fnmr(rate)) <= rate + 1e-9


def test_counting_and_fit_meet_without_a_rise() -> None:
    counts = np.zeros(BIN_COUNT, np.int64)
    counts[900:1100] = 500
    counts[1500], counts[1501] = 15, 20
    calibration = Calibration(counts, counts, Tail(0.49, 0.0004, 0.3, 0.05))
    rates = [calibration.fmr(t).value for t in np.linspace(0.4, 1, 5000)]
    assert all(a >= b for a, b in itertools.pairwise(rates))
    # A rate that not even identical vectors can keep to has a threshold that nothing reaches.
    assert calibration.threshold_at_fmr(1e-9).similarity > 1


def test_errors_are_equal_at_the_equal_error_threshold(calibration: Calibration) -> None:
    t = calibration.equal_error_threshold()
    assert calibration.fmr(t).value == pytest.approx(calibration.fnmr(t), rel=0.05)


@given(st.floats(1e-9, 0.99), st.integers(1, 10**7))
def test_fpir_and_fmr_invert(fpir: float, comparisons: int) -> None:
    assert fpir_from_fmr(fmr_for_fpir(fpir, comparisons), comparisons) == pytest.approx(fpir, rel=1e-6)


def test_fpir_is_that_of_independent_comparisons() -> None:
    assert fpir_from_fmr(0.01, 100) == pytest.approx(1 - 0.99**100)
    assert fpir_from_fmr(0.3, 0) == 0
    assert fpir_from_fmr(1.0, 5) == 1
    # Where 1 - (1 - x)^N in floating point gives 0.
    assert fpir_from_fmr(1e-18, 1000) == pytest.approx(1e-15)


@pytest.mark.parametrize("shape", [-0.2, 0.0, 0.1])
def test_the_tail_is_scipys_generalised_pareto(shape: float) -> None:
    tail = Tail(0.3, 0.001, shape, 0.05)
    for t in (0.3, 0.35, 0.45):
        expected = 0.001 * stats.genpareto.sf(t - 0.3, shape, scale=0.05)
        assert tail.exceedance(t) == pytest.approx(expected)


def test_the_tail_never_ends() -> None:
    """Bounded scores have a fit that ends; what is kept must not promise that strangers end there."""
    rng = np.random.default_rng(2)
    scores = np.sort(rng.uniform(0, 0.5, 1_000_000))[::-1]
    beyond = scores[:20_000] - scores[20_000]
    tail = fit_tail(beyond, np.ones(len(beyond)), float(scores[20_000]), 0.02)
    assert tail.exceedance(0.51) > 0


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
    assert read.fmr(0.2).value == pytest.approx(np.mean(np.array(loop) >= 0.2), rel=0.1)


@pytest.mark.parametrize("shape", [0.0, 0.15])
def test_a_fit_finds_the_tail_it_was_drawn_from(shape: float) -> None:
    excesses = stats.genpareto.rvs(shape, scale=0.04, size=20_000, random_state=5)
    tail = fit_tail(excesses, np.ones(len(excesses)), 0.3, 0.01)
    assert tail.scale == pytest.approx(0.04, rel=0.05)
    assert tail.shape == pytest.approx(shape, abs=0.03)
    # Counting a score twice is as weighing it 2.
    twice = fit_tail(np.repeat(excesses, 2), np.ones(2 * len(excesses)), 0.3, 0.01)
    weighed = fit_tail(excesses, np.full(len(excesses), 2.0), 0.3, 0.01)
    assert (twice.shape, twice.scale) == pytest.approx((weighed.shape, weighed.scale), rel=1e-3)


def people(rng: np.random.Generator, count: int, images: int = 1, dimension: int = 32) -> tuple[Float, list[str]]:
    """Unit vectors of people in a cone, some of whom resemble everybody: pairs are not independent."""
    common = np.ones(dimension)
    centres = rng.normal(size=(count, dimension)) + rng.gamma(4, 0.12, size=(count, 1)) * common
    vectors = np.repeat(centres, images, 0) + 0.3 * rng.normal(size=(count * images, dimension))
    return unit(vectors), [str(i // images) for i in range(count * images)]


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(11)
    many, names = people(rng, 5000)
    truth = Calibration.from_document(calibrate(many, [*names[:-30], *names[:30]], "truth"))
    points = [truth.threshold_at_fmr(r).similarity for r in (0.03, 0.003)]
    held = []
    for _ in range(60):
        vectors, labels = people(rng, 150, 2)
        found = Calibration.from_document(calibrate(vectors, labels, "sample"))
        held += [(r := found.fmr(t)).low <= truth.fmr(t).value <= r.high for t in points]
    assert 0.9 <= np.mean(held) <= 0.995


def test_too_few_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        calibrate(np.eye(8, dtype=np.float32), list("aabbccdd"), "test")


@pytest.mark.parametrize("broken", [{}, {"histograms": {"impostor": [1], "genuine": [1]}, "tail": {}}])
def test_a_broken_calibration_is_refused(broken: dict[str, object]) -> None:
    with pytest.raises(PackError, match="calibration"):
        Calibration.from_document(broken)


def test_the_bundled_calibration_is_evidence(pack: ModelPack) -> None:
    assert pack.calibration is not None
    calibration = Calibration.from_document(pack.calibration)
    assert calibration.impostor_pairs > 1_000_000
    assert calibration.genuine_pairs > 1_000
    assert len(pack.calibration["histograms"]["impostor"]) == BIN_COUNT
    threshold = calibration.threshold_at_fmr(1e-3)
    assert not threshold.extrapolated
    assert calibration.fmr(threshold.similarity).value * calibration.impostor_pairs > MIN_SUPPORT
    assert math.isfinite(calibration.threshold_at_fmr(1e-9).similarity)


@settings(max_examples=200)
@given(st.integers(0, 2**32 - 1), st.floats(1e-12, 1.0))
def test_a_threshold_is_the_one_that_bisection_finds(seed: int, rate: float) -> None:
    rng = np.random.default_rng(seed)
    steps = rng.exponential(1.0, BIN_COUNT) * (rng.random(BIN_COUNT) < rng.random())  # with flat stretches
    logs = np.minimum(0.0, -np.concatenate([[0.0], np.cumsum(steps)]) * rng.choice([1e-6, 1e-3, 1.0, 30.0]))
    curve = FmrCurve(np.exp(np.maximum(logs, -600)), np.zeros(BIN_COUNT + 1), 0.5)
    found = curve.threshold_at_fmr(rate).similarity
    if curve.fmr(1.0).value > rate:
        assert found > 1
        return
    low, high = -1.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if curve.fmr(middle).value > rate else (low, middle)
    assert curve.fmr(found).value <= rate
    assert found == pytest.approx(high, abs=1e-6)


def test_rates_of_many_similarities_are_each_ones() -> None:
    curve = FmrCurve(np.geomspace(1, 1e-9, BIN_COUNT + 1), np.zeros(BIN_COUNT + 1), 0.5)
    similarities = np.linspace(-1.2, 1.2, 50)
    assert curve.rates_at(similarities).tolist() == [curve.fmr(float(s)).value for s in similarities]
