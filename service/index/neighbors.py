"""Most similar other vectors of each vector, without a matrix of all pairs."""

from __future__ import annotations

import numpy as np

from models.risk.albums import NEIGHBORS, Neighbors
from models.runtime.network import Float
from service.index.faiss_structures import exact


def nearest(vectors: Float, count: int = NEIGHBORS) -> Neighbors:
    """Return the ``count`` most similar other vectors of each of (n, d) unit vectors, fewer if there are fewer."""
    size = len(vectors)
    kept = min(count, max(0, size - 1))
    similarities, rows = exact(vectors, vectors, min(kept + 1, max(1, size)))
    own = rows == np.arange(size)[:, None]
    own[~own.any(1), -1] = True  # more than ``count`` copies come before the vector itself
    others = ~own
    return Neighbors(rows[others].reshape(size, kept).astype(np.int64), similarities[others].reshape(size, kept))
