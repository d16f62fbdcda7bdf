"""Grouping of an album's faces."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from models.risk.albums import MIN_FACES, NEIGHBORS, AlbumRisk, Neighbors, group_faces, mean_similarities
from models.risk.calibration import Calibration, Ints
from models.runtime.network import Float
from service.index.faiss_structures import exact

Group = list[tuple[int, float | None]]
"""Rows of faces, and certainties: the probability that a face and the others of its group are one person."""


def group_faces_of_album(
    vectors: Float, photos: Ints, pack: Calibration, risk: float
) -> tuple[list[Group], float | None]:
    """Group (n, d) unit vectors of usable faces in (n,) photos. Return the groups, the largest first, then single
    faces, and the similarity from which groups merged; None if there are too few faces to group.

    The order of the rows decides between equals, so it must not depend on names or times.

    Args:
        risk: accepted share of pairs of faces in one group that are two people, in (0, 1).
    """
    if len(vectors) < MIN_FACES:
        return singles(range(len(vectors))), None
    near = nearest(vectors)
    album = AlbumRisk.of(vectors, photos, near, pack)
    threshold = album.threshold(risk)
    found = group_faces(vectors, photos, near, threshold, album.same_picture)
    several = sorted((rows for rows in found if len(rows) > 1), key=lambda rows: (-len(rows), rows[0]))
    groups: list[Group] = [
        list(zip(rows, map(album.certainty, mean_similarities(vectors, rows).tolist()), strict=True))
        for rows in several
    ]
    return groups + singles(rows[0] for rows in found if len(rows) == 1), threshold


def singles(rows: Iterable[int]) -> list[Group]:
    """Return groups of one face each, which is certain of nothing."""
    return [[(row, None)] for row in rows]


def nearest(vectors: Float, count: int = NEIGHBORS) -> Neighbors:
    """Return the ``count`` most similar other vectors of each of (n, d) unit vectors, fewer if there are fewer."""
    size = len(vectors)
    kept = min(count, max(0, size - 1))
    similarities, rows = exact(vectors, vectors, min(kept + 1, max(1, size)))
    own = rows == np.arange(size)[:, None]
    own[~own.any(1), -1] = True  # more than ``count`` copies come before the vector itself
    others = ~own
    return Neighbors(rows[others].reshape(size, kept).astype(np.int64), similarities[others].reshape(size, kept))
