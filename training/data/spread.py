"""Some of many rows, evenly from the first to the last."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def spread_rows(count: int, wanted: int) -> NDArray[np.intp]:
    """At most ``wanted`` (>= 1) of the rows below ``count``, ascending; from two on, the first and the last are among
    them."""
    return np.unique(np.linspace(0, count - 1, min(count, wanted)).astype(np.intp))


def at_most(count: int | None, labels: NDArray[np.int64]) -> NDArray[np.intp]:
    """Rows of (n,) labels: of each label all, or ``count`` evenly from the first to the last."""
    of_each = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    if count is not None:
        of_each = [rows[spread_rows(len(rows), count)] for rows in of_each]
    return np.sort(np.concatenate(of_each))
