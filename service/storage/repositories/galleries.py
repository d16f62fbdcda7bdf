"""Galleries: creation, settings, cached reads and deletion."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Final

import sqlalchemy as sa

from service.core.errors import GalleryExistsError, GalleryNotFoundError
from service.domain.gallery import Gallery, GalleryCounts, GallerySettings
from service.storage.audit.log import append, note
from service.storage.db.engine import new_version
from service.storage.db.tables import galleries, generations
from service.storage.events.outbox import read_webhooks
from service.storage.repositories import erasures
from service.storage.repositories.erasures import ErasingStore, Receipt, entry_of
from service.storage.repositories.gallery_rows import VISIBLE, gallery_of, gallery_rows, update_gallery, webhooks_state

# Built once: SQLAlchemy takes longer to build a statement than SQLite to run it.
GALLERY: Final = gallery_rows().where(VISIBLE, galleries.c.name == sa.bindparam("gallery"))
VERSION: Final = sa.select(galleries.c.pk, galleries.c.version, webhooks_state().label("webhooks")).where(
    VISIBLE, galleries.c.name == sa.bindparam("gallery")
)


class GalleryStore(ErasingStore):
    """Galleries in SQL. Every method is one transaction and blocks."""

    def sizes(self, limit: int) -> GalleryCounts:
        """Return the total sizes, and the sizes of the ``limit`` oldest galleries. Reads every gallery's row."""
        counts = galleries.c.name, galleries.c.subject_count, galleries.c.template_count
        oldest = sa.select(*counts).where(VISIBLE).order_by(galleries.c.pk).limit(limit)
        subjects, templates = sa.func.sum(galleries.c.subject_count), sa.func.sum(galleries.c.template_count)
        total = sa.select(sa.func.count(), subjects, templates).where(VISIBLE)
        with self._database.read() as connection:
            number, people, photos = connection.execute(total).one()
            by_gallery = {row[0]: (row[1], row[2]) for row in connection.execute(oldest)}
        return GalleryCounts(number, people or 0, photos or 0, by_gallery)

    def keys(self) -> set[int]:
        """Return the row keys of all galleries."""
        with self._database.read() as connection:
            return set(connection.execute(sa.select(galleries.c.pk).where(VISIBLE)).scalars())

    def create(self, name: str, fingerprint: str, dimension: int, settings: GallerySettings) -> Gallery:
        """Create a gallery with its data key. Raises GalleryExistsError."""
        now, version = datetime.now(UTC), new_version()
        with self._database.write(GalleryExistsError(f"gallery {name!r} exists")) as connection:
            common = {"fingerprint": fingerprint, "dimension": dimension, "created_at": now}
            inserted = galleries.insert().values(name=name, settings=asdict(settings), version=version, **common)
            pk: int = connection.execute(inserted.returning(galleries.c.pk)).scalar_one()
            seal = self._database.vault.create(connection, pk)
            first = {"gallery_pk": pk, "generation": 0, "state": "current"}
            connection.execute(generations.insert().values(**first, **common))
            gallery = Gallery(pk, name, fingerprint, dimension, settings, now, seal, version=version)
            note(self._database.vault, connection, "gallery_created", gallery)
        return gallery

    def get(self, name: str) -> Gallery:
        """Return the gallery in its latest version. Raises GalleryNotFoundError."""
        if (cached := self._cache.current(name)) is not None:
            return cached
        # Read the file's version first: any later write changes it.
        file_version = self._database.file_version()
        before = self._cache.latest(name)
        if before is not None:
            now = self._database.first(VERSION, {"gallery": name})
            if now is not None and tuple(now) == (before.pk, before.version, before.webhooks):
                self._cache.put(before, file_version)
                return before
        row = self._database.first(GALLERY, {"gallery": name})
        if row is None:
            self._cache.evict(name)
            raise GalleryNotFoundError(f"there is no gallery {name!r}")
        gallery = gallery_of(row, self._database.vault)
        if gallery.webhooks:
            with self._database.read() as connection:
                filters = [webhook.filter for webhook in read_webhooks(connection, self._database.vault)]
            gallery = replace(gallery, listeners=tuple(one for one in filters if one.may_want(name, "decision")))
        self._cache.put(gallery, file_version)
        return gallery

    def evict_changed(self) -> None:
        """Evict galleries that changed, with names that another process erased, or were deleted, with their keys."""
        with self._database.read() as connection:
            now = {
                row.name: row.version for row in connection.execute(sa.select(galleries.c.name, galleries.c.version))
            }
        self._cache.evict_all_but(lambda name, version: now.get(name) == version)

    def list_page(self, after: str | None, limit: int, among: Collection[str] | None = None) -> list[Gallery]:
        """Return galleries by name: at most ``limit`` after the name ``after``, optionally only names in ``among``."""
        query = gallery_rows().where(VISIBLE).order_by(galleries.c.name).limit(limit)
        if among is not None:
            query = query.where(galleries.c.name.in_(among))
        if after is not None:
            query = query.where(galleries.c.name > after)
        with self._database.read() as connection:
            return [gallery_of(row, self._database.vault) for row in connection.execute(query)]

    def update(self, name: str, change: Callable[[GallerySettings], GallerySettings]) -> Gallery:
        """Replace the settings by the result of ``change``; return the new gallery. Raises GalleryNotFoundError."""
        missing = GalleryNotFoundError(f"there is no gallery {name!r}")
        with self._database.write(missing) as connection:
            locked = gallery_rows().where(VISIBLE, galleries.c.name == name).with_for_update(of=galleries)
            row = connection.execute(locked).first()
            if row is None:
                raise missing
            before, version = gallery_of(row, self._database.vault), new_version()
            settings = change(before.settings)
            update_gallery(connection, before.pk, settings=asdict(settings), version=version)
            old, new = asdict(before.settings), asdict(settings)
            changed = {name: value for name, value in new.items() if value != old[name]}
            note(self._database.vault, connection, "gallery_updated", before, changed=changed)
        return replace(before, settings=settings, version=version)

    def delete(self, name: str) -> tuple[Gallery, Receipt]:
        """Delete a gallery with all its subjects; return it with the receipt. Raises as :meth:`update`."""
        gallery = self.get(name)
        with self._database.change(gallery) as connection:
            receipt = erasures.erase(connection, gallery, "gallery")
            assert receipt is not None  # noqa: S101 - its row is locked
            append(self._database.vault, connection, [entry_of(receipt, "gallery_deleted")])
        self._cache.evict(name)
        return gallery, erasures.with_log_emptied(self._database, receipt)
