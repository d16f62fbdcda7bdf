"""Galleries by thousands of templates: blocks of items into SQL, each in one transaction, and all of one moment out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from service.errors import GalleryNotFoundError, KithError, TemplateConflictError
from service.gallery import rows
from service.gallery.audit_log import record
from service.gallery.database import Database
from service.gallery.erasure import erased_since, erased_templates_since, was_erased
from service.gallery.index import Keys
from service.gallery.labels import labels_of
from service.gallery.sealed_rows import About, close_about, close_crop, lookup_of, open_about, open_crop
from service.gallery.store import gallery_of, gallery_rows
from service.gallery.subjects import Crop, Gallery
from service.gallery.tables import changes, crops, galleries, labels, subjects, templates, vectors
from service.gallery.transfer import (
    MOST_IN_BLOCK,
    Items,
    Refusal,
    derived_id,
    earlier_id,
    microseconds,
    moment,
    rows_in_block,
    vector_bytes,
)
from service.security.sealing import VECTOR_TYPE

WITH_CROPS: Final = 512
"""Templates in a block that has their crops too."""
KEYS_AT_ONCE: Final = 50_000
SUBJECT_COLUMNS: Final = ("pk", "gallery_pk", "lookup", "sealed", "created_at", "updated_at", "erased")
TEMPLATE_COLUMNS: Final = (
    "pk",
    "id",
    "gallery_pk",
    "subject_pk",
    "kind",
    "quality",
    "detection_score",
    "created_at",
    "erased",
)


@dataclass(frozen=True)
class Added:
    """What became of a block of items. ``present`` templates were there already."""

    subjects: int
    templates: int
    present: int
    refused: list[Refusal]


class BulkStore:
    """Many templates at once. All methods block."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, gallery: Gallery, items: Items) -> Added:
        """Store checked items (service.gallery.transfer.check) with their log lines, all or nothing; what is there
        already is passed over. A template without an id gets one that follows from subject and vector, a time that is
        yet to come is taken for now. A subject that exists keeps its name, metadata and tags; one that was erased since
        ``gallery`` was read is refused, and so is a template.

        Raises:
            GalleryNotFoundError, RecogniserMismatchError: the gallery was deleted, or moved to another recogniser,
                meanwhile.
            StorageError: it cannot be written.
        """
        gallery.seal.unlock()
        unnamed = _unnamed(gallery, items)
        with self._database.change(gallery) as connection, rows.wide_cache(connection):
            items = _named(connection, gallery, items, unnamed)
            lookups = {subject: lookup_of(gallery.seal, subject) for subject in set(items.subjects)}
            known = _subjects_of(connection, gallery, lookups)
            new, refused = _new_templates(connection, gallery, items, lookups)
            if erased := erased_since(connection, gallery.pk, gallery.seal, lookups, gallery.erased):
                gone = {row: was_erased() for row, s in enumerate(items.subjects) if s in erased}
                new, refused = [row for row in new if row not in gone], refused | gone
            names = {row: unnamed.get(row, (items.templates[row],)) for row in new}
            named = {name for either in names.values() for name in either}
            if lost := erased_templates_since(connection, gallery.pk, named, gallery.erased):
                refused |= {row: was_erased("template") for row, either in names.items() if lost.intersection(either)}
                new = [row for row in new if row not in refused]
            refusals = [Refusal(items.numbers[row], error) for row, error in refused.items()]
            first = _first_rows(items, refused)
            unknown = [row for subject, row in first.items() if subject not in known]
            known |= _add_subjects(connection, gallery, items.chosen(unknown), lookups)
            _add_templates(connection, gallery, items.chosen(new), known)
            count = galleries.update().where(galleries.c.pk == gallery.pk)
            connection.execute(
                count.values(
                    subject_count=galleries.c.subject_count + len(unknown),
                    template_count=galleries.c.template_count + len(new),
                )
            )
            counts: dict[str, Any] = {"subjects": len(unknown), "templates": len(new), "refused": len(refusals)}
            record(self._database.vault, connection, "gallery_imported", gallery, **counts)
        present = int(items.given.sum()) - len(new) - sum(bool(items.given[row]) for row in refused)
        return Added(len(unknown), len(new), present, refusals)

    @contextmanager
    def reading(self, name: str, embeddings: bool = True, with_crops: bool = False) -> Iterator[Reading]:
        """A gallery at one moment, which lasts as long as the block. Raises GalleryNotFoundError."""
        with self._database.read() as connection:
            row = connection.execute(gallery_rows().where(galleries.c.name == name)).first()
            if row is None:
                raise GalleryNotFoundError(f"there is no gallery {name!r}")
            yield Reading(connection, gallery_of(row, self._database.vault), embeddings, with_crops)


