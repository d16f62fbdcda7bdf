"""Score fusion: a probe's similarity to a subject is the cosine to the mean of its templates, weighted by quality."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from models.runtime.network import Float

MIN_MEAN_NORM: Final = 1e-6
"""Norm of a mean of unit vectors below which its direction is rounding noise."""
MAX_BLOCK_TEMPLATES: Final = 2048
"""Templates per block; several copies of a block are in memory."""
Ints = NDArray[np.int64]
"""Keys of subjects, positions or counts, (n,)."""


def fuse_similarities(probes: Float, vectors: Float, subject_pks: Ints, qualities: Float) -> Float:
    """Compute the similarity of every probe to every subject, by brute force.

    Args:
        probes: (q, d) unit vectors.
        vectors: (m, d) unit vectors of templates.
        subject_pks: (m,) subject key of each template, ascending.
        qualities: (m,) scores in [0, 1], NaN if unknown.

    Returns:
        (q, s) similarities, subjects in ascending order of their keys.
    """
    return probes @ subject_vectors(vectors, subject_pks, qualities).T


def subject_vectors(vectors: Float, subject_pks: Ints, qualities: Float) -> Float:
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
        found[first:last] = _mean_vectors(vectors[part], subject_pks[part], qualities[part])
        first = last
    return found


def _mean_vectors(vectors: Float, subject_pks: Ints, qualities: Float) -> Float:
    _, starts, counts = np.unique(subject_pks, return_index=True, return_counts=True)
    weighted = vectors * _quality_weights(qualities, subject_pks, starts, counts)[:, None]
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
