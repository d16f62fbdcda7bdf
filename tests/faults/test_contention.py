"""Conflicting writers are asked to retry, and their rejected writes store nothing."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from service.core.errors import StorageBusyError, StorageError
from service.domain.gallery import Gallery, GallerySettings, LogTrimmedError, NewTemplate
from service.storage.db.engine import Database
from service.storage.db.tables import galleries
from service.storage.repositories.store import Store
from tests.databases import open_database
from tests.faults.workers import Node
from tests.postgres import DatabaseUrl, Postgres


def test_a_writer_that_waited_too_long_on_sqlite(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'kith.db'}"
    database, other = open_database(url), open_database(url)
    store = Store(database)
    # The service's connections wait ten seconds for a lock; here, a hundredth of a second.
    sa.event.listen(
        database.engine, "engine_connect", lambda connection: connection.connection.execute("PRAGMA busy_timeout=10")
    )
    with other.engine.execution_options(write=True).begin(), pytest.raises(StorageBusyError, match="locked"):
        store.galleries.create("g", "f" * 32, 8, GallerySettings())
    store.galleries.create("g", "f" * 32, 8, GallerySettings())
    store.close()
    other.close()


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
        floor = slow.store.galleries.get("g").log_floor
        assert slow.store.changes.count_after(gallery, floor) == slow.store.changes.count_after(gallery, 0) == 5
        with pytest.raises(LogTrimmedError):
            slow.store.changes.changed_subjects(gallery, floor - 1, 9)


def test_a_deadlock_on_postgresql_ends_with_one_of_the_two(postgres: Postgres) -> None:
    database = open_database(postgres.create(f"kith_{uuid.uuid4().hex}"))
    store = Store(database)
    one, two = (store.galleries.create(name, "f" * 32, 8, GallerySettings()) for name in ("one", "two"))
    both_hold = threading.Barrier(2)
    told: list[StorageError] = []

    def write(mine: int, theirs: int) -> None:
        try:
            with database.write(StorageError("a constraint")) as connection:
                for pk in (mine, theirs):
                    count = galleries.c.template_count + 1
                    connection.execute(galleries.update().where(galleries.c.pk == pk).values(template_count=count))
                    if pk == mine:
                        both_hold.wait(60)
        except StorageError as error:
            told.append(error)

    threads = [threading.Thread(daemon=True, target=write, args=keys) for keys in ((one.pk, two.pk), (two.pk, one.pk))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [type(error) for error in told] == [StorageBusyError]
    assert [store.galleries.get(name).templates for name in ("one", "two")] == [1, 1]
    store.close()
