"""What a recogniser's scores mean: impostor and genuine similarities of identity-labelled photos, as evidence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import date
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.risk import BIN_COUNT, EDGES, MIN_SUPPORT, bins, histogram
from models.runtime import Float
from models.tails import Tail, fit_tail

TAIL_QUANTILE = 0.999
LARGEST_KEPT = 1000
ROWS_AT_ONCE = 256
COARSE_STEP = 10
"""Bins between two similarities at which the uncertainty is kept."""
COARSE_EDGES = EDGES[::COARSE_STEP]


def calibrate(vectors: Float, labels: Sequence[str], data: str) -> dict[str, Any]:
    """Compare everybody with everybody and return calibration.json's document.

    Args:
        vectors: (n, d) unit vectors.
        labels: (n,) who each is.
        data: what the photos are, for the record.

    Raises:
        ValueError: too few pairs of either kind for a tail.
    """
    who = np.unique(np.asarray(labels), return_inverse=True)[1]
    impostor_counts, genuine_counts = histogram(np.empty(0)), histogram(np.empty(0))
    exceeding = np.zeros((who.max() + 1, len(COARSE_EDGES)))
    compared = np.zeros(who.max() + 1)
    largest = np.empty(0, np.float32)
    kept = max(LARGEST_KEPT, int(len(vectors) ** 2 * (1 - TAIL_QUANTILE)))
    for start in range(0, len(vectors), ROWS_AT_ONCE):
        block = vectors[start : start + ROWS_AT_ONCE]
        similarity = np.clip(block @ vectors.T, -1, 1)
        rows = np.arange(start, start + len(block))
        upper = np.arange(len(vectors))[None] > rows[:, None]
        same = who[rows][:, None] == who[None]
        impostors = similarity[upper & ~same]
        impostor_counts += histogram(impostors)
        genuine_counts += histogram(similarity[upper & same])
        np.add.at(exceeding, who[rows], _reached(similarity, ~same))
        np.add.at(compared, who[rows], (~same).sum(1))
        largest = np.sort(np.concatenate([largest, impostors]))[::-1][:kept]
    pairs = int(impostor_counts.sum())
    if pairs < 10_000 or not genuine_counts.sum():
        raise ValueError(f"{pairs} impostor and {int(genuine_counts.sum())} genuine pairs are too few to calibrate")
    tail = _tail(largest.astype(np.float64), pairs)
    known_at, variances = _variances(exceeding, compared)
    independent = 1 / float(np.interp(tail.start, known_at, variances))
    return {
        "version": 1,
        "data": data,
        "date": date.today().isoformat(),
        "people": len(np.unique(who)),
        "images": len(vectors),
        "impostor_pairs": pairs,
        "genuine_pairs": int(genuine_counts.sum()),
        "histograms": {"impostor": impostor_counts.tolist(), "genuine": genuine_counts.tolist()},
        "largest_impostors": [round(float(v), 5) for v in largest[:LARGEST_KEPT]],
        "tail": {**vars(tail), "errors": _standard_errors(tail, independent)},
        "variances": [known_at, variances],
    }


def _reached(similarity: Float, chosen: NDArray[np.bool_]) -> NDArray[np.float64]:
    """(rows, similarities) how many chosen entries of each row are at or above each of COARSE_EDGES."""
    coarse = bins(similarity) // COARSE_STEP
    cells = coarse + np.arange(len(coarse))[:, None] * (BIN_COUNT // COARSE_STEP)
    counts = np.bincount(cells[chosen], minlength=len(coarse) * BIN_COUNT // COARSE_STEP)
    counts = counts.reshape(len(coarse), -1)[:, ::-1].cumsum(1)[:, ::-1]
    return np.concatenate([counts, np.zeros((len(coarse), 1))], 1)


def _tail(largest: NDArray[np.float64], pairs: int) -> Tail:
    """The scores beyond the 99.9th percentile of all pairs."""
    count = max(50, round(pairs * (1 - TAIL_QUANTILE)))
    ordered = np.sort(largest)[::-1]
    if len(ordered) <= count:
        count = len(ordered) - 1
    start = float(ordered[count])
    excess = ordered[:count] - start
    return fit_tail(excess[excess > 0], np.ones(int((excess > 0).sum())), start, count / pairs)


def _standard_errors(tail: Tail, exceeding: float) -> dict[str, float]:
    """Asymptotic ones (R. Smith, 1987), of as many scores beyond the start as are independent."""
    return {
        "shape": math.sqrt((1 + tail.shape) ** 2 / exceeding),
        "scale": math.sqrt(2 * tail.scale**2 * (1 + tail.shape) / exceeding),
    }


def _variances(exceeding: NDArray[np.float64], compared: NDArray[np.float64]) -> tuple[list[float], list[float]]:
    """Variance of the logarithm of FMR at some similarities, over the choice of people: pairs share them.

    Four times the variance of a ratio of sums over people (W. Hoeffding, 1948, for pairs; the four as in
    models.gallery_risk). Left out where there are no 30 pairs: beyond, the tail is what is uncertain.

    Args:
        exceeding: (people, similarities) how many of a person's comparisons reach each of COARSE_EDGES.
        compared: (people,) a person's comparisons.
    """
    above = exceeding.sum(0)
    share = above / compared.sum()
    residual = exceeding - share * compared[:, None]
    enough = above / 2 >= MIN_SUPPORT
    variance = 4 * (residual[:, enough] ** 2).sum(0) / above[enough] ** 2
    return [round(float(t), 3) for t in COARSE_EDGES[enough]], [float(f"{v:.3g}") for v in variance]
