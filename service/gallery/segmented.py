"""A gallery's vectors in this process: changed by one at a time, searched by many, put in order in the background."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from models.network import Float
from service.gallery.faiss_index import TRAIN_ON
from service.gallery.index import Builder, IndexStats, Keys, Kind, Recall, StoppedError
from service.gallery.index_choice import Choice, Failure, Sizes, choose
from service.gallery.index_files import IndexFiles
from service.gallery.recall import expected, probes_of, recall_of, sample_of
from service.gallery.segments import ROWS_AT_ONCE, ROWS_PICKED, Found, Rows, Segment, View
from service.gallery.subjects import IndexSetting

DEAD_SHARE: Final = 0.2
"""Of a segment: with more of its vectors removed it is made anew."""
FEWEST_DEAD: Final = 64
MEASURE_AGAIN: Final = 0.2
"""Vectors that came or went, as a share of a gallery's size, after which its recall is measured again."""
MANY_SMALL: Final = 8
"""Segments, of less than half the greatest length, that are worth merging."""
GROWTH: Final = 1.5
WRITE_AGAIN_S: Final = 600
"""After which graphs are written again that lost their file to a deletion."""
log = logging.getLogger(__name__)


class Batch(NamedTuple):
    """Changes up to ``sequence``: whatever has one of these ascending keys goes, then ``rows`` come."""

    gone: Keys
    rows: Rows
    sequence: int


@dataclass(frozen=True)
class Measured:
    """What recall was found to be at ``depth``, where ``size`` vectors had structures, after ``moved`` came or went."""

    recall: Recall
    depth: int
    size: int
    moved: int


@dataclass(frozen=True)
class Trained:
    """A builder, made in a gallery of ``size`` vectors after ``moved`` came or went; ``alone``: no structure was made
    before it."""

    builder: Builder
    size: int
    moved: int
    alone: bool


