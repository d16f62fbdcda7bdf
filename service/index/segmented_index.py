"""In-memory index of a gallery: one writer at a time, concurrent searches, compaction in the background."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from kith.wire.common import IndexSetting
from models.runtime.network import Float
from service.index.faiss_structures import DIMENSIONS_PER_LOOKUP, MAX_TRAINING_VECTORS
from service.index.protocol import Builder, Kind, StoppedError
from service.index.recall import Measurement, measure, sample_of
from service.index.segment_builder import Batch, SegmentBuilder, Sizes
from service.index.segments import Rows, View

REMEASURE_SHARE: Final = 0.2
"""Vectors added or removed, as a share of the gallery, after which recall is measured again."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trained:
    """Builder trained on ``size`` vectors after ``moved`` changes. All structures come from it."""

    builder: Builder
    size: int
    moved: int


class SegmentedIndex:
    """Index made of segments. Safe to share between threads.

    Args:
        dimension: length of a vector.
        setting: the gallery's index setting.
        promise: recall@1 to keep (0 to 1); below it, every vector is compared.
        build_for: returns a builder that is trained on a sample of the vectors.
        run_later: runs a function in the background.

    Attributes:
        view: what searches read.
        kind: whether there are structures.
        measured: recall of the structures, if they answer.
    """

    def __init__(
        self,
        dimension: int,
        setting: IndexSetting,
        promise: float,
        build_for: Callable[[Float], Builder],
        run_later: Callable[[Callable[[], None]], None],
        sizes: Sizes | None = None,
    ) -> None:
        self._dimension, self._setting, self._promise = dimension, setting, promise
        self._build_for, self._run_later = build_for, run_later
        self._sizes = sizes or Sizes()
        self.view = View()
        self._segments = SegmentBuilder(dimension, self._sizes)
        self._epoch = 0
        """Number of loads and unloads. A merge that was begun in an earlier epoch is discarded."""
        self._trained: Trained | None = None
        self.kind: Kind = "exact"
        self.measured: Measurement | None = None
        self._failed: int | None = None
        """Number of vectors when recall stayed below the promise at every depth."""
        self._closed = False
        self._scheduled = False
        self._scheduling = threading.Lock()
        self._changing = threading.Lock()
        self._compacting = threading.Lock()

    def load(self, rows: Rows, sequence: int) -> None:
        """Replace all content with rows sorted by key. The caller must not change them afterwards."""
        with self._changing:
            self._reset(View(self._segments.load(rows), sequence))
        self._schedule()

    def unload(self) -> None:
        """Release all content until the next load."""
        with self._changing:
            self._reset(View())

    def apply(self, batches: Iterable[Batch]) -> None:
        """Apply changes. Searches see all batches at once."""
        with self._changing:
            view = self.view
            for batch in batches:
                view = self._segments.apply(view, batch)
            self.view = view
        self._schedule()

    def close(self) -> None:
        """Stop compaction at its next step."""
        self._closed = True

    def compact(self) -> None:
        """Seal, merge and rebuild segments, then measure recall. Searches continue meanwhile.

        Raises:
            StoppedError: the index was closed.
        """
        with self._compacting:
            while self.merge_next() or self._check_recall():
                pass

    def needs_compaction(self) -> bool:
        """Return whether :meth:`compact` has work to do."""
        view = self.view
        kind = self._choose(view)
        return kind != self.kind or bool(self._segments.select(view, kind == "compact")) or self._is_unmeasured(view)

    def merge_next(self) -> bool:
        """Merge one group of segments. Return whether there was one."""
        with self._changing:
            epoch = self._epoch
            self.kind = self._choose(self.view)
            if self.kind == "exact":
                self._drop_structures()
            view, structured = self.view, self.kind == "compact"
        old = self._segments.select(view, structured)
        if not old:
            return False
        builder = self._builder_for(view) if structured else None
        merged = self._segments.merge(old, builder, lambda: self._closed)
        with self._changing:
            if self._epoch == epoch:
                self.view = self._segments.swap(self.view, old, merged)
        return True

    def _reset(self, view: View) -> None:
        self._epoch += 1
        self.measured, self._trained = None, None
        self.view = view

    def _schedule(self) -> None:
        """Compact in the background if there is work to do."""
        with self._scheduling:
            if self._scheduled or self._closed or not self.needs_compaction():
                return
            self._scheduled = True
        self._run_later(self._compact_in_background)

    def _compact_in_background(self) -> None:
        try:
            self.compact()
        except StoppedError:
            pass
        except Exception:  # no caller waits for this thread, so the log is the only report
            self._scheduled = False  # the next change tries again
            log.exception("index compaction failed; searches continue on the index as it is")
        else:
            # Reset only now: a second compaction would block a thread that other galleries need.
            self._scheduled = False
            self._schedule()

    def _choose(self, view: View) -> Kind:
        return choose(self._setting, len(view), self._dimension, self._sizes, self._failed, self.kind)

    def _drop_structures(self) -> None:
        """Compare every vector from now on."""
        view = self.view
        self.measured, self._trained = None, None
        self.view = replace(view, segments=tuple(replace(s, structure=None) for s in view.segments), depth=None)

    def _builder_for(self, view: View) -> Builder:
        """Return the builder of all structures. It is trained on the gallery as it was before the first of them."""
        if self._trained is None:
            size = len(view)
            sample = sample_of(view, min(size, MAX_TRAINING_VECTORS), np.random.default_rng(size))
            self._trained = Trained(self._build_for(sample), size, view.moved)
        return self._trained.builder

    def _check_recall(self) -> bool:
        """Measure recall if the gallery has changed. Return whether there is more to do because it is too low.

        The first remedy is to rebuild all structures, the second to compare every vector.
        """
        with self._changing:
            view, epoch = self.view, self._epoch
        if not self._is_unmeasured(view):
            return False
        builder = self._builder_for(view)
        measured = measure(view, builder.depths, self._promise, lambda: self._closed)
        with self._changing:
            if self._epoch != epoch:
                return True
            if measured.recall >= self._promise:
                self.measured = measured
                self.view = replace(self.view, depth=measured.depth)
                return False
            log.warning("recall@1 of the index is %.4f for %d vectors", measured.recall, len(view))
            if self._is_trained_on(view):
                self._failed = len(view)
            self._drop_structures()
        return True

    def _is_trained_on(self, view: View) -> bool:
        """Return whether the builder was trained on most of these vectors."""
        trained = self._trained
        return trained is not None and view.moved - trained.moved <= REMEASURE_SHARE * trained.size

    def _is_unmeasured(self, view: View) -> bool:
        last = self.measured
        if last is None:
            return view.structured > 1
        changed = max(view.moved - last.moved, abs(view.structured - last.size))
        return view.structured > 1 and changed > REMEASURE_SHARE * last.size


def choose(wanted: IndexSetting, size: int, dimension: int, sizes: Sizes, failed: int | None, now: Kind) -> Kind:
    """Return the kind for ``size`` vectors. ``failed``: size at the last failure; ``now``: the current kind."""
    if wanted == "exact" or dimension % DIMENSIONS_PER_LOOKUP:
        return "exact"
    # Retry once the gallery has doubled or halved.
    if failed is not None and failed < 2 * size and size < 2 * failed:
        return "exact"
    # Hysteresis: avoid switching back and forth around the limit.
    limit = sizes.compact_from if now == "exact" else sizes.compact_from // 2
    return "exact" if size < (sizes.seal if wanted == "compact" else limit) else "compact"
