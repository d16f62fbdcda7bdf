"""A gallery's vectors in segments, and what a search makes of them. Nothing here changes once it is made.

A search takes one ``View`` and needs no lock: who changes the gallery makes another view, which shares what stayed.
Sealed segments are sorted by owner and key and may have a structure that finds candidates, which are then compared
exactly; the last segment, the tail, grows by what was enrolled, and is compared whole. A vector that was removed stays
where it was, marked, until its segment is made anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.network import Float
from service.gallery.faiss_index import exact, products, similarities_at
from service.gallery.index import Keys, Structure

Mask = NDArray[np.bool_]
ROWS_AT_ONCE: Final = 16_384
"""Of similarities being ranked: few enough to stay in a processor's cache with those of a few probes."""
ROWS_PICKED: Final = 4096
"""At once: numpy lets no other thread run meanwhile."""
FEW_PROBES: Final = 8
"""Up to which ranking in numpy beats FAISS's own."""
GATHER_EXACT: Final = 0.3
GATHER_STRUCTURED: Final = 0.02
"""Shares of a segment that a filter leaves, up to which picking the rows out and comparing them all is cheapest."""
MANY: Final = 0.25
"""Share of a segment that as many candidates make that comparing everything is cheaper."""


class Found(NamedTuple):
    """(q, m) similarities, best first, with the key and the owner of each; -inf and -1 where there were fewer."""

    similarities: Float
    keys: Keys
    owners: Keys

    def at(self, columns: Keys) -> Found:
        """(q, m) of the columns of each probe."""
        return Found(
            np.take_along_axis(self.similarities, columns, 1),
            np.take_along_axis(self.keys, columns, 1),
            np.take_along_axis(self.owners, columns, 1),
        )


class Rows(NamedTuple):
    """(n,) keys and owners, and (n, d) unit vectors."""

    keys: Keys
    owners: Keys
    vectors: Float

    def at(self, chosen: slice | Keys) -> Rows:
        return Rows(self.keys[chosen], self.owners[chosen], self.vectors[chosen])


@dataclass(frozen=True, eq=False)
class Segment:
    """(n, d) vectors with (n,) keys and owners; those that are not ``alive`` were removed. ``number`` is one segment's
    for as long as it lives."""

    number: int
    vectors: Float
    keys: Keys
    owners: Keys
    alive: Mask
    live: int
    sealed: bool
    structure: Structure | None = None
    by_key: tuple[Keys, NDArray[np.int32]] | None = None
    """The keys, ascending, and the row of each; None: the rows are in that order."""

    @classmethod
    def seal(cls, number: int, rows: Rows, structure: Structure | None = None) -> Segment:
        """Of rows sorted by owner and key."""
        ascending = bool((np.diff(rows.keys) > 0).all())
        order = None if ascending else np.argsort(rows.keys).astype(np.int32)
        by_key = None if order is None else (rows.keys[order], order)
        alive = np.ones(len(rows.keys), np.bool_)
        vectors = rows.vectors if structure is None else structure.vectors
        return cls(number, vectors, rows.keys, rows.owners, alive, len(alive), True, structure, by_key)

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def dead(self) -> int:
        return len(self.keys) - self.live

    @property
    def memory_bytes(self) -> int:
        held = sum(array.nbytes for array in (self.vectors, self.keys, self.owners, self.alive, *(self.by_key or ())))
        return int(held) + (self.structure.memory_bytes if self.structure else 0)

    def rows_of_keys(self, keys: Keys) -> Keys:
        """The living rows of these ascending keys."""
        if not self.sealed:
            return np.flatnonzero(_contained(self.keys, keys) & self.alive)
        ordered, row_of = self.by_key or (self.keys, None)
        places = np.minimum(np.searchsorted(ordered, keys), len(ordered) - 1)
        places = places[ordered[places] == keys]
        rows = places if row_of is None else row_of[places].astype(np.int64)
        return np.asarray(rows[self.alive[rows]], np.int64)

    def rows_of_owners(self, owners: Keys) -> Keys:
        """The living rows of these ascending owners."""
        if not self.sealed:
            return np.flatnonzero(_contained(self.owners, owners) & self.alive)
        first = np.searchsorted(self.owners, owners, "left")
        counts = np.searchsorted(self.owners, owners, "right") - first
        # Runs of rows, one after the other.
        ends = np.cumsum(counts)
        rows = np.arange(ends[-1] if len(ends) else 0) + np.repeat(first - (ends - counts), counts)
        return np.asarray(rows[self.alive[rows]], np.int64)

    def without(self, rows: Keys) -> Segment:
        alive = self.alive.copy()
        alive[rows] = False
        return replace(self, alive=alive, live=self.live - len(rows))

    @property
    def rows(self) -> Rows:
        """The removed ones too."""
        return Rows(self.keys, self.owners, self.vectors)


