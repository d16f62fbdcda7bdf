"""Segments of an index, and exact search over them. All objects are immutable.

A search takes one ``View`` and needs no lock: each change creates a new view that shares unchanged segments. Sealed
segments are sorted by key. They may have a structure that finds candidates, which are then compared exactly.
The last segment, the tail, takes new vectors and is compared exhaustively. A removed vector stays as a tombstone until
its segment is rebuilt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.runtime.network import Float
from service.domain.gallery import Keys
from service.index.faiss_structures import exact, products, similarities_at
from service.index.protocol import Structure

Mask = NDArray[np.bool_]
ROWS_PER_BLOCK: Final = 16_384
"""Rows compared at once: their similarities stay in the processor's cache."""
ROWS_PER_GATHER: Final = 4096
"""Rows gathered at once: numpy holds the GIL meanwhile."""
MAX_NUMPY_PROBES: Final = 8
"""Probes up to which ranking in numpy is faster than FAISS."""
MAX_GATHER_SHARE_EXACT: Final = 0.3
MAX_GATHER_SHARE_STRUCTURED: Final = 0.02
"""Share of a segment that passes a filter, up to which gathering and comparing these rows is cheapest."""
MAX_CANDIDATE_SHARE: Final = 0.25
"""Share of a segment above which comparing everything is cheaper than asking for so many candidates."""


class Matches(NamedTuple):
    """(q, m) similarities, best first, with keys; -inf and -1 fill gaps."""

    similarities: Float
    keys: Keys

    def at(self, columns: Keys) -> Matches:
        """Return the (q, m) selected columns of each probe."""
        return Matches(np.take_along_axis(self.similarities, columns, 1), np.take_along_axis(self.keys, columns, 1))


class Rows(NamedTuple):
    """(n,) keys, and (n, d) unit vectors."""

    keys: Keys
    vectors: Float

    def at(self, chosen: slice | Keys) -> Rows:
        return Rows(self.keys[chosen], self.vectors[chosen])


@dataclass(frozen=True, eq=False)
class Segment:
    """(n, d) vectors with (n,) keys. Rows that are not ``alive`` are tombstones; ``number`` is unique."""

    number: int
    vectors: Float
    keys: Keys
    alive: Mask
    live: int
    sealed: bool
    structure: Structure | None = None

    @classmethod
    def seal(cls, number: int, rows: Rows, structure: Structure | None = None) -> Segment:
        """Return a sealed segment of rows sorted by key."""
        alive = np.ones(len(rows.keys), np.bool_)
        return cls(number, rows.vectors, rows.keys, alive, len(alive), True, structure)

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def dead(self) -> int:
        return len(self.keys) - self.live

    def rows_of_keys(self, keys: Keys) -> Keys:
        """Return the live rows with these ascending keys."""
        if not self.sealed:
            return np.flatnonzero(_contained(self.keys, keys) & self.alive)
        rows = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        rows = rows[self.keys[rows] == keys]
        return np.asarray(rows[self.alive[rows]], np.int64)

    def without(self, rows: Keys) -> Segment:
        """Return the segment with these rows as tombstones."""
        alive = self.alive.copy()
        alive[rows] = False
        return replace(self, alive=alive, live=self.live - len(rows))

    @property
    def rows(self) -> Rows:
        """All rows, tombstones included."""
        return Rows(self.keys, self.vectors)


class Hits(NamedTuple):
    """(q, m) unordered similarities and rows of one segment; -inf and -1 fill gaps."""

    similarities: Float
    rows: Keys


@dataclass(frozen=True, eq=False)
class View:
    """State of a gallery at one ``sequence`` of its change log.

    Attributes:
        moved: vectors added or removed since the gallery was loaded.
        depth: candidates per segment with a structure that keep the promised recall; None until that has been
            measured: compare every vector.
    """

    segments: tuple[Segment, ...] = ()
    sequence: int = 0
    moved: int = 0
    depth: int | None = None

    def __len__(self) -> int:
        return sum(segment.live for segment in self.segments)

    @cached_property
    def structured(self) -> int:
        """Number of vectors in segments with a structure."""
        return sum(segment.live for segment in self.segments if segment.structure is not None)

    def contains(self, keys: Keys) -> Mask:
        """Return which of these ascending keys have a vector."""
        found = np.zeros(len(keys), np.bool_)
        for segment in self.segments:
            found[np.searchsorted(keys, segment.keys[segment.rows_of_keys(keys)])] = True
        return found

    def search(self, probes: Float, k: int, among: Keys | None = None) -> Matches:
        """Return the ``k`` most similar vectors for each of (q, d) probes.

        Args:
            among: ascending keys to search; None: all.
        """
        probes, depth = np.ascontiguousarray(probes, np.float32), self.depth
        none = np.full((len(probes), 0), -1, np.int64)
        found = [Matches(none.astype(np.float32), none)]
        found += [
            Matches(hits.similarities, np.where(hits.rows < 0, -1, segment.keys[hits.rows]))
            for segment in self.segments
            if segment.live and (hits := _hits(segment, probes, k, depth, among)) is not None
        ]
        return _best(Matches(*(np.concatenate(parts, 1) for parts in zip(*found, strict=True))), k)


