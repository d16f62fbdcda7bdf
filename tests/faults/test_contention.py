"""Conflicting writers are asked to retry, and their rejected writes store nothing."""

from __future__ import annotations

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from service.core.errors import StorageBusyError, StorageError
from service.domain.gallery import Gallery, GallerySettings, LogTrimmedError, NewTemplate
from service.storage.db.engine import Database
from service.storage.db.tables import galleries
from service.storage.repositories.store import Store
from tests.databases import open_database
from tests.faults.workers import Node
from tests.postgres import DatabaseUrl, Postgres


def test_a_late_trim_does_not_lower_the_log_floor(database_url: DatabaseUrl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a follower between the two positions would skip the deleted lines."""
    url = database_url()
    with Node(url) as slow, Node(url) as quick:
        gallery = slow.store.galleries.create("g", "f" * 32, 8, GallerySettings())
        vector = np.eye(8, dtype=np.float32)[0]
        for number in range(20):
            slow.enroll("g", "a", [NewTemplate(f"{number:032x}", vector, "embedding")])
            slow.delete_subject("g", "a")
        begin = Database.change

        def after_another(database: Database, gallery: Gallery) -> Any:
            monkeypatch.undo()
            assert quick.store.changes.trim(gallery, 5) == 35
            return begin(database, gallery)

        monkeypatch.setattr(Database, "change", after_another)
        slow.store.changes.trim(gallery, 25)
        assert slow.store.galleries.get("g").log_floor == 35
        with pytest.raises(LogTrimmedError):
            slow.store.changes.changed_subjects(gallery, 34, 9)


def test_a_deadlock_on_postgresql_ends_with_one_of_the_two(postgres: Postgres) -> None:
    database = open_database(postgres.create(f"kith_{uuid.uuid4().hex}"))
    both_hold, count = threading.Barrier(2), galleries.c.template_count + 1
    with closing(Store(database)) as store, ThreadPoolExecutor(2) as threads:
        one, two = (store.galleries.create(name, "f" * 32, 8, GallerySettings()).pk for name in ("one", "two"))

        def write(mine: int, theirs: int) -> None:
            with database.write(StorageError("a constraint")) as connection:
                connection.execute(galleries.update().where(galleries.c.pk == mine).values(template_count=count))
                both_hold.wait(60)
                connection.execute(galleries.update().where(galleries.c.pk == theirs).values(template_count=count))

        told = [threads.submit(write, *keys).exception for keys in ((one, two), (two, one))]
        assert {type(each(30)) for each in told} == {StorageBusyError, type(None)}
        assert [store.galleries.get(name).templates for name in ("one", "two")] == [1, 1]
