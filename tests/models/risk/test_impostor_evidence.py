"""Rival-adjusted scores: what the histograms hold, and the promised misses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.risk.calibration import Floats, histogram, mean_growth
from models.risk.impostor_evidence import (
    RIVAL_WEIGHT,
    GenuineProbes,
    ImpostorEvidence,
    Levels,
    resemblance,
    search_scores,
)
from models.risk.miss_rate import promised_misses
from models.vision.recognition import l2_normalize
from tests.models.risk.test_gallery_risk import evidence_of, people

SIMILARITIES = st.lists(st.floats(-1, 1), min_size=1, max_size=6).map(lambda ones: sorted(ones, reverse=True))


def searches(similarities: Floats, genuine: GenuineProbes) -> ImpostorEvidence:
    """Return the evidence of (q, n) similarities to other subjects."""
    nearest = np.sort(similarities, axis=1)[:, :-3:-1]
    return ImpostorEvidence.of(
        histogram(similarities), nearest, similarities.shape[1] + 1, len(similarities) * 2, genuine
    )


@given(SIMILARITIES, st.floats(-1, 1), st.floats(0, 0.5))
def test_adjusted_scores_keep_the_order_of_subjects(similarities: list[float], rival: float, farther: float) -> None:
    adjusted = search_scores(similarities, rival)
    assert adjusted == sorted(adjusted, reverse=True)
    assert max(adjusted) <= 1
    assert search_scores(similarities, None) == similarities
    assert search_scores(similarities[::-1], rival) == adjusted[::-1]
    # A nearer runner-up lowers the score.
    alone = search_scores([similarities[0], *(each - farther for each in similarities[1:])], rival)
    assert adjusted[0] <= alone[0] + 1e-12


@given(st.integers(1, 20), st.floats(0, 1))
def test_more_templates_raise_the_similarity_of_their_mean(templates: int, similarity: float) -> None:
    assert mean_growth(1, similarity) == 1
    assert mean_growth(templates + 1, similarity) >= mean_growth(templates, similarity) - 1e-12


def test_promised_misses_are_those_of_fresh_photos() -> None:
    rng = np.random.default_rng(1)
    n, templates = 400, 3
    faces = people(rng, n, templates + 1)
    probes, fresh = faces[:, 0], faces[:, templates]
    means = l2_normalize(faces[:, :templates].sum(1))
    others = faces[:, 1:templates]
    fused = np.einsum("nd,nd->n", probes, l2_normalize(others.sum(1)))
    single = np.einsum("nd,njd->nj", probes, others).mean(1)
    similarities = probes @ means.T
    similarities = np.asarray(similarities, np.float64)[~np.eye(n, dtype=bool)].reshape(n, n - 1)
    evidence = searches(similarities, GenuineProbes(fused, single, np.full(n, templates)))
    assert evidence.rival is not None
    scores = fresh @ means.T
    own = np.diag(scores).copy()
    np.fill_diagonal(scores, -1)
    best_other = scores.max(1)
    adjusted = own - RIVAL_WEIGHT * (best_other - evidence.rival)
    for threshold in (0.7, 0.8, 0.85):
        promised = promised_misses(evidence, None, threshold)
        assert promised is not None
        missed = 1 - float(((own > best_other) & (adjusted >= threshold)).mean())
        assert promised.value == pytest.approx(missed, abs=0.05)
        assert promised.low <= promised.value <= promised.high
    without_mated_photos = evidence_of(people(np.random.default_rng(2), 20)[:, 0])
    assert promised_misses(without_mated_photos, None, 0.5) is None


def test_a_probe_raises_no_level_that_its_own_score_is_lowered_by() -> None:
    rng = np.random.default_rng(4)
    similarities = rng.normal(0.1, 0.1, (80, 30)).astype(np.float32)
    np.fill_diagonal(similarities, -1)
    levels, without = resemblance(similarities)
    for subject in range(30):
        column = similarities[:, subject]
        assert levels[subject] == pytest.approx(np.sort(column)[-7:].mean(), abs=1e-6)
        for probe in (0, int(column.argmax()), int(np.argsort(column)[-7]), int(np.argsort(column)[-8])):
            others = np.sort(np.delete(column, probe))[-7:]
            assert without[probe, subject] == pytest.approx(others.mean(), abs=1e-6)


def test_levels_of_subjects_that_are_newer_than_the_evidence_are_usual() -> None:
    levels = Levels(np.array([3, 5, 9]), np.array([0.1, 0.0, -0.2]), 0.1)
    assert levels.of([9, 4, 3, 10, 1]) == [-0.2, 0.0, 0.1, 0.0, 0.0]


def test_evidence_is_read_as_it_was_written() -> None:
    levels = Levels(np.array([3, 5, 9]), np.array([0.1234, 0.0, -0.2]), 0.1)
    evidence = replace(evidence_of(people(np.random.default_rng(3), 20)[:, 0]), levels=levels)
    again = ImpostorEvidence.from_document(evidence.document())
    assert again.genuine is not None and evidence.genuine is not None
    assert np.array_equal(again.genuine.scores, evidence.genuine.scores)
    assert np.array_equal(again.pairs, evidence.pairs) and np.array_equal(again.best, evidence.best)
    assert (again.rival, again.probes, again.subjects, again.pair_count) == (evidence.rival, 20, 20, 190)
    assert again.levels is not None and again.levels.of([3, 5, 9]) == pytest.approx([0.1234, 0.0, -0.2])
