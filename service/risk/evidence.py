"""Impostor scores of a gallery: a sample of its subjects, each searched among all other subjects. Pure functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from models.risk.calibration import BIN_COUNT, Floats
from models.risk.impostor_evidence import GenuineProbes, ImpostorEvidence, Levels, level_weight, resemblance
from models.runtime.network import Float
from service.domain.fusion import Ints, fuse_similarities, subject_vectors
from service.domain.gallery import Snapshot

MAX_PROBES: Final = 2048
"""Sampled subjects, which bounds the cost for galleries of any size."""
MAX_BLOCK_CELLS: Final = 16_000_000
"""Similarities in memory at a time."""


def impostor_evidence(
    snapshot: Snapshot, vectors_of: Callable[[Float, Ints, Float], Float] = subject_vectors, with_levels: bool = True
) -> ImpostorEvidence:
    """Search one template of each sampled subject among all other subjects, and count the similarities.

    The template is also compared with the other templates of its own subject. The sample depends on the subject keys
    only. So all processes draw the same sample, and adding or removing a subject hardly changes it.

    Args:
        vectors_of: the vectors of subjects from their templates, keys and qualities.
        with_levels: lower similarities by the levels of subjects.
    """
    pks, first, templates = np.unique(snapshot.subject_pks, return_index=True, return_counts=True)
    sample = np.argsort(_hashes(pks), kind="stable") if len(pks) > 1 else np.empty(0, np.int64)
    drawn = np.sort(sample[:MAX_PROBES])
    probes = snapshot.vectors[first[drawn]]
    weight = level_weight(len(pks)) if with_levels else 0.0
    pairs, resembling = np.zeros(BIN_COUNT, np.int64), np.zeros(len(pks))
    nearest, resembling_best = np.full((len(drawn), 2), -2.0), np.zeros(len(drawn))
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
        without = np.zeros_like(found)
        if weight:
            resembling[begin:end], without = resemblance(found)
            found -= weight * without
            found[own, drawn[own] - begin] = -2.0
        nearest, resembling_best = _nearest(nearest, resembling_best, found, without)
    pairs[0] -= len(drawn)  # the own subjects
    nearest += weight * float(np.median(resembling)) if weight else 0.0
    levels = Levels.of_resemblance(pks, weight, resembling, nearest[:, 0], resembling_best) if weight else None
    genuine = _genuine_probes(snapshot, first[drawn], templates[drawn])
    if levels is not None:
        genuine = replace(genuine, leveled=genuine.leveled - levels.values[drawn])
    return ImpostorEvidence.of(pairs, nearest, len(pks), len(snapshot.vectors), genuine, levels)


def _nearest(nearest: Floats, resembling_best: Floats, found: Float, without: Float) -> tuple[Floats, Floats]:
    """Return the two largest of each row of ``nearest`` and ``found``, and ``without`` of the largest."""
    places = np.arange(len(found))
    best = found.argmax(1)
    highest = found[places, best]
    resembling_best = np.where(highest > nearest[:, 0], without[places, best], resembling_best)
    found[places, best] = -2.0
    return np.sort(np.column_stack([nearest, highest, found.max(1)]))[:, :1:-1], resembling_best


def _fast_histogram(similarities: Float) -> NDArray[np.int64]:
    """Count similarities by bin in single precision, in which a similarity on a border may fall either way."""
    counts = np.bincount((similarities * (BIN_COUNT / 2) + BIN_COUNT / 2).astype(np.int64), minlength=BIN_COUNT)
    counts[BIN_COUNT - 1] += counts[BIN_COUNT:].sum()
    return counts[:BIN_COUNT]


def _genuine_probes(snapshot: Snapshot, first: Ints, templates: Ints) -> GenuineProbes:
    """Compare the first template of each subject with the subject's others."""
    whole, single = np.full(len(first), np.nan), np.full(len(first), np.nan)
    for i in np.flatnonzero(templates > 1):
        probe, others = snapshot.vectors[first[i]], slice(first[i] + 1, first[i] + templates[i])
        vectors, qualities = snapshot.vectors[others], snapshot.qualities[others]
        one = np.zeros(len(vectors), np.int64)
        whole[i] = fuse_similarities(probe[None], vectors, one, qualities)[0, 0]
        single[i] = float((vectors @ probe).mean())
    return GenuineProbes(whole, single, templates)


def _hashes(keys: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Hash each key to 64 bits (finalizer of MurmurHash3, A. Appleby)."""
    h = keys.astype(np.uint64)
    for shift, factor in ((33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53)):
        h = (h ^ (h >> np.uint64(shift))) * np.uint64(factor)
    return np.asarray(h ^ (h >> np.uint64(33)))
