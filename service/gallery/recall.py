"""How often an index finds what comparing every vector finds, on probes made of the gallery's own vectors. Pure."""

from __future__ import annotations

import time
from typing import Final

import numpy as np

from models.network import Float
from models.recognition import unit
from service.gallery.index import Recall
from service.gallery.segments import ROWS_PICKED, View

SAMPLE: Final = 1000
"""Probes: of a promise of 0.999 one miss."""
PROBE_SIMILARITY: Final = 0.4
"""Of a probe to the vector that it is made of: about the threshold of a large gallery. Who is less alike is not named
anyway, who is more alike is easier to find."""
NOISE: Final = 1e-6
NEAREST: Final = 10
PROBES_AT_ONCE: Final = 32
SAME: Final = 1e-5
"""Two similarities as near as this are a tie, or differ by rounding."""


def probes_of(view: View, rng: np.random.Generator) -> Float:
    """(q, d) unit vectors, each as similar to one of the gallery's as PROBE_SIMILARITY. The rest of it is another
    vector's, so that probes lie where the gallery's vectors do."""
    sample = sample_of(view, 2 * min(SAMPLE, len(view) // 2), rng)
    own, others = np.split(rng.permutation(sample), 2)
    # A little of no direction in particular, for the two may be one.
    others = others + NOISE * rng.standard_normal(others.shape, np.float32)
    aside = unit(others - (own * others).sum(1, keepdims=True) * own)
    return np.asarray(PROBE_SIMILARITY * own + np.sqrt(1 - PROBE_SIMILARITY**2) * aside, np.float32)


def sample_of(view: View, size: int, rng: np.random.Generator) -> Float:
    """(size, d) of the living vectors, none twice, in the order in which they are held."""
    places = np.sort(rng.choice(len(view), size, replace=False))
    sample = np.empty((size, view.segments[0].vectors.shape[1]), np.float32)
    before = taken = 0
    for segment in view.segments:
        chosen = places[np.searchsorted(places, before) : np.searchsorted(places, before + segment.live)]
        rows = np.flatnonzero(segment.alive)[chosen - before]
        for start in range(0, len(rows), ROWS_PICKED):
            part = rows[start : start + ROWS_PICKED]
            sample[taken : taken + len(part)] = segment.vectors[part]
            taken += len(part)
            time.sleep(0)
        before += segment.live
    return sample


def expected(view: View, probes: Float) -> Float:
    """(q, <= NEAREST) similarities that comparing every vector finds."""
    parts = [
        view.search(probes[start : start + PROBES_AT_ONCE], NEAREST, None).similarities
        for start in range(0, len(probes), PROBES_AT_ONCE)
    ]
    return np.concatenate(parts)


def recall_of(view: View, probes: Float, best: Float, depth: int, promise: float) -> Recall:
    """At ``depth``, beside the ``best`` that :func:`expected` found."""
    at_1, at_10 = [], []
    for start in range(0, len(probes), PROBES_AT_ONCE):
        part = slice(start, start + PROBES_AT_ONCE)
        found = view.search(probes[part], NEAREST, depth).similarities
        at_1.append(found[:, 0] >= best[part, 0] - SAME)
        at_10.append((found >= best[part, -1:] - SAME).mean(1))
    return Recall(
        float(np.concatenate(at_1).mean()),
        float(np.concatenate(at_10).mean()),
        len(probes),
        PROBE_SIMILARITY,
        promise,
    )
