"""A subject's score from its templates. Pure; each rule's scores have a distribution of their own.

``max``: the most similar template. ``mean_top_k``: the mean of the three most similar, of all where there are fewer.
``centroid``: the cosine to the templates' mean. ``quality_weighted``: the same, each template weighing as its quality
score does.
"""

from __future__ import annotations

from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from models.network import Float

Fusion = Literal["max", "mean_top_k", "centroid", "quality_weighted"]
OneVector = Literal["centroid", "quality_weighted"]
ONE_VECTOR: Final[tuple[OneVector, ...]] = ("centroid", "quality_weighted")
TOP_K: Final = 3
DEFAULT_FUSION: Final[Fusion] = "quality_weighted"
"""Which misses fewest (docs/decisions/0018)."""
NO_DIRECTION: Final = 1e-6
"""Of the length of a mean of unit vectors: below it, what is left is rounding."""
TEMPLATES_AT_ONCE: Final = 2048
"""That are in memory several times while their subjects' vectors are made."""
CELLS_AT_ONCE: Final = 1 << 20
"""Of similarities being fused: few enough to stay in a processor's cache."""
Keys = NDArray[np.int64]


def scores(probes: Float, vectors: Float, subject_pks: Keys, qualities: Float, fusion: Fusion) -> Float:
    """The fused similarity of every probe to every subject, by brute force.

    Args:
        probes: (q, d) unit vectors.
        vectors: (m, d) unit vectors of templates.
        subject_pks: (m,) whose each is, ascending.
        qualities: (m,) scores in [0, 1], NaN where unknown.

    Returns:
        (q, s), subjects in the order of their keys. Beside it, and the (s, d) of a rule of one vector a subject, little
        memory is used.
    """
    if fusion == "centroid" or fusion == "quality_weighted":
        return probes @ subject_vectors(vectors, subject_pks, qualities, fusion).T
    return _mean_of_best(probes, vectors, subject_pks, 1 if fusion == "max" else TOP_K)


def subject_vectors(vectors: Float, subject_pks: Keys, qualities: Float, fusion: OneVector) -> Float:
    """The one vector that stands for each subject; arguments as of :func:`scores`.

    Returns:
        (s, d) of unit norm; zero, which is similar to nobody, where a subject's templates cancel each other out. Beside
        it, little memory is used.
    """
    _, starts, counts = np.unique(subject_pks, return_index=True, return_counts=True)
    ends = starts + counts
    found = np.empty((len(starts), vectors.shape[1]), np.float32)
    first = 0
    while first < len(starts):
        last = max(first + 1, int(np.searchsorted(ends, starts[first] + TEMPLATES_AT_ONCE, "right")))
        part = slice(int(starts[first]), int(ends[last - 1]))
        found[first:last] = _means(vectors[part], subject_pks[part], qualities[part], fusion)
        first = last
    return found


def _means(vectors: Float, subject_pks: Keys, qualities: Float, fusion: OneVector) -> Float:
    _, starts, counts = np.unique(subject_pks, return_index=True, return_counts=True)
    weighted = vectors if fusion == "centroid" else vectors * _weights(qualities, subject_pks, starts, counts)[:, None]
    means = np.add.reduceat(weighted, starts, axis=0, dtype=np.float64) / counts[:, None]
    lengths = np.linalg.norm(means, axis=1, keepdims=True)
    return np.asarray(np.where(lengths > NO_DIRECTION, means / np.maximum(lengths, NO_DIRECTION), 0), np.float32)


def _weights(qualities: Float, subject_pks: Keys, starts: Keys, counts: Keys) -> Float:
    """(m,), of mean 1 within each subject."""
    known = np.add.reduceat(~np.isnan(qualities), starts, dtype=np.int64)
    ascending = qualities[np.lexsort((qualities, subject_pks))]  # within a subject; NaN come last
    low, high = ascending[starts + np.maximum(known - 1, 0) // 2], ascending[starts + known // 2]
    median = np.where(known > 0, (low + high) / 2, 1)
    weights = np.where(np.isnan(qualities), np.repeat(median, counts), qualities)
    means = np.add.reduceat(weights, starts, dtype=np.float64) / counts
    # Nothing but templates of quality 0: they still are all there is.
    weights = np.where(np.repeat(means > 0, counts), weights, 1)
    return np.asarray(weights / np.repeat(np.where(means > 0, means, 1), counts), np.float32)


def _mean_of_best(probes: Float, vectors: Float, subject_pks: Keys, k: int) -> Float:
    """(q, s) mean of each subject's ``k`` highest similarities, of all it has if fewer."""
    _, starts, counts = np.unique(subject_pks, return_index=True, return_counts=True)
    fused = np.empty((len(probes), len(starts)), np.float32)
    # Subjects with most templates first: those with a j-th template are the first so many of a block.
    order = np.argsort(-counts, kind="stable")
    size = max(1, CELLS_AT_ONCE // max(1, len(probes)))
    for begin in range(0, len(order), size):
        block = order[begin : begin + size]
        best = np.full((k, len(probes), len(block)), -np.inf, np.float32)
        for j in range(counts[block[0]]):
            having = int((counts[block] > j).sum())
            left = probes @ vectors[starts[block[:having]] + j].T
            if j == 0:
                best[0] = left
                continue
            for place in best[: j + 1, :, :having]:
                higher = np.maximum(place, left)
                np.minimum(place, left, out=left)
                place[:] = higher
        total = best[0]
        for j in range(1, k):
            having = int((counts[block] > j).sum())
            total[:, :having] += best[j, :, :having]
        # Where all have as many templates, blocks are neighbours, which are written much faster as such.
        columns = slice(block[0], block[-1] + 1) if (np.diff(block) == 1).all() else block
        fused[:, columns] = total / np.minimum(counts[block], k).astype(np.float32)
    return fused
