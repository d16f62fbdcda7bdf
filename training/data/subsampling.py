"""Evenly spaced subsets of rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def evenly_spaced_rows(count: int, max_rows: int) -> NDArray[np.intp]:
    """Return at most ``max_rows`` (>= 1) rows below ``count``, ascending, from the first to the last."""
    return np.unique(np.linspace(0, count - 1, min(count, max_rows)).astype(np.intp))


def limit_per_label(count: int | None, labels: NDArray[np.int64]) -> NDArray[np.intp]:
    """Return rows of (n,) labels: all, or at most ``count`` evenly spaced ones per label."""
    of_each = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    if count is not None:
        of_each = [rows[evenly_spaced_rows(len(rows), count)] for rows in of_each]
    return np.sort(np.concatenate(of_each))
