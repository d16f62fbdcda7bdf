"""Groups of the faces of unlabeled photos, one per person, at a stated risk of wrong pairs. Pure functions.

The risk is the share of pairs of faces in one group that are two people. Of the pairs that reach a similarity t, a
share of FMR(t) * M / R(t) is wrong, where M pairs are of two people and R(t) pairs reach t: the false discovery rate of
Y. Benjamini and Y. Hochberg (1995). Groups merge if their similarity reaches the smallest t that meets the risk.

The similarity of two groups is the geometric mean of average and centroid linkage, exact from the sums of their
vectors. Average linkage asks too much of large groups, and centroid linkage too little (docs/decisions.md, 58). Faces
of one photo are never in one group, unless they are one picture.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from models.risk.calibration import (
    EDGES,
    MIN_SUPPORT,
    UNREACHABLE_SIMILARITY,
    Calibration,
    Floats,
    FmrCurve,
    Ints,
    count_at_or_above,
    histogram,
)
from models.risk.gallery_risk import impostor_probability
from models.risk.pair_odds import likelihood_ratios, log_ratio_at
from models.risk.tail import fit_on_scale
from models.runtime.network import Float

NEIGHBORS: Final = 32
"""Most similar faces of each face that may begin a merge. Groups inherit those of their faces."""
MAX_SAMPLE: Final = 2000
"""Faces of which all pairs are compared to fit the FMR: two million pairs."""
MAX_REPEATED: Final = 0.9
"""Largest share of pairs of an album that show one person."""
FIT_ROUNDS: Final = 2
"""Repeated people affect the fitted curve, and the curve identifies repeated people."""
SAME_PICTURE_FNMR: Final = 0.99
"""FNMR of the similarity from which two faces of a photo are one picture, as in a mirror or a collage."""
CANDIDATE_SHARE: Final = 0.8
"""Two groups may reach a threshold only if some of their faces reach this share of it: fusion adds no more."""
MIN_FACES: Final = 2
MIN_NORM: Final = 1e-6


@dataclass(frozen=True, eq=False)
class Neighbors:
    """Most similar other faces: (n, k) rows, and (n, k) similarities."""

    rows: Ints
    similarities: Float


@dataclass(frozen=True, eq=False)
class AlbumRisk:
    """False match rate of an album's faces.

    Attributes:
        curve: FMR of single similarities.
        repeated_share: estimated share of pairs that show one person.
        above: (2001,) estimated numbers of pairs at or above EDGES, among ``pairs``.
        pairs: number of pairs that may be one person.
        same_picture: similarity from which two faces of a photo are one picture.
        ratios: (2001,) likelihood ratios at EDGES, one person over two.
    """

    curve: FmrCurve
    repeated_share: float
    above: Floats
    pairs: int
    same_picture: float
    ratios: Floats

    @classmethod
    def of(cls, vectors: Float, photos: Ints, neighbors: Neighbors, pack: Calibration) -> AlbumRisk:
        """Fit the risk of (n, d) unit vectors of faces in (n,) photos, at least MIN_FACES.

        The pack gives the prior of the curve. The album gives the pairs within photos, of different people, and the
        pairs across photos, each with the probability that it shows different people.
        """
        same_picture = pack.threshold_at_fnmr(SAME_PICTURE_FNMR)
        within = _similarities_within(vectors, photos)
        known = histogram(within[within < same_picture])
        rows = np.unique(np.linspace(0, len(vectors) - 1, min(len(vectors), MAX_SAMPLE)).round().astype(np.int64))
        across = _histogram_across(vectors[rows], photos[rows]) / 2
        curve, share = _fit(across, known, len(rows), pack)
        pairs = len(vectors) * (len(vectors) - 1) // 2 - int(known.sum())
        above = _pairs_above(across, pairs, neighbors, photos, same_picture)
        ratios = likelihood_ratios(curve, pack.genuine)
        return cls(curve, share, above, pairs, same_picture, ratios)

    def threshold(self, risk: float) -> float:
        """Return the smallest similarity from which at most a share ``risk``, in (0, 1), of pairs is two people.

        UNREACHABLE_SIMILARITY if no pair is similar enough.
        """
        wrong = self.curve.rates * (self.pairs * (1 - self.repeated_share))
        fitting = np.flatnonzero((self.above > 0) & (wrong <= risk * self.above))
        return float(EDGES[fitting[0]]) if len(fitting) else UNREACHABLE_SIMILARITY

    def certainty(self, similarity: float) -> float:
        """Return the probability that two faces with a similarity are one person, given the album's share of them."""
        share = min(max(self.repeated_share, 1 / max(2, self.pairs)), MAX_REPEATED)
        log_odds = log_ratio_at(self.ratios, similarity) + math.log(share / (1 - share))
        return 1 / (1 + math.exp(-log_odds))


