"""Vector indexes of other libraries, to search beside Kith's: FAISS's own, hnswlib and usearch.

Each is built with the library's usual settings for 512 dimensions, and left out if the library is not installed
(``pip install hnswlib usearch``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import numpy as np

from models.runtime.network import Float
from models.runtime.onnx_runtime import available_cores
from service.index.faiss_structures import api as faiss
from service.index.faiss_structures import similarities_at

LINKS: Final = 32
DEPTH: Final = 128
"""Of building and of searching."""
LISTS_PER_ROOT: Final = 4
"""Lists of an inverted file, in square roots of its size (FAISS's guidelines: 4 to 16)."""
VISITED_SHARE: Final = 16
"""One of so many lists is searched."""
TRAINING_VECTORS: Final = 100_000
Search = Callable[[Float], Float]
"""Function of (q, d) ``probes`` to (q, k) similarities, best first."""


def indexes(held: Float, k: int) -> Iterator[tuple[str, Callable[[], Search]]]:
    """Yield the name of each index and the function that builds it over (n, d) unit vectors, to find ``k`` of them."""
    lists, links = int(LISTS_PER_ROOT * np.sqrt(len(held))), f"{LINKS} links, depth {DEPTH}"
    depths = f"efConstruction={DEPTH},efSearch={DEPTH}"
    yield f"FAISS HNSW, {links}", partial(_faiss, held, k, f"HNSW{LINKS},Flat", depths)
    visited = f"nprobe={lists // VISITED_SHARE}"
    yield f"FAISS IVF, 1 of {VISITED_SHARE} lists", partial(_faiss, held, k, f"IVF{lists},Flat", visited)
    yield "FAISS 8 bits a number", partial(_faiss, held, k, "SQ8", "")
    if find_spec("hnswlib") is not None:
        yield f"hnswlib, {links}", partial(_hnswlib, held, k)
    if find_spec("usearch") is not None:
        yield f"usearch, {links}", partial(_usearch, held, k)


def _faiss(held: Float, k: int, factory: str, parameters: str) -> Search:
    index = faiss.index_factory(held.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
    if parameters:
        faiss.ParameterSpace().set_index_parameters(index, parameters)
    index.train(held[:: max(1, len(held) // TRAINING_VECTORS)])
    index.add(held)
    if factory != "SQ8":
        return lambda probes: np.asarray(index.search(probes, k)[0])
    # Its similarities are rounded: the exact ones tell whether it found the nearest.
    return lambda probes: -np.sort(-similarities_at(probes, held, index.search(probes, k)[1]), axis=1)


def _hnswlib(held: Float, k: int) -> Search:
    index: Any = import_module("hnswlib").Index(space="ip", dim=held.shape[1])
    index.init_index(max_elements=len(held), ef_construction=DEPTH, M=LINKS)
    index.set_num_threads(available_cores())
    index.add_items(held)
    index.set_ef(DEPTH)
    return lambda probes: 1 - np.asarray(index.knn_query(probes, k)[1])


def _usearch(held: Float, k: int) -> Search:
    options = {"metric": "ip", "dtype": "f32", "connectivity": LINKS, "expansion_add": DEPTH, "expansion_search": DEPTH}
    index: Any = import_module("usearch.index").Index(ndim=held.shape[1], **options)
    index.add(np.arange(len(held)), held, threads=available_cores())

    def search(probes: Float) -> Float:
        found = index.search(probes, k, threads=available_cores() if len(probes) > 1 else 1)
        return 1 - np.asarray(found.distances, np.float32).reshape(len(probes), -1)

    return search
