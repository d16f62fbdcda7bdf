"""A subject's score from its templates: against its definition, and what follows from it."""

from __future__ import annotations

import math
import statistics
import tracemalloc
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from models.runtime.network import Float
from models.vision.recognition import l2_normalize
from service.domain.fusion import MAX_BLOCK_TEMPLATES, Ints, fuse_similarities, subject_vectors

DIMENSION = 8


def fused_similarity(probe: Float, vectors: Sequence[Float], qualities: Sequence[float]) -> float:
    """The definition, in float64, one subject at a time."""
    wide = np.stack(vectors).astype(np.float64)
    known = [q for q in qualities if not math.isnan(q)]
    missing = statistics.median(known) if known else 1.0
    weights = np.array([missing if math.isnan(q) else q for q in qualities])
    weights = weights if weights.any() else np.ones(len(wide))
    mean = weights @ wide
    return float(mean @ probe / np.linalg.norm(mean))


@st.composite
def galleries(draw: st.DrawFn, most_templates: int = 9) -> tuple[Float, Float, Ints, Float]:
    """Probes, vectors, whose each is, qualities."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    counts = draw(st.lists(st.integers(1, most_templates), min_size=1, max_size=12))
    qualities = draw(
        st.lists(
            st.one_of(st.just(math.nan), st.just(0.0), st.floats(0.01, 1)), min_size=sum(counts), max_size=sum(counts)
        )
    )
    keys = np.repeat(np.sort(rng.choice(1000, len(counts), replace=False)), counts)
    vectors = l2_normalize(rng.normal(size=(len(keys), DIMENSION)))
    return l2_normalize(rng.normal(size=(3, DIMENSION))), vectors, keys, np.array(qualities, np.float32)


@given(galleries())
def test_a_score_is_its_definition(drawn: tuple[Float, Float, Ints, Float]) -> None:
    probes, vectors, keys, qualities = drawn
    expected = [
        [fused_similarity(p, list(vectors[keys == key]), qualities[keys == key].tolist()) for p in probes]
        for key in np.unique(keys)
    ]
    np.testing.assert_allclose(fuse_similarities(probes, vectors, keys, qualities), np.transpose(expected), atol=1e-4)


def test_little_memory_is_used_beside_one_vector_a_subject(rng: np.random.Generator) -> None:
    """Evidence uses all templates of a gallery, so additional copies of them would exhaust memory."""
    each = np.append(rng.integers(1, 4, 10_000), 2 * MAX_BLOCK_TEMPLATES)
    keys = np.repeat(np.arange(len(each)), each)
    vectors, qualities = l2_normalize(rng.normal(size=(len(keys), 128))), rng.random(len(keys), np.float32)
    tracemalloc.start()
    found = subject_vectors(vectors, keys, qualities)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < found.nbytes + vectors.nbytes
    for subject in (0, 5000, 9999, 10_000):
        own = keys == subject
        (alone,) = subject_vectors(vectors[own], keys[own], qualities[own])
        np.testing.assert_array_equal(found[subject], alone)


def test_templates_that_cancel_out_are_similar_to_nobody(rng: np.random.Generator) -> None:
    vectors = l2_normalize(rng.normal(size=(2, DIMENSION)))
    found = subject_vectors(
        np.stack([vectors[0], -vectors[0], vectors[1]]), np.array([3, 3, 5]), np.ones(3, np.float32)
    )
    np.testing.assert_allclose(found, [np.zeros(DIMENSION), vectors[1]], atol=1e-6)