def group_faces(
    vectors: Float, photos: Ints, neighbors: Neighbors, threshold: float, same_picture: float
) -> list[list[int]]:
    """Return the rows of each group, loners included, in the order of their first rows.

    The most similar two groups merge first.

    Args:
        vectors: (n, d) unit vectors.
        photos: (n,) photo of each face.
        threshold: similarity of groups that merge.
        same_picture: similarity from which two faces of a photo are one picture.
    """
    return _Merging(vectors, photos, neighbors, threshold, same_picture).groups()


class _Merging:
    """State of agglomerative clustering. A group is named by one of its rows.

    The heap holds the best partner of each group, as it was when the group last changed. An entry whose partner changed
    since is computed again when it is the largest: no pair is more similar than it was for both of its groups then.
    """

    def __init__(
        self, vectors: Float, photos: Ints, neighbors: Neighbors, threshold: float, same_picture: float
    ) -> None:
        count = len(vectors)
        self._threshold = threshold
        self._sums = np.array(vectors, np.float32)
        self._sizes = [1] * count
        self._weights = np.ones(count)
        """(n,) square roots of the number of faces times the length of their sum."""
        self._members: list[list[int]] = [[row] for row in range(count)]
        self._pictures = _pictures(vectors, photos, same_picture)
        """Pictures by group and photo: the first row of each. Faces alone in their photo are left out."""
        self._versions = [0] * count
        self._near = _candidates(neighbors, CANDIDATE_SHARE * threshold)
        self._heap: list[tuple[float, int, int, int, int]] = []

    def groups(self) -> list[list[int]]:
        for row in range(len(self._near)):
            self._push_best(row)
        while self._heap:
            _, row, other, version, other_version = heapq.heappop(self._heap)
            if version != self._versions[row]:
                continue
            if other_version == self._versions[other]:
                if self._may_merge(row, other):
                    self._merge(row, other)
                    continue
                self._near[row].discard(other)
                self._near[other].discard(row)
            self._push_best(row)
        return sorted(sorted(members) for members in self._members if members)

    def _merge(self, row: int, other: int) -> None:
        kept, gone = (row, other) if len(self._near[row]) >= len(self._near[other]) else (other, row)
        self._sums[kept] += self._sums[gone]
        self._sizes[kept] += self._sizes[gone]
        self._weights[kept] = math.sqrt(self._sizes[kept] * max(float(np.linalg.norm(self._sums[kept])), MIN_NORM))
        self._members[kept] += self._members[gone]
        self._members[gone] = []
        self._pictures[kept] = self._pictures[kept] | self._pictures[gone]
        self._pictures[gone] = {}
        for near in self._near[gone]:
            self._near[near].discard(gone)
            self._near[near].add(kept)
        self._near[kept] |= self._near[gone]
        self._near[kept] -= {kept, gone}
        self._near[gone] = set()
        self._versions[kept] += 1
        self._versions[gone] = -1
        self._push_best(kept)

    def _push_best(self, row: int) -> None:
        """Add the most similar group near a group, if it reaches the threshold."""
        near = self._near[row]
        if not near:
            return
        others = np.fromiter(near, np.int64, len(near))
        scores = (self._sums[others] @ self._sums[row]) / (self._weights[others] * self._weights[row])
        best = int(scores.argmax())
        if (score := float(scores[best])) >= self._threshold:
            other = int(others[best])
            heapq.heappush(self._heap, (-score, row, other, self._versions[row], self._versions[other]))

    def _may_merge(self, row: int, other: int) -> bool:
        few, many = sorted((self._pictures[row], self._pictures[other]), key=len)
        return all(many.get(photo, picture) == picture for photo, picture in few.items())


