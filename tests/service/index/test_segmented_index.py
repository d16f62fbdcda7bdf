"""An index gives the same results as brute force, after any insertion, removal and compaction."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kith.wire.common import IndexSetting
from models.runtime.network import Float
from models.vision.recognition import l2_normalize
from service.domain.gallery import Keys
from service.index import recall, segment_builder
from service.index.faiss_structures import COMPACT_DEPTHS, exact, finds_gpu, trainer_for
from service.index.protocol import Builder, Kind, StoppedError, Structure
from service.index.recall import recall_of
from service.index.segment_builder import Batch, Sizes
from service.index.segmented_index import SegmentedIndex, choose
from service.index.segments import Rows, View

TINY = Sizes(seal=24, compact_from=60, max_length=96)


class Background:
    """Queue of background work that runs on request."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def __call__(self, work: Callable[[], None]) -> None:
        self.waiting.append(work)

    def run(self) -> None:
        while self.waiting:
            self.waiting.pop(0)()


def index_of(
    dimension: int,
    wanted: IndexSetting = "auto",
    promise: float = 0.999,
    sizes: Sizes = TINY,
    later: Callable[[Callable[[], None]], None] | None = None,
) -> SegmentedIndex:
    return SegmentedIndex(dimension, wanted, promise, trainer_for("cpu"), later or Background(), sizes)


def batch(keys: list[int], vectors: Float, sequence: int, gone: list[int] | None = None) -> Batch:
    named = np.array(sorted({*keys, *(gone or [])}), np.int64)
    rows = Rows(np.array(keys, np.int64), np.asarray(vectors, np.float32))
    return Batch(named, rows, sequence)


def brute_force(model: dict[int, Float], probe: Float, k: int, among: set[int] | None) -> list[float]:
    allowed = [vector for key, vector in model.items() if among is None or key in among]
    return sorted((float(probe @ vector) for vector in allowed), reverse=True)[:k]


def check(
    index: SegmentedIndex, model: dict[int, Float], rng: np.random.Generator, dimension: int, exact: bool
) -> None:
    """Similarities are always the true ones of the keys named; the best ones where every vector is compared."""
    view = index.view
    assert len(view) == len(model)
    probes = l2_normalize(rng.normal(size=(int(rng.choice([1, 2, 8, 9, 20])), dimension)))
    k = int(rng.integers(1, 12))
    among = None if rng.random() < 0.5 else {key for key in [*model, 7] if rng.random() < 0.3}
    keys = None if among is None else np.array(sorted(among), np.int64)
    assert keys is None or view.contains(keys).tolist() == [key in model for key in keys.tolist()]
    found = view.search(probes, k, keys)
    for probe, similarities, named in zip(probes, *found, strict=True):
        kept = named >= 0
        expected = brute_force(model, probe, k, among)
        assert len(set(named[kept].tolist())) == kept.sum() == len(expected)
        for similarity, key in zip(similarities[kept], named[kept], strict=True):
            assert among is None or int(key) in among
            assert similarity == pytest.approx(float(probe @ model[int(key)]), abs=1e-5)
        if exact:
            assert similarities[kept].tolist() == pytest.approx(expected, abs=1e-5)


STEPS = ["add", "add many", "replace", "remove", "remove many", "search", "in order"]


