"""Bulk import and export of templates: blocks of items, one transaction each, and exports of one snapshot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from service.core.errors import GalleryNotFoundError
from service.domain.gallery import Gallery, Item, Person
from service.domain.gallery_items import MAX_BLOCK_ITEMS, rows_in_block, vector_bytes
from service.storage.db import bulk_rows
from service.storage.db.engine import Database
from service.storage.db.row_sealing import open_crop, open_subject
from service.storage.db.tables import IS_PERSON, crops, galleries, subjects, templates, vectors
from service.storage.repositories.gallery_rows import VISIBLE, gallery_of, gallery_rows
from service.storage.repositories.templates import Admission, admit

MAX_ITEMS_WITH_CROPS: Final = 512
"""Items of a block that includes crops."""
SHOWN_COLUMNS: Final = ("kind", "quality", "detection_score", "created_at")


class BulkStore:
    """Bulk reads and writes of templates. All methods block."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, gallery: Gallery, items: Sequence[Item], people: Mapping[str, Person]) -> Admission:
        """Store a block of checked items (service.domain.gallery_items.checked), as :func:`admit` does.

        Raises GalleryNotFoundError, GalleryMovedError, StorageError.
        """
        with self._database.change(gallery) as connection, bulk_rows.large_page_cache(connection):
            return admit(self._database.vault, connection, gallery, items, people)

    @contextmanager
    def open_export(self, name: str, embeddings: bool = True, with_crops: bool = False) -> Iterator[Export]:
        """Open a snapshot of a gallery until the block ends. Raises GalleryNotFoundError."""
        with self._database.read() as connection:
            row = connection.execute(gallery_rows().where(VISIBLE, galleries.c.name == name)).first()
            if row is None:
                raise GalleryNotFoundError(f"there is no gallery {name!r}")
            yield Export(connection, gallery_of(row, self._database.vault), embeddings, with_crops)


class Export:
    """Snapshot of a gallery, read in blocks."""

    def __init__(self, connection: Connection, gallery: Gallery, embeddings: bool, with_crops: bool) -> None:
        self.gallery = gallery
        self.embeddings = embeddings
        self._connection = connection
        self._with_crops = with_crops

    def blocks(self) -> Iterator[list[dict[str, Any]]]:
        """Yield items of a file: all subjects by age with their templates by age. One without templates is one item.

        Only the first item of a subject has its name, tags and metadata.
        """
        size = min(rows_in_block(self.gallery.dimension), MAX_ITEMS_WITH_CROPS if self._with_crops else MAX_BLOCK_ITEMS)
        query = (
            sa.select(subjects.c.pk.label("owner"), templates.c.pk.label("template"))
            .select_from(subjects.outerjoin(templates, templates.c.subject_pk == subjects.c.pk))
            .where(subjects.c.gallery_pk == self.gallery.pk, IS_PERSON)
            .order_by(subjects.c.pk, templates.c.pk)
            .execution_options(yield_per=size)
        )
        last = 0
        with self._connection.execute(query) as found:
            for rows in found.partitions():
                yield self._block(rows, last)
                last = rows[-1].owner

    def _block(self, rows: Sequence[Any], last: int) -> list[dict[str, Any]]:
        """Return items. ``last``: key of the subject of the item before them."""
        people = self._subjects(sorted({row.owner for row in rows}))
        found = self._templates([row.template for row in rows if row.template is not None])
        items = list[dict[str, Any]]()
        for row in rows:
            about = people[row.owner]
            items.append(({"subject": about["subject"]} if row.owner == last else about) | found.get(row.template, {}))
            last = row.owner
        return items

    def _subjects(self, keys: list[int]) -> dict[int, dict[str, Any]]:
        columns = [subjects.c[c] for c in ("pk", "sealed", "created_at", "updated_at")]
        query = sa.select(*columns).where(subjects.c.pk.in_(keys))
        opened = ((row, open_subject(self.gallery.seal, row.sealed)) for row in self._connection.execute(query))
        return {
            row.pk: {
                "subject": about.id,
                "name": about.name,
                "metadata": about.metadata,
                "tags": about.tags,
                "subject_created_at": row.created_at,
                "subject_updated_at": row.updated_at,
            }
            for row, about in opened
        }

    def _templates(self, keys: list[int]) -> dict[int, dict[str, Any]]:
        vector = vectors.c.vector if self.embeddings else sa.null()
        crop = crops.c.sealed if self._with_crops else sa.null()
        columns = [templates.c[name] for name in ("pk", "id", *SHOWN_COLUMNS)]
        query = sa.select(*columns, vector.label("vector"), crop.label("crop")).select_from(templates)
        if self.embeddings:
            own = (vectors.c.template_pk == templates.c.pk) & (vectors.c.generation == self.gallery.generation)
            query = query.outerjoin(vectors, own)
        if self._with_crops:
            query = query.outerjoin(crops, crops.c.template_pk == templates.c.pk)
        rows = self._connection.execute(query.where(templates.c.pk.in_(keys))).all()
        seal, sealed = self.gallery.seal, [row.vector for row in rows if row.vector is not None]
        opened = iter(seal.open_vectors(sealed, self.gallery.generation, self.gallery.dimension))
        items = dict[int, dict[str, Any]]()
        for row in rows:
            item = items[row.pk] = {"template": row.id, **{name: getattr(row, name) for name in SHOWN_COLUMNS}}
            if row.vector is not None:
                item["embedding"] = vector_bytes(next(opened))
            if row.crop is not None:
                face = open_crop(seal, row.crop)
                item |= {"crop": face.image, "landmarks": face.landmarks_xy}
        return items
