"""Killed while indexes are compacted and their files written: none is damaged, and none is believed more than SQL."""

from __future__ import annotations

from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from service.gallery import segmented
from service.gallery.check import open_check
from service.gallery.follower import Followers
from service.gallery.index_choice import Sizes
from service.gallery.index_files import SUFFIX, check_index_files
from service.gallery.replicas import InProcess, in_process
from service.gallery.store import Store
from service.gallery.subjects import GallerySettings
from tests.databases import open_database
from tests.faults import LONG
from tests.faults.killing import Killed, pause
from tests.faults.tally import Tally
from tests.faults.test_sigkill import findings, new_template
from tests.faults.workers import Node, template_id, vector_of
from tests.postgres import DatabaseUrl

DIMENSION: Final = 32
AT_ONCE: Final = 40
SIZES: Final = Sizes(seal=64, compact_from=128, coded=512, linked=512)
"""So small that a few hundred vectors are compacted as millions are."""


class Served:
    """A node whose indexes have files."""

    def __init__(self, url: str, folder: Path) -> None:
        self.store = Store(open_database(url))
        self.followers = Followers(in_process(self.store, InProcess(folder=folder, sizes=SIZES)))

    def found(self, templates: list[str]) -> int:
        """How many of them a search finds as their own."""
        gallery = self.store.gallery("g")
        probes = np.stack([vector_of(template, DIMENSION) for template in templates])
        results, _ = self.followers.of(gallery).search(probes, 1)
        named = self.store.subjects_by_pk(gallery, [hits[0].subject_pk for hits in results if hits])
        return sum(
            bool(hits) and named[hits[0].subject_pk].id == f"s{template}"
            for template, hits in zip(templates, results, strict=True)
        )

    def close(self) -> None:
        self.followers.close()
        self.store.close()


def _grow(url: str, folder: Path, seed: int, pipe: Pipe) -> None:
    """Enrol, delete, search, and give the background its time, until killed."""
    segmented.WRITE_AGAIN_S = 0.0  # type: ignore[assignment, misc]
    rng, served = np.random.default_rng(seed), Served(url, folder)
    gallery = served.store.gallery("g")
    first = int(rng.integers(2**40)) << 40
    for step in range(10_000):
        made = [template_id(seed, first + step * AT_ONCE + i) for i in range(AT_ONCE)]
        for template in made:
            served.store.enrol(gallery, f"s{template}", [new_template(template)], None)
        gone = made[: int(rng.integers(0, AT_ONCE // 2))]
        for template in gone:
            served.store.delete_subject(gallery, f"s{template}")
        pipe.send((made[len(gone) :], gone))
        served.found(made)
        pause(rng.uniform(0, 0.05))


@pytest.mark.parametrize("kind", ["graph", "compact"] if LONG else ["graph"])
def test_killed_while_an_index_is_compacted_and_written(
    some_database_url: DatabaseUrl, tmp_path: Path, kind: str, tally: Tally
) -> None:
    url, rng, folder = some_database_url(), np.random.default_rng(), tmp_path / "indexes"
    with Node(url) as node:
        settings = GallerySettings(fusion="max", index=kind, recall=0.9)  # type: ignore[arg-type]
        gallery = node.store.create_gallery("g", "f" * 32, DIMENSION, settings)
    present: set[str] = set()
    deleted: set[str] = set()
    files, kill = 0, 0
    while kill < (10 if LONG else 1) or (kind == "graph" and not files and kill < 10):
        kill += 1
        for kept, gone in Killed(_grow, url, folder, kill).after(int(rng.integers(6, 12)), rng.uniform(0, 0.3)):
            present |= set(kept)
            deleted |= set(gone)
        tally.kills["compaction and writing of an index"] += 1
        with tally.judging():
            assert check_index_files(folder, [gallery.pk]) == []
            files = max(files, len(list(folder.rglob(f"*{SUFFIX}"))))
            served = Served(url, folder)
            try:
                assert served.found(sorted(present)) >= 0.97 * len(present)
                assert served.found(sorted(deleted)) == 0
                assert served.followers.of(served.store.gallery("g")).stats().problem is None
            finally:
                served.close()
            assert findings(url, "g") == []
    assert files or kind == "compact", "no file was ever written: the kills prove nothing of them"


def test_a_damaged_index_file_is_no_harm(tmp_path: Path) -> None:
    url, folder = f"sqlite:///{tmp_path / 'kith.db'}", tmp_path / "indexes"
    with Node(url) as node:
        settings = GallerySettings(fusion="max", index="graph", recall=0.9)
        gallery = node.store.create_gallery("g", "f" * 32, DIMENSION, settings)
    said = Killed(_grow, url, folder, 7).after(10, 0.5)
    present = sorted({template for kept, _ in said for template in kept})
    victims = list(folder.rglob(f"*{SUFFIX}"))
    assert victims
    for victim in victims:
        content = bytearray(victim.read_bytes())
        content[len(content) * 2 // 3] ^= 1
        victim.write_bytes(content)
    assert len(check_index_files(folder, [gallery.pk])) == len(victims)
    with open_check(open_database(url), index_folder=folder) as check:
        assert [(found.kind, found.count) for found in check.findings(None, False)] == [("index_files", len(victims))]
    served = Served(url, folder)
    try:
        assert served.found(present) >= 0.97 * len(present)
        assert "made anew" in (served.followers.of(gallery).stats().problem or "")
    finally:
        served.close()