@settings(max_examples=80)
@given(
    seed=st.integers(0, 2**32 - 1),
    wanted=st.sampled_from(["auto", "exact", "compact"]),
    steps=st.lists(st.sampled_from(STEPS), max_size=40),
)
def test_any_history_is_searched_as_by_brute_force(seed: int, wanted: IndexSetting, steps: list[str]) -> None:
    rng = np.random.default_rng(seed)
    dimension, background = 16, Background()
    index = index_of(dimension, wanted, later=background)
    model: dict[int, Float] = {}
    sequence = 0
    for step in [*steps, "search", "in order", "search"]:
        sequence += 1
        if step in ("add", "add many"):
            size = int(rng.integers(1, 80 if step == "add many" else 5))
            keys = list(range(sequence * 1000, sequence * 1000 + size))
        elif step == "replace" and model:
            keys = rng.choice(list(model), min(len(model), 3), replace=False).tolist()
        elif step in ("remove", "remove many") and model:
            share = len(model) * 2 // 3 if step == "remove many" else 2
            gone = rng.choice(list(model), min(len(model), share), replace=False).tolist()
            index.apply([batch([], np.empty((0, dimension), np.float32), sequence, [*gone, 7])])
            for key in gone:
                del model[key]
            continue
        elif step == "in order":
            background.run()
            continue
        elif step == "search":
            # With so few vectors a structure is asked for more than it is worth, and every one is compared.
            check(index, model, rng, dimension, exact=True)
            continue
        else:
            continue
        vectors = l2_normalize(rng.normal(size=(len(keys), dimension)))
        index.apply([batch(keys, vectors, sequence)])
        model.update(zip(keys, vectors, strict=True))
        assert index.view.sequence == sequence
    index.compact()
    assert not index.needs_compaction()


def clustered(rng: np.random.Generator, people: int, each: int, dimension: int) -> Float:
    centers = l2_normalize(rng.normal(size=(people, dimension)))
    spread = 0.5 * rng.normal(size=(people * each, dimension)) / np.sqrt(dimension)
    return l2_normalize(np.repeat(centers, each, 0) + spread)


def filled(wanted: IndexSetting, vectors: Float, sizes: Sizes, promise: float = 0.999) -> SegmentedIndex:
    index = index_of(vectors.shape[1], wanted, promise, sizes)
    n = len(vectors)
    index.load(Rows(np.arange(1, n + 1), vectors), n)
    index.compact()
    return index


SMALL = Sizes(seal=256, compact_from=2000, max_length=4096)


def test_a_structure_finds_what_comparing_all_finds_in_any_part(rng: np.random.Generator) -> None:
    vectors = clustered(rng, 4000, 2, 32)
    index = filled("compact", vectors, SMALL)
    assert (index.kind, len(index.view)) == ("compact", 8000)
    assert len(index.view.segments) > 1 and all(segment.structure for segment in index.view.segments)
    assert index.measured is not None and index.measured.recall >= 0.999
    # Delete some rows, and change others.
    gone = np.sort(rng.choice(np.arange(1, 8001), 500, replace=False))
    index.apply([batch(gone[:250].tolist(), -vectors[gone[:250] - 1], 8001, gone.tolist())])
    view = index.view
    for share in (1.0, 0.5, 0.1, 0.01):
        among = np.sort(rng.choice(np.arange(1, 8001), int(8000 * share), replace=False)) if share < 1 else None
        inside = vectors_of(view, np.arange(1, 8001) if among is None else among)
        probes = inside[rng.choice(len(inside), 40)]
        probes = l2_normalize(probes + 0.6 * rng.normal(size=probes.shape) / np.sqrt(32))
        for batched in (probes, probes[:1]):
            found, expected = view.search(batched, 5, among), replace(view, depth=None).search(batched, 5, among)
            assert (found.keys[:, 0] == expected.keys[:, 0]).mean() >= 0.97
            assert not np.isin(found.keys, gone[250:]).any()
            assert among is None or np.isin(found.keys, among).all()
            assert np.allclose(found.similarities[:, 0], expected.similarities[:, 0], atol=0.1)
    # No candidate is among those that are least like the probe.
    among = np.setdiff1d(1 + np.flatnonzero(vectors @ vectors[0] < 0), gone)
    found, expected = (each.search(vectors[:1], 5, among) for each in (view, replace(view, depth=None)))
    assert found.keys.tolist() == expected.keys.tolist()


