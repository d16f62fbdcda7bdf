"""Grouping of an album's faces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from models.risk.albums import MIN_FACES, NEIGHBORS, AlbumRisk, Neighbors, group_faces, mean_similarities
from models.risk.calibration import Calibration, Ints
from models.runtime.network import Float
from service.index.faiss_structures import exact


@dataclass(frozen=True)
class Grouping:
    """Groups of faces, given by their rows.

    Attributes:
        groups: rows and certainties of several faces, the largest group first. A certainty is the probability that the
            face and the others of its group are one person.
        singles: rows of faces that resemble no other one enough.
        threshold: similarity from which groups merged; None if there are too few faces to group.
        known_different_pairs: pairs that the photos themselves show to be two people.
    """

    groups: Sequence[Sequence[tuple[int, float]]]
    singles: Sequence[int]
    threshold: float | None
    known_different_pairs: int


def group_faces_of_album(vectors: Float, photos: Ints, pack: Calibration, risk: float) -> Grouping:
    """Group (n, d) unit vectors of usable faces in (n,) photos.

    The order of the rows decides between equals, so it must not depend on names or times.

    Args:
        risk: accepted share of pairs of faces in one group that are two people, in (0, 1).
    """
    if len(vectors) < MIN_FACES:
        return Grouping([], range(len(vectors)), None, 0)
    near = nearest(vectors)
    album = AlbumRisk.of(vectors, photos, near, pack)
    threshold = album.threshold(risk)
    found = group_faces(vectors, photos, near, threshold, album.same_picture)
    several = sorted((rows for rows in found if len(rows) > 1), key=lambda rows: (-len(rows), rows[0]))
    groups = [
        list(zip(rows, map(album.certainty, mean_similarities(vectors, rows).tolist()), strict=True))
        for rows in several
    ]
    return Grouping(groups, [rows[0] for rows in found if len(rows) == 1], threshold, album.known_pairs)


def nearest(vectors: Float, count: int = NEIGHBORS) -> Neighbors:
    """Return the ``count`` most similar other vectors of each of (n, d) unit vectors, fewer if there are fewer."""
    size = len(vectors)
    kept = min(count, max(0, size - 1))
    similarities, rows = exact(vectors, vectors, min(kept + 1, max(1, size)))
    own = rows == np.arange(size)[:, None]
    own[~own.any(1), -1] = True  # more than ``count`` copies come before the vector itself
    others = ~own
    return Neighbors(rows[others].reshape(size, kept).astype(np.int64), similarities[others].reshape(size, kept))
