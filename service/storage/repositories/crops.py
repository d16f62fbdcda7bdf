"""Stored face crops of many subjects, templates, strangers and albums, read at once."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from kith.wire.crops import CropIn
from service.domain.gallery import Gallery
from service.storage.db.engine import Database
from service.storage.db.row_sealing import open_crop, subject_lookup
from service.storage.db.tables import IS_PERSON, album_faces, albums, crops, subjects, templates
from service.storage.repositories.albums import current_albums
from service.storage.repositories.erasures import is_named


class CropStore:
    """Crops in SQL. Every method is one transaction and blocks."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def read(self, gallery: Gallery, wanted: Sequence[CropIn]) -> list[bytes | None]:
        """Return the encoded crop of each; of a whole subject or stranger the one of best quality, None without any."""
        named = [(one.stranger or subject_lookup(gallery.seal, one.subject or ""), one.template) for one in wanted]
        with self._database.read() as connection:
            found = _subject_crops(connection, gallery, named)
            seen = _album_crops(connection, gallery, wanted)
        sealed = [own or seen.get((one.album, one.face)) for own, one in zip(found, wanted, strict=True)]
        return [None if crop is None else open_crop(gallery.seal, crop).image for crop in sealed]


def _subject_crops(
    connection: Connection, gallery: Gallery, wanted: Sequence[tuple[str, str | None]]
) -> list[bytes | None]:
    """Return the sealed crop of each (name in a subject's row, id of a template); without template, the best."""
    whole = [name for name, template in wanted if template is None]
    single = [template for _, template in wanted if template is not None]
    query = (
        sa.select(templates.c.pk, templates.c.id, templates.c.quality, subjects.c.lookup)
        .join(subjects, subjects.c.pk == templates.c.subject_pk)
        .join(crops, crops.c.template_pk == templates.c.pk)
        .where(is_named(gallery.pk, subjects.c.lookup.in_({name for name, _ in wanted})), IS_PERSON)
        .where(subjects.c.lookup.in_(whole) | templates.c.id.in_(single))
    )
    # The last of each name is the one with the best quality, the newest of equals.
    ranked = sorted(connection.execute(query), key=lambda row: ((row.quality or {}).get("score", 0.0), row.pk))
    keys = {(row.lookup, template): row.pk for row in ranked for template in (None, row.id)}
    chosen = [keys.get(each) for each in wanted]
    sealed = sa.select(crops.c.template_pk, crops.c.sealed).where(crops.c.template_pk.in_(filter(None, chosen)))
    stored = {row.template_pk: row.sealed for row in connection.execute(sealed)}
    return [stored.get(pk or 0) for pk in chosen]


def _album_crops(
    connection: Connection, gallery: Gallery, wanted: Sequence[CropIn]
) -> dict[tuple[str | None, str | None], bytes]:
    """Return sealed crops by album and face."""
    faces = [one.face for one in wanted if one.face is not None]
    query = (
        sa.select(albums.c.id.label("album"), album_faces.c.id, album_faces.c.crop)
        .join(albums, albums.c.pk == album_faces.c.album_pk)
        .where(current_albums(gallery), album_faces.c.id.in_(faces))
    )
    return {(row.album, row.id): row.crop for row in connection.execute(query)}
