"""Kills while an index is compacted: the index rebuilt after the restart agrees with SQL."""

from __future__ import annotations

from multiprocessing.connection import Connection as Pipe
from typing import Final

import numpy as np
import pytest

from service.domain.gallery import GallerySettings
from service.index.follower import Followers, in_process
from service.index.selection import Sizes
from service.storage.repositories.store import Store
from tests.databases import open_database
from tests.faults import LONG
from tests.faults.killing import Killed, pause
from tests.faults.tally import Tally
from tests.faults.test_sigkill import new_template
from tests.faults.workers import Node, template_id, vector_of
from tests.postgres import DatabaseUrl
from tests.soundness import problems

pytestmark = pytest.mark.long

DIMENSION: Final = 32
AT_ONCE: Final = 40
SIZES: Final = Sizes(seal=64, compact_from=128, max_length=512)
"""Small sizes, so that a few hundred vectors are compacted like millions."""


class Served:
    """A node with in-process indexes."""

    def __init__(self, url: str) -> None:
        self.store = Store(open_database(url))
        self.followers = Followers(in_process(self.store, sizes=SIZES))

    def found(self, templates: list[str]) -> int:
        """Count the vectors that find their own template."""
        gallery = self.store.galleries.get("g")
        probes = np.stack([vector_of(template, DIMENSION) for template in templates])
        results, _ = self.followers.catch_up_blocking(gallery).search(probes, 1)
        named = self.store.subjects.by_pk(gallery, [hits[0].subject_pk for hits in results if hits])
        return sum(
            bool(hits) and named[hits[0].subject_pk].id == f"s{template}"
            for template, hits in zip(templates, results, strict=True)
        )

    def close(self) -> None:
        self.followers.close()
        self.store.close()


def _grow(url: str, seed: int, pipe: Pipe) -> None:
    """Enroll, delete, search and run background work until killed."""
    rng, served = np.random.default_rng(seed), Served(url)
    gallery = served.store.galleries.get("g")
    first = int(rng.integers(2**40)) << 40
    for step in range(10_000):
        made = [template_id(seed, first + step * AT_ONCE + i) for i in range(AT_ONCE)]
        for template in made:
            served.store.templates.enroll(gallery, f"s{template}", [new_template(template, DIMENSION)], None)
        gone = made[: int(rng.integers(0, AT_ONCE // 2))]
        for template in gone:
            served.store.subjects.delete(gallery, f"s{template}")
        pipe.send((made[len(gone) :], gone))
        served.found(made)
        pause(rng.uniform(0, 0.05))


def test_killed_while_an_index_is_compacted(some_database_url: DatabaseUrl, tally: Tally) -> None:
    url, rng = some_database_url(), np.random.default_rng()
    with Node(url) as node:
        settings = GallerySettings(index="compact", recall=0.9)
        node.store.galleries.create("g", "f" * 32, DIMENSION, settings)
    present: set[str] = set()
    deleted: set[str] = set()
    for kill in range(10 if LONG else 1):
        for kept, gone in Killed(_grow, url, kill).after(int(rng.integers(6, 12)), rng.uniform(0, 0.3)):
            present |= set(kept)
            deleted |= set(gone)
        tally.kills["compaction of an index"] += 1
        with tally.judging():
            served = Served(url)
            try:
                assert served.found(sorted(present)) >= 0.97 * len(present)
                assert served.found(sorted(deleted)) == 0
            finally:
                served.close()
            assert problems(url, "g") == []
