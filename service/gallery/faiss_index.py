"""The default index: exact inner products by FAISS, in process. The only faiss import."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from models.runtime import Float

# It reports each faster build that its wheel does not have as if that were a fault.
logging.getLogger("faiss.loader").setLevel(logging.WARNING)

import faiss  # noqa: E402


class FaissIndex:
    """Exact cosine search over unit vectors of length ``dimension``."""

    def __init__(self, dimension: int) -> None:
        self._index = faiss.IndexIDMap2(faiss.IndexFlatIP(dimension))
        self._keys: set[int] = set()

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, keys: Sequence[int], vectors: Float) -> None:
        self.remove(keys)
        self._index.add_with_ids(np.ascontiguousarray(vectors, np.float32), np.asarray(keys, np.int64))
        self._keys.update(keys)

    def remove(self, keys: Sequence[int]) -> None:
        known = [key for key in keys if key in self._keys]
        if known:
            self._index.remove_ids(faiss.IDSelectorBatch(np.asarray(known, np.int64)))
            self._keys.difference_update(known)

    def search(self, probes: Float, k: int, among: NDArray[np.int64] | None = None) -> tuple[Float, NDArray[np.int64]]:
        options = None if among is None else faiss.SearchParameters(sel=faiss.IDSelectorBatch(among))  # type: ignore[call-arg]
        similarities, keys = self._index.search(np.ascontiguousarray(probes, np.float32), k, params=options)
        return np.asarray(similarities, np.float32), np.asarray(keys, np.int64)
