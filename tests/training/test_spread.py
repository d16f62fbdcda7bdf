"""Evenly spread rows: what packs were calibrated and checked on must come out the same for ever."""

from __future__ import annotations

import numpy as np
import pytest

from training.data.spread import at_most, spread_rows


@pytest.mark.parametrize("count", [1, 2, 5, 31, 32, 33, 1000, 42_427])
@pytest.mark.parametrize("wanted", [1, 2, 32, 256, 2000])
def test_as_packs_were_made_by_it(count: int, wanted: int) -> None:
    """The formula by which the shipped packs' crops were chosen."""
    assert np.array_equal(spread_rows(count, wanted), np.unique(np.linspace(0, count - 1, wanted).astype(int)))


def test_from_the_first_to_the_last() -> None:
    assert spread_rows(9, 3).tolist() == [0, 4, 8]
    assert spread_rows(3, 8).tolist() == [0, 1, 2]
    assert spread_rows(0, 8).tolist() == []


def test_photos_of_each_person_are_taken_evenly() -> None:
    labels = np.array([0, 0, 0, 0, 0, 1, 1, 2])
    assert at_most(None, labels).tolist() == list(range(8))
    assert at_most(3, labels).tolist() == [0, 2, 4, 5, 6, 7]
    assert at_most(2, labels).tolist() == [0, 4, 5, 6, 7]
