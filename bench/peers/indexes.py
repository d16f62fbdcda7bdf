"""Vector indexes of other libraries, to search beside Kith's: FAISS's own, hnswlib and usearch.

Each is built with the library's usual settings for 512 dimensions, and left out if the library is not installed
(``pip install hnswlib usearch``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, Protocol

import numpy as np

from models.runtime.network import Float
from models.runtime.onnx_runtime import available_cores
from service.index.faiss_structures import api as faiss
from service.index.faiss_structures import similarities_at

LINKS: Final = 32
BUILD_DEPTH: Final = 128
DEPTHS: Final = (128, 512)
"""Candidates of a search in a graph: the usual number, and one at which they find 99 % of the nearest."""
LISTS_PER_ROOT: Final = 4
"""Lists of an inverted file, in square roots of its size (FAISS's guidelines: 4 to 16)."""
VISITED_SHARES: Final = (16, 4)
"""One of so many lists is searched."""
TRAINING_VECTORS: Final = 100_000


class Search(Protocol):
    """Function of (q, d) ``probes`` and a depth to (q, k) similarities, best first."""

    def __call__(self, probes: Float, depth: int) -> Float: ...


@dataclass(frozen=True)
class PeerIndex:
    """An index of another library.

    Attributes:
        depths: name of each setting of a search, and its value.
        build: function that builds the index and returns its search.
    """

    name: str
    depths: Mapping[str, int]
    build: Callable[[], Search]


def indexes(held: Float, k: int) -> Iterator[PeerIndex]:
    """Yield the indexes over (n, d) unit vectors, to find ``k`` of them."""
    lists = int(LISTS_PER_ROOT * np.sqrt(len(held)))
    graph, depths = f"{LINKS} links", {f"depth {depth}": depth for depth in DEPTHS}
    visited = {f"1 of {share} lists": lists // share for share in VISITED_SHARES}
    yield PeerIndex(f"FAISS HNSW, {graph}", depths, partial(_faiss, held, k, f"HNSW{LINKS},Flat", "efSearch"))
    yield PeerIndex("FAISS IVF", visited, partial(_faiss, held, k, f"IVF{lists},Flat", "nprobe"))
    yield PeerIndex("FAISS SQ8", {"8 bits a number": 0}, partial(_faiss, held, k, "SQ8", None))
    if find_spec("hnswlib") is not None:
        yield PeerIndex(f"hnswlib, {graph}", depths, partial(_hnswlib, held, k))
    if find_spec("usearch") is not None:
        yield PeerIndex(f"usearch, {graph}", depths, partial(_usearch, held, k))


def _faiss(held: Float, k: int, factory: str, depth_name: str | None) -> Search:
    index, space = faiss.index_factory(held.shape[1], factory, faiss.METRIC_INNER_PRODUCT), faiss.ParameterSpace()
    if depth_name == "efSearch":
        space.set_index_parameter(index, "efConstruction", BUILD_DEPTH)
    index.train(held[:: max(1, len(held) // TRAINING_VECTORS)])
    index.add(held)

    def search(probes: Float, depth: int) -> Float:
        if depth_name is not None:
            space.set_index_parameter(index, depth_name, depth)
            return np.asarray(index.search(probes, k)[0])
        # Its similarities are rounded: the exact ones tell whether it found the nearest.
        return -np.sort(-similarities_at(probes, held, index.search(probes, k)[1]), axis=1)

    return search


def _hnswlib(held: Float, k: int) -> Search:
    index: Any = import_module("hnswlib").Index(space="ip", dim=held.shape[1])
    index.init_index(max_elements=len(held), ef_construction=BUILD_DEPTH, M=LINKS)
    index.set_num_threads(available_cores())
    index.add_items(held)

    def search(probes: Float, depth: int) -> Float:
        index.set_ef(depth)
        return 1 - np.asarray(index.knn_query(probes, k)[1])

    return search


def _usearch(held: Float, k: int) -> Search:
    options = {"metric": "ip", "dtype": "f32", "connectivity": LINKS, "expansion_add": BUILD_DEPTH}
    index: Any = import_module("usearch.index").Index(ndim=held.shape[1], **options)
    index.add(np.arange(len(held)), held, threads=available_cores())

    def search(probes: Float, depth: int) -> Float:
        index.expansion_search = depth
        found = index.search(probes, k, threads=available_cores() if len(probes) > 1 else 1)
        return 1 - np.asarray(found.distances, np.float32).reshape(len(probes), -1)

    return search
