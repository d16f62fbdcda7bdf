"""FAISS: exact search of vectors that lie elsewhere, and the structures that make it faster. The only faiss import."""

from __future__ import annotations

import ctypes
import io
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from models.network import Float
from service.errors import SettingsError
from service.gallery.index import Builder, Keys, Kind, StoppedError

# It reports each faster build that its wheel does not have as if that were a fault.
logging.getLogger("faiss.loader").setLevel(logging.WARNING)

# Its threads else wait for each other by spinning, which takes the processor from those that have something to do: on
# busy cores a search of a few probes takes far longer.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import faiss  # noqa: E402

api: Any = faiss  # its stubs know half of it
# Above so many vectors faiss leaves a batch to BLAS; its own default only from 128,000 queries on.
api.cvar.distance_compute_blas_threshold = 20
THREADS: Final[int] = api.omp_get_max_threads()
FEWEST_FOR_THREADS: Final = 250_000_000
"""Multiplications, some ten milliseconds of a core. For fewer, waking a team of threads and waiting for its last costs
more than it gains."""
ROWS_IN_CACHE: Final = 1024
"""Two megabytes of vectors of 512 numbers: near enough for the next probe."""
LOOKUP_OF: Final = 4
"""Numbers of a vector that are one look into a table where it is coded."""
TRAIN_ON: Final = 50_000
"""Vectors: 16 centroids of four dimensions need no more."""
CODE_SLICE: Final = 16_384
GRAPH_SLICE: Final = 1024
GRAPH_LINKS: Final = 32
IVF_ROWS_A_LIST: Final = 1000
GPU_MOST: Final = 2048
"""Candidates that a GPU's search can return."""
COMPACT_DEPTHS: Final = (128, 256, 512, 1024, 2048)
GRAPH_DEPTHS: Final = (64, 128, 256, 512, 1024)


def exact(probes: Float, vectors: Float, k: int) -> tuple[Float, Keys]:
    """The ``k`` most similar of (n, d) vectors for each of many (q, d) probes, best first; -1 where fewer exist."""
    with _threads(len(probes) * vectors.size):
        similarities, rows = api.knn(_plain(probes), vectors, k, metric=api.METRIC_INNER_PRODUCT)
    return similarities, rows


def products(probes: Float, vectors: Float) -> Float:
    """(q, n) similarities of a few (q, d) probes to all of (n, d) vectors, by the calling thread alone.

    numpy's BLAS shares even a product of a tenth of a millisecond among threads, which look for more work until some
    20 ms after it: on two cores that cost a photo as much as the networks did (bench/searches.py).
    """
    probes, vectors = _plain(probes), _plain(vectors)
    found = np.empty((len(probes), len(vectors)), np.float32)
    for start in range(0, len(vectors), ROWS_IN_CACHE):
        part = vectors[start : start + ROWS_IN_CACHE]
        for probe, row in zip(probes, found, strict=True):
            pointers = [api.swig_ptr(array) for array in (row[start:], probe, part)]
            api.fvec_inner_products_ny(*pointers, vectors.shape[1], len(part))
    return found


def similarities_at(probes: Float, vectors: Float, rows: Keys) -> Float:
    """(q, m) similarities of each of (q, d) probes to its own (q, m) rows of (n, d) vectors; -inf where a row is -1."""
    found = np.full(rows.shape, -np.inf, np.float32)
    probes, rows = _plain(probes), np.ascontiguousarray(rows, np.int64)
    pointers = [api.swig_ptr(array) for array in (found, probes, vectors, rows)]
    with _threads(rows.size * vectors.shape[1]):
        api.fvec_inner_products_by_idx(*pointers, vectors.shape[1], *rows.shape)
    return found


def builders(device: str) -> Callable[[Kind, Float], Builder]:
    """What makes a kind's builder of a sample of a gallery's vectors, on ``device``, ``cpu`` or ``gpu``.

    Raises:
        SettingsError: there is no such device, or the faiss that is installed knows of none.
    """
    if device == "gpu":
        check_gpu()
        return _gpu_builder
    return _cpu_builder


