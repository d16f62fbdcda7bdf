"""What a recogniser's scores mean: impostor and genuine similarities of identity-labelled photos, as evidence."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from models.network import Float
from models.risk import BIN_COUNT, EDGES, MIN_SUPPORT, Calibration, bins, histogram
from models.tails import Tail, fit_tail

TAIL_QUANTILE = 0.999
LARGEST_KEPT = 1000
ROWS_AT_ONCE = 256
IMPOSTORS_NEEDED: Final = 10_000
GENUINE_NEEDED: Final = MIN_SUPPORT
SAME_PHOTO: Final = 0.9999
"""Nobody looks so alike on two photos: it is one photo, copied or saved again."""
REPORTED_RATES: Final = (1e-2, 1e-3, 1e-4, 1e-5)
COARSE_STEP: Final = 10
"""Bins between two similarities at which the uncertainty is kept."""
COARSE_EDGES: Final = EDGES[::COARSE_STEP]


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
    exceeding = np.zeros((who.max() + 1, len(COARSE_EDGES)))
    compared = np.zeros(who.max() + 1)
    largest = np.empty(0, np.float32)
    kept = max(LARGEST_KEPT, int(len(vectors) ** 2 * (1 - TAIL_QUANTILE)))
    for rows, similarity in _similarities(vectors):
        upper = np.arange(len(vectors))[None] > rows[:, None]
        same = who[rows][:, None] == who[None]
        impostors = similarity[upper & ~same]
        impostor_counts += histogram(impostors)
        genuine_counts += histogram(similarity[upper & same])
        np.add.at(exceeding, who[rows], _reached(similarity, ~same))
        np.add.at(compared, who[rows], (~same).sum(1))
        largest = np.sort(np.concatenate([largest, impostors]))[::-1][:kept]
    pairs, genuine_pairs = int(impostor_counts.sum()), int(genuine_counts.sum())
    if pairs < IMPOSTORS_NEEDED or genuine_pairs < GENUINE_NEEDED:
        raise ValueError(
            f"{len(vectors)} usable photos of {len(np.unique(who))} people give {pairs:,} pairs of different people "
            f"and {genuine_pairs:,} of the same, too few to calibrate: {IMPOSTORS_NEEDED:,} and {GENUINE_NEEDED} are "
            "needed, as 75 people with two photos each give"
        )
    tail = _tail(largest.astype(np.float64), pairs)
    known_at, variances = _variances(exceeding, compared)
    independent = 1 / float(np.interp(tail.start, known_at, variances))
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
