"""What a recogniser's scores mean: impostor and genuine similarities of identity-labelled photos, as evidence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from models.risk import MIN_SUPPORT, Calibration, Tail, histogram
from models.runtime import Float

TAIL_QUANTILE = 0.999
LARGEST_KEPT = 1000
ROWS_AT_ONCE = 1024
IMPOSTORS_NEEDED: Final = 10_000
GENUINE_NEEDED: Final = MIN_SUPPORT
SAME_PHOTO: Final = 0.9999
"""Nobody looks so alike on two photos: it is one photo, copied or saved again."""
REPORTED_RATES: Final = (1e-2, 1e-3, 1e-4, 1e-5)


def calibrate(vectors: Float, labels: Sequence[str], data: str) -> dict[str, Any]:
    """Compare everybody with everybody and return calibration.json's document. Photos that occur twice count once, and
    not at all where the copies are filed under different people.

    Args:
        vectors: (n, d) unit vectors.
        labels: (n,) who each is.
        data: what the photos are, for the record.

    Raises:
        ValueError: too few pairs of either kind for a tail.
    """
    who = np.unique(np.asarray(labels), return_inverse=True)[1]
    kept_rows = distinct(vectors, who)
    copies = len(vectors) - len(kept_rows)
    vectors, who = vectors[kept_rows], who[kept_rows]
    impostor_counts, genuine_counts = histogram(np.empty(0)), histogram(np.empty(0))
    largest = np.empty(0, np.float32)
    kept = max(LARGEST_KEPT, int(len(vectors) ** 2 * (1 - TAIL_QUANTILE)))
    for rows, similarity in _similarities(vectors):
        upper = np.arange(len(vectors))[None] > rows[:, None]
        same = who[rows][:, None] == who[None]
        impostors = similarity[upper & ~same]
        impostor_counts += histogram(impostors)
        genuine_counts += histogram(similarity[upper & same])
        largest = np.sort(np.concatenate([largest, impostors]))[::-1][:kept]
    pairs, genuine_pairs = int(impostor_counts.sum()), int(genuine_counts.sum())
    if pairs < IMPOSTORS_NEEDED or genuine_pairs < GENUINE_NEEDED:
        raise ValueError(
            f"{len(vectors)} usable photos of {len(np.unique(who))} people give {pairs:,} pairs of different people "
            f"and {genuine_pairs:,} of the same, too few to calibrate: {IMPOSTORS_NEEDED:,} and {GENUINE_NEEDED} are "
            "needed, as 75 people with two photos each give"
        )
    tail, errors = fit_tail(largest.astype(np.float64), pairs)
    return {
        "version": 1,
        "data": data,
        "date": date.today().isoformat(),
        "people": len(np.unique(who)),
        "images": len(vectors),
        "copies": copies,
        "impostor_pairs": pairs,
        "genuine_pairs": genuine_pairs,
        "histograms": {"impostor": impostor_counts.tolist(), "genuine": genuine_counts.tolist()},
        "largest_impostors": [round(float(v), 5) for v in largest[:LARGEST_KEPT]],
        "tail": {"start": tail.start, "share": tail.share, "shape": tail.shape, "scale": tail.scale, "errors": errors},
    }


def distinct(vectors: Float, who: NDArray[np.integer[Any]]) -> NDArray[np.intp]:
    """Rows of (n, d) unit vectors that are photos of their own: the first of several copies of a photo; none of them
    where they show one face under several people's names, for then it is not known who that is.

    A copy kept would be a pair of similarity 1: as genuine it promises too much; as impostor, with the other photos of
    whom it shows, it is the whole tail.
    """
    pairs = [
        np.column_stack([rows[near], found])
        for rows, similarity in _similarities(vectors)
        for near, found in [np.nonzero(similarity > SAME_PHOTO)]
    ]
    first, second = np.concatenate(pairs).T if pairs else np.empty((2, 0), np.intp)
    graph = coo_array((np.ones(len(first), bool), (first, second)), shape=(len(vectors),) * 2)
    photo = connected_components(graph, directed=False)[1]
    people_of_photo = np.bincount(np.unique(np.column_stack([photo, who]), axis=0)[:, 0])
    first_rows = np.unique(photo, return_index=True)[1]
    return np.asarray(first_rows[people_of_photo == 1])


def _similarities(vectors: Float) -> Iterator[tuple[NDArray[np.intp], Float]]:
    """Some rows at a time, with their (r, n) cosines to all."""
    for start in range(0, len(vectors), ROWS_AT_ONCE):
        block = vectors[start : start + ROWS_AT_ONCE]
        yield np.arange(start, start + len(block)), np.clip(block @ vectors.T, -1, 1)


def described(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a calibration says, as a person would read it."""
    calibration = Calibration.from_document(document)
    counts = [
        (name.replace("_", " ").capitalize(), f"{document[name]:,}")
        for name in ("people", "images", "photos_without_face", "copies", "impostor_pairs", "genuine_pairs")
        if name in document
    ]
    at_rates = []
    for rate in REPORTED_RATES:
        threshold = calibration.threshold_at_fmr(rate)
        if threshold.similarity > 1:
            at_rates.append((f"Threshold at FMR {rate:g}", "out of reach: identical vectors are not rare enough"))
            continue
        mark = " (extrapolated)" if threshold.extrapolated else ""
        missed = calibration.fnmr(threshold.similarity)
        at_rates.append((f"Threshold at FMR {rate:g}", f"{threshold.similarity:.3f}{mark}, FNMR {missed:.2%}"))
    middle = calibration.equal_error_threshold()
    return [*counts, *at_rates, ("EER", f"{calibration.fnmr(middle):.2%} (threshold {middle:.3f})")]


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