class Builders:
    """Counts what was trained."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, sample: Float) -> Builder:
        self.count += 1
        return trainer_for("cpu")(sample)


def in_crowds(rng: np.random.Generator, crowds: int, size: int, dimension: int) -> Float:
    """Sixteen centroids for four dimensions distinguish the clusters, but not the vectors inside one."""
    centers = np.repeat(l2_normalize(rng.normal(size=(crowds, dimension))), size // crowds, 0)
    return l2_normalize(centers + 0.002 * rng.normal(size=centers.shape))


def test_vectors_that_codes_cannot_tell_apart_are_searched_exactly(rng: np.random.Generator) -> None:
    vectors = in_crowds(rng, 20, 40_000, 32)
    background, trained = Background(), Builders()
    index = SegmentedIndex(32, "auto", 0.999, trained, background, replace(SMALL, max_length=65_536))
    index.load(Rows(np.arange(1, 40_001), vectors), 1)
    background.run()
    # Inserting and deleting rows does not improve the codes.
    nothing = np.empty((0, 32), np.float32)
    index.apply([batch([], nothing, 2, [40_000])])
    background.run()
    assert trained.count == 1
    assert index.kind == "exact"
    assert not any(segment.structure for segment in index.view.segments)
    probe = vectors[123:124]
    assert index.view.search(probe, 1).keys.tolist() == [[124]]


WAKING = """
import sys, time
import numpy as np
from service.index.faiss_structures import trainer_for
from service.index.segmented_index import SegmentedIndex
from service.index.segments import Rows

vectors = np.random.default_rng(0).normal(size=(3000, 512)).astype(np.float32)
index = SegmentedIndex(512, "exact", 0.999, trainer_for("cpu"), lambda _: None)
index.load(Rows(np.arange(3000), vectors), 0)
time.sleep(0.5)  # numpy's threads look for work for a while after they were made
others = time.process_time() - time.thread_time()
for probes in (1, 2, 6, 20) * 5:
    for among in (None, np.arange(0, 3000, 2), np.arange(100)):
        index.view.search(vectors[:probes], 5, among)
sys.exit(time.process_time() - time.thread_time() > others + 0.002)
"""


def test_searching_a_small_gallery_wakes_no_other_thread() -> None:
    """Numpy's BLAS threads would spin for longer than the search takes."""
    subprocess.run([sys.executable, "-c", WAKING], check=True)


