"""Cached reads are reused while they are valid, and never longer, whichever process writes."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa

from kith import Kith, KithClientError
from models.runtime.network import Float
from service.core.errors import StorageError
from service.domain.findings import HygieneFinding, HygieneReport
from service.domain.gallery import Gallery, GallerySettings, NewTemplate, SubjectLabel
from service.security.sealing import Seal, new_key
from service.settings import Settings
from service.storage.repositories.read_cache import VersionedCache
from service.storage.repositories.store import Store
from tests.databases import ON_BOTH, open_database
from tests.nodes import Node
from tests.packs import BUNDLED_DIMENSION
from tests.postgres import DatabaseUrl
from tests.service.storage.scene import DIMENSION, some


class Process(Node):
    """Objects of a server process, and the number of SQL statements it has run."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.statements = 0
        sa.event.listen(self.database.engine, "before_cursor_execute", self._count)

    def _count(self, _connection: object, _cursor: object, statement: str, *_: object) -> None:
        self.statements += statement != "BEGIN"

    def search(self, name: str, probe: Float) -> list[SubjectLabel]:
        gallery = self.store.galleries.get(name)
        (hits,), _ = self.followers.catch_up_blocking(gallery, gallery.version).search(probe[None], 3)
        pks = [hit.subject_pk for hit in hits]
        known = self.store.subjects.names(gallery, pks)
        return [known[pk] for pk in pks]

    def statements_of(self, action: Callable[[], object]) -> int:
        before = self.statements
        action()
        return self.statements - before


def filled(store: Store, name: str, rng: np.random.Generator) -> list[NewTemplate]:
    gallery = store.galleries.create(name, "f" * 32, DIMENSION, GallerySettings())
    new = some(rng, 4)
    for i, template in enumerate(new):
        store.templates.enroll(gallery, f"s{i}", [template], None)
    return new


@ON_BOTH
def test_where_nothing_was_written_a_search_reads_nothing(database_url: DatabaseUrl, rng: np.random.Generator) -> None:
    url = database_url()
    with Process(url) as one, Process(url) as two:
        asked = 0 if url.startswith("sqlite") else 1  # PostgreSQL is asked for the gallery's version
        probe = filled(one.store, "g", rng)[0].vector
        filled(one.store, "other", rng)
        found = one.search("g", probe)
        assert one.statements_of(lambda: one.search("g", probe)) == asked
        assert one.search("g", probe) == found
        two.store.templates.enroll(two.store.galleries.get("other"), "s9", some(rng), None)
        # One query reads the gallery's version; its names and index are unchanged.
        assert one.statements_of(lambda: one.search("g", probe)) == 1
        assert one.statements_of(lambda: one.search("g", probe)) == asked


def test_a_subject_row_removed_by_another_program_is_reported_as_damage(
    kith: Kith, gallery: str, settings: Settings, rng: np.random.Generator
) -> None:
    vectors = [template.vector.tolist() for template in some(rng, 2, BUNDLED_DIMENSION)]
    kith.update_gallery(gallery, risk={"threshold": 0.5})
    for i, vector in enumerate(vectors):
        kith.enroll(gallery, f"s{i}", embeddings=[vector], allow_duplicate=True)
    with closing(sqlite3.connect(settings.data_dir / "kith.db")) as by_hand:
        of_gallery = "SELECT max(pk) FROM galleries WHERE name = ?"
        own = f"SELECT min(pk) FROM subjects WHERE gallery_pk = ({of_gallery})"  # noqa: S608
        by_hand.execute(f"DELETE FROM subjects WHERE pk = ({own})", (gallery,))  # noqa: S608
        by_hand.commit()
    with pytest.raises(KithClientError) as refused:
        kith.identify(gallery, embeddings=[vectors[0]])
    assert (refused.value.status, refused.value.code) == (500, "storage_damaged")


def test_a_database_that_goes_back_is_another_one(tmp_path: Path, rng: np.random.Generator) -> None:
    """An older copy over the file of running processes: what was read of the lost history is not taken for what is
    written after it."""
    url = f"sqlite:///{tmp_path / 'kith.db'}"
    with (
        Process(url) as one,
        Process(url) as two,
        closing(sqlite3.connect(tmp_path / "kith.db")) as file,
        closing(sqlite3.connect(tmp_path / "copy")) as copy,
    ):
        probe = filled(one.store, "g", rng)[0].vector
        file.backup(copy)
        one.store.subjects.put(one.store.galleries.get("g"), "s0", "lost", {}, [])
        assert two.search("g", probe)[0].name == "lost"
        copy.backup(file)
        assert two.search("g", probe)[0].name is None
        one.store.subjects.put(one.store.galleries.get("g"), "s0", "acknowledged afterwards", {}, [])
        assert two.search("g", probe)[0].name == "acknowledged afterwards"


@pytest.mark.parametrize("path", ["", ":memory:", "file:kith.db?uri=true"])
def test_sqlite_is_a_file(path: str) -> None:
    """Another connection to it sees the same."""
    with pytest.raises(StorageError, match="path"):
        open_database(f"sqlite:///{path}")


def some_galleries(count: int) -> list[Gallery]:
    settings, at = GallerySettings(), datetime.now(UTC)
    return [Gallery(i, f"g{i}", "f", DIMENSION, settings, at, Seal(new_key()), version=i) for i in range(count)]


def found_of(count: int) -> HygieneReport:
    found = [HygieneFinding("lookalikes", (k, k), (k, k), "look", 0.5, 0.5, 0.1, 0.2) for k in range(count)]
    return HygieneReport(found, [], None)


def test_values_are_of_one_version_and_bounded_by_size() -> None:
    cached, made = VersionedCache[str, HygieneReport](10, len), some_galleries(3)
    for gallery in made:
        cached.put(gallery, {"ada": found_of(4)})
    assert [[*cached.get(each, ["ada", "bob"])] for each in made] == [[], ["ada"], ["ada"]]
    assert not cached.get(replace(made[2], version=7), ["ada"])
    cached.put(made[0], {"dee": found_of(11)})
    assert not cached.get(made[0], ["dee"]) and len(cached) == 2
    for number in range(30):  # an empty one takes room, too
        cached.put(made[2], {f"empty{number}": found_of(0)})
    assert len(cached) == 10
    cached.put(made[1], {"ada": found_of(4)})
    cached.keep(lambda name, version: (name, version) == (made[1].name, made[1].version))
    assert len(cached) == 1 and cached.get(made[1], ["ada"])


def test_an_erasure_evicts_at_once(store: Store, rng: np.random.Generator) -> None:
    template, *_ = filled(store, "g", rng)
    erasing: list[Callable[[Gallery], object]] = [
        lambda now: store.templates.delete(now, "s0", template.id),
        lambda now: store.subjects.merge(now, "s0", "s1"),
        lambda now: store.subjects.delete(now, "s1"),
    ]
    for erase in erasing:
        now = store.galleries.get("g")
        store.cache.findings.put(now, {None: found_of(2)})
        erase(now)
        assert store.cache.latest("g") is None and not len(store.cache.findings)
