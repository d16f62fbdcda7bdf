"""What a recogniser's scores mean: impostor and genuine similarities of identity-labelled photos, as evidence."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from models.risk import Tail, histogram
from models.runtime import Float

TAIL_QUANTILE = 0.999
LARGEST_KEPT = 1000
ROWS_AT_ONCE = 1024


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
        largest = np.sort(np.concatenate([largest, impostors]))[::-1][:kept]
    pairs = int(impostor_counts.sum())
    if pairs < 10_000 or not genuine_counts.sum():
        raise ValueError(f"{pairs} impostor and {int(genuine_counts.sum())} genuine pairs are too few to calibrate")
    tail, errors = fit_tail(largest.astype(np.float64), pairs)
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
        "tail": {"start": tail.start, "share": tail.share, "shape": tail.shape, "scale": tail.scale, "errors": errors},
    }


def fit_tail(largest: NDArray[np.float64], pairs: int) -> tuple[Tail, dict[str, float]]:
    """Fit a generalised Pareto to the scores beyond the 99.9th percentile of all pairs, by maximum likelihood.

    Standard errors are the asymptotic ones of R. Smith, "Estimating tails of probability distributions", 1987, which
    take the scores for independent: with pairs that share photos they are a lower bound.
    """
    count = max(50, round(pairs * (1 - TAIL_QUANTILE)))
    ordered = np.sort(largest)[::-1]
    if len(ordered) <= count:
        count = len(ordered) - 1
    start = float(ordered[count])
    excess = ordered[:count] - start
    shape, _, scale = stats.genpareto.fit(excess[excess > 0], floc=0)
    if shape < 0:
        # A negative shape ends: beyond some score it promises that no stranger ever comes. No finite evidence can
        # promise that, so the tail is taken as exponential, which errs on the safe side.
        shape, scale = 0.0, float(excess.mean())
    n = len(excess)
    errors = {
        "shape": float(np.sqrt((1 + shape) ** 2 / n)),
        "scale": float(np.sqrt(2 * scale**2 * (1 + shape) / n)),
    }
    return Tail(start, count / pairs, float(shape), float(scale)), errors