def _unnamed(gallery: Gallery, items: Items) -> dict[int, tuple[str, str]]:
    """Rows of templates that the file gives no id: theirs, and the one that an earlier version gave."""
    return {
        row: (derived_id(gallery.seal, subject, items.vectors[row]), earlier_id(subject, items.vectors[row]))
        for row, (subject, given) in enumerate(zip(items.subjects, items.given.tolist(), strict=True))
        if given and items.templates[row] is None
    }


def _named(connection: Connection, gallery: Gallery, items: Items, unnamed: Mapping[int, tuple[str, str]]) -> Items:
    """With ids for all templates: what an earlier version imported is known by the id that it gave."""
    if not unnamed:
        return items
    earlier = rows.among(connection, templates.c.id, [name for _, name in unnamed.values()])
    query = sa.select(templates.c.id).where(templates.c.gallery_pk == gallery.pk, earlier)
    known = set(connection.execute(query).scalars())
    ids = list(items.templates)
    for row, (name, before) in unnamed.items():
        ids[row] = before if before in known else name
    return replace(items, templates=ids)


def _subjects_of(connection: Connection, gallery: Gallery, lookups: Mapping[str, str]) -> dict[str, int]:
    """Keys by id of those that there are; ``lookups``: by id."""
    query = sa.select(subjects.c.lookup, subjects.c.pk).where(subjects.c.gallery_pk == gallery.pk)
    chosen = query.where(rows.among(connection, subjects.c.lookup, list(lookups.values())))
    found = {row.lookup: row.pk for row in connection.execute(chosen)}
    return {subject: found[lookup] for subject, lookup in lookups.items() if lookup in found}


def _new_templates(
    connection: Connection, gallery: Gallery, items: Items, lookups: Mapping[str, str]
) -> tuple[list[int], dict[int, KithError]]:
    """Rows of templates that are not there yet, and those whose id another one has, there or earlier in the block."""
    named = [row for row, given in enumerate(items.given.tolist()) if given]
    raw = np.ascontiguousarray(items.vectors, VECTOR_TYPE)
    stored = _stored(connection, gallery, [items.templates[row] for row in named])
    seen: dict[str, tuple[str, bytes | int | None]] = {
        id_: (row.lookup, vector) for id_, (row, vector) in stored.items()
    }
    if not seen and len({items.templates[row] for row in named}) == len(named):
        return named, {}
    new: list[int] = []
    refused: dict[int, KithError] = {}
    for row in named:
        template, owner = items.templates[row], lookups[items.subjects[row]]
        earlier = seen.get(template)
        if earlier is None:
            seen[template] = owner, row
            new.append(row)
            continue
        first, vector = earlier
        known = raw[vector].tobytes() if isinstance(vector, int) else vector
        if owner != first:
            there = items.subjects[vector] if isinstance(vector, int) else _owner(gallery, stored[template][0])
            refused[row] = TemplateConflictError(f"template {template} is one of subject {there!r}")
        elif known is not None and known != raw[row].tobytes():
            refused[row] = TemplateConflictError(f"template {template} has another embedding")
    return new, refused


def _owner(gallery: Gallery, row: sa.Row[Any]) -> str:
    return open_about(gallery.seal, row.sealed).id


def _stored(
    connection: Connection, gallery: Gallery, ids: Sequence[str]
) -> dict[str, tuple[sa.Row[Any], bytes | None]]:
    """Of the templates that exist, by id: a row with their subject's ``lookup`` and ``sealed``, and their vector."""
    query = (
        sa.select(templates.c.id, subjects.c.lookup, subjects.c.sealed, vectors.c.vector)
        .join(subjects, subjects.c.pk == templates.c.subject_pk)
        .outerjoin(vectors, (vectors.c.template_pk == templates.c.pk) & (vectors.c.generation == gallery.generation))
        .where(templates.c.gallery_pk == gallery.pk, rows.among(connection, templates.c.id, ids))
    )
    found: list[Any] = list(connection.execute(query))
    sealed = [row.vector for row in found if row.vector is not None]
    opened = iter(gallery.seal.open_vectors(sealed, gallery.generation, gallery.dimension))
    return {row.id: (row, None if row.vector is None else vector_bytes(next(opened))) for row in found}


