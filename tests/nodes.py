"""Server processes without HTTP, and a model of their expected answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import numpy as np

from models.runtime.network import Float
from service.domain.gallery import NewTemplate, SubjectFilter
from service.index.follower import Follower, Followers, in_process
from service.index.milvus import Milvus
from service.index.milvus_follower import MilvusEngine, MilvusFollower
from service.storage.repositories.shared_indexes import SharedIndexes
from service.storage.repositories.store import Store
from tests.databases import open_database
from tests.service.index.test_gallery import brute_force


class Node:
    """Components of a server process: a database, and an engine for its indexes."""

    def __init__(self, url: str, milvus: Milvus | None = None) -> None:
        self.database = open_database(url)
        self.url = url
        self.store = Store(self.database)
        self.shared = SharedIndexes(self.database)
        self.engine = None if milvus is None else MilvusEngine(milvus, self.shared)
        self.followers = Followers(in_process(self.store) if self.engine is None else self.engine.follower)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def follower(self, gallery: str = "g") -> Follower:
        return self.followers.catch_up_blocking(self.store.galleries.get(gallery))

    def replica(self, gallery: str = "g") -> MilvusFollower:
        """Options of a node with Milvus."""
        assert self.engine is not None
        return self.engine.follower(self.store.galleries.get(gallery))

    def close(self) -> None:
        self.followers.close()
        if self.engine is not None:
            self.engine.close()
        self.store.close()


Nodes = Callable[..., Node]


class Model:
    """Model of the enrolled subjects, in plain lists. ``outsiders``: decoys by id, with their subjects."""

    def __init__(self) -> None:
        self.enrolled: dict[str, list[NewTemplate]] = {}
        self.outsiders: dict[str, tuple[str, NewTemplate]] = {}

    def check(self, node: Any, probes: Float, k: int, among: set[str] | None = None) -> None:
        """``node``: has a store and followers."""
        gallery = node.store.galleries.get("g")
        names = {s.pk: s.id for s in node.store.subjects.list_page(gallery, None, 1000, SubjectFilter())}
        known = self.enrolled | {f"/{owner}/{decoy}": [new] for decoy, (owner, new) in self.outsiders.items()}
        keys = None if among is None else np.array(sorted(pk for pk, name in names.items() if name in among), np.int64)
        results, compared = node.followers.catch_up_blocking(gallery).search(probes, k, keys)
        names |= {outsider: f"/{names[owner]}" for outsider, owner in gallery.outsiders.items()}
        assert compared == sum(bool(t) and (among is None or name in among) for name, t in known.items())
        for probe, hits in zip(probes, results, strict=True):
            expected = brute_force(known, probe, k, among)
            assert [names[hit.subject_pk] for hit in hits] == [name.rpartition("/")[0] or name for name, _ in expected]
            assert np.allclose([hit.similarity for hit in hits], [s for _, s in expected], atol=1e-4)
