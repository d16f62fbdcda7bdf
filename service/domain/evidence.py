"""Impostor scores of a gallery: a sample of its subjects, each searched among all other subjects. Pure functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from models.risk.calibration import BIN_COUNT, EDGES, bin_indices, count_at_or_above
from models.risk.gallery_risk import ImpostorEvidence
from models.runtime.network import Float
from service.domain.fusion import Fusion, fuse_similarities, subject_vectors
from service.domain.gallery import Snapshot

MAX_PROBES: Final = 2048
"""Sampled subjects, which bounds the cost for galleries of any size."""
MAX_BLOCK_CELLS: Final = 4_000_000
"""Similarities in memory at a time."""


def impostor_evidence(snapshot: Snapshot, fusion: Fusion) -> ImpostorEvidence:
    """Search one template of each sampled subject among all other subjects, and count the similarities.

    The sample depends on the subject keys only. So all processes draw the same sample, and adding or removing a subject
    hardly changes it.
    """
    pks, first = np.unique(snapshot.subject_pks, return_index=True)
    drawn = np.sort(np.argsort(_hashes(pks), kind="stable")[:MAX_PROBES])
    fuse = _fusion_function(snapshot, fusion)
    counts, best = np.zeros(BIN_COUNT, np.int64), np.zeros(BIN_COUNT, np.int64)
    squares = np.zeros(len(EDGES))
    size = max(1, MAX_BLOCK_CELLS // max(1, len(pks)))
    for start in range(0, len(drawn) if len(pks) > 1 else 0, size):
        rows = drawn[start : start + size]
        binned = bin_indices(fuse(snapshot.vectors[first[rows]]))
        for row, own in zip(binned, rows, strict=True):
            histogram = np.bincount(row, minlength=BIN_COUNT)
            histogram[row[own]] -= 1
            counts += histogram
            squares += count_at_or_above(histogram) ** 2
            best[np.flatnonzero(histogram)[-1]] += 1
    return ImpostorEvidence(counts, squares, best, len(drawn), len(pks))


def _fusion_function(snapshot: Snapshot, fusion: Fusion) -> Callable[[Float], Float]:
    """Return a function from (q, d) probes to (q, s) fused similarities; subject vectors are computed once."""
    known = snapshot.vectors, snapshot.subject_pks, snapshot.qualities
    if fusion == "centroid" or fusion == "quality_weighted":
        subjects = subject_vectors(*known, fusion)
        return lambda probes: probes @ subjects.T
    return lambda probes: fuse_similarities(probes, *known, fusion)


def _hashes(keys: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Hash each key to 64 bits (finalizer of MurmurHash3, A. Appleby)."""
    h = keys.astype(np.uint64)
    for shift, factor in ((33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53)):
        h = (h ^ (h >> np.uint64(shift))) * np.uint64(factor)
    return np.asarray(h ^ (h >> np.uint64(33)))
