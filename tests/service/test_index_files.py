"""A graph's file saves its building, and is never believed more than SQL."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from models.network import Float
from models.recognition import unit
from service.gallery import segmented
from service.gallery.faiss_index import Graphs, builders
from service.gallery.index import Kind
from service.gallery.index_choice import Sizes
from service.gallery.index_files import IndexFiles, check_index_files, forget_earlier, forget_files
from service.gallery.segmented import Batch, SegmentedIndex
from service.gallery.segments import Rows
from service.gallery.subjects import Gallery, GallerySettings
from service.security.sealing import Seal, new_key

N, DIMENSION = 600, 16
GALLERY = Gallery(
    7, "g", "f" * 32, DIMENSION, GallerySettings(fusion="max", index="graph"), datetime.now(UTC), Seal(new_key())
)
SIZES = Sizes(seal=64, compact_from=10**6, coded=512, linked=512)


@pytest.fixture
def vectors(rng: np.random.Generator) -> Float:
    return unit(rng.normal(size=(N, DIMENSION)))


class Built:
    """An index on files, and how many graphs it had to build."""

    def __init__(self, folder: Path, vectors: Float, gallery: Gallery = GALLERY, keys: Float | None = None) -> None:
        self.graphs = 0
        kept = np.arange(N) if keys is None else keys
        self.index = SegmentedIndex(
            DIMENSION, "graph", 0.9, self._builder, lambda _: None, SIZES, files=IndexFiles(folder, gallery)
        )
        self.index.load(Rows(np.arange(N)[kept], np.arange(N)[kept] // 2, vectors[kept]), 1)
        self.index.compact()

    def _builder(self, kind: Kind, sample: Float) -> Graphs:
        made, count = Graphs(sample.shape[1]), self
        build = made.build

        def counted(vectors: Float, stopped: Callable[[], bool]) -> object:
            count.graphs += 1
            return build(vectors, stopped)

        made.build = counted  # type: ignore[assignment, method-assign]
        return made

    def nearest(self, probes: Float) -> list[int]:
        return [int(key) for key in self.index.search(self.index.view, probes, 1).keys[:, 0]]


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.graph"))


def test_a_restart_builds_nothing(tmp_path: Path, vectors: Float) -> None:
    first = Built(tmp_path, vectors)
    assert first.graphs == len(files(tmp_path)) == 2
    again = Built(tmp_path, vectors)
    assert again.graphs == 0 and again.index.stats().problem is None
    assert again.nearest(vectors[:50]) == first.nearest(vectors[:50]) == list(range(50))
    assert check_index_files(tmp_path, [7]) == []
    assert [p.problem for p in check_index_files(tmp_path, [8])] == ["its gallery was deleted"] * 2
    forget_files(tmp_path, GALLERY)
    assert files(tmp_path) == []


def test_files_of_earlier_versions_go_at_once(tmp_path: Path, vectors: Float) -> None:
    """Their hashes anybody could make."""
    Built(tmp_path, vectors)
    old, now = files(tmp_path)
    old.write_bytes(old.read_bytes().replace(b"kith graph 3", b"kith graph 1", 1))
    forget_earlier(tmp_path)
    assert files(tmp_path) == [now]


@pytest.mark.parametrize("damage", ["cut short", "one bit", "other magic", "empty", "header"])
def test_a_damaged_file_is_reported_deleted_and_made_anew(tmp_path: Path, vectors: Float, damage: str) -> None:
    Built(tmp_path, vectors)
    victim = files(tmp_path)[0]
    content = bytearray(victim.read_bytes())
    match damage:
        case "cut short":
            del content[len(content) // 2 :]
        case "one bit":
            content[len(content) * 2 // 3] ^= 1
        case "other magic":
            content[0] ^= 1
        case "empty":
            content.clear()
        case "header":
            content[20] = 0
    victim.write_bytes(content)
    assert [p.path for p in check_index_files(tmp_path, [7])] == [victim]
    again = Built(tmp_path, vectors)
    assert again.graphs == 1
    assert victim.name in (again.index.stats().problem or "")
    assert again.nearest(vectors) == list(range(N))
    assert check_index_files(tmp_path, [7]) == [] and len(files(tmp_path)) == 2


def test_what_changed_since_is_not_taken_from_a_file(tmp_path: Path, vectors: Float, rng: np.random.Generator) -> None:
    Built(tmp_path, vectors)
    before = set(files(tmp_path))
    changed = vectors.copy()
    changed[:20] = unit(rng.normal(size=(20, DIMENSION)))
    again = Built(tmp_path, changed, keys=np.setdiff1d(np.arange(N), [30, 31]))
    assert again.graphs == 0 and again.index.stats().vectors == N - 2
    assert again.nearest(changed[:30]) == list(range(30))
    assert not {30, 31} & set(again.nearest(vectors[30:32]))
    assert len(before - set(files(tmp_path))) == 1  # the one that held who was deleted meanwhile


def test_files_of_another_rule_and_unfinished_ones_do_not_stay(tmp_path: Path, vectors: Float) -> None:
    Built(tmp_path, vectors)
    (written, *_) = files(tmp_path)
    for age in (0, 7200):
        unfinished = written.with_name(f"{age}.part")
        unfinished.write_bytes(b"links")
        os.utime(unfinished, (time.time() - age,) * 2)
    assert [problem.path.name for problem in check_index_files(tmp_path, [GALLERY.pk])] == ["7200.part"]
    Built(tmp_path, vectors)
    assert [path.name for path in written.parent.glob("*.part")] == ["0.part"]
    other = replace(GALLERY, settings=replace(GALLERY.settings, fusion="mean_top_k"))
    Built(tmp_path, vectors, other)
    assert not written.exists() and len(files(tmp_path)) == 2


def test_another_gallerys_recogniser_or_time_is_refused(tmp_path: Path, vectors: Float) -> None:
    Built(tmp_path, vectors)
    other = Built(tmp_path, vectors, replace(GALLERY, fingerprint="e" * 32))
    assert other.graphs == 2 and "another fingerprint" in (other.index.stats().problem or "")
    late = Built(tmp_path, -vectors, replace(GALLERY, fingerprint="e" * 32))
    assert late.graphs == 2 and "another time" in (late.index.stats().problem or "")


def test_who_is_deleted_is_in_no_file_from_then_on(
    tmp_path: Path, vectors: Float, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = Built(tmp_path, vectors)
    # A template that only changed leaves the files be; one that goes takes its file along.
    built.index.apply([Batch(np.array([5]), Rows(np.array([5]), np.array([2]), vectors[6:7]), 2)])
    assert len(files(tmp_path)) == 2
    built.index.apply([Batch(np.array([9]), Rows(np.array([], np.int64), np.array([], np.int64), vectors[:0]), 3)])
    assert len(files(tmp_path)) == 1
    built.index.compact()
    assert len(files(tmp_path)) == 1  # not with every deletion
    monkeypatch.setattr(segmented, "WRITE_AGAIN_S", 0)
    built.index.compact()
    assert len(files(tmp_path)) == 2 and built.graphs == 2
    for path in files(tmp_path):
        head, body = path.read_bytes().split(b"\n", 2)[1:]
        keys = np.frombuffer(body[: 8 * json.loads(head)["nodes"]], np.int64)
        assert 9 not in keys and 5 not in keys


def test_a_full_disk_costs_the_file_not_the_index(tmp_path: Path, vectors: Float) -> None:
    in_the_way = tmp_path / "7"
    in_the_way.write_text("no folder")
    built = Built(tmp_path, vectors)
    assert built.graphs == 2 and "could not be written" in (built.index.stats().problem or "")
    assert built.nearest(vectors) == list(range(N))


def test_codes_have_no_files(tmp_path: Path, vectors: Float) -> None:
    index = SegmentedIndex(
        DIMENSION, "compact", 0.5, builders("cpu"), lambda _: None, SIZES, files=IndexFiles(tmp_path, GALLERY)
    )
    index.load(Rows(np.arange(N), np.arange(N), vectors), 1)
    index.compact()
    assert index.stats().kind == "compact" and files(tmp_path) == []
