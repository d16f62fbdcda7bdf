"""Kills of a process at any instant of one kind of work: what it told persists, and the rest is absent or complete."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import pytest
import sqlalchemy as sa

from kith.wire.transfer import GalleryFileItem
from service.core.atomic_files import atomic_write
from service.core.errors import GalleryNotFoundError
from service.domain.gallery import Crop, Gallery, GallerySettings, IdempotentResponse, NewTemplate, SubjectFilter
from service.domain.gallery_items import FileRow, vector_bytes
from service.index.follower import Followers, in_process
from service.index.segment_builder import Sizes
from service.security.master_keys import KeyFile, MasterKeys
from service.storage.damage import damage
from service.storage.db import engine
from service.storage.db.row_sealing import subject_lookup
from service.storage.db.tables import crops, erasures, idempotency, labels, templates, vectors
from service.storage.privacy.backup import back_up, read_manifest, restore
from service.storage.privacy.master_key_rotation import rewrap, uses
from service.storage.repositories.bulk_templates import BulkStore
from service.storage.repositories.erasures import ErasureStore
from service.storage.repositories.store import Store
from service.storage.transfer.importing import Import
from tests.databases import open_database
from tests.faults import LONG
from tests.faults.killing import Killed, pause
from tests.faults.workers import Node, template_id, vector_of
from tests.postgres import DatabaseUrl
from tests.soundness import problems

DIMENSION: Final = 32
TEMPLATES: Final = [template_id(3, number) for number in range(500)]
LANDMARKS: Final = ((1.0, 1.0), (3.0, 1.0), (2.0, 2.0), (1.0, 3.0), (3.0, 3.0))


def new_template(template: str, crop: Crop | None = None) -> NewTemplate:
    return NewTemplate(template, vector_of(template, DIMENSION), "photo", crop=crop)


def create(node: Node, name: str, enrolled: list[str], **settings: Any) -> Gallery:
    gallery = node.store.galleries.create(name, "f" * 32, DIMENSION, GallerySettings(**settings))
    if enrolled:
        node.store.templates.enroll(gallery, "a", [new_template(template) for template in enrolled], None)
    return gallery


class Work:
    """One kind of work on a new database.

    Attributes:
        work: run in a process of its own; sends a message after each step.
        kills: number of kills, and of those with KITH_FAULTS=long.
        words, delay_s: bounds of the messages before a kill, and of the time after them.
        ends: whether the work ends by itself.
    """

    work: ClassVar[Callable[..., None]]
    kills: ClassVar[tuple[int, int]]
    words: ClassVar[tuple[int, int]] = (1, 2)
    delay_s: float = 0.05
    ends: ClassVar[bool] = True

    def __init__(self, another_url: DatabaseUrl, folder: Path) -> None:
        self.url, self.path = another_url(), folder / "file"
        self.arguments: tuple[Any, ...] = (self.url, self.path)
        self.prepare(another_url)

    def prepare(self, another_url: DatabaseUrl) -> None:
        """Fill the database."""

    def judge(self, said: list[Any]) -> None:
        """Check what must hold after a kill."""

    def finished(self, said: list[Any]) -> None:
        """Check what must hold after an uninterrupted run."""

    def run_once(self) -> list[Any]:
        """Run to the end, and take the time as the bound of the delay."""
        started = time.monotonic()
        said = Killed(type(self).work, *self.arguments).at_its_end()
        self.delay_s = time.monotonic() - started
        return said


def _delete_gallery(url: str, _path: Path, pipe: Pipe) -> None:
    with Node(url) as node:
        pipe.send("begun")
        node.store.galleries.delete("g")


class Deletion(Work):
    work, kills = _delete_gallery, (2, 12)

    def prepare(self, another_url: DatabaseUrl) -> None:
        with Node(self.url) as node:
            create(node, "g", TEMPLATES)

    def judge(self, said: list[Any]) -> None:
        with Node(self.url) as node:
            try:
                assert set(node.templates("g")) == set(TEMPLATES)
            except GalleryNotFoundError:
                create(node, "g", TEMPLATES)
                assert set(node.templates("g")) == set(TEMPLATES)

    def finished(self, said: list[Any]) -> None:
        with Node(self.url) as node:
            create(node, "g", [])
            assert node.templates("g") == {}


def _back_up(url: str, path: Path, pipe: Pipe) -> None:
    database = open_database(url)
    pipe.send("begun")
    back_up(database, path)
    pipe.send("done")


class Backup(Work):
    """The file is the one before, or complete."""

    work, kills = _back_up, (1, 8)

    def prepare(self, another_url: DatabaseUrl) -> None:
        with Node(self.url) as node:
            create(node, "g", TEMPLATES)
        assert self.run_once() == ["begun", "done"]
        self.rows = read_manifest(self.path).rows

    def judge(self, said: list[Any]) -> None:
        assert read_manifest(self.path).rows == self.rows


def _restore(url: str, path: Path, pipe: Pipe) -> None:
    database = open_database(url)
    pipe.send("begun")
    restore(database, path, replace=True)
    pipe.send("done")


class Restore(Work):
    """The database is unchanged, or restored."""

    work, kills, delay_s = _restore, (1, 8), 0.5
    of_before: Final = template_id(4, 0)

    def prepare(self, another_url: DatabaseUrl) -> None:
        with Node(another_url()) as source:
            create(source, "g", TEMPLATES)
            back_up(source.database, self.path)
        with Node(self.url) as node:
            create(node, "before", [self.of_before])
        self.state = "before"

    def judge(self, said: list[Any]) -> None:
        with Node(self.url) as node:
            (gallery,) = node.store.galleries.list_page(None, 5)
            assert gallery.name == "g" or (self.state == "before" and "done" not in said)
            self.state = gallery.name
            assert set(node.templates(self.state)) == (set(TEMPLATES) if self.state == "g" else {self.of_before})

    def finished(self, said: list[Any]) -> None:
        self.judge(said)
        assert (said, self.state) == (["begun", "done"], "g")


PEOPLE: Final = [f"s{person}" for person in range(60)]
EACH: Final = 5


def _erase_left(url: str, _path: Path, pipe: Pipe) -> None:
    with Node(url) as node:
        gallery = node.store.galleries.get("g")
        for subject in node.store.subjects.list_page(gallery, None, 1000, SubjectFilter()):
            pipe.send((subject.id, node.delete_subject("g", subject.id).id))


class Erasure(Work):
    """A person is stored completely or not at all, and is gone once acknowledged."""

    work, kills, words, delay_s = _erase_left, (4, 20), (1, 6), 0.01

    def prepare(self, another_url: DatabaseUrl) -> None:
        self.acknowledged: dict[str, str] = {}
        with Node(self.url) as node:
            gallery = create(node, "g", [], keep_crops=True)
            for person, name in enumerate(PEOPLE):
                ids = [template_id(person, number) for number in range(EACH)]
                new = [new_template(template, Crop(b"a face" * 100, LANDMARKS)) for template in ids]
                node.store.templates.enroll(gallery, name, new, IdempotentResponse(f"key {name}", "d", "an answer"))
                node.store.subjects.put(gallery, name, "Name", {}, ["tag"])

    def judge(self, said: list[Any]) -> None:
        self.acknowledged |= dict(said)
        with Node(self.url) as node:
            gallery = node.store.galleries.get("g")
            left = {s.id for s in node.store.subjects.list_page(gallery, None, 1000, SubjectFilter())}
            assert not left & self.acknowledged.keys()
            with node.database.read() as connection:
                tables = (templates, vectors, crops, labels, idempotency)
                counts = [connection.execute(sa.select(sa.func.count()).select_from(t)).scalar_one() for t in tables]
                known = set(connection.execute(sa.select(erasures.c.subject)).scalars())
            assert counts == [len(left) * EACH] * 3 + [len(left)] * 2
            assert known == {subject_lookup(gallery.seal, gone) for gone in {*PEOPLE} - left}
            receipts = ErasureStore(node.database).list_page(gallery, limit=1000)
            assert {receipt.id for _, receipt in receipts} >= set(self.acknowledged.values())
            assert set(node.templates("g").values()) == left

    def finished(self, said: list[Any]) -> None:
        self.judge(said)
        assert self.acknowledged.keys() <= set(PEOPLE)
        with Node(self.url) as node:
            assert node.templates("g") == {}


IN_BLOCK: Final = 100
BLOCKS: Final = 40 if LONG else 12


def _block(number: int) -> list[str]:
    return [template_id(7, number * IN_BLOCK + i) for i in range(IN_BLOCK)]


def _import(url: str, _path: Path, pipe: Pipe) -> None:
    database = open_database(url)
    taking = Import(BulkStore(database), Store(database).galleries.get("g"))
    for number in range(BLOCKS):
        rows = []
        for place, template in enumerate(_block(number), start=1):
            about = GalleryFileItem(subject=f"s{int(template, 16) % 500}", template=template)
            vector = vector_bytes(vector_of(template, DIMENSION))
            rows.append(FileRow(number * IN_BLOCK + place, about, about.subject, vector))
        taking.take(rows)
        pipe.send(number)


class Importing(Work):
    """Complete blocks are stored, and importing the same file again adds the rest."""

    work, kills, words = _import, (2, 8), (0, BLOCKS // 2)

    def prepare(self, another_url: DatabaseUrl) -> None:
        with Node(self.url) as node:
            create(node, "g", [])

    def judge(self, said: list[Any]) -> None:
        with Node(self.url) as node:
            stored = node.templates("g")
        whole = len(stored) // IN_BLOCK
        assert set(stored) == {template for number in range(whole) for template in _block(number)}
        assert whole >= len(said)

    def finished(self, said: list[Any]) -> None:
        self.judge(said)
        assert said == [*range(BLOCKS)]


SIZES: Final = Sizes(seal=64, compact_from=128, max_length=512)
"""Small sizes, so that a few hundred vectors are compacted like millions."""
AT_ONCE: Final = 40


class Served:
    """A node with in-process indexes."""

    def __init__(self, url: str) -> None:
        self.store = Store(open_database(url))
        self.followers = Followers(in_process(self.store, sizes=SIZES))

    def found(self, enrolled: list[str]) -> int:
        """Count the vectors that find their own template."""
        gallery = self.store.galleries.get("g")
        probes = np.stack([vector_of(template, DIMENSION) for template in enrolled])
        results, _ = self.followers.catch_up_blocking(gallery).search(probes, 1)
        named = self.store.subjects.by_pk(gallery, [hits[0].subject_pk for hits in results if hits])
        return sum(
            bool(hits) and named[hits[0].subject_pk].id == f"s{template}"
            for template, hits in zip(enrolled, results, strict=True)
        )

    def close(self) -> None:
        self.followers.close()
        self.store.close()


def _grow(url: str, _path: Path, pipe: Pipe) -> None:
    """Enroll, delete, search and run background work until killed."""
    rng, served = np.random.default_rng(), Served(url)
    gallery, first = served.store.galleries.get("g"), int(rng.integers(2**40)) << 40
    for step in range(10_000):
        made = [template_id(5, first + step * AT_ONCE + i) for i in range(AT_ONCE)]
        for template in made:
            served.store.templates.enroll(gallery, f"s{template}", [new_template(template)], None)
        gone = made[: int(rng.integers(0, AT_ONCE // 2))]
        for template in gone:
            served.store.subjects.delete(gallery, f"s{template}")
        pipe.send((made[len(gone) :], gone))
        served.found(made)
        pause(rng.uniform(0, 0.05))


class Compaction(Work):
    """The index rebuilt after the restart agrees with SQL."""

    work, kills, words, delay_s, ends = _grow, (1, 10), (6, 12), 0.3, False

    def prepare(self, another_url: DatabaseUrl) -> None:
        self.present: set[str] = set()
        self.deleted: set[str] = set()
        with Node(self.url) as node:
            create(node, "g", [], index="compact", recall=0.9)

    def judge(self, said: list[Any]) -> None:
        for kept, gone in said:
            self.present |= set(kept)
            self.deleted |= set(gone)
        with closing(Served(self.url)) as served:
            assert served.found(sorted(self.present)) >= 0.97 * len(self.present)
            assert served.found(sorted(self.deleted)) == 0


def _rotate(url: str, path: Path, pipe: Pipe) -> None:
    """Rotate the keys repeatedly. The two previous keys stay: a killed rotation may have left one of them in use."""
    file = KeyFile(path)
    with closing(engine.open_database(url, MasterKeys(file))) as database:
        pipe.send("begun")
        while True:
            rewrap(database, file.add())
            with atomic_write(path) as kept:
                kept.write("\n".join(path.read_text().split()[:3]).encode())
            pipe.send("rotated")


class Rotation(Work):
    """One master key wraps all keys, and opens them."""

    work, kills, words, delay_s, ends = _rotate, (4, 24), (2, 3), 0.1, False

    def prepare(self, another_url: DatabaseUrl) -> None:
        master = MasterKeys(KeyFile(self.path, may_make=True))
        with closing(Store(engine.open_database(self.url, master))) as store:
            for number in range(20):
                store.galleries.create(f"g{number}", "f" * 32, 8, GallerySettings())
        self.used = master.first().id

    def judge(self, said: list[Any]) -> None:
        assert "rotated" in said
        with closing(engine.open_database(self.url, MasterKeys(KeyFile(self.path)))) as database:
            before = self.used
            with database.read() as connection:
                (self.used,) = uses(connection)  # a killed rotation was complete or had no effect
            assert self.used != before
            assert [*damage(database)] == []


SHORT: Final = [Deletion, Importing]
OTHERS: Final = [Backup, Restore, Erasure, Compaction, Rotation]


@pytest.mark.parametrize("kind", [*SHORT, *(pytest.param(kind, marks=pytest.mark.long) for kind in OTHERS)])
def test_killed_at_any_instant(some_database_url: DatabaseUrl, tmp_path: Path, kind: type[Work]) -> None:
    rng, at_work = np.random.default_rng(), kind(some_database_url, tmp_path)
    for _ in range(kind.kills[LONG]):
        said = Killed(kind.work, *at_work.arguments).after(
            int(rng.integers(*kind.words)), rng.uniform(0, at_work.delay_s)
        )
        at_work.judge(said)
        assert kind is Rotation or problems(at_work.url) == []
    if kind.ends:
        said = Killed(kind.work, *at_work.arguments).at_its_end()
        at_work.finished(said)
        assert problems(at_work.url) == []
