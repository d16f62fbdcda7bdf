"""The map from a search's thresholds to a client's cut-offs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.api.compreface.similarity import (
    CLIENT_DETECTION,
    PRESETS,
    STEP,
    Cutoffs,
    level_of,
    level_of_candidate,
    parse_cutoffs,
    to_client,
    to_probability,
)

COSINES = st.floats(-1, 1)


@given(
    st.lists(COSINES, min_size=2, max_size=2), st.lists(COSINES, min_size=2, max_size=2), st.sampled_from([*PRESETS])
)
def test_the_map_is_monotonic_and_keeps_the_thresholds_at_the_cutoffs(
    similarities: list[float], thresholds: list[float], preset: str
) -> None:
    cutoffs, (review, accept) = PRESETS[preset], sorted(thresholds)

    def mapped(similarity: float) -> float:
        outcome = "identified" if similarity >= accept else "uncertain" if similarity >= review else "unknown"
        return to_client(similarity, accept, review, level_of(outcome), cutoffs)

    low, high = sorted(similarities)
    assert 0 <= mapped(low) <= mapped(high) <= 1
    for similarity in similarities:
        assert (mapped(similarity) >= cutoffs.known) == (similarity >= accept)
        assert (mapped(similarity) >= cutoffs.maybe) == (similarity >= accept)
        assert (mapped(similarity) >= cutoffs.unknown) == (similarity >= review)


@given(COSINES, COSINES)
def test_a_candidate_that_was_not_chosen_never_passes_for_a_match(similarity: float, review: float) -> None:
    for cutoffs in PRESETS.values():
        level = level_of_candidate(similarity, review, "known")
        assert to_client(similarity, review, review, level, cutoffs) <= cutoffs.maybe - STEP
        assert level_of_candidate(similarity, review, "unknown") == "unknown"


def test_the_decision_counts_more_than_the_similarity() -> None:
    cutoffs = PRESETS["double-take"]
    lookalike = to_client(0.8, 0.4, 0.3, level_of("uncertain"), cutoffs)
    assert cutoffs.unknown <= lookalike < cutoffs.known
    assert to_client(0.8, 0.4, 0.3, level_of("rejected_quality"), cutoffs) < cutoffs.unknown
    assert to_client(0.2, 0.4, 0.3, level_of("same"), cutoffs) == cutoffs.known
    assert to_client(0.9, 1.2, 0.3, level_of("uncertain"), cutoffs) < cutoffs.maybe, "no similarity reaches the risk"


def test_double_take_rounds_percentages_to_two_digits() -> None:
    cutoffs = PRESETS["double-take"]
    closest = to_client(0.4 - 1e-9, 0.4, 0.3, level_of("uncertain"), cutoffs)
    assert round(closest * 100, 2) < 60


@pytest.mark.parametrize("client", [0.5, 0.6, 0.75, 0.9])
def test_every_cutoff_of_the_sdk_examples_accepts_exactly_the_matches(client: float) -> None:
    cutoffs = PRESETS["sdk"]
    assert to_client(0.5, 0.5, 0.4, level_of("identified"), cutoffs) >= client
    assert to_client(0.4999, 0.5, 0.4, level_of("uncertain"), cutoffs) < client


@given(st.floats(0.01, 0.99), st.floats(0, 1))
def test_detection_scores(min_score: float, score: float) -> None:
    probability = to_probability(score, min_score)
    assert CLIENT_DETECTION <= probability <= 1
    assert to_probability(min_score, min_score) == CLIENT_DETECTION
    assert to_probability(1, min_score) == 1


def test_cutoffs_of_a_setting() -> None:
    assert parse_cutoffs("double-take") == Cutoffs(0.6, 0.6, 0.4)
    assert parse_cutoffs("0.8,0.7,0.5") == Cutoffs(0.8, 0.7, 0.5)


@pytest.mark.parametrize(
    "text", ["", "sdks", "0.8", "0.8,0.7", "0.7,0.8,0.5", "0.8,0.5,0.5", "1,0.5,0.4", "a,b,c", "nan,nan,nan"]
)
def test_invalid_cutoffs(text: str) -> None:
    with pytest.raises(ValueError, match=r"known|float"):
        parse_cutoffs(text)
