"""Recall of an index against exhaustive search, measured with probes derived from the gallery's own vectors."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from models.runtime.network import Float
from models.vision.recognition import l2_normalize
from service.index.protocol import StoppedError
from service.index.segments import ROWS_PER_GATHER, View

PROBES: Final = 1000
"""Resolution of the estimate: one miss is 0.001."""
PROBE_SIMILARITY: Final = 0.4
"""Cosine similarity of a probe to its vector: about the threshold of a large gallery. Less similar vectors are never
returned as matches, and more similar ones are easier to find."""
NOISE: Final = 1e-6
NEAREST: Final = 10
RECALL_OF_NEAREST: Final = 0.95
"""Recall of the NEAREST that a depth should reach: they are listed as candidates, and the second tells how unusual the
first one is."""
PROBES_PER_BATCH: Final = 32
TOLERANCE: Final = 1e-5
"""Similarities this close are ties, or differ by rounding."""


@dataclass(frozen=True)
class Measurement:
    """Recall@1 at ``depth`` (0 to 1), of a gallery with ``size`` structured vectors after ``moved`` changes."""

    recall: float
    depth: int
    size: int
    moved: int


def measure(view: View, depths: Sequence[int], promise: float, stopped: Callable[[], bool]) -> Measurement:
    """Measure recall at the first of the ascending depths that keeps the promise and reaches RECALL_OF_NEAREST, or at
    the last.

    Only vectors that have structures count: the others are compared anyway.

    Raises:
        StoppedError: ``stopped`` returned true.
    """
    part = replace(view, segments=tuple(s for s in view.segments if s.structure is not None))
    probes = probes_of(part, np.random.default_rng(len(part)))
    best = nearest(replace(part, depth=None), probes)
    for depth in depths:
        if stopped():
            raise StoppedError
        recall, of_nearest = recall_of(part, probes, best, depth)
        if recall >= promise and of_nearest >= RECALL_OF_NEAREST:
            break
    return Measurement(recall, depth, len(part), view.moved)


def probes_of(view: View, rng: np.random.Generator) -> Float:
    """Return (q, d) unit vectors, each at PROBE_SIMILARITY to one of the gallery's vectors.

    The orthogonal part comes from a second vector of the gallery, so that probes have its distribution.
    """
    sample = sample_of(view, 2 * min(PROBES, len(view) // 2), rng)
    own, others = np.split(rng.permutation(sample), 2)
    # Noise, because both vectors may be the same.
    others = others + NOISE * rng.standard_normal(others.shape, np.float32)
    aside = l2_normalize(others - (own * others).sum(1, keepdims=True) * own)
    return np.asarray(PROBE_SIMILARITY * own + np.sqrt(1 - PROBE_SIMILARITY**2) * aside, np.float32)


def sample_of(view: View, size: int, rng: np.random.Generator) -> Float:
    """Return (size, d) distinct live vectors, in storage order."""
    places = np.sort(rng.choice(len(view), size, replace=False))
    sample = np.empty((size, view.segments[0].vectors.shape[1]), np.float32)
    before = taken = 0
    for segment in view.segments:
        chosen = places[np.searchsorted(places, before) : np.searchsorted(places, before + segment.live)]
        rows = np.flatnonzero(segment.alive)[chosen - before]
        for start in range(0, len(rows), ROWS_PER_GATHER):
            part = rows[start : start + ROWS_PER_GATHER]
            sample[taken : taken + len(part)] = segment.vectors[part]
            taken += len(part)
            time.sleep(0)  # numpy holds the GIL while it gathers
        before += segment.live
    return sample


def recall_of(view: View, probes: Float, best: Float, depth: int) -> tuple[float, float]:
    """Return recall of the first and of the NEAREST at ``depth``, relative to the ``best`` similarities."""
    found = nearest(replace(view, depth=depth), probes)
    at_1, at_10 = found[:, 0] >= best[:, 0] - TOLERANCE, found >= best[:, -1:] - TOLERANCE
    return float(at_1.mean()), float(at_10.mean())


def nearest(view: View, probes: Float) -> Float:
    """Return the (q, <= NEAREST) highest similarities."""
    starts = range(0, len(probes), PROBES_PER_BATCH)
    return np.concatenate(
        [view.search(probes[start : start + PROBES_PER_BATCH], NEAREST).similarities for start in starts]
    )
