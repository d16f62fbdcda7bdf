"""Score fusion: the similarity of a probe to a subject with several templates. Pure functions.

- ``max``: similarity of the most similar template.
- ``mean_top_k``: mean of the three most similar templates, or of all if there are fewer.
- ``centroid``: cosine to the mean template.
- ``quality_weighted``: cosine to the mean template, weighted by quality scores.

Each rule has its own score distribution, so thresholds do not transfer between rules.
"""

from __future__ import annotations

from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from kith.wire.common import Fusion
from models.runtime.network import Float

VectorFusion = Literal["centroid", "quality_weighted"]
VECTOR_FUSIONS: Final[tuple[VectorFusion, ...]] = ("centroid", "quality_weighted")
TOP_K: Final = 3
DEFAULT_FUSION: Final[Fusion] = "quality_weighted"
"""Rule with the lowest FNIR (docs/decisions/0018)."""
MIN_MEAN_NORM: Final = 1e-6
"""Norm of a mean of unit vectors below which its direction is rounding noise."""
MAX_BLOCK_TEMPLATES: Final = 2048
"""Templates per block; several copies of a block are in memory."""
MAX_BLOCK_CELLS: Final = 1 << 20
"""Similarities per block, which fit in a processor's cache."""
Ints = NDArray[np.int64]
"""Keys of subjects, positions or counts, (n,)."""


def fuse_similarities(probes: Float, vectors: Float, subject_pks: Ints, qualities: Float, fusion: Fusion) -> Float:
    """Compute the fused similarity of every probe to every subject, by brute force.

    Args:
        probes: (q, d) unit vectors.
        vectors: (m, d) unit vectors of templates.
        subject_pks: (m,) subject key of each template, ascending.
        qualities: (m,) scores in [0, 1], NaN if unknown.

    Returns:
        (q, s) similarities, subjects in ascending order of their keys.
    """
    if fusion == "centroid" or fusion == "quality_weighted":
        return probes @ subject_vectors(vectors, subject_pks, qualities, fusion).T
    return _mean_of_best(probes, vectors, subject_pks, 1 if fusion == "max" else TOP_K)


def subject_vectors(vectors: Float, subject_pks: Ints, qualities: Float, fusion: VectorFusion) -> Float:
    """Compute one vector per subject. Arguments as in :func:`fuse_similarities`.

    Returns:
        (s, d) unit vectors. A subject whose templates cancel each other out gets the zero vector.
    """
    _, starts, counts = np.unique(subject_pks, return_index=True, return_counts=True)
    ends = starts + counts
    found = np.empty((len(starts), vectors.shape[1]), np.float32)
    first = 0
    while first < len(starts):
        last = max(first + 1, int(np.searchsorted(ends, starts[first] + MAX_BLOCK_TEMPLATES, "right")))
        part = slice(int(starts[first]), int(ends[last - 1]))
        found[first:last] = _mean_vectors(vectors[part], subject_pks[part], qualities[part], fusion)
        first = last
    return found


def _mean_vectors(vectors: Float, subject_pks: Ints, qualities: Float, fusion: VectorFusion) -> Float:
    _, starts, counts = np.unique(subject_pks, return_index=True, return_counts=True)
    weighted = (
        vectors if fusion == "centroid" else vectors * _quality_weights(qualities, subject_pks, starts, counts)[:, None]
    )
    means = np.add.reduceat(weighted, starts, axis=0, dtype=np.float64) / counts[:, None]
    lengths = np.linalg.norm(means, axis=1, keepdims=True)
    return np.asarray(np.where(lengths > MIN_MEAN_NORM, means / np.maximum(lengths, MIN_MEAN_NORM), 0), np.float32)


def _quality_weights(qualities: Float, subject_pks: Ints, starts: Ints, counts: Ints) -> Float:
    """Return (m,) weights with mean 1 within each subject. Unknown qualities count as the subject's median."""
    known = np.add.reduceat(~np.isnan(qualities), starts, dtype=np.int64)
    ascending = qualities[np.lexsort((qualities, subject_pks))]  # per subject, NaN last
    low, high = ascending[starts + np.maximum(known - 1, 0) // 2], ascending[starts + known // 2]
    median = np.where(known > 0, (low + high) / 2, 1)
    weights = np.where(np.isnan(qualities), np.repeat(median, counts), qualities)
    means = np.add.reduceat(weights, starts, dtype=np.float64) / counts
    # If all qualities of a subject are 0, weight its templates equally.
    weights = np.where(np.repeat(means > 0, counts), weights, 1)
    return np.asarray(weights / np.repeat(np.where(means > 0, means, 1), counts), np.float32)


def _mean_of_best(probes: Float, vectors: Float, subject_pks: Ints, k: int) -> Float:
    """Return the (q, s) means of each subject's ``k`` highest similarities."""
    _, starts, counts = np.unique(subject_pks, return_index=True, return_counts=True)
    fused = np.empty((len(probes), len(starts)), np.float32)
    # Subjects with the most templates first, so that those with a j-th template are a prefix of the block.
    order = np.argsort(-counts, kind="stable")
    size = max(1, MAX_BLOCK_CELLS // max(1, len(probes)))
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
        # A slice is written much faster than an index array.
        columns = slice(block[0], block[-1] + 1) if (np.diff(block) == 1).all() else block
        fused[:, columns] = total / np.minimum(counts[block], k).astype(np.float32)
    return fused