def _contained(values: Keys, ascending: Keys) -> Mask:
    if not len(ascending):
        return np.zeros(len(values), np.bool_)
    return np.asarray(ascending[np.minimum(np.searchsorted(ascending, values), len(ascending) - 1)] == values)


def _hits(segment: Segment, probes: Float, k: int, depth: int | None, among: Keys | None) -> Hits | None:
    """Return one segment's hits; None: no row passes the filter."""
    structured = segment.structure is not None and depth is not None
    allowed, available = (None if not segment.dead else segment.alive), segment.live
    if among is not None:
        rows = segment.rows_of_keys(among)
        available = len(rows)
        if not available:
            return None
        if available <= (MAX_GATHER_SHARE_STRUCTURED if structured else MAX_GATHER_SHARE_EXACT) * len(segment):
            return _gathered(segment, probes, k, rows)
        allowed = np.zeros(len(segment), np.bool_)
        allowed[rows] = True
    if structured and depth is not None:
        found = _candidates(segment, probes, max(depth, k), allowed, available)
        if found is not None:
            return Hits(similarities_at(probes, segment.vectors, found), found)
    return _every(segment, probes, k, allowed)


def _candidates(segment: Segment, probes: Float, depth: int, allowed: Mask | None, available: int) -> Keys | None:
    """Return ``depth`` candidates or more among the ``allowed`` rows. None: comparing all rows is cheaper.

    Structures cannot filter, so the number requested grows until enough candidates are allowed.
    """
    assert segment.structure is not None  # noqa: S101 - checked by the caller
    wanted = min(depth, available)
    asked = wanted if allowed is None else int(1.2 * wanted * len(segment) / available) + 16
    while asked <= MAX_CANDIDATE_SHARE * len(segment):
        rows = segment.structure.candidates(probes, asked)
        passed = rows >= 0
        if allowed is not None:
            passed &= allowed[rows]
        if (passed.sum(1) >= wanted).all():
            return np.where(passed, rows, -1)
        asked *= 4
    return None


def _gathered(segment: Segment, probes: Float, k: int, rows: Keys) -> Hits:
    kept = []
    for start in range(0, len(rows), ROWS_PER_BLOCK):
        part = rows[start : start + ROWS_PER_BLOCK]
        vectors = segment.vectors[part]
        if len(probes) > MAX_NUMPY_PROBES:
            similarities, places = exact(probes, vectors, min(k, len(part)))
        else:
            similarities, places = _top(products(probes, vectors), k)
        kept.append((similarities, part[places]))
    return _joined(kept)


def _every(segment: Segment, probes: Float, k: int, allowed: Mask | None) -> Hits:
    if len(probes) > MAX_NUMPY_PROBES:
        if allowed is not None:
            return _gathered(segment, probes, k, np.flatnonzero(allowed))
        return Hits(*exact(probes, segment.vectors, min(k, len(segment))))
    kept = []
    for start in range(0, len(segment), ROWS_PER_BLOCK):
        part = slice(start, start + ROWS_PER_BLOCK)
        similarities = products(probes, segment.vectors[part])
        if allowed is not None:
            similarities[:, ~allowed[part]] = -np.inf
        best, places = _top(similarities, k)
        kept.append((best, np.where(best > -np.inf, places + start, -1)))
    return _joined(kept)


def _top(similarities: Float, k: int) -> tuple[Float, Keys]:
    """Return the (q, <= k) highest of (q, n) similarities, unordered, and their columns."""
    if similarities.shape[1] <= k:
        return similarities, np.broadcast_to(np.arange(similarities.shape[1]), similarities.shape)
    columns = np.argpartition(similarities, -k, axis=1)[:, -k:]
    return np.take_along_axis(similarities, columns, 1), columns


def _joined(kept: Sequence[tuple[Float, Keys]]) -> Hits:
    return Hits(np.concatenate([part[0] for part in kept], 1), np.concatenate([part[1] for part in kept], 1))


def _best(found: Matches, k: int) -> Matches:
    if found.similarities.shape[1] > k:
        found = found.at(_top(found.similarities, k)[1])
    return found.at(np.lexsort((found.keys, -found.similarities), axis=1))