class Hits(NamedTuple):
    """(q, m) similarities and rows of one segment, in no order; ``exact``: they need no further look."""

    similarities: Float
    rows: Keys
    exact: bool


@dataclass(frozen=True, eq=False)
class View:
    """A gallery as of one ``sequence`` of its change log. ``owners``: how many have a vector. ``moved``: how many
    vectors came or went since the gallery was loaded."""

    segments: tuple[Segment, ...] = ()
    sequence: int = 0
    owners: int = 0
    moved: int = 0

    def __len__(self) -> int:
        return sum(segment.live for segment in self.segments)

    @cached_property
    def structured(self) -> int:
        """Vectors that are found by a structure."""
        return sum(segment.live for segment in self.segments if segment.structure is not None)

    def count_of(self, owners: Keys) -> Keys:
        """How many living vectors each of these ascending owners has."""
        counts = np.zeros(len(owners), np.int64)
        for segment in self.segments:
            found = segment.owners[segment.rows_of_owners(owners)]
            counts += np.bincount(np.searchsorted(owners, found), minlength=len(owners))
        return counts

    def search(self, probes: Float, k: int, depth: int | None, among: Keys | None = None) -> Found:
        """The ``k`` most similar vectors for each of (q, d) probes.

        Args:
            depth: look at so many candidates where a segment has a structure; None: compare every vector.
            among: restricts the search to the vectors of these ascending owners, before it.
        """
        parts = [
            (segment, hits)
            for segment in self.segments
            if segment.live and (hits := _hits(segment, probes, k, depth, among)) is not None
        ]
        if not parts:
            none = np.full((len(probes), 0), -1, np.int64)
            return Found(none.astype(np.float32), none, none)
        return _best(_compared(probes, parts, max(depth or 0, k)), k)

    def vectors_of(self, owners: Keys) -> Rows:
        """The living vectors of these ascending owners, by owner."""
        found = [segment.rows.at(segment.rows_of_owners(owners)) for segment in self.segments]
        together = Rows(
            np.concatenate([rows.keys for rows in found]),
            np.concatenate([rows.owners for rows in found]),
            np.concatenate([rows.vectors for rows in found]),
        )
        return together.at(np.lexsort((together.keys, together.owners)))


def _contained(values: Keys, ascending: Keys) -> Mask:
    if not len(ascending):
        return np.zeros(len(values), np.bool_)
    return np.asarray(ascending[np.minimum(np.searchsorted(ascending, values), len(ascending) - 1)] == values)


def _hits(segment: Segment, probes: Float, k: int, depth: int | None, among: Keys | None) -> Hits | None:
    """What one segment has for a search; None: nothing that may be found."""
    structured = segment.structure is not None and depth is not None
    allowed, available = (None if not segment.dead else segment.alive), segment.live
    if among is not None:
        rows = segment.rows_of_owners(among)
        available = len(rows)
        if not available:
            return None
        if available <= (GATHER_STRUCTURED if structured else GATHER_EXACT) * len(segment):
            return _gathered(segment, probes, k, rows)
        allowed = np.zeros(len(segment), np.bool_)
        allowed[rows] = True
    if structured and depth is not None:
        candidates = _candidates(segment, probes, max(depth, k), allowed, available)
        if candidates is not None:
            return candidates
    return _every(segment, probes, k, allowed)


