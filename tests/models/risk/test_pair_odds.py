"""Odds of pairs: monotone, bounded, and as frequent as they say."""

from __future__ import annotations

import numpy as np
import pytest

from models.risk.calibration import EDGES, Calibration
from models.risk.pair_odds import DUPLICATE_SHARE, MAX_ODDS, PairOdds
from models.runtime.network import Float
from tests.models.risk.test_gallery_risk import evidence_of, people

SUBJECTS = 200


def gallery() -> Float:
    """Return one vector of each subject; similarities are as in the calibration."""
    return people(np.random.default_rng(3), SUBJECTS, dimension=100, common=0)[:, 0]


@pytest.fixture(scope="module")
def odds(calibration: Calibration) -> PairOdds:
    return PairOdds.of(evidence_of(gallery()), calibration, np.empty(0))


def test_more_similar_pairs_have_larger_odds(odds: PairOdds) -> None:
    values = [odds.odds(t) for t in EDGES]
    assert values == sorted(values)
    assert 1 / MAX_ODDS <= values[0] < 1 < values[-1] <= MAX_ODDS


def test_the_recall_is_the_share_of_pairs_with_these_odds(odds: PairOdds, calibration: Calibration) -> None:
    threshold = next(t for t in EDGES if odds.odds(t) >= 1)
    assert odds.recall(1).value == pytest.approx(1 - calibration.fnmr(threshold), abs=0.01)
    assert odds.recall(1).low < odds.recall(1).value < odds.recall(1).high
    assert odds.recall(100).value < odds.recall(1).value


def test_pairs_of_the_gallery_count_for_recall(odds: PairOdds, calibration: Calibration) -> None:
    evidence = evidence_of(gallery())
    likely = PairOdds.of(evidence, calibration, np.full(100, 0.9))
    assert likely.recall(1).value > odds.recall(1).value
    assert likely.recall(1).high - likely.recall(1).low < odds.recall(1).high - odds.recall(1).low


def test_as_many_pairs_as_the_odds_say_are_one_person(odds: PairOdds) -> None:
    """Simulate pairs of one person and of two in the proportion of the prior."""
    rng = np.random.default_rng(5)
    same = rng.normal(0.6, 0.15, 100_000)
    scale = people(rng, 2000, dimension=100, common=0)[:, 0]
    different = (scale[:1000] @ scale[1000:].T).ravel()
    prior = 2 * DUPLICATE_SHARE / (SUBJECTS - 1)
    low, high = ((next(t for t in EDGES if odds.odds(t) >= bound)) for bound in (1 / 20, 1 / 2))
    one = ((same >= low) & (same < high)).mean() * prior
    two = ((different >= low) & (different < high)).mean()
    assert 1 / 20 / 3 < one / two < 1 / 2 * 3
