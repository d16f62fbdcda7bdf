"""FAISS adapter: exact search over numpy arrays, and approximate search structures. The only faiss import."""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from models.runtime.network import Float
from service.domain.gallery import Keys
from service.index.protocol import Builder, StoppedError

# The loader warns about every instruction set that the wheel lacks.
logging.getLogger("faiss.loader").setLevel(logging.WARNING)

# By default, OpenMP threads spin while they wait, which slows down all other threads on busy cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import faiss  # noqa: E402

api: Any = faiss  # the stubs are incomplete
# Use BLAS for batches above this size. The default threshold is far too high.
api.cvar.distance_compute_blas_threshold = 20
NICENESS: Final = 10
"""Niceness of background threads, so that searches get the processor first."""
MIN_MULTIPLICATIONS_FOR_THREADS: Final = 250_000_000
"""About 10 ms of one core. Below, starting threads and waiting for the last one costs more than it gains."""
ROWS_PER_CACHE_BLOCK: Final = 1024
"""2 MB of vectors of 512 dimensions, which stay in the cache for the next probe."""
DIMENSIONS_PER_LOOKUP: Final = 4
"""Dimensions that one table lookup covers in a coded vector, whose length must be a multiple."""
MAX_TRAINING_VECTORS: Final = 50_000
"""Enough for 16 centroids of four dimensions."""
ROWS_PER_SLICE: Final = 16_384
MAX_GPU_RESULTS: Final = 2048
"""Limit of results per search on a GPU."""
COMPACT_DEPTHS: Final = (128, 256, 512, 1024, 2048)


def exact(probes: Float, vectors: Float, k: int) -> tuple[Float, Keys]:
    """Return (q, k) similarities and rows of the most similar of (n, d) vectors, best first; -1 fills gaps."""
    with _threads(len(probes) * vectors.size):
        similarities, rows = api.knn(_contiguous(probes), vectors, k, metric=api.METRIC_INNER_PRODUCT)
    return similarities, rows


def products(probes: Float, vectors: Float) -> Float:
    """Return (q, n) similarities of a few (q, d) probes to all (n, d) vectors, in the calling thread.

    numpy's BLAS starts threads even for a product of 0.1 ms, and these spin for 20 ms afterwards. On two cores that
    cost as much per photo as the networks.
    """
    probes, vectors = _contiguous(probes), _contiguous(vectors)
    found = np.empty((len(probes), len(vectors)), np.float32)
    for start in range(0, len(vectors), ROWS_PER_CACHE_BLOCK):
        part = vectors[start : start + ROWS_PER_CACHE_BLOCK]
        for probe, row in zip(probes, found, strict=True):
            pointers = [api.swig_ptr(array) for array in (row[start:], probe, part)]
            api.fvec_inner_products_ny(*pointers, vectors.shape[1], len(part))
    return found


def similarities_at(probes: Float, vectors: Float, rows: Keys) -> Float:
    """Return (q, m) similarities of each of (q, d) probes to its own (q, m) rows of (n, d) vectors.

    -inf where a row is -1.
    """
    found = np.full(rows.shape, -np.inf, np.float32)
    probes, rows = _contiguous(probes), np.ascontiguousarray(rows, np.int64)
    pointers = [api.swig_ptr(array) for array in (found, probes, vectors, rows)]
    with _threads(rows.size * vectors.shape[1]):
        api.fvec_inner_products_by_idx(*pointers, vectors.shape[1], *rows.shape)
    return found


def finds_gpu() -> bool:
    """Return whether FAISS is built for GPUs and finds one."""
    return hasattr(faiss, "StandardGpuResources") and api.get_num_gpus() > 0


def trainer_for(device: str) -> Callable[[Float], Builder]:
    """Return the function that trains a builder on (n, d) sample vectors, for ``device`` cpu or gpu."""
    return Codes if device == "cpu" else lambda _: GpuBuilder()


class Codes:
    """Builder of product quantization: 4 bits for 4 dimensions, scanned in registers.

    Reads 1/32 of the bytes of the vectors (André, Kermarrec and Le Scouarnec, arXiv:1704.07355 and 1812.09162).
    """

    depths: tuple[int, ...] = COMPACT_DEPTHS

    def __init__(self, sample: Float) -> None:
        """Train on at most MAX_TRAINING_VECTORS of (n, d) vectors, at least 16; ``d`` a multiple of 4."""
        dimension = sample.shape[1]
        kind = f"PQ{dimension // DIMENSIONS_PER_LOOKUP}x4fs"
        self._empty = api.index_factory(dimension, kind, api.METRIC_INNER_PRODUCT)
        self._empty.pq.cp.min_points_per_centroid = 1
        self._empty.train(_contiguous(sample[:MAX_TRAINING_VECTORS]))

    def build(self, vectors: Float, stopped: Callable[[], bool]) -> CodeIndex:
        index = api.clone_index(self._empty)
        _add(index, vectors, stopped)
        return CodeIndex(index, vectors.shape)


class CodeIndex:
    """Product-quantized vectors of one segment. Safe to search from several threads."""

    def __init__(self, index: Any, shape: tuple[int, ...]) -> None:
        # Kernel that keeps a block of codes in registers for all probes and collects candidates in reservoirs. The
        # default kernel takes 50 % longer for a batch.
        index.implem = 15
        self._index = index
        self._size = math.prod(shape)

    def candidates(self, probes: Float, depth: int) -> Keys:
        with _threads(len(probes) * self._size // DIMENSIONS_PER_LOOKUP):
            rows: Keys = self._index.search(_contiguous(probes), depth)[1]
        return rows


class GpuBuilder:
    """Builder of GPU indexes, which compare every vector in fp16. Candidates are compared again in fp32."""

    depths: tuple[int, ...] = COMPACT_DEPTHS

    def build(self, vectors: Float, stopped: Callable[[], bool]) -> OnGpu:
        resources, config = api.StandardGpuResources(), api.GpuIndexFlatConfig()
        config.useFloat16 = True
        index = api.GpuIndexFlatIP(resources, vectors.shape[1], config)
        _add(index, vectors, stopped)
        return OnGpu(index, resources)


class OnGpu:
    """GPU index of one segment. Searches are serialized."""

    def __init__(self, index: Any, resources: Any) -> None:
        self._index, self._resources = index, resources
        self._lock = threading.Lock()

    def candidates(self, probes: Float, depth: int) -> Keys:
        with self._lock:
            rows: Keys = self._index.search(_contiguous(probes), min(depth, MAX_GPU_RESULTS))[1]
        return rows


def _contiguous(vectors: Float) -> Float:
    return np.ascontiguousarray(vectors, np.float32)


def lower_thread_priority() -> None:
    """Limit FAISS and its BLAS to one thread for later calls of this thread.

    On Linux, also lower its priority. Elsewhere niceness belongs to the whole process.
    """
    api.omp_set_num_threads(1)
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


@contextmanager
def _threads(multiplications: int) -> Iterator[None]:
    """Use one thread for little work, and all that the calling thread may use otherwise."""
    allowed = api.omp_get_max_threads()
    if multiplications < MIN_MULTIPLICATIONS_FOR_THREADS:
        api.omp_set_num_threads(1)
    try:
        yield
    finally:
        api.omp_set_num_threads(allowed)


def _add(index: Any, vectors: Float, stopped: Callable[[], bool]) -> None:
    for start in range(0, len(vectors), ROWS_PER_SLICE):
        if stopped():
            raise StoppedError
        index.add(vectors[start : start + ROWS_PER_SLICE])
