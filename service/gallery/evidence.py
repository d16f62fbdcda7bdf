"""What a gallery's templates say about strangers: each of some subjects searched for among all the others. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from models.gallery_risk import ImpostorEvidence
from models.network import Float
from models.risk import BIN_COUNT, EDGES, above, bins
from service.gallery.fusion import Fusion, scores, subject_vectors
from service.gallery.subjects import Snapshot

MAX_PROBES: Final = 2048
"""Subjects that are searched for; a gallery's evidence costs at most this many searches, however large it is."""
CELLS_AT_ONCE: Final = 4_000_000
"""Similarities in memory."""


def impostor_evidence(snapshot: Snapshot, fusion: Fusion) -> ImpostorEvidence:
    """Search for one template of each subject, of at most MAX_PROBES of them, among all other subjects.

    Which subjects are drawn depends on their keys alone, so that every process draws the same, and a subject that came
    or went hardly changes the draw.
    """
    pks, first = np.unique(snapshot.subject_pks, return_index=True)
    drawn = np.sort(np.argsort(_hashes(pks), kind="stable")[:MAX_PROBES])
    fuse = _fuser(snapshot, fusion)
    counts, best = np.zeros(BIN_COUNT, np.int64), np.zeros(BIN_COUNT, np.int64)
    squares = np.zeros(len(EDGES))
    size = max(1, CELLS_AT_ONCE // max(1, len(pks)))
    for start in range(0, len(drawn) if len(pks) > 1 else 0, size):
        rows = drawn[start : start + size]
        binned = bins(fuse(snapshot.vectors[first[rows]]))
        for row, own in zip(binned, rows, strict=True):
            histogram = np.bincount(row, minlength=BIN_COUNT)
            histogram[row[own]] -= 1
            counts += histogram
            squares += above(histogram) ** 2
            best[np.flatnonzero(histogram)[-1]] += 1
    return ImpostorEvidence(counts, squares, best, len(drawn), len(pks))


def _fuser(snapshot: Snapshot, fusion: Fusion) -> Callable[[Float], Float]:
    """(q, d) probes to (q, s) fused similarities; what the rule makes of the templates alone is made once."""
    known = snapshot.vectors, snapshot.subject_pks, snapshot.qualities
    if fusion == "centroid" or fusion == "quality_weighted":
        stood_for = subject_vectors(*known, fusion)
        return lambda probes: probes @ stood_for.T
    return lambda probes: scores(probes, *known, fusion)


def _hashes(keys: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Well mixed 64 bits of each key (the finaliser of MurmurHash3, A. Appleby)."""
    h = keys.astype(np.uint64)
    for shift, factor in ((33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53)):
        h = (h ^ (h >> np.uint64(shift))) * np.uint64(factor)
    return np.asarray(h ^ (h >> np.uint64(33)))
