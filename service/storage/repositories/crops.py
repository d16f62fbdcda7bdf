"""Stored face crops of many subjects, templates, strangers and albums, read at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from service.domain.gallery import CropOf, Gallery
from service.storage.db.engine import Database
from service.storage.db.row_sealing import open_crop, subject_lookup
from service.storage.db.tables import album_faces, albums, crops, stranger_templates, strangers, subjects, templates
from service.storage.repositories.albums import current_albums


class CropStore:
    """Crops in SQL. Every method is one transaction and blocks."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def read(self, gallery: Gallery, wanted: Sequence[CropOf]) -> list[bytes | None]:
        """Return the encoded crop of each; of a whole subject or stranger the one of best quality, None without any."""
        lookups = {one.subject: subject_lookup(gallery.seal, one.subject) for one in wanted if one.subject is not None}
        with self._database.read() as connection:
            rows = _crop_rows(connection, gallery, lookups, wanted)
            people = _best(rows, lambda row: row.lookup)
            photos = {(row.lookup, row.id): row.pk for row in rows}
            unknown = _best(_stranger_crop_rows(connection, gallery, wanted), lambda row: row.id)
            chosen = [
                photos.get((lookups.get(one.subject or ""), one.template))
                if one.template is not None
                else people.get(lookups.get(one.subject or ""))
                for one in wanted
            ]
            owned = _sealed(connection, crops.c.template_pk, crops.c.sealed, chosen)
            met = [unknown.get(one.stranger) for one in wanted]
            foreign = _sealed(connection, stranger_templates.c.pk, stranger_templates.c.crop, met)
            seen = _album_crops(connection, gallery, wanted)
        found = [
            owned.get(mine) or foreign.get(other) or seen.get((one.album, one.face))
            for one, mine, other in zip(wanted, chosen, met, strict=True)
        ]
        return [None if sealed is None else open_crop(gallery.seal, sealed).image for sealed in found]


def _crop_rows(
    connection: Connection, gallery: Gallery, lookups: dict[str, str], wanted: Sequence[CropOf]
) -> list[sa.Row[Any]]:
    """Return key, id, quality and subject of the templates with a crop: all of whole subjects, else the wanted ones."""
    whole = [lookups[one.subject] for one in wanted if one.subject is not None and one.template is None]
    single = [one.template for one in wanted if one.template is not None]
    query = (
        sa.select(templates.c.pk, templates.c.id, templates.c.quality, subjects.c.lookup)
        .join(subjects, subjects.c.pk == templates.c.subject_pk)
        .join(crops, crops.c.template_pk == templates.c.pk)
        .where(subjects.c.gallery_pk == gallery.pk, subjects.c.lookup.in_(lookups.values()))
        .where(subjects.c.lookup.in_(whole) | templates.c.id.in_(single))
    )
    return list(connection.execute(query))


def _stranger_crop_rows(connection: Connection, gallery: Gallery, wanted: Sequence[CropOf]) -> list[sa.Row[Any]]:
    ids = [one.stranger for one in wanted if one.stranger is not None]
    query = (
        sa.select(stranger_templates.c.pk, stranger_templates.c.quality, strangers.c.id)
        .join(strangers, strangers.c.pk == stranger_templates.c.stranger_pk)
        .where(strangers.c.gallery_pk == gallery.pk, strangers.c.generation == gallery.generation)
        .where(strangers.c.id.in_(ids), stranger_templates.c.crop.is_not(None))
    )
    return list(connection.execute(query))


def _album_crops(
    connection: Connection, gallery: Gallery, wanted: Sequence[CropOf]
) -> dict[tuple[str | None, str | None], bytes]:
    """Return sealed crops by album and face."""
    faces = [one.face for one in wanted if one.face is not None]
    query = (
        sa.select(albums.c.id.label("album"), album_faces.c.id, album_faces.c.crop)
        .join(albums, albums.c.pk == album_faces.c.album_pk)
        .where(current_albums(gallery), album_faces.c.id.in_(faces))
    )
    return {(row.album, row.id): row.crop for row in connection.execute(query)}


def _best(rows: Iterable[sa.Row[Any]], owner: Callable[[sa.Row[Any]], Any]) -> dict[Any, int]:
    """Return the key of the row with the best quality, the newest of equals, by owner."""
    ranked = sorted(rows, key=lambda row: ((row.quality or {}).get("score", 0.0), row.pk))
    return {owner(row): row.pk for row in ranked}


def _sealed(
    connection: Connection, key: sa.Column[Any], value: sa.Column[Any], pks: Iterable[int | None]
) -> dict[int | None, bytes]:
    chosen = key.in_({pk for pk in pks if pk is not None})
    return {row[0]: row[1] for row in connection.execute(sa.select(key, value).where(chosen))}
