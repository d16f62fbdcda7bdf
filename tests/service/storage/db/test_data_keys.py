"""Data keys of galleries: they seal rows, a lost one costs its gallery, and a deleted gallery's is gone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
import sqlalchemy as sa
from sqlalchemy.sql.dml import UpdateBase

from service.core.errors import GalleryNotFoundError, MasterKeyError, StorageDamagedError, StorageError
from service.domain.events import EventFilter
from service.domain.gallery import GallerySettings
from service.security.master_keys import GivenKeys, MasterKeys
from service.security.sealing import SealBrokenError, new_key
from service.storage.damage import damage
from service.storage.db import engine
from service.storage.db.engine import Database
from service.storage.db.row_sealing import open_cursor, seal_cursor
from service.storage.db.tables import data_keys, labels, subjects, vectors
from service.storage.privacy.master_key_rotation import Use, rewrap
from service.storage.privacy.retention import Retention
from service.storage.repositories.store import Store
from tests.databases import MASTER, claimed, open_database
from tests.service.storage.scene import made, some

LOST: list[Callable[[sa.ColumnElement[bool]], UpdateBase]] = [
    lambda own: data_keys.update().where(own).values(wrapped=bytes(60)),
    lambda own: data_keys.update().where(own).values(master_key="another"),
    lambda own: data_keys.delete().where(own),
]


@pytest.mark.parametrize("loss", LOST, ids=["damaged", "of another master key", "gone"])
def test_a_lost_key_costs_its_gallery_alone(
    database: Database, url: str, loss: Callable[[sa.ColumnElement[bool]], UpdateBase]
) -> None:
    store = Store(database)
    for name in ("lost", "sound"):
        gallery = store.galleries.create(name, "f" * 32, 8, GallerySettings(retention_days=1))
        store.subjects.put(gallery, "ada", "Ada", {}, [])
        store.jobs.finish(claimed(database, gallery, "import"), "failed", {"code": "invalid_image"})
    for name in ("lost", "sound"):
        store.jobs.create(store.galleries.get(name), "import", {})
    store.webhooks.create("https://receiver.example", None, EventFilter())
    with database.write(StorageError("unforeseen")) as connection:
        connection.execute(loss(data_keys.c.gallery_pk == store.galleries.get("lost").pk))
    new = GivenKeys(new_key().hex(), "the rotation")
    with closing(engine.open_database(url, MasterKeys(*MASTER.sources, new))) as lossy:
        store = Store(lossy)
        assert [gallery.name for gallery in store.galleries.list_page(None, 9)] == ["lost", "sound"]
        told = {
            job.gallery: job.problem["code"] for job in store.jobs.list_jobs(None, ["failed"], None, 9) if job.problem
        }
        assert told == {"lost": "master_key", "sound": "invalid_image"}
        first, second = store.jobs.claim("one", 60), store.jobs.claim("one", 60)
        assert first is not None and second is not None
        assert (first.gallery, second.gallery) == ("lost", "sound")
        store.jobs.finish(first, "failed", {"code": "master_key"})
        assert store.jobs.job(first.id).state == "failed"
        assert Retention(lossy).sweep(datetime.now(UTC) + timedelta(days=400)).removed["subjects"] == 2
        lost = store.galleries.get("lost")
        for use in (
            lambda: store.subjects.get(lost, "ada"),
            lambda: store.subjects.put(lost, "bob", None, {}, []),
            lambda: store.subjects.delete(lost, "ada"),
            lambda: store.strangers.forget_all(lost),
        ):
            with pytest.raises(MasterKeyError):
                use()
        (found,) = damage(lossy)
        assert found.startswith("gallery lost cannot be read: ")
        assert rewrap(lossy, new.first()) == Use(3, 1), "rotation leaves it as it is"
        # Its settings are changed, and it is deleted.
        assert store.galleries.update("lost", lambda before: replace(before, recall=0.9)).settings.recall == 0.9
        assert store.galleries.delete("lost")[1].kind == "gallery"


def test_galleries_have_nothing_in_common(database: Database, rng: np.random.Generator) -> None:
    """Ids and tags do not reveal subjects of both galleries, and sealed values do not open in the other one."""
    store, (template,) = Store(database), some(rng)
    one, two = (made(database, name) for name in ("one", "two"))
    for gallery in (one, two):
        store.subjects.put(gallery, "ada", "Ada", {}, ["tag"])
        store.templates.enroll(gallery, "ada", [template], None)
    with database.write(StorageError("unforeseen")) as connection:
        for column in (subjects.c.lookup, subjects.c.sealed, labels.c.label, vectors.c.vector):
            first, second = connection.execute(sa.select(column)).scalars()
            assert first != second, column
        of_one = sa.select(subjects.c.sealed).where(subjects.c.gallery_pk == one.pk)
        connection.execute(subjects.update().values(sealed=connection.execute(of_one).scalar_one()))
    assert store.subjects.get(one, "ada").name == "Ada"
    with pytest.raises(StorageDamagedError):
        store.subjects.get(two, "ada")
    place = seal_cursor(one.seal, 7)
    assert open_cursor(one.seal, place) == (7,)
    with pytest.raises(SealBrokenError):
        open_cursor(two.seal, place)


def test_a_deleted_gallerys_key_is_gone_everywhere(database: Database, url: str) -> None:
    with closing(open_database(url)) as asking, closing(open_database(url)) as silent:
        gallery, stores = made(database), [Store(each) for each in (asking, silent)]
        for each in stores:
            assert each.galleries.get("g").pk == gallery.pk
        Store(database).galleries.delete("g")
        with pytest.raises(GalleryNotFoundError):
            stores[0].galleries.get("g")
        stores[1].galleries.evict_changed()
        assert [each.cache.latest("g") for each in stores] == [None, None]
        with silent.read() as connection:
            assert connection.execute(sa.select(data_keys)).all() == []