def check_gpu() -> None:
    """Raises SettingsError where FAISS finds no GPU."""
    if not hasattr(faiss, "StandardGpuResources"):
        raise SettingsError("KITH_INDEX_DEVICE is gpu, but the faiss installed is for CPUs: install kith-face[gpu]")
    if api.get_num_gpus() < 1:
        raise SettingsError("KITH_INDEX_DEVICE is gpu, but FAISS finds no GPU: see `kith doctor`")


def _cpu_builder(kind: Kind, sample: Float) -> Builder:
    return Graphs(sample.shape[1]) if kind == "graph" else Codes(sample)


def _gpu_builder(kind: Kind, sample: Float) -> Builder:
    match kind:
        case "graph":
            return Graphs(sample.shape[1])
        case "compact":
            return GpuLists(sample)
        case "exact":
            return GpuFlats(sample.shape[1])


class Codes:
    """Product quantisation, four bits for four dimensions, scanned in a processor's registers: 1/32 of the vectors'
    bytes are read (André, Kermarrec and Le Scouarnec, arXiv:1704.07355 and 1812.09162)."""

    kind: Kind = "compact"
    depths: tuple[int, ...] = COMPACT_DEPTHS

    def __init__(self, sample: Float) -> None:
        """Train on at most TRAIN_ON of (n, d) vectors, at least 16; ``d`` a multiple of 4."""
        self._empty = api.index_factory(sample.shape[1], f"PQ{sample.shape[1] // 4}x4fs", api.METRIC_INNER_PRODUCT)
        self._empty.pq.cp.min_points_per_centroid = 1
        self._empty.train(_plain(sample[:TRAIN_ON]))

    def build(self, vectors: Float, stopped: Callable[[], bool]) -> CodesOf:
        index = api.clone_index(self._empty)
        for start in range(0, len(vectors), CODE_SLICE):
            _check(stopped)
            index.add(vectors[start : start + CODE_SLICE])
        return CodesOf(index, vectors)