class SegmentedIndex:
    """``build_for``: what makes a kind's builder of a sample of the vectors. ``later``: runs a function in the
    background. Safe to share between threads."""

    def __init__(
        self,
        dimension: int,
        wanted: IndexSetting,
        promise: float,
        build_for: Callable[[Kind, Float], Builder],
        later: Callable[[Callable[[], None]], None],
        sizes: Sizes | None = None,
        accelerated: bool = False,
        files: IndexFiles | None = None,
    ) -> None:
        self._dimension, self._wanted, self._promise = dimension, wanted, promise
        self._build_for, self._later = build_for, later
        self._sizes = sizes or Sizes()
        self._accelerated = accelerated
        self._files = files
        self._files_written = -float(WRITE_AGAIN_S)
        self._problem: str | None = None
        self.view = View()
        self._epoch = 0
        self._number = 0
        self._trained: Trained | None = None
        self._choice = choose(wanted, 0, dimension, self._sizes, None, "exact")
        self._measured: Measured | None = None
        self._failed: Failure | None = None
        self._compacted_at: datetime | None = None
        self._closed = False
        self._scheduled = False
        self._scheduling = threading.Lock()
        self._changing = threading.Lock()
        self._compacting = threading.Lock()

    def search(self, view: View, probes: Float, k: int, among: Keys | None = None) -> Found:
        """As :meth:`View.search`, as far down as the promised recall needs; every vector is compared until it is known
        how far that is. ``view``: of this index."""
        probes = np.ascontiguousarray(probes, np.float32)
        measured = self._measured
        return view.search(probes, k, measured.depth if measured and view.structured else None, among)

    def load(self, rows: Rows, sequence: int) -> None:
        """Hold these rows, sorted by owner and key, instead of whatever there was; they do not change any more."""
        with self._changing:
            self._epoch += 1
            self._measured, self._trained = None, None
            stored, rest = self._stored(rows)
            self.view = View((*stored, *self._cut(rest)), sequence, _owners(rows))
        self._order()

    def unload(self) -> None:
        """Hold nothing, until it is loaded again."""
        with self._changing:
            self._epoch += 1
            self._measured, self._trained = None, None
            self.view = View()

    def apply(self, batches: Iterable[Batch]) -> None:
        """Change what is held; searches see all of it at once."""
        with self._changing:
            view = self.view
            for batch in batches:
                view = self._applied(view, batch)
            self.view = view
        self._order()

    def stats(self) -> IndexStats:
        view = self.view
        measured = self._measured if view.structured else None
        return IndexStats(
            "faiss",
            self._choice.kind,
            self._choice.reason,
            len(view),
            view.sequence,
            sum(segment.sealed for segment in view.segments),
            sum(segment.live for segment in view.segments if not segment.sealed),
            sum(segment.dead for segment in view.segments),
            sum(segment.memory_bytes for segment in view.segments),
            measured.depth if measured else None,
            measured.recall if measured else None,
            self._compacted_at,
            self._problem,
        )

    def close(self) -> None:
        self._closed = True

    # Changes

    def _applied(self, view: View, batch: Batch) -> View:
        before = {segment.number: segment.rows_of_keys(batch.gone) for segment in view.segments}
        left = [segment.owners[before[segment.number]] for segment in view.segments]
        touched = np.unique(np.concatenate([*left, batch.rows.owners]))
        had = view.count_of(touched) > 0
        self._forget_files(view, before, batch)
        segments = [
            segment.without(before[segment.number]) if len(before[segment.number]) else segment
            for segment in view.segments
        ]
        moved = view.moved + sum(len(rows) for rows in before.values()) + len(batch.rows.keys)
        now = View(self._appended(segments, batch.rows), batch.sequence, moved=moved)
        has = now.count_of(touched) > 0
        return replace(now, owners=view.owners + int(has.sum()) - int(had.sum()))

    def _appended(self, segments: list[Segment], rows: Rows) -> tuple[Segment, ...]:
        tail = segments.pop() if segments and not segments[-1].sealed else None
        if len(rows.keys) >= self._sizes.seal:
            cut = self._cut(rows.at(np.lexsort((rows.keys, rows.owners))), at_least=1)
            return (*segments, *cut, *([tail] if tail else []))
        if not len(rows.keys):
            return (*segments, tail) if tail else tuple(segments)
        return (*segments, self._tail(rows) if tail is None else _grown(tail, rows))

    def _cut(self, rows: Rows, at_least: int | None = None) -> list[Segment]:
        """Sealed segments without structure, or a tail if there are less than ``at_least`` rows."""
        if len(rows.keys) < (self._sizes.seal if at_least is None else at_least):
            return [self._tail(rows)] if len(rows.keys) else []
        longest = self._sizes.longest(self._choice.kind)
        count = -(-len(rows.keys) // longest)
        if count <= 1:
            return [Segment.seal(self._next(), rows)] if count else []
        bounds = np.linspace(0, len(rows.keys), count + 1).astype(int).tolist()
        # Copies, so that the whole can go while a part stays.
        return [Segment.seal(self._next(), _copied(rows.at(slice(start, stop)))) for start, stop in pairwise(bounds)]

    def _tail(self, rows: Rows) -> Segment:
        held, alive = _copied(rows), np.ones(len(rows.keys), np.bool_)
        return Segment(self._next(), held.vectors, held.keys, held.owners, alive, len(alive), False)

    def _next(self) -> int:
        self._number += 1
        return self._number

    # Order

    def _order(self) -> None:
        """Have done in the background what is due."""
        with self._scheduling:
            if self._scheduled or self._closed or not self._due(self.view):
                return
            self._scheduled = True
        self._later(self._compact_logged)

    def _due(self, view: View) -> bool:
        choice = self._choose(view)
        if choice.kind != self._choice.kind:
            return True
        self._choice = choice
        return bool(self._worst(view)) or self._unmeasured(view) or bool(self._unwritten(view))

    def _wants(self, segment: Segment, kind: Kind) -> bool:
        """Whether a segment is not as it should be."""
        if segment.dead > max(FEWEST_DEAD, DEAD_SHARE * len(segment)):
            return True
        if not segment.sealed:
            return len(segment) >= self._sizes.seal
        has = segment.structure is not None
        return has != self._structured(kind)

    def _structured(self, kind: Kind) -> bool:
        return kind != "exact" or self._accelerated

    def _choose(self, view: View) -> Choice:
        return choose(self._wanted, len(view), self._dimension, self._sizes, self._failed, self._choice.kind)

    def _compact_logged(self) -> None:
        try:
            self.compact()
        except StoppedError:
            pass
        except Exception:  # nobody waits for this thread's answer: whatever it is, the log has it
            self._scheduled = False  # the next change tries again
            log.exception("an index could not be put in order; it stays as it was, and answers as before")
        else:
            # Only now, else a second one would wait for this one in a thread that other galleries need.
            self._scheduled = False
            self._order()

    def compact(self) -> None:
        """Seal, merge and rebuild what is due, measure recall, and fall back to comparing everything where it is too
        low; searches go on meanwhile.

        Raises:
            StoppedError: the index was closed.
        """
        with self._compacting:
            while (made := self._round()) or self._fallen():
                if made and self._outgrown(self.view):
                    self._fallen()
            self._compacted_at = datetime.now(UTC)
            self._write_files()

    def _round(self) -> bool:
        """Make one group of segments anew; whether there was one."""
        with self._changing:
            view, epoch = self.view, self._epoch
            choice = self._choose(view)
            if choice.kind != self._choice.kind or not self._structured(choice.kind):
                self._unmake()
                view = self.view
            self._choice = choice
        old = self._worst(view)
        if not old:
            return False
        builder = self._builder_for(view) if self._structured(choice.kind) else None
        made = self._made(old, builder)
        with self._changing:
            if self._epoch == epoch:
                self._swap(old, made)
        return True

    def _worst(self, view: View) -> list[Segment]:
        """What to make one segment of: the first that is not as it should be, with those that are no longer than twice
        all together, so that each vector is moved a few times only."""
        kind = self._choice.kind
        longest = self._sizes.longest(kind)
        first = next((segment for segment in view.segments if self._wants(segment, kind)), None)
        others = sorted((s for s in view.segments if s is not first and s.sealed and s.live < longest), key=len)
        if first is None:
            small = [segment for segment in others if segment.live <= longest // 2]
            return small[:2] if len(small) > MANY_SMALL else []
        old = [first]
        if not first.sealed and first.live < self._sizes.seal:
            return old
        for segment in others:
            together = sum(s.live for s in old)
            if segment.live <= 2 * together and segment.live + together <= longest:
                old.append(segment)
        return old

    def _unmake(self) -> None:
        """Let all structures go: every vector is compared."""
        view = self.view
        self._measured, self._trained = None, None
        self.view = replace(view, segments=tuple(replace(s, structure=None) for s in view.segments))

    def _builder_for(self, view: View) -> Builder:
        size, kind = len(view), self._choice.kind
        trained = self._trained
        if trained is None or trained.builder.kind != kind or size >= 4 * trained.size:
            sample = sample_of(view, min(size, TRAIN_ON), np.random.default_rng(size))
            trained = Trained(self._build_for(kind, sample), size, view.moved, not view.structured)
            self._measured, self._trained = None, trained
        return trained.builder

    def _made(self, old: Sequence[Segment], builder: Builder | None) -> Segment | None:
        """One segment of the living rows of all; the tail stays one if it is short."""
        whole = len(old) == 1 and old[0].sealed and not old[0].dead
        rows = old[0].rows if whole else self._merged(old)
        if not len(rows.keys):
            return None
        if not any(segment.sealed for segment in old) and len(rows.keys) < self._sizes.seal:
            return self._tail(rows)
        structure = None if builder is None else builder.build(rows.vectors, lambda: self._closed)
        return Segment.seal(self._next(), rows, structure)

    def _merged(self, old: Sequence[Segment]) -> Rows:
        alive = [np.flatnonzero(segment.alive) for segment in old]
        keys = np.concatenate([segment.keys[rows] for segment, rows in zip(old, alive, strict=True)])
        owners = np.concatenate([segment.owners[rows] for segment, rows in zip(old, alive, strict=True)])
        order = np.lexsort((keys, owners))
        places = np.empty(len(order), np.int64)
        places[order] = np.arange(len(order))
        vectors = np.empty((len(order), self._dimension), np.float32)
        start = 0
        for segment, rows in zip(old, alive, strict=True):
            for i in range(0, len(rows), ROWS_PICKED):
                part = rows[i : i + ROWS_PICKED]
                vectors[places[start + i : start + i + len(part)]] = segment.vectors[part]
                time.sleep(0)
            start += len(rows)
        return Rows(keys[order], owners[order], vectors)

    def _swap(self, old: Sequence[Segment], made: Segment | None) -> None:
        """Put ``made`` in the place of ``old``, with what happened to these meanwhile."""
        view = self.view
        now = {segment.number: segment for segment in view.segments}
        gone = {segment.number for segment in old}
        segments = [segment for segment in view.segments if segment.number not in gone and segment.sealed]
        tails = [segment for segment in view.segments if segment.number not in gone and not segment.sealed]
        for before in old:
            after = now[before.number]
            died = before.alive & ~after.alive[: len(before)]
            if made is not None and died.any():
                # By key: a vector that came again since has the same one, but lies in the tail.
                made = made.without(made.rows_of_keys(np.sort(before.keys[died])))
            if len(after) > len(before):
                new = slice(len(before), len(after))
                since = self._tail(after.rows.at(new))
                tails.append(since.without(np.flatnonzero(~after.alive[new])))
        if made is not None and made.live:
            (segments if made.sealed else tails).append(made)
        if len(tails) > 1:
            tails = [_all_of(tails)]
        self.view = replace(view, segments=(*segments, *tails))

    def _fallen(self) -> bool:
        """Measure recall if the gallery is another than when it was measured; whether there is more to do, as it is
        too low: make all structures anew, once, then fall back."""
        with self._changing:
            view, epoch = self.view, self._epoch
        if not self._unmeasured(view):
            return False
        builder = self._builder_for(view)
        measured = self._measure(view, builder)
        kept = measured.recall.at_1 >= self._promise
        with self._changing:
            if self._epoch != epoch:
                return True
            if kept:
                self._measured = measured
                return False
            log.warning("%s found %.4f of the most similar of %d", builder.kind, measured.recall.at_1, measured.size)
            if not self._fresh(view):
                self._unmake()
                return True
            self._measured = None
            if builder.kind == "exact":
                self._accelerated = False
            self._failed = Failure(builder.kind, len(view), measured.recall.at_1, self._promise)
        return True

    def _measure(self, view: View, builder: Builder) -> Measured:
        """At the first depth that keeps the promise, or the last; among the vectors that have structures, as those that
        are compared anyway say nothing of them."""
        part = replace(view, segments=tuple(s for s in view.segments if s.structure is not None))
        probes = probes_of(part, np.random.default_rng(len(part)))
        best = expected(part, probes)
        for depth in builder.depths:
            if self._closed:
                raise StoppedError
            recall = recall_of(part, probes, best, depth, self._promise)
            if recall.at_1 >= self._promise:
                break
        return Measured(recall, depth, len(part), view.moved)

    def _fresh(self, view: View) -> bool:
        """Whether all structures are of a builder that was trained on these vectors, or on most of them."""
        trained = self._trained
        return trained is not None and trained.alone and view.moved - trained.moved <= MEASURE_AGAIN * trained.size

    def _unmeasured(self, view: View) -> bool:
        then = self._measured
        if then is None:
            return view.structured > 1
        others = max(view.moved - then.moved, abs(view.structured - then.size))
        return view.structured > 1 and others > MEASURE_AGAIN * then.size

    def _outgrown(self, view: View) -> bool:
        """Whether recall is to be measured before all segments are made: each time costs as much as the size."""
        then = self._measured
        return view.structured > 1 and (then is None or view.structured > 2 * then.size)

    # Files

    def _stored(self, rows: Rows) -> tuple[list[Segment], Rows]:
        """Segments whose graph lies in a file, and the rows that are in none."""
        choice = choose(self._wanted, len(rows.keys), self._dimension, self._sizes, self._failed, self._choice.kind)
        if self._files is None or choice.kind != "graph":
            return [], rows
        self._choice = choice
        return self._files.read(rows, self._next, self._report)

    def _unwritten(self, view: View) -> list[Segment]:
        """Graphs that have no file, unless some were written just now."""
        if self._files is None or time.monotonic() - self._files_written < WRITE_AGAIN_S:
            return []
        files, graph = self._files, self._choice.kind == "graph"
        return [s for s in view.segments if graph and s.structure is not None and not files.has(s)]

    def _write_files(self) -> None:
        if self._files is None:
            return
        view = self.view
        if not view.segments:  # about to be loaded; of those who were deleted no file is left
            return
        self._files.keep(view.segments)
        for segment in self._unwritten(view):
            try:
                self._files.write(segment)
            except OSError as error:
                self._report(f"a graph could not be written, and will be built again after a restart: {error}")
                break
            # Somebody in it may have been deleted while it was written.
            now = {each.number: each for each in self.view.segments}.get(segment.number)
            if now is None or now.live != segment.live:
                self._files.remove(segment.number)
        self._files_written = time.monotonic()

    def _forget_files(self, view: View, before: dict[int, Keys], batch: Batch) -> None:
        """Who is deleted, and not only changed, is to be found in no file."""
        if self._files is not None:
            for segment in view.segments:
                if len(np.setdiff1d(segment.keys[before[segment.number]], batch.rows.keys)):
                    self._files.remove(segment.number)

    def _report(self, problem: str) -> None:
        log.warning("%s", problem)
        self._problem = problem


def _owners(rows: Rows) -> int:
    return int((np.diff(rows.owners) != 0).sum()) + 1 if len(rows.owners) else 0


def _copied(rows: Rows) -> Rows:
    vectors = np.empty_like(rows.vectors)
    for start in range(0, len(vectors), ROWS_AT_ONCE):
        vectors[start : start + ROWS_AT_ONCE] = rows.vectors[start : start + ROWS_AT_ONCE]
    return Rows(rows.keys.copy(), rows.owners.copy(), vectors)


def _grown(tail: Segment, rows: Rows) -> Segment:
    keys, owners = np.concatenate([tail.keys, rows.keys]), np.concatenate([tail.owners, rows.owners])
    alive = np.concatenate([tail.alive, np.ones(len(rows.keys), np.bool_)])
    vectors = _behind(tail.vectors, rows.vectors)
    return replace(tail, keys=keys, owners=owners, vectors=vectors, alive=alive, live=tail.live + len(rows.keys))


def _behind(old: Float, new: Float) -> Float:
    """(n + m, d). Where there is room behind the old ones, the new are written there, where nobody has looked yet."""
    n, m = len(old), len(old) + len(new)
    room = old.base
    if room is None or len(room) < m:
        room = np.empty((max(m, int(GROWTH * m)), old.shape[1]), np.float32)
        room[:n] = old
    room[n:m] = new
    return np.asarray(room[:m], np.float32)


def _all_of(tails: Sequence[Segment]) -> Segment:
    first = tails[0]
    return replace(
        first,
        vectors=np.concatenate([tail.vectors for tail in tails]),
        keys=np.concatenate([tail.keys for tail in tails]),
        owners=np.concatenate([tail.owners for tail in tails]),
        alive=np.concatenate([tail.alive for tail in tails]),
        live=sum(tail.live for tail in tails),
    )
