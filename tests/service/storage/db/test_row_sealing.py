"""Personal data is stored sealed, and altered rows are detected."""

from __future__ import annotations

import numpy as np
import pytest
import sqlalchemy as sa

from service.core.errors import GalleryNotFoundError, StorageDamagedError
from service.security.sealing import SealBrokenError
from service.storage.db.engine import Database
from service.storage.db.row_sealing import open_cursor, seal_cursor
from service.storage.db.tables import (
    data_keys,
    labels,
    subjects,
    vectors,
)
from service.storage.repositories.store import Store
from tests.databases import open_database
from tests.postgres import DatabaseUrl
from tests.service.storage.privacy.test_erasure import made, some

NAME, ID, TAG = "Ada Lovelace", "ada-1815", "poetical science"


def test_galleries_have_nothing_in_common(database: Database) -> None:
    """Ids and tags do not reveal subjects of both galleries, and sealed values do not open in the other one."""
    store = Store(database)
    one, two = made(database, "one"), made(database, "two")
    (template,) = some(np.random.default_rng(0))
    for gallery in (one, two):
        store.subjects.put(gallery, ID, NAME, {}, [TAG])
        store.templates.enroll(gallery, ID, [template], None)
    with database.write(StorageDamagedError("unforeseen")) as connection:
        for column in (subjects.c.lookup, subjects.c.sealed, labels.c.label, vectors.c.vector):
            first, second = connection.execute(sa.select(column)).scalars()
            assert first != second, column
        sealed = connection.execute(sa.select(subjects.c.sealed)).scalars().first()
        connection.execute(subjects.update().values(sealed=sealed))
    broken = 0
    for gallery in (one, two):
        try:
            assert store.subjects.get(gallery, ID).name == NAME
        except StorageDamagedError:
            broken += 1
    assert broken == 1
    place = seal_cursor(one.seal, 7)
    assert open_cursor(one.seal, place) == (7,)
    with pytest.raises(SealBrokenError):
        open_cursor(two.seal, place)


def test_a_deleted_gallerys_key_is_gone_everywhere(database_url: DatabaseUrl) -> None:
    url = database_url()
    here, asking, silent = (open_database(url) for _ in range(3))
    gallery = made(here)
    store = Store(asking)
    for known in (store, Store(silent)):
        assert known.galleries.get("g").pk == gallery.pk
    Store(here).galleries.delete("g")
    with pytest.raises(GalleryNotFoundError):
        store.galleries.get("g")
    assert gallery.pk not in asking.vault._seals
    with silent.read() as connection:
        assert connection.execute(sa.select(data_keys)).all() == []
        assert gallery.pk in silent.vault._seals
        silent.vault.evict_deleted(connection)
        assert gallery.pk not in silent.vault._seals
    for database in (here, asking, silent):
        database.close()
