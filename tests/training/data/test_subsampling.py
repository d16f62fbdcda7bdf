"""Evenly spaced rows must stay stable: packs were calibrated on them."""

from __future__ import annotations

import numpy as np
import pytest

from training.data.subsampling import evenly_spaced_rows, limit_per_label


@pytest.mark.parametrize("count", [1, 2, 5, 31, 32, 33, 1000, 42_427])
@pytest.mark.parametrize("wanted", [1, 2, 32, 256, 2000])
def test_rows_match_those_of_shipped_packs(count: int, wanted: int) -> None:
    """The formula that selected the crops of the shipped packs."""
    assert np.array_equal(evenly_spaced_rows(count, wanted), np.unique(np.linspace(0, count - 1, wanted).astype(int)))


def test_photos_of_each_person_are_taken_evenly() -> None:
    labels = np.array([0, 0, 0, 0, 0, 1, 1, 2])
    assert limit_per_label(None, labels).tolist() == list(range(8))
    assert limit_per_label(3, labels).tolist() == [0, 2, 4, 5, 6, 7]
    assert limit_per_label(2, labels).tolist() == [0, 4, 5, 6, 7]
