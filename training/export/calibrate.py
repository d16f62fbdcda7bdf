"""Calibration evidence: impostor and genuine similarities of identity-labeled photos."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from models.risk.calibration import BIN_COUNT, EDGES, MIN_SUPPORT, Calibration, Tail, bin_indices, fit_tail, histogram
from models.runtime.network import Float

TAIL_QUANTILE = 0.999
MAX_STORED_IMPOSTORS = 1000
BLOCK_ROWS = 256
MIN_IMPOSTOR_PAIRS: Final = 10_000
MIN_GENUINE_PAIRS: Final = MIN_SUPPORT
MIN_DUPLICATE_SIMILARITY: Final = 0.9999
"""Photos at least this similar are copies of one photo."""
REPORTED_RATES: Final = (1e-2, 1e-3, 1e-4, 1e-5)
COARSE_STEP: Final = 10
"""Bins between two similarities with a stored variance."""
COARSE_EDGES: Final = EDGES[::COARSE_STEP]


def calibrate(vectors: Float, labels: Sequence[str], data: str) -> dict[str, Any]:
    """Compare all photos with each other and return the document of calibration.json.

    Copies of a photo count once, or not at all if they are labeled as different people.

    Args:
        vectors: (n, d) unit vectors.
        labels: (n,) person of each.
        data: description of the photos, for the record.

    Raises:
        ValueError: too few pairs of either kind.
    """
    who = np.unique(np.asarray(labels), return_inverse=True)[1]
    distinct_rows = find_distinct_photos(vectors, who)
    copies = len(vectors) - len(distinct_rows)
    vectors, who = vectors[distinct_rows], who[distinct_rows]
    impostor_counts, genuine_counts = histogram(np.empty(0)), histogram(np.empty(0))
    exceeding = np.zeros((who.max() + 1, len(COARSE_EDGES)))
    compared = np.zeros(who.max() + 1)
    largest = np.empty(0, np.float32)
    tail_size = max(MAX_STORED_IMPOSTORS, int(len(vectors) ** 2 * (1 - TAIL_QUANTILE)))
    for rows, similarity in _similarities(vectors):
        upper = np.arange(len(vectors))[None] > rows[:, None]
        same = who[rows][:, None] == who[None]
        impostors = similarity[upper & ~same]
        impostor_counts += histogram(impostors)
        genuine_counts += histogram(similarity[upper & same])
        np.add.at(exceeding, who[rows], _count_at_or_above(similarity, ~same))
        np.add.at(compared, who[rows], (~same).sum(1))
        largest = np.sort(np.concatenate([largest, impostors]))[::-1][:tail_size]
    pairs, genuine_pairs = int(impostor_counts.sum()), int(genuine_counts.sum())
    if pairs < MIN_IMPOSTOR_PAIRS or genuine_pairs < MIN_GENUINE_PAIRS:
        raise ValueError(
            f"{len(vectors)} usable photos of {len(np.unique(who))} people give {pairs:,} pairs of different people "
            f"and {genuine_pairs:,} of the same, too few to calibrate. The minimum is {MIN_IMPOSTOR_PAIRS:,} "
            f"and {MIN_GENUINE_PAIRS}, such as 75 people with two photos each"
        )
    tail = _tail(largest.astype(np.float64), pairs)
    known_at, variances = _variances(exceeding, compared)
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
        "largest_impostors": [round(float(v), 5) for v in largest[:MAX_STORED_IMPOSTORS]],
        "tail": dict(vars(tail)),
        "variances": [known_at, variances],
    }


def _count_at_or_above(similarity: Float, chosen: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return (rows, similarities) counts of selected entries per row at or above each of COARSE_EDGES."""
    coarse = bin_indices(similarity) // COARSE_STEP
    cells = coarse + np.arange(len(coarse))[:, None] * (BIN_COUNT // COARSE_STEP)
    counts = np.bincount(cells[chosen], minlength=len(coarse) * BIN_COUNT // COARSE_STEP)
    counts = counts.reshape(len(coarse), -1)[:, ::-1].cumsum(1)[:, ::-1]
    return np.concatenate([counts, np.zeros((len(coarse), 1))], 1)


def find_distinct_photos(vectors: Float, who: NDArray[np.integer[Any]]) -> NDArray[np.intp]:
    """Return the rows of distinct photos: the first copy of each, none if its copies have different labels.

    A copy is a pair of similarity 1. As genuine pair it makes FNMR too optimistic; as impostor pair it dominates the
    tail.
    """
    pairs = [
        np.column_stack([rows[near], found])
        for rows, similarity in _similarities(vectors)
        for near, found in [np.nonzero(similarity > MIN_DUPLICATE_SIMILARITY)]
    ]
    first, second = np.concatenate(pairs).T if pairs else np.empty((2, 0), np.intp)
    graph = coo_array((np.ones(len(first), bool), (first, second)), shape=(len(vectors),) * 2)
    photo = connected_components(graph, directed=False)[1]
    people_of_photo = np.bincount(np.unique(np.column_stack([photo, who]), axis=0)[:, 0])
    first_rows = np.unique(photo, return_index=True)[1]
    return np.asarray(first_rows[people_of_photo == 1])


def _similarities(vectors: Float) -> Iterator[tuple[NDArray[np.intp], Float]]:
    """Yield blocks of rows with their (r, n) cosines to all vectors."""
    for start in range(0, len(vectors), BLOCK_ROWS):
        block = vectors[start : start + BLOCK_ROWS]
        yield np.arange(start, start + len(block)), np.clip(block @ vectors.T, -1, 1)


def describe_calibration(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the names and values of a calibration for a table."""
    calibration = Calibration.from_document(document)
    counts = [
        (name.replace("_", " ").capitalize(), f"{document[name]:,}")
        for name in ("people", "images", "photos_without_face", "copies", "impostor_pairs", "genuine_pairs")
        if name in document
    ]
    at_rates = []
    for rate in REPORTED_RATES:
        threshold = calibration.curve.threshold_at_fmr(rate)
        if threshold.value > 1:
            at_rates.append((f"Threshold at FMR {rate:g}", "unreachable: too many identical vectors"))
            continue
        mark = " (extrapolated)" if threshold.extrapolated else ""
        missed = calibration.fnmr(threshold.value)
        at_rates.append((f"Threshold at FMR {rate:g}", f"{threshold.value:.3f}{mark}, FNMR {missed:.2%}"))
    middle = calibration.equal_error_threshold()
    return [*counts, *at_rates, ("EER", f"{calibration.fnmr(middle):.2%} (threshold {middle:.3f})")]


def _tail(largest: NDArray[np.float64], pairs: int) -> Tail:
    """Fit the tail beyond the 99.9th percentile of all pairs."""
    count = max(50, round(pairs * (1 - TAIL_QUANTILE)))
    ordered = np.sort(largest)[::-1]
    if len(ordered) <= count:
        count = len(ordered) - 1
    start = float(ordered[count])
    excess = ordered[:count] - start
    return fit_tail(excess[excess > 0], np.ones(int((excess > 0).sum())), start, count / pairs)


def _variances(exceeding: NDArray[np.float64], compared: NDArray[np.float64]) -> tuple[list[float], list[float]]:
    """Return the variance of ln FMR at some similarities, over the choice of people, since pairs share people.

    Four times the variance of a ratio of sums over people (W. Hoeffding, 1948, for pairs; the factor as in
    models.risk.gallery_risk). Similarities with fewer than 30 pairs are left out: there the uncertainty of the tail
    dominates.

    Args:
        exceeding: (people, similarities) a person's comparisons that reach each of COARSE_EDGES.
        compared: (people,) a person's comparisons.
    """
    above = exceeding.sum(0)
    share = above / compared.sum()
    residual = exceeding - share * compared[:, None]
    enough = above / 2 >= MIN_SUPPORT
    variance = 4 * (residual[:, enough] ** 2).sum(0) / above[enough] ** 2
    return [round(float(t), 3) for t in COARSE_EDGES[enough]], [float(f"{v:.3g}") for v in variance]