def test_recall_is_measured_again_when_others_have_come(rng: np.random.Generator) -> None:
    """Replace half of the rows: old codes do not distinguish the new rows, and retrained codes do."""
    size, dimension, background, trained = 10_000, 64, Background(), Builders()
    index = SegmentedIndex(dimension, "auto", 0.999, trained, background, replace(SMALL, max_length=16_384))
    half = np.zeros((size, dimension // 2), np.float32)
    first, others = (clustered(rng, size, 1, dimension // 2) for _ in range(2))
    first, others = np.hstack([first, half]), np.hstack([half, others])
    index.load(Rows(np.arange(size), first), 1)
    background.run()
    for sequence, start in enumerate(range(0, size, 2500), 2):
        keys = list(range(size + start, size + start + 2500))
        gone = list(range(start, start + 2500))
        index.apply([batch(keys, others[start : start + 2500], sequence, gone)])
        background.run()
        assert index.measured is not None and index.measured.recall >= 0.999
        found = index.view.search(others[: start + 2500 : 10], 1)
        assert (found.keys[:, 0] == size + np.arange(0, start + 2500, 10)).mean() >= 0.99
    trainings = trained.count
    assert index.kind == "compact" and trainings > 1
    index.load(Rows(np.arange(size), first), 9)  # other content has codes of its own
    background.run()
    assert trained.count == trainings + 1
    # A gallery that shrinks forgets the depth, which is measured anew when it grows again.
    index.apply([batch([], np.empty((0, dimension), np.float32), 10, list(range(999, size)))])
    background.run()
    assert (index.kind, index.view.depth, len(index.view)) == ("exact", None, 999)


def test_the_depth_finds_runners_up(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best is found at the first depth, but the ten best differ little from many others."""
    vectors = l2_normalize(rng.normal(size=(8000, 256)))
    depths = {}
    for share in (0.0, 0.95):
        monkeypatch.setattr(recall, "RECALL_OF_NEAREST", share)
        index = index_of(256, "compact", sizes=replace(SMALL, max_length=16_384))
        index.load(Rows(np.arange(8000), vectors), 1)
        index.compact()
        assert index.measured is not None and index.measured.recall >= 0.999
        depths[share] = index.view.depth
    assert depths[0.0] == COMPACT_DEPTHS[0] and depths[0.95] in COMPACT_DEPTHS[1:-1]


@dataclass
class Fake:
    """Builder of structures that find the best rows, or always those stored first. ``during``: called in each build."""

    sees: bool = False
    during: Callable[[], object] = bool
    vectors: Float | None = None
    depths: tuple[int, ...] = (64,)

    def build(self, vectors: Float, stopped: Callable[[], bool]) -> Structure:
        self.during()
        return replace(self, vectors=vectors)

    def candidates(self, probes: Float, depth: int) -> Keys:
        if self.sees and self.vectors is not None:
            return exact(probes, self.vectors, depth)[1]
        return np.tile(np.arange(depth), (len(probes), 1))


def test_a_structure_answers_only_once_its_recall_is_known(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = l2_normalize(rng.normal(size=(4000, 16)))
    found: list[bool] = []

    def search() -> None:
        rows = rng.integers(0, 4000, 20)
        found.append(bool((index.view.search(vectors[rows], 1).keys[:, 0] == rows).all()))

    def measured(*arguments: object) -> tuple[float, float]:
        search()
        return recall_of(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(recall, "recall_of", measured)
    sizes = replace(SMALL, max_length=1024)
    index = SegmentedIndex(16, "compact", 0.999, lambda _: Fake(during=search), Background(), sizes)
    index.load(Rows(np.arange(4000), vectors), 1)
    assert len(index.view.segments) == 4
    index.compact()
    assert len(found) == 5 and all(found)
    assert index.kind == "exact"


def test_a_segment_that_is_the_whole_gallery_is_not_copied(rng: np.random.Generator) -> None:
    vectors = l2_normalize(rng.normal(size=(2000, 16)))
    index = index_of(16, "exact", sizes=SMALL)
    index.load(Rows(np.arange(2000), vectors), 1)
    (segment,) = index.view.segments
    assert np.shares_memory(segment.vectors, vectors)


def test_one_gallery_waits_in_one_thread_only(rng: np.random.Generator) -> None:
    """Other galleries need the other threads."""
    background, vectors, waiting = Background(), l2_normalize(rng.normal(size=(1200, 16))), list[int]()

    def during() -> None:
        if not waiting:
            index.apply([batch(list(range(600, 1200)), vectors[600:], 2)])
            waiting.append(len(background.waiting))

    index = SegmentedIndex(16, "compact", 0.5, lambda _: Fake(during=during), background, SMALL)
    index.load(Rows(np.arange(600), vectors[:600]), 1)
    background.run()
    assert waiting == [0]
    assert len(index.view) == 1200 and not index.needs_compaction()


def test_a_new_segment_contains_changes_made_during_its_build_and_none_replaces_later_content(
    rng: np.random.Generator,
) -> None:
    vectors, meanwhile = clustered(rng, 2300, 1, 32), list[Callable[[], object]]()
    index = SegmentedIndex(
        32,
        "compact",
        0.5,
        lambda _: Fake(True, lambda: [meanwhile.pop()() for _ in meanwhile]),
        Background(),
        SMALL,
    )
    index.load(Rows(np.arange(2000), vectors[:2000]), 1)
    for start in (2000, 2150):  # a tail that is long enough to be sealed
        index.apply([batch(list(range(start, start + 150)), vectors[start : start + 150], 2)])
    change = batch([5, 3000, 3001], l2_normalize(rng.normal(size=(3, 32))), 3, [7, 2005])
    undone = batch([], np.empty((0, 32), np.float32), 3, [3001])
    meanwhile += [lambda: index.apply([change, undone]), bool]  # while the tail is merged, which is second
    index.compact()
    view = index.view
    assert len(view) == 2299
    assert view.contains(np.array([5, 7, 2005, 3000, 3001])).tolist() == [True, False, False, True, False]
    assert replace(view, depth=None).search(vectors[5:6], 1).keys.tolist() != [[5]]
    index.load(Rows(np.arange(1000), vectors[:1000]), 4)
    meanwhile.append(lambda: index.load(Rows(np.arange(1000, 2000), vectors[1000:2000]), 5))
    index.compact()
    assert index.view.sequence == 5 and np.array_equal(keys_of(index.view), np.arange(1000, 2000))


def test_a_change_waits_for_the_swap_of_a_segment(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    index, swap = index_of(16, "exact", sizes=SMALL), segment_builder.SegmentBuilder.swap
    index.apply([batch(list(range(300)), l2_normalize(rng.normal(size=(300, 16))), 1)])
    for start in (300, 450):
        index.apply([batch(list(range(start, start + 150)), l2_normalize(rng.normal(size=(150, 16))), 2)])

    def interrupted(*arguments: Any) -> View:
        view = swap(*arguments)
        changes.append(threads.submit(index.apply, [batch([1000], np.eye(1, 16, dtype=np.float32), 3)]))
        wait(changes, 0.1)
        return view

    with ThreadPoolExecutor() as threads:
        changes = list[Future[None]]()
        monkeypatch.setattr(segment_builder.SegmentBuilder, "swap", interrupted)
        index.compact()
    assert changes and len(index.view) == 601 and index.view.sequence == 3


def test_a_closed_index_stops_building(rng: np.random.Generator) -> None:
    index = index_of(32, "compact", sizes=SMALL)
    index.load(Rows(np.arange(2000), clustered(rng, 2000, 1, 32)), 1)
    index.close()
    with pytest.raises(StoppedError):
        index.compact()
    assert index.view.search(index.view.segments[0].vectors[:1], 1).keys.tolist() == [[0]]


@pytest.mark.parametrize(
    ("wanted", "size", "dimension", "failed_at", "now", "kind"),
    [
        ("auto", 19_999, 512, None, "exact", "exact"),
        ("auto", 20_000, 512, None, "exact", "compact"),
        ("auto", 19_999, 512, None, "compact", "compact"),
        ("auto", 9_999, 512, None, "compact", "exact"),
        ("exact", 10**9, 512, None, "compact", "exact"),
        ("compact", 4096, 512, None, "exact", "compact"),
        ("compact", 100, 512, None, "exact", "exact"),
        ("auto", 30_000, 30, None, "exact", "exact"),
        # A kind that failed is tried again in a gallery twice or half as large.
        ("auto", 30_000, 512, 60_000, "exact", "compact"),
        ("auto", 30_001, 512, 60_000, "exact", "exact"),
        ("auto", 119_999, 512, 60_000, "exact", "exact"),
        ("auto", 120_000, 512, 60_000, "exact", "compact"),
    ],
)
def test_the_kind_follows_from_setting_and_size(
    wanted: IndexSetting, size: int, dimension: int, failed_at: int | None, now: Kind, kind: Kind
) -> None:
    assert choose(wanted, size, dimension, Sizes(), failed_at, now) == kind


@pytest.mark.skipif(not finds_gpu(), reason="FAISS finds no GPU here")
def test_a_gpu_search_equals_brute_force(rng: np.random.Generator) -> None:
    vectors = clustered(rng, 5000, 2, 64)
    index = SegmentedIndex(64, "compact", 0.99, trainer_for("gpu"), Background(), SMALL)
    index.load(Rows(np.arange(10_000), vectors), 1)
    index.compact()
    assert all(segment.structure for segment in index.view.segments)
    found = index.view.search(vectors[:50], 1)
    assert (found.keys[:, 0] == np.arange(50)).mean() >= 0.98


def vectors_of(view: View, keys: Keys) -> Float:
    return np.concatenate([segment.vectors[segment.rows_of_keys(keys)] for segment in view.segments])


def keys_of(view: View) -> Keys:
    return np.unique(np.concatenate([segment.keys[segment.alive] for segment in view.segments]))


def test_small_batches_do_not_pile_up_in_small_segments(rng: np.random.Generator) -> None:
    index = index_of(16, "exact", sizes=Sizes(seal=32, compact_from=10**6, max_length=2048))
    for number in range(60):
        keys = list(range(number * 40, number * 40 + 40))
        index.apply([batch(keys, l2_normalize(rng.normal(size=(40, 16))), number + 1)])
        index.compact()
    assert len(index.view.segments) <= segment_builder.MAX_SMALL_SEGMENTS + 2
    assert np.array_equal(keys_of(index.view), np.arange(2400))
