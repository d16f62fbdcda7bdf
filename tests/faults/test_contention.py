"""Writers in each other's way are told to try again, and nothing of theirs is stored."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from service.errors import StorageBusyError, StorageError
from service.gallery.database import Database
from service.gallery.store import Store
from service.gallery.subjects import Gallery, GallerySettings, LogTrimmedError, NewTemplate
from service.gallery.tables import galleries
from tests.databases import open_database
from tests.faults.workers import Node
from tests.postgres import DatabaseUrl, Postgres


def test_a_writer_that_waited_too_long_on_sqlite(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'kith.db'}"
    database, other = open_database(url), open_database(url)
    store = Store(database)
    # The patience of the service's connections is ten seconds; here, a hundredth of one.
    sa.event.listen(
        database.engine, "engine_connect", lambda connection: connection.connection.execute("PRAGMA busy_timeout=10")
    )
    with other.engine.execution_options(write=True).begin(), pytest.raises(StorageBusyError, match="locked"):
        store.create_gallery("g", "f" * 32, 8, GallerySettings())
    store.create_gallery("g", "f" * 32, 8, GallerySettings())
    store.close()
    other.close()


def test_who_trims_the_log_late_does_not_forget_what_others_trimmed(
    database_url: DatabaseUrl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a follower between the two places would pass over the lines that are gone."""
    url = database_url()
    with Node(url) as slow, Node(url) as quick:
        gallery = slow.store.create_gallery("g", "f" * 32, 8, GallerySettings())
        vector = np.eye(8, dtype=np.float32)[0]
        for number in range(20):
            slow.enrol("g", "a", [NewTemplate(f"{number:032x}", vector, "embedding")])
            slow.delete_subject("g", "a")
        begin = Database.change

        def after_another(database: Database, gallery: Gallery) -> Any:
            monkeypatch.undo()
            assert quick.store.trim_log(gallery, 5) == 35
            return begin(database, gallery)

        monkeypatch.setattr(Database, "change", after_another)
        slow.store.trim_log(gallery, 25)
        kept = slow.store.changes_after(slow.store.gallery("g"), slow.store.gallery("g").log_floor)
        assert len(kept) == 5
        with pytest.raises(LogTrimmedError):
            slow.store.changes_after(gallery, kept[0].sequence - 2)


def test_a_deadlock_on_postgresql_ends_with_one_of_the_two(postgres: Postgres) -> None:
    database = open_database(postgres.create(f"kith_{uuid.uuid4().hex}"))
    store = Store(database)
    one, two = (store.create_gallery(name, "f" * 32, 8, GallerySettings()) for name in ("one", "two"))
    both_hold = threading.Barrier(2)
    told: list[StorageError] = []

    def write(mine: int, theirs: int) -> None:
        try:
            with database.write(StorageError("a constraint")) as connection:
                for pk in (mine, theirs):
                    count = galleries.c.template_count + 1
                    connection.execute(galleries.update().where(galleries.c.pk == pk).values(template_count=count))
                    if pk == mine:
                        both_hold.wait(10)
        except StorageError as error:
            told.append(error)

    threads = [threading.Thread(daemon=True, target=write, args=keys) for keys in ((one.pk, two.pk), (two.pk, one.pk))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [type(error) for error in told] == [StorageBusyError]
    assert [store.gallery(name).templates for name in ("one", "two")] == [1, 1]
    store.close()