def mean_similarities(vectors: Float, rows: Sequence[int]) -> Floats:
    """Return the mean similarity of each face of a group, given by its rows, to the others of the group."""
    chosen = vectors[list(rows)].astype(np.float64)
    return np.asarray((chosen @ chosen.sum(0) - (chosen**2).sum(1)) / max(1, len(rows) - 1))


def _similarities_within(vectors: Float, photos: Ints) -> Floats:
    """Return the similarities of all pairs of faces within photos."""
    found = [np.zeros(0)]
    for rows in _shared(photos):
        first, second = np.triu_indices(len(rows), 1)
        found.append(np.einsum("nd,nd->n", vectors[rows[first]], vectors[rows[second]], dtype=np.float64))
    return np.concatenate(found)


def _shared(photos: Ints) -> list[Ints]:
    """Return the rows of each photo with several faces."""
    order = np.argsort(photos, kind="stable")
    _, starts = np.unique(photos[order], return_index=True)
    return [rows for rows in np.split(order, starts[1:]) if len(rows) > 1]


def _histogram_across(vectors: Float, photos: Ints) -> Ints:
    """Return the (2000,) histogram of each face's similarities to the faces of other photos."""
    counts = np.zeros(len(EDGES) - 1, np.int64)
    for row, vector in enumerate(vectors):
        counts += histogram(vectors[photos != photos[row]] @ vector)
    return counts


def _fit(across: Floats, known: Ints, faces: int, pack: Calibration) -> tuple[FmrCurve, float]:
    """Return the curve, and the share of pairs across photos that show one person. Each depends on the other."""
    curve, share = pack.curve, 0.0
    for _ in range(FIT_ROUNDS if across.sum() + known.sum() else 0):
        probability = impostor_probability(across, curve.rates, pack.genuine, MAX_REPEATED)
        different = across * probability
        share = 1 - float(different.sum()) / max(1.0, float(across.sum()))
        counts = different + known
        curve = fit_on_scale(pack.curve.scale, counts, 1, min(1.0, faces / float(counts.sum()))).curve
    return curve, share


def _pairs_above(sampled: Floats, pairs: int, neighbors: Neighbors, photos: Ints, same_picture: float) -> Floats:
    """Return estimated numbers of pairs at or above EDGES: of neighbors, or of the sample, whichever shows more."""
    first = np.repeat(np.arange(len(photos)), neighbors.rows.shape[1])
    second, similarities = neighbors.rows.ravel(), neighbors.similarities.ravel()
    allowed = (photos[first] != photos[second]) | (similarities >= same_picture)
    low, high = np.minimum(first, second)[allowed], np.maximum(first, second)[allowed]
    _, unique = np.unique(low * len(photos) + high, return_index=True)
    counted = count_at_or_above(histogram(similarities[allowed][unique]))
    above = count_at_or_above(sampled)
    scaled = np.where(above >= MIN_SUPPORT, above * (pairs / max(1.0, float(above[0]))), 0.0)
    return np.maximum(counted, np.minimum(scaled, pairs))


def _candidates(neighbors: Neighbors, floor: float) -> list[set[int]]:
    near: list[set[int]] = [set() for _ in range(len(neighbors.rows))]
    for first, second in np.argwhere(neighbors.similarities >= floor).tolist():
        other = int(neighbors.rows[first, second])
        near[first].add(other)
        near[other].add(first)
    return near


def _pictures(vectors: Float, photos: Ints, same_picture: float) -> list[dict[int, int]]:
    """Return the picture of each face by its photo. Faces of one picture have the number of the first of them."""
    pictures: dict[int, dict[int, int]] = defaultdict(dict)
    for rows in _shared(photos):
        alike = vectors[rows] @ vectors[rows].T >= same_picture
        for place, row in enumerate(rows.tolist()):
            first = int(np.flatnonzero(alike[place])[0]) if alike[place].any() else place
            pictures[row][int(photos[row])] = int(rows[min(first, place)])
    return [pictures.get(row, {}) for row in range(len(vectors))]