class CodesOf:
    """Safe to search from several threads."""

    def __init__(self, index: Any, vectors: Float) -> None:
        # Of faiss's kernels the one that keeps a block of codes in registers for all probes of a batch, and collects
        # candidates in reservoirs. What faiss picks by itself takes a batch half as long again.
        index.implem = 15
        self._index = index
        self.vectors = vectors
        self.memory_bytes = len(vectors) * vectors.shape[1] // 8

    def candidates(self, probes: Float, depth: int) -> tuple[Float, Keys]:
        with _threads(len(probes) * self.vectors.size // LOOKUP_OF):
            scores, rows = self._index.search(_plain(probes), depth)
        return scores, rows


class Graphs:
    """Hierarchical navigable small worlds (Malkov and Yashunin, arXiv:1603.09320): a search visits a few hundred
    vectors, whatever the size."""

    kind: Kind = "graph"
    depths: tuple[int, ...] = GRAPH_DEPTHS

    def __init__(self, dimension: int) -> None:
        self._dimension = dimension

    def build(self, vectors: Float, stopped: Callable[[], bool]) -> Graph:
        index = api.IndexHNSWFlat(self._dimension, GRAPH_LINKS, api.METRIC_INNER_PRODUCT)
        with _all_threads():
            for start in range(0, len(vectors), GRAPH_SLICE):
                _check(stopped)
                index.add(vectors[start : start + GRAPH_SLICE])
        return Graph(index)


class Graph:
    """Safe to search from several threads."""

    def __init__(self, index: Any, storage: Any = None) -> None:
        """``storage``: a flat index that holds the vectors, where ``index`` does not own one itself."""
        self._index = index
        self.vectors = _lent(storage or api.downcast_index(index.storage), (index, storage))
        self.memory_bytes = index.hnsw.neighbors.size() * 4 + index.hnsw.offsets.size() * 8

    def candidates(self, probes: Float, depth: int) -> tuple[Float, Keys]:
        options = api.SearchParametersHNSW(efSearch=depth)
        with _threads(len(probes) * depth * GRAPH_LINKS * self.vectors.shape[1]):
            scores, rows = self._index.search(_plain(probes), depth, params=options)
        return scores, rows

    def links(self) -> bytes:
        """The graph without its vectors."""
        written = io.BytesIO()
        writer = api.PyCallbackIOWriter(written.write)
        api.write_index(self._index, writer, api.IO_FLAG_SKIP_STORAGE)
        return written.getvalue()

    @classmethod
    def of_links(cls, links: bytes, vectors: Float) -> Graph:
        """What :meth:`links` gave, with the vectors that it is of."""
        index = api.deserialize_index(np.frombuffer(links, np.uint8))
        storage = api.IndexFlatIP(vectors.shape[1])
        for start in range(0, len(vectors), CODE_SLICE):
            storage.add(vectors[start : start + CODE_SLICE])
        index.storage, index.own_fields = storage, False
        return cls(index, storage)


class GpuFlats:
    """Every vector is compared, by the GPU: 16 bits a number, so that the best are compared once more in full."""

    kind: Kind = "exact"
    depths: tuple[int, ...] = COMPACT_DEPTHS

    def __init__(self, dimension: int) -> None:
        self._dimension = dimension

    def build(self, vectors: Float, stopped: Callable[[], bool]) -> OnGpu:
        resources, config = api.StandardGpuResources(), api.GpuIndexFlatConfig()
        config.useFloat16 = True
        index = api.GpuIndexFlatIP(resources, self._dimension, config)
        for start in range(0, len(vectors), CODE_SLICE):
            _check(stopped)
            index.add(vectors[start : start + CODE_SLICE])
        return OnGpu(index, resources, vectors, None)


class GpuLists:
    """Inverted lists on the GPU: only the lists nearest to a probe are compared."""

    kind: Kind = "compact"
    depths: tuple[int, ...] = COMPACT_DEPTHS

    def __init__(self, sample: Float) -> None:
        self._sample = _plain(sample[:TRAIN_ON])

    def build(self, vectors: Float, stopped: Callable[[], bool]) -> OnGpu:
        lists = max(1, min(len(vectors), 39 * len(self._sample)) // IVF_ROWS_A_LIST)
        resources = api.StandardGpuResources()
        dimension = vectors.shape[1]
        index = api.GpuIndexIVFFlat(resources, dimension, lists, api.METRIC_INNER_PRODUCT)
        index.train(self._sample)
        for start in range(0, len(vectors), CODE_SLICE):
            _check(stopped)
            index.add(vectors[start : start + CODE_SLICE])
        return OnGpu(index, resources, vectors, lists)


class OnGpu:
    """A GPU's index; its searches wait for each other there."""

    def __init__(self, index: Any, resources: Any, vectors: Float, lists: int | None) -> None:
        self._index, self._resources, self._lists = index, resources, lists
        self._lock = threading.Lock()
        self.vectors = vectors
        self.memory_bytes = 0  # of this machine's

    def candidates(self, probes: Float, depth: int) -> tuple[Float, Keys]:
        # More candidates are of use only with more lists to find them in.
        options = None
        if self._lists is not None:
            options = api.SearchParametersIVF(nprobe=min(self._lists, max(8, depth // 8)))
        with self._lock:
            scores, rows = self._index.search(_plain(probes), min(depth, GPU_MOST), params=options)
        return scores, rows


def _lent(storage: Any, owners: object) -> Float:
    """(n, d) vectors of a flat index; its ``owners`` live as long as anyone looks at them."""
    size = storage.ntotal * storage.d
    memory = (ctypes.c_float * size).from_address(int(storage.get_xb()))
    memory.owners = owners
    return np.frombuffer(memory, np.float32).reshape(-1, storage.d)


def _plain(vectors: Float) -> Float:
    return np.ascontiguousarray(vectors, np.float32)


def use_one_thread() -> None:
    """Of FAISS and its BLAS, for whatever the calling thread does from now on, but for building graphs."""
    api.omp_set_num_threads(1)


@contextmanager
def _threads(multiplications: int) -> Iterator[None]:
    """One thread for little work, else as many as the calling thread may use."""
    allowed = api.omp_get_max_threads()
    if multiplications < FEWEST_FOR_THREADS:
        api.omp_set_num_threads(1)
    try:
        yield
    finally:
        api.omp_set_num_threads(allowed)


@contextmanager
def _all_threads() -> Iterator[None]:
    allowed = api.omp_get_max_threads()
    api.omp_set_num_threads(THREADS)
    try:
        yield
    finally:
        api.omp_set_num_threads(allowed)


def _check(stopped: Callable[[], bool]) -> None:
    if stopped():
        raise StoppedError