def _first_rows(items: Items, refused: Mapping[int, KithError]) -> dict[str, int]:
    """For each subject the first row that is taken: what it says of the subject is believed."""
    first: dict[str, int] = {}
    for row, subject in enumerate(items.subjects):
        if row not in refused:
            first.setdefault(subject, row)
    return first


def _add_subjects(connection: Connection, gallery: Gallery, new: Items, lookups: Mapping[str, str]) -> dict[str, int]:
    keys = rows.reserve(connection, subjects, len(new))
    known = zip(new.subjects, new.names, new.metadata, new.tags, strict=True)
    columns = (
        keys,
        [gallery.pk] * len(keys),
        [lookups[subject] for subject in new.subjects],
        [close_about(gallery.seal, About(id_, name, said or {}, tags or [])) for id_, name, said, tags in known],
        _times(connection, new.subject_created_us),
        _times(connection, new.subject_updated_us),
        [gallery.erased] * len(keys),
    )
    rows.insert(connection, subjects, SUBJECT_COLUMNS, zip(*columns, strict=True))
    borne = [
        (gallery.pk, label, key)
        for key, tags, metadata in zip(keys, new.tags, new.metadata, strict=True)
        if tags or metadata
        for label in sorted(labels_of(gallery.seal, tags or [], metadata or {}))
    ]
    rows.insert(connection, labels, ("gallery_pk", "label", "subject_pk"), borne)
    return dict(zip(new.subjects, keys, strict=True))


def _add_templates(connection: Connection, gallery: Gallery, items: Items, subject_pks: dict[str, int]) -> None:
    if not len(items):
        return
    keys = rows.reserve(connection, templates, len(items))
    columns = (
        keys,
        items.templates,
        [gallery.pk] * len(items),
        [subject_pks[subject] for subject in items.subjects],
        items.kinds,
        _each(items.qualities, rows.as_json),
        _each(items.detection_scores, float),
        _times(connection, items.created_us),
        [gallery.erased] * len(items),
    )
    rows.insert(connection, templates, TEMPLATE_COLUMNS, zip(*columns, strict=True))
    sealed = gallery.seal.close_vectors(items.vectors, gallery.generation)
    rows.insert_vectors(connection, keys, gallery.generation, b"".join(sealed), len(sealed[0]))
    kept = (
        []
        if not gallery.settings.keep_crops
        else [
            (key, close_crop(gallery.seal, Crop(*crop)))
            for key, crop in zip(keys, items.crops, strict=True)
            if crop is not None
        ]
    )
    if kept:
        rows.insert(connection, crops, ("template_pk", "sealed"), kept)
    lines = sa.select(templates.c.gallery_pk, templates.c.pk, templates.c.subject_pk).where(
        templates.c.pk.between(keys[0], keys[-1]), templates.c.gallery_pk == gallery.pk
    )
    columns_of_log = ["gallery_pk", "template_pk", "subject_pk"]
    connection.execute(changes.insert().from_select(columns_of_log, lines.order_by(templates.c.pk)))


def _each(column: list[Any], convert: Callable[[Any], Any]) -> list[Any]:
    """What is not None, converted."""
    return column if column.count(None) == len(column) else [None if v is None else convert(v) for v in column]


def _times(connection: Connection, column: list[int | None]) -> list[datetime | str]:
    """Now, where an item says nothing, or a time that is yet to come: retention would not get there."""
    at = datetime.now(UTC)
    now, latest = rows.as_time(connection, at), microseconds(at)
    said = {us: rows.as_time(connection, moment(us)) for us in set(column) if us is not None and us < latest}
    return [now if us is None else said.get(us, now) for us in column] if said else [now] * len(column)


