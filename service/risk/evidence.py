"""Impostor scores of a gallery: a sample of its subjects, each searched among all other subjects. Pure functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from models.risk.calibration import BIN_COUNT
from models.risk.impostor_evidence import GenuineProbes, ImpostorEvidence
from models.runtime.network import Float
from service.domain.fusion import Ints, fuse_similarities, subject_vectors
from service.domain.gallery import Snapshot

MAX_PROBES: Final = 2048
"""Sampled subjects, which bounds the cost for galleries of any size."""
MAX_BLOCK_CELLS: Final = 16_000_000
"""Similarities in memory at a time."""


def impostor_evidence(
    snapshot: Snapshot, vectors_of: Callable[[Float, Ints, Float], Float] = subject_vectors
) -> ImpostorEvidence:
    """Search one template of each sampled subject among all other subjects, and count the similarities.

    The template is also compared with the other templates of its own subject. The sample depends on the subject keys
    only. So all processes draw the same sample, and adding or removing a subject hardly changes it.

    ``vectors_of``: the vectors of subjects from their templates, keys and qualities.
    """
    pks, first, templates = np.unique(snapshot.subject_pks, return_index=True, return_counts=True)
    sample = np.argsort(_hashes(pks), kind="stable") if len(pks) > 1 else np.empty(0, np.int64)
    drawn = np.sort(sample[:MAX_PROBES])
    probes, places = snapshot.vectors[first[drawn]], np.arange(len(drawn))
    pairs = np.zeros(BIN_COUNT, np.int64)
    nearest = np.full((len(drawn), 2), -1.0)
    ends = first + templates
    width = max(1, MAX_BLOCK_CELLS // max(1, len(drawn)))
    for begin in range(0, len(pks) if len(drawn) else 0, width):
        end = min(begin + width, len(pks))
        part = slice(int(first[begin]), int(ends[end - 1]))
        found = probes @ vectors_of(snapshot.vectors[part], snapshot.subject_pks[part], snapshot.qualities[part]).T
        own = np.flatnonzero((drawn >= begin) & (drawn < end))
        found[own, drawn[own] - begin] = -1.0
        for row in found:
            pairs += _fast_histogram(row)
        best = found.argmax(1)
        highest = found[places, best]
        found[places, best] = -1.0
        nearest = np.sort(np.column_stack([nearest, highest, found.max(1)]))[:, :1:-1]
    pairs[0] -= len(drawn)  # the own subjects
    genuine = _genuine_probes(snapshot, first[drawn], templates[drawn])
    return ImpostorEvidence.of(pairs, nearest, len(pks), len(snapshot.vectors), genuine)


def _fast_histogram(similarities: Float) -> NDArray[np.int64]:
    """Count similarities by bin in single precision, in which a similarity on a border may fall either way."""
    counts = np.bincount((similarities * (BIN_COUNT / 2) + BIN_COUNT / 2).astype(np.int64), minlength=BIN_COUNT)
    counts[BIN_COUNT - 1] += counts[BIN_COUNT:].sum()
    return counts[:BIN_COUNT]


def _genuine_probes(snapshot: Snapshot, first: Ints, templates: Ints) -> GenuineProbes:
    """Compare the first template of each subject with the subject's others."""
    fused, single = np.full(len(first), np.nan), np.full(len(first), np.nan)
    for i in np.flatnonzero(templates > 1):
        probe, others = snapshot.vectors[first[i]], slice(first[i] + 1, first[i] + templates[i])
        vectors, qualities = snapshot.vectors[others], snapshot.qualities[others]
        one = np.zeros(len(vectors), np.int64)
        fused[i] = fuse_similarities(probe[None], vectors, one, qualities)[0, 0]
        single[i] = float((vectors @ probe).mean())
    return GenuineProbes(fused, single, templates)


def _hashes(keys: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Hash each key to 64 bits (finalizer of MurmurHash3, A. Appleby)."""
    h = keys.astype(np.uint64)
    for shift, factor in ((33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53)):
        h = (h ^ (h >> np.uint64(shift))) * np.uint64(factor)
    return np.asarray(h ^ (h >> np.uint64(33)))
