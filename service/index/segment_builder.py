"""Changes to the segments of a view: append, remove, merge and replace. Each returns a new view."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from typing import Final, NamedTuple

import numpy as np

from service.domain.gallery import Keys
from service.index.protocol import Builder
from service.index.segments import ROWS_PER_BLOCK, ROWS_PER_GATHER, Rows, Segment, View

MAX_TOMBSTONE_SHARE: Final = 0.2
"""Share of removed vectors above which a segment is rebuilt."""
MIN_TOMBSTONES: Final = 64
"""Removed vectors up to which a segment is never rebuilt."""
MAX_SMALL_SEGMENTS: Final = 8
"""Segments below half the maximum length above which two of them are merged."""


@dataclass(frozen=True)
class Sizes:
    """Size limits, in vectors.

    Attributes:
        seal: length at which the tail becomes a sealed segment.
        compact_from: gallery size from which ``auto`` has structures.
        max_length: maximum length of a segment.
    """

    seal: int = 4096
    compact_from: int = 20_000
    max_length: int = 262_144


class Batch(NamedTuple):
    """Changes up to ``sequence``: remove the rows with these ascending keys, then add ``rows``."""

    gone: Keys
    rows: Rows
    sequence: int


class SegmentBuilder:
    """Builder of one index's segments; it numbers them. Not safe to share between threads, except for ``merge``."""

    def __init__(self, dimension: int, sizes: Sizes) -> None:
        self._dimension = dimension
        self._sizes = sizes
        self._numbers = count(1)

    def load(self, rows: Rows) -> tuple[Segment, ...]:
        """Return segments of rows sorted by key."""
        return tuple(self._cut(rows))

    def apply(self, view: View, batch: Batch) -> View:
        """Return the view after a batch of changes."""
        removed = [segment.rows_of_keys(batch.gone) for segment in view.segments]
        rest = [one.without(rows) if len(rows) else one for one, rows in zip(view.segments, removed, strict=True)]
        moved = view.moved + sum(map(len, removed)) + len(batch.rows.keys)
        return replace(view, segments=self._append(rest, batch.rows), sequence=batch.sequence, moved=moved)

    def merge(self, old: Sequence[Segment], builder: Builder | None, stopped: Callable[[], bool]) -> Segment | None:
        """Return one segment with the live rows of all; a short tail stays a tail. None: no row is live.

        Raises:
            StoppedError: ``stopped`` returned true while the structure was built.
        """
        reusable = len(old) == 1 and old[0].sealed and not old[0].dead
        rows = old[0].rows if reusable else self._live_rows(old)
        if not len(rows.keys):
            return None
        if not any(segment.sealed for segment in old) and len(rows.keys) < self._sizes.seal:
            return self._tail(rows)
        structure = None if builder is None else builder.build(rows.vectors, stopped)
        return Segment.seal(next(self._numbers), rows, structure)

    def swap(self, view: View, old: Sequence[Segment], merged: Segment | None) -> View:
        """Return the view with ``merged`` instead of ``old``, including changes made to ``old`` during the merge."""
        current = {segment.number: segment for segment in view.segments}
        replaced = {segment.number for segment in old}
        segments = [segment for segment in view.segments if segment.number not in replaced and segment.sealed]
        tails = [segment for segment in view.segments if segment.number not in replaced and not segment.sealed]
        for before in old:
            after = current[before.number]
            removed = before.alive & ~after.alive[: len(before)]
            if merged is not None and removed.any():
                # By key: a vector that was added again has the same key, but is in the tail.
                merged = merged.without(merged.rows_of_keys(np.sort(before.keys[removed])))
            if len(after) > len(before):
                added = slice(len(before), len(after))
                tail = self._tail(after.rows.at(added))
                tails.append(tail.without(np.flatnonzero(~after.alive[added])))
        if merged is not None and merged.live:
            (segments if merged.sealed else tails).append(merged)
        return replace(view, segments=(*segments, *([_concatenate(tails)] if tails else [])))

    def select(self, view: View, structured: bool) -> list[Segment]:
        """Return the segments to merge next: the first that is out of order, and smaller ones.

        Together the others are at most twice as long, so that each vector is copied a few times only.
        """
        max_length = self._sizes.max_length
        first = next((segment for segment in view.segments if self._is_out_of_order(segment, structured)), None)
        others = sorted((s for s in view.segments if s is not first and s.sealed and s.live < max_length), key=len)
        if first is None:
            small = [segment for segment in others if segment.live <= max_length // 2]
            return small[:2] if len(small) > MAX_SMALL_SEGMENTS else []
        selected = [first]
        if not first.sealed and first.live < self._sizes.seal:
            return selected
        for segment in others:
            total = sum(s.live for s in selected)
            if segment.live <= 2 * total and segment.live + total <= max_length:
                selected.append(segment)
        return selected

    def _is_out_of_order(self, segment: Segment, structured: bool) -> bool:
        if segment.dead > max(MIN_TOMBSTONES, MAX_TOMBSTONE_SHARE * len(segment)):
            return True
        if not segment.sealed:
            return len(segment) >= self._sizes.seal
        return (segment.structure is not None) != structured

    def _append(self, segments: list[Segment], rows: Rows) -> tuple[Segment, ...]:
        tails = [segments.pop()] if segments and not segments[-1].sealed else []
        if len(rows.keys) >= self._sizes.seal:
            segments = [*segments, *self._cut(rows.at(np.argsort(rows.keys)))]
        elif len(rows.keys):
            tails = [_concatenate([*tails, self._tail(rows)])]
        return (*segments, *tails)

    def _cut(self, rows: Rows) -> list[Segment]:
        """Return sealed segments without structure, or a tail of few rows."""
        if len(rows.keys) < self._sizes.seal:
            return [self._tail(rows)] if len(rows.keys) else []
        pieces = -(-len(rows.keys) // self._sizes.max_length)
        if pieces == 1:
            return [Segment.seal(next(self._numbers), rows)]
        bounds = np.linspace(0, len(rows.keys), pieces + 1).astype(int).tolist()
        # Copies, so that the whole array can be freed while one part stays.
        return [
            Segment.seal(next(self._numbers), _copy(rows.at(slice(start, stop)))) for start, stop in pairwise(bounds)
        ]

    def _tail(self, rows: Rows) -> Segment:
        held, alive = _copy(rows), np.ones(len(rows.keys), np.bool_)
        return Segment(next(self._numbers), held.vectors, held.keys, alive, len(alive), False)

    def _live_rows(self, old: Sequence[Segment]) -> Rows:
        """Return the live rows of all segments, sorted by key."""
        alive = [np.flatnonzero(segment.alive) for segment in old]
        keys = np.concatenate([segment.keys[rows] for segment, rows in zip(old, alive, strict=True)])
        order = np.argsort(keys)
        places = np.empty(len(order), np.int64)
        places[order] = np.arange(len(order))
        vectors = np.empty((len(order), self._dimension), np.float32)
        start = 0
        for segment, rows in zip(old, alive, strict=True):
            for i in range(0, len(rows), ROWS_PER_GATHER):
                part = rows[i : i + ROWS_PER_GATHER]
                vectors[places[start + i : start + i + len(part)]] = segment.vectors[part]
                time.sleep(0)  # numpy holds the GIL while it gathers
            start += len(rows)
        return Rows(keys[order], vectors)


def _copy(rows: Rows) -> Rows:
    vectors = np.empty_like(rows.vectors)
    for start in range(0, len(vectors), ROWS_PER_BLOCK):
        vectors[start : start + ROWS_PER_BLOCK] = rows.vectors[start : start + ROWS_PER_BLOCK]
    return Rows(rows.keys.copy(), vectors)


def _concatenate(tails: Sequence[Segment]) -> Segment:
    return replace(
        tails[0],
        vectors=np.concatenate([tail.vectors for tail in tails]),
        keys=np.concatenate([tail.keys for tail in tails]),
        alive=np.concatenate([tail.alive for tail in tails]),
        live=sum(tail.live for tail in tails),
    )