def _candidates(segment: Segment, probes: Float, depth: int, allowed: Mask | None, available: int) -> Hits | None:
    """Those that a search restricted to ``allowed`` rows would rank first. None: it is cheaper to compare all.

    A structure knows no restriction: it is asked for more, until enough of them are allowed, which then are the first.
    """
    assert segment.structure is not None  # noqa: S101 - the caller saw to it
    wanted = min(depth, available)
    asked = wanted if allowed is None else int(1.2 * wanted * len(segment) / available) + 16
    while asked <= MANY * len(segment):
        scores, rows = segment.structure.candidates(probes, asked)
        passed = rows >= 0
        if allowed is not None:
            passed &= allowed[rows]
        if (passed.sum(1) >= wanted).all():
            return Hits(np.where(passed, scores, -np.inf), np.where(passed, rows, -1), False)
        asked *= 4
    return None


def _gathered(segment: Segment, probes: Float, k: int, rows: Keys) -> Hits:
    kept = []
    for start in range(0, len(rows), ROWS_AT_ONCE):
        part = rows[start : start + ROWS_AT_ONCE]
        vectors = segment.vectors[part]
        if len(probes) > FEW_PROBES:
            similarities, places = exact(probes, vectors, min(k, len(part)))
        else:
            similarities, places = _top(products(probes, vectors), k)
        kept.append((similarities, part[places]))
    return _joined(kept)


def _every(segment: Segment, probes: Float, k: int, allowed: Mask | None) -> Hits:
    if len(probes) > FEW_PROBES:
        if allowed is not None:
            return _gathered(segment, probes, k, np.flatnonzero(allowed))
        return Hits(*exact(probes, segment.vectors, min(k, len(segment))), True)
    kept = []
    for start in range(0, len(segment), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        similarities = products(probes, segment.vectors[part])
        if allowed is not None:
            similarities[:, ~allowed[part]] = -np.inf
        best, places = _top(similarities, k)
        kept.append((best, np.where(best > -np.inf, places + start, -1)))
    return _joined(kept)


def _top(similarities: Float, k: int) -> tuple[Float, Keys]:
    """(q, <= k) highest of (q, n), in no order, and their columns."""
    if similarities.shape[1] <= k:
        return similarities, np.broadcast_to(np.arange(similarities.shape[1]), similarities.shape)
    columns = np.argpartition(similarities, -k, axis=1)[:, -k:]
    return np.take_along_axis(similarities, columns, 1), columns


def _joined(kept: Sequence[tuple[Float, Keys]]) -> Hits:
    return Hits(np.concatenate([part[0] for part in kept], 1), np.concatenate([part[1] for part in kept], 1), True)


def _compared(probes: Float, parts: list[tuple[Segment, Hits]], depth: int) -> Found:
    """Every part's hits with exact similarities; of estimated ones only the best ``depth`` over all segments."""
    estimated = [hits.similarities for _, hits in parts if not hits.exact]
    least: Float | float = -np.inf
    if sum(scores.shape[1] for scores in estimated) > depth:
        together = np.concatenate(estimated, 1)
        least = -np.partition(-together, depth - 1, axis=1)[:, depth - 1 : depth]
    found = list(_looked_at(probes, parts, least))
    return Found(
        np.concatenate([part.similarities for part in found], 1),
        np.concatenate([part.keys for part in found], 1),
        np.concatenate([part.owners for part in found], 1),
    )


def _looked_at(probes: Float, parts: list[tuple[Segment, Hits]], least: Float | float) -> Iterator[Found]:
    for segment, hits in parts:
        similarities, rows = hits.similarities, hits.rows
        if not hits.exact:
            rows = np.where(similarities >= least, rows, -1)
            similarities = similarities_at(probes, segment.vectors, rows)
        missing = rows < 0
        similarities = np.where(missing, -np.inf, similarities).astype(np.float32)
        yield Found(
            similarities, np.where(missing, -1, segment.keys[rows]), np.where(missing, -1, segment.owners[rows])
        )


def _best(found: Found, k: int) -> Found:
    if found.similarities.shape[1] > k:
        found = found.at(_top(found.similarities, k)[1])
    return found.at(np.lexsort((found.keys, -found.similarities), axis=1))
