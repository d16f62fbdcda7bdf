"""Thresholds for recent probes unlike the gallery."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from models.risk.normal_scale import from_scale, to_scale
from models.risk.probe_shift import MIN_PROBES, Panel, ProbeShift, RowLevels, row_levels

levels = st.tuples(st.floats(-0.9, 0.9), st.floats(0.0, 0.5)).map(
    lambda pair: RowLevels((pair[0], min(pair[0] + pair[1], 0.99)), (0.001, 0.001))
)
powers = st.floats(-0.5, 2.0)


@given(levels, levels, powers, st.floats(-1, 1))
def test_a_shift_never_lowers_a_score_and_raises_it_at_most_halfway_to_1(
    gallery: RowLevels, probes: RowLevels, power: float, score: float
) -> None:
    shift = ProbeShift.between(power, gallery, probes)
    raised = score if shift is None else shift.raised(score)
    assert score <= raised <= (1 + score) / 2


@given(levels, levels, powers, st.floats(-0.99, 0.99))
def test_the_original_of_a_raised_score_is_the_score(
    gallery: RowLevels, probes: RowLevels, power: float, score: float
) -> None:
    shift = ProbeShift.between(power, gallery, probes)
    if shift is not None:
        assert abs(float(shift.original(np.array([shift.raised(score)]))[0]) - score) < 1e-6


@given(levels, levels, powers, st.floats(-1, 1), st.floats(-1, 1))
def test_a_shift_keeps_the_order_of_scores(
    gallery: RowLevels, probes: RowLevels, power: float, one: float, other: float
) -> None:
    shift = ProbeShift.between(power, gallery, probes)
    if shift is not None:
        assert shift.raised(min(one, other)) <= shift.raised(max(one, other))


@given(powers, st.floats(-0.99, 0.99))
def test_the_scale_is_invertible(power: float, similarity: float) -> None:
    u = to_scale(np.array([similarity]), power)
    assert abs(float(from_scale(u, power)[0]) - similarity) < 1e-6


@given(levels, powers)
def test_probes_like_the_gallery_shift_nothing(gallery: RowLevels, power: float) -> None:
    assert ProbeShift.between(power, gallery, gallery) is None


def test_a_difference_within_the_standard_errors_shifts_nothing() -> None:
    gallery = RowLevels((0.5, 0.7), (0.01, 0.01))
    assert ProbeShift.between(0.5, gallery, RowLevels((0.53, 0.73), (0.01, 0.01))) is None
    assert ProbeShift.between(0.5, gallery, RowLevels((0.6, 0.8), (0.01, 0.01))) is not None


def test_samples_of_one_distribution_hardly_ever_shift() -> None:
    rng = np.random.default_rng(1)
    shifts = 0
    for _ in range(300):
        own, probes = (row_levels(rng.normal(0.3, 0.1, (count, 128))) for count in (300, 2 * MIN_PROBES))
        shift = ProbeShift.between(0.5, RowLevels.of(own), RowLevels.of(probes))
        shifts += shift is not None and shift.raised(0.8) > 0.801
    assert shifts <= 6


def test_the_most_similar_subject_of_a_probe_does_not_count() -> None:
    strangers = np.random.default_rng(2).normal(0.3, 0.1, (50, 127))
    own = np.full((50, 1), 0.95)
    assert np.allclose(row_levels(np.hstack([strangers, own])), np.quantile(strangers, (0.5, 0.98), axis=1).T)


def test_the_stored_panel_is_read_as_written() -> None:
    panel = Panel(np.array([3, 8, 21]), RowLevels((0.25, 0.5), (0.001, 0.002)))
    found = Panel.from_document(panel.document())
    assert found.levels == panel.levels
    assert found.subjects.tolist() == [3, 8, 21]
