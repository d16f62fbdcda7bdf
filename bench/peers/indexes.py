"""Vector indexes of other libraries, to search beside Kith's: FAISS's own, hnswlib and usearch.

Each is built with the library's usual settings for 512 dimensions, and left out if the library is not installed
(``pip install hnswlib usearch``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import numpy as np

from models.runtime.network import Float
from models.runtime.onnx_runtime import available_cores
from service.index.faiss_structures import api as faiss

LINKS: Final = 32
BUILD_DEPTH: Final = 128
SEARCH_DEPTH: Final = 128
LISTS_PER_ROOT: Final = 4
"""Lists of an inverted file, in square roots of its size (FAISS's guidelines: 4 to 16)."""
VISITED_SHARE: Final = 16
"""One of so many lists is searched."""
TRAINING_VECTORS: Final = 100_000
Search = Callable[[Float, int], Float]
"""Function of (q, d) ``probes`` and ``k`` to (q, k) similarities, best first."""


def indexes(held: Float) -> Iterator[tuple[str, Callable[[], Search]]]:
    """Yield the name of each index and the function that builds it over (n, d) unit vectors."""
    links = f"{LINKS} links, depth {SEARCH_DEPTH}"
    yield f"FAISS HNSW, {links}", lambda: _faiss_graph(held)
    yield f"FAISS IVF, 1 of {VISITED_SHARE} lists", lambda: _faiss_lists(held)
    yield "FAISS 8 bits a number", lambda: _faiss_bytes(held)
    if find_spec("hnswlib") is not None:
        yield f"hnswlib, {links}", lambda: _hnswlib(held)
    if find_spec("usearch") is not None:
        yield f"usearch, {links}", lambda: _usearch(held)


def _faiss_graph(held: Float) -> Search:
    index = faiss.IndexHNSWFlat(held.shape[1], LINKS, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction, index.hnsw.efSearch = BUILD_DEPTH, SEARCH_DEPTH
    index.add(held)
    return lambda probes, k: np.asarray(index.search(probes, k)[0])


def _faiss_lists(held: Float) -> Search:
    lists = int(LISTS_PER_ROOT * np.sqrt(len(held)))
    quantizer = faiss.IndexFlatIP(held.shape[1])
    index = faiss.IndexIVFFlat(quantizer, held.shape[1], lists, faiss.METRIC_INNER_PRODUCT)
    index.train(held[:: max(1, len(held) // TRAINING_VECTORS)])
    index.add(held)
    index.nprobe = lists // VISITED_SHARE
    return lambda probes, k, keep=quantizer: np.asarray(index.search(probes, k)[0])  # type: ignore[misc]


def _faiss_bytes(held: Float) -> Search:
    index = faiss.IndexScalarQuantizer(held.shape[1], faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT)
    index.train(held[:: max(1, len(held) // TRAINING_VECTORS)])
    index.add(held)
    # Its similarities are rounded: the exact ones tell whether it found the nearest.
    return lambda probes, k: _exact(probes, held, index.search(probes, k)[1])


def _hnswlib(held: Float) -> Search:
    index: Any = import_module("hnswlib").Index(space="ip", dim=held.shape[1])
    index.init_index(max_elements=len(held), ef_construction=BUILD_DEPTH, M=LINKS)
    index.set_num_threads(available_cores())
    index.add_items(held)
    index.set_ef(SEARCH_DEPTH)
    return lambda probes, k: 1 - np.asarray(index.knn_query(probes, k)[1])


def _usearch(held: Float) -> Search:
    library: Any = import_module("usearch.index")
    index = library.Index(
        ndim=held.shape[1],
        metric="ip",
        dtype="f32",
        connectivity=LINKS,
        expansion_add=BUILD_DEPTH,
        expansion_search=SEARCH_DEPTH,
    )
    index.add(np.arange(len(held)), held, threads=available_cores())

    def search(probes: Float, k: int) -> Float:
        distances = index.search(probes, k, threads=available_cores() if len(probes) > 1 else 1).distances
        return 1 - np.asarray(distances, np.float32).reshape(len(probes), -1)

    return search


def _exact(probes: Float, held: Float, rows: Any) -> Float:
    found = np.einsum("qd,qkd->qk", probes, held[rows])
    return np.asarray(-np.sort(-found, axis=1), np.float32)