class Reading:
    """A gallery as it was when reading began."""

    def __init__(self, connection: Connection, gallery: Gallery, embeddings: bool, with_crops: bool) -> None:
        self.gallery = gallery
        self.embeddings = embeddings
        self._connection = connection
        self._with_crops = with_crops

    def blocks(self) -> Iterator[Items]:
        """Everybody by age, each with their templates by age; one without templates is an item all the same. What is
        known of a subject stands on its first item."""
        size = min(rows_in_block(self.gallery.dimension), WITH_CROPS if self._with_crops else MOST_IN_BLOCK)
        owners, keys = self._keys()
        first = owners != np.append(0, owners[:-1])
        for start in range(0, len(owners), size):
            part = slice(start, start + size)
            yield self._block(start + 1, owners[part].tolist(), keys[part].tolist(), first[part].tolist())

    def _keys(self) -> tuple[Keys, Keys]:
        """(n,) of subjects and (n,) of their templates, 0 where there is none, in the order of the items: from indexes
        alone, as the database would sort whole rows with their vectors."""
        query = (
            sa.select(subjects.c.pk, sa.func.coalesce(templates.c.pk, 0))
            .select_from(subjects.outerjoin(templates, templates.c.subject_pk == subjects.c.pk))
            .where(subjects.c.gallery_pk == self.gallery.pk)
            .execution_options(yield_per=KEYS_AT_ONCE)
        )
        parts = [np.array(part, np.int64) for part in self._connection.execute(query).partitions()]
        pairs = np.concatenate([np.empty((0, 2), np.int64), *parts])
        order = np.lexsort((pairs[:, 1], pairs[:, 0]))
        return pairs[order, 0], pairs[order, 1]

    def _block(self, number: int, owners: list[int], keys: list[int], first: list[bool]) -> Items:
        people = self._people(sorted(set(owners)))
        ids, *about = zip(*(people[owner] for owner in owners), strict=True)
        names, metadata, tags, born, changed = (
            [value if is_first else None for value, is_first in zip(column, first, strict=True)] for column in about
        )
        found = self._templates([key for key in keys if key])
        nothing = (None,) * 7
        columns = zip(*(found.get(key, nothing) for key in keys), strict=True)
        template_ids, kinds, qualities, scores, created, stored, kept = map(list, columns)
        seal, dimension = self.gallery.seal, self.gallery.dimension
        given = np.array([sealed is not None for sealed in stored], np.bool_)
        sealed_vectors = [sealed for sealed in stored if sealed is not None]
        block = seal.open_vectors(sealed_vectors, self.gallery.generation, dimension)
        if not given.all():
            block, opened = np.zeros((len(owners), dimension), np.float32), block
            block[given] = opened
        faces = [None if sealed is None else open_crop(seal, sealed) for sealed in kept]
        return Items(
            range(number, number + len(owners)),
            list(ids),
            names,
            metadata,
            tags,
            _each(born, microseconds),
            _each(changed, microseconds),
            template_ids,
            kinds,
            qualities,
            scores,
            _each(created, microseconds),
            [None if face is None else (face.image, face.landmarks_xy) for face in faces],
            block,
            given,
        )

    def _people(self, keys: list[int]) -> dict[int, Sequence[Any]]:
        columns = [subjects.c[c] for c in ("pk", "sealed", "created_at", "updated_at")]
        query = sa.select(*columns).where(rows.among(self._connection, subjects.c.pk, keys))
        opened = ((row, open_about(self.gallery.seal, row.sealed)) for row in self._connection.execute(query))
        return {row.pk: (*vars(about).values(), row.created_at, row.updated_at) for row, about in opened}

    def _templates(self, keys: list[int]) -> dict[int, Sequence[Any]]:
        columns = [templates.c[c] for c in ("pk", "id", "kind", "quality", "detection_score", "created_at")]
        joined: sa.FromClause = templates
        nothing: sa.ColumnElement[Any] = sa.null()
        vector, crop = nothing, nothing
        if self.embeddings:
            of_generation = vectors.c.generation == self.gallery.generation
            joined = joined.outerjoin(vectors, (vectors.c.template_pk == templates.c.pk) & of_generation)
            vector = vectors.c.vector
        if self._with_crops:
            joined = joined.outerjoin(crops, crops.c.template_pk == templates.c.pk)
            crop = crops.c.sealed
        query = sa.select(*columns, vector, crop).select_from(joined)
        chosen = query.where(rows.among(self._connection, templates.c.pk, keys))
        return {row[0]: row[1:] for row in self._connection.execute(chosen)}
