"""The map from a search's thresholds to a client's cut-offs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.vision.detection import DEFAULT_MIN_SCORE
from service.api.compreface.similarity import (
    CLIENT_DETECTION,
    KNOWN,
    MAYBE,
    STEP,
    UNKNOWN,
    level_of,
    level_of_candidate,
    to_client,
    to_probability,
)

COSINES = st.floats(-1, 1)


@given(st.lists(COSINES, min_size=2, max_size=2), st.lists(COSINES, min_size=2, max_size=2))
def test_the_map_is_monotonic_and_keeps_the_thresholds_at_the_cutoffs(
    similarities: list[float], thresholds: list[float]
) -> None:
    review, accept = sorted(thresholds)

    def mapped(similarity: float) -> float:
        outcome = "identified" if similarity >= accept else "uncertain" if similarity >= review else "unknown"
        return to_client(similarity, accept, review, level_of(outcome))

    low, high = sorted(similarities)
    assert 0 <= mapped(low) <= mapped(high) <= 1
    for similarity in similarities:
        assert (mapped(similarity) >= KNOWN) == (similarity >= accept)
        assert (mapped(similarity) >= MAYBE) == (similarity >= accept)
        assert (mapped(similarity) >= UNKNOWN) == (similarity >= review)


@given(COSINES, COSINES)
def test_a_candidate_that_was_not_chosen_never_passes_for_a_match(similarity: float, review: float) -> None:
    level = level_of_candidate(similarity, review, "known")
    assert to_client(similarity, review, review, level) <= MAYBE - STEP
    assert level_of_candidate(similarity, review, "unknown") == "unknown"


def test_the_decision_counts_more_than_the_similarity() -> None:
    lookalike = to_client(0.8, 0.4, 0.3, level_of("uncertain"))
    assert UNKNOWN <= lookalike < KNOWN
    assert to_client(0.8, 0.4, 0.3, level_of("rejected_quality")) < UNKNOWN
    assert to_client(0.2, 0.4, 0.3, level_of("identified")) == KNOWN
    assert to_client(0.9, 1.2, 0.3, level_of("uncertain")) < MAYBE, "no similarity reaches the risk"


@pytest.mark.parametrize("client", [0.5, 0.6, 0.75, 0.9])
def test_every_cutoff_of_clients_accepts_exactly_the_matches(client: float) -> None:
    """Double Take rounds to percent with two digits first."""
    assert to_client(0.5, 0.5, 0.4, level_of("identified")) >= client
    assert round(to_client(0.5 - 1e-9, 0.5, 0.4, level_of("uncertain")), 4) < client


@given(st.floats(0, 1))
def test_detection_scores(score: float) -> None:
    assert CLIENT_DETECTION <= to_probability(score) <= 1
    assert to_probability(DEFAULT_MIN_SCORE) == CLIENT_DETECTION
    assert to_probability(1) == 1
