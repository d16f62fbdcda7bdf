"""Bulk import and export of templates: blocks of items, one transaction each, and exports of one snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from service.core.errors import GalleryNotFoundError, KithError, TemplateConflictError
from service.domain.events import Event
from service.domain.gallery import Crop, Gallery, Keys
from service.domain.gallery_items import (
    MAX_BLOCK_ITEMS,
    GalleryItems,
    RejectedItem,
    derive_template_id,
    from_microseconds,
    rows_in_block,
    to_microseconds,
    vector_bytes,
)
from service.security.sealing import VECTOR_TYPE
from service.storage.audit.log import note
from service.storage.db import bulk_rows
from service.storage.db.engine import Database
from service.storage.db.row_sealing import (
    SubjectRecord,
    labels_of,
    open_crop,
    open_subject,
    seal_crop,
    seal_subject,
    subject_lookup,
)
from service.storage.db.tables import crops, galleries, labels, subjects, templates, vectors
from service.storage.repositories.erasures import erased_error, erased_since, erased_templates_since
from service.storage.repositories.gallery_rows import gallery_of, gallery_rows

MAX_ITEMS_WITH_CROPS: Final = 512
"""Items of a block that includes crops."""
KEYS_PER_READ: Final = 50_000
SUBJECT_COLUMNS: Final = ("pk", "gallery_pk", "lookup", "sealed", "created_at", "updated_at")
SHOWN_COLUMNS: Final = ("kind", "quality", "detection_score", "created_at")
TEMPLATE_COLUMNS: Final = ("pk", "id", "gallery_pk", "subject_pk", *SHOWN_COLUMNS)

VECTOR_COLUMNS: Final = ("template_pk", "generation", "vector")


@dataclass(frozen=True)
class BlockResult:
    """Number of added subjects and templates, of templates that were ``present``, and the refused items."""

    subjects: int
    templates: int
    present: int
    refused: list[RejectedItem]


class BulkStore:
    """Bulk reads and writes of templates. All methods block."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, gallery: Gallery, items: GalleryItems) -> BlockResult:
        """Store a block of checked items (service.domain.gallery_items.check), all or nothing.

        Templates that exist are skipped, and existing subjects keep their name, metadata and tags. A template without
        an id gets one derived from its subject and vector. Future times are replaced by now. Subjects and templates
        that were erased since ``gallery`` was read are refused.

        Raises GalleryNotFoundError, GalleryMovedError, StorageError.
        """
        gallery.seal.unlock()
        items = _with_ids(gallery, items)
        with self._database.change(gallery) as connection, bulk_rows.large_page_cache(connection):
            lookups = {subject: subject_lookup(gallery.seal, subject) for subject in set(items.subjects)}
            known = _existing_subjects(connection, gallery, lookups)
            new, refused = _new_templates(connection, gallery, items, lookups)
            if erased := erased_since(connection, gallery.pk, gallery.seal, lookups, gallery.erased):
                refused |= {row: erased_error() for row, subject in enumerate(items.subjects) if subject in erased}
            ids = {items.templates[row] for row in new}
            if lost := erased_templates_since(connection, gallery.pk, ids, gallery.erased):
                refused |= {row: erased_error("template") for row in new if items.templates[row] in lost}
            new = [row for row in new if row not in refused]
            refusals = [RejectedItem(items.numbers[row], error) for row, error in refused.items()]
            # The first accepted row of each subject provides its name, tags and metadata.
            first: dict[str, int] = {}
            for row, subject in enumerate(items.subjects):
                if row not in refused:
                    first.setdefault(subject, row)
            unknown = [row for subject, row in first.items() if subject not in known]
            known |= _add_subjects(connection, gallery, items.select(unknown), lookups)
            _add_templates(connection, gallery, items.select(new), known)
            counts: dict[str, Any] = {"subjects": len(unknown), "templates": len(new), "refused": len(refusals)}
            imported = Event("enrollment", {"subject_count": len(unknown), "template_count": len(new)})
            published = [imported] if new else []
            note(self._database.vault, connection, "gallery_imported", gallery, published=published, **counts)
        present = int(items.given.sum()) - len(new) - sum(bool(items.given[row]) for row in refused)
        return BlockResult(len(unknown), len(new), present, refusals)

    @contextmanager
    def open_export(self, name: str, embeddings: bool = True, with_crops: bool = False) -> Iterator[Export]:
        """Open a snapshot of a gallery until the block ends. Raises GalleryNotFoundError."""
        with self._database.read() as connection:
            row = connection.execute(gallery_rows().where(galleries.c.name == name)).first()
            if row is None:
                raise GalleryNotFoundError(f"there is no gallery {name!r}")
            yield Export(connection, gallery_of(row, self._database.vault), embeddings, with_crops)


def _with_ids(gallery: Gallery, items: GalleryItems) -> GalleryItems:
    """Derive the ids of templates that the file does not name."""
    columns = zip(items.subjects, items.vectors, items.given.tolist(), items.templates, strict=True)
    ids = [
        derive_template_id(gallery.seal, subject, vector) if given and id_ is None else id_
        for subject, vector, given, id_ in columns
    ]
    return replace(items, templates=ids)


def _existing_subjects(connection: Connection, gallery: Gallery, lookups: Mapping[str, str]) -> dict[str, int]:
    """Return the row keys of existing subjects by id. ``lookups`` maps ids to keyed hashes."""
    query = sa.select(subjects.c.lookup, subjects.c.pk).where(subjects.c.gallery_pk == gallery.pk)
    chosen = query.where(bulk_rows.is_in(connection, subjects.c.lookup, list(lookups.values())))
    found = {row.lookup: row.pk for row in connection.execute(chosen)}
    return {subject: found[lookup] for subject, lookup in lookups.items() if lookup in found}


def _new_templates(
    connection: Connection, gallery: Gallery, items: GalleryItems, lookups: Mapping[str, str]
) -> tuple[list[int], dict[int, KithError]]:
    """Return the rows of new templates, and errors for rows whose id belongs to another template."""
    given = [row for row, is_given in enumerate(items.given.tolist()) if is_given]
    raw = np.ascontiguousarray(items.vectors, VECTOR_TYPE)
    stored = _stored(connection, gallery, [items.templates[row] for row in given])
    seen: dict[str, tuple[str, bytes | int | None]] = {id_: (row.lookup, v) for id_, (row, v) in stored.items()}
    if not seen and len({items.templates[row] for row in given}) == len(given):
        return given, {}
    new: list[int] = []
    refused: dict[int, KithError] = {}
    for row in given:
        template, owner = items.templates[row], lookups[items.subjects[row]]
        earlier = seen.get(template)
        if earlier is None:
            seen[template] = owner, row
            new.append(row)
            continue
        first, vector = earlier
        known = raw[vector].tobytes() if isinstance(vector, int) else vector
        if owner != first:
            if isinstance(vector, int):
                other = items.subjects[vector]
            else:
                other = open_subject(gallery.seal, stored[template][0].sealed).id
            refused[row] = TemplateConflictError(f"template {template} belongs to subject {other!r}")
        elif known is not None and known != raw[row].tobytes():
            refused[row] = TemplateConflictError(f"template {template} has another embedding")
    return new, refused


def _stored(
    connection: Connection, gallery: Gallery, ids: Sequence[str]
) -> dict[str, tuple[sa.Row[Any], bytes | None]]:
    """Return existing templates by id: a row with their subject's ``lookup`` and ``sealed``, and their vector."""
    query = (
        sa.select(templates.c.id, subjects.c.lookup, subjects.c.sealed, vectors.c.vector)
        .join(subjects, subjects.c.pk == templates.c.subject_pk)
        .outerjoin(vectors, (vectors.c.template_pk == templates.c.pk) & (vectors.c.generation == gallery.generation))
        .where(templates.c.gallery_pk == gallery.pk, bulk_rows.is_in(connection, templates.c.id, ids))
    )
    found: list[Any] = list(connection.execute(query))
    sealed = [row.vector for row in found if row.vector is not None]
    opened = iter(gallery.seal.open_vectors(sealed, gallery.generation, gallery.dimension))
    return {row.id: (row, None if row.vector is None else vector_bytes(next(opened))) for row in found}


def _add_subjects(
    connection: Connection, gallery: Gallery, new: GalleryItems, lookups: Mapping[str, str]
) -> dict[str, int]:
    keys = bulk_rows.reserve_keys(connection, subjects, len(new))
    known = zip(new.subjects, new.names, new.metadata, new.tags, strict=True)
    records = [SubjectRecord(id_, name, said or {}, tags or []) for id_, name, said, tags in known]
    columns = (
        keys,
        [gallery.pk] * len(keys),
        [lookups[subject] for subject in new.subjects],
        [seal_subject(gallery.seal, record) for record in records],
        _times(connection, new.subject_created_us),
        _times(connection, new.subject_updated_us),
    )
    bulk_rows.insert(connection, subjects, SUBJECT_COLUMNS, zip(*columns, strict=True))
    new_labels = [
        (gallery.pk, label, key)
        for key, one in zip(keys, records, strict=True)
        for label in sorted(labels_of(gallery.seal, one.tags, one.metadata))
    ]
    bulk_rows.insert(connection, labels, ("gallery_pk", "label", "subject_pk"), new_labels)
    return dict(zip(new.subjects, keys, strict=True))


def _add_templates(connection: Connection, gallery: Gallery, items: GalleryItems, subject_pks: dict[str, int]) -> None:
    if not len(items):
        return
    keys = bulk_rows.reserve_keys(connection, templates, len(items))
    columns = (
        keys,
        items.templates,
        [gallery.pk] * len(items),
        [subject_pks[subject] for subject in items.subjects],
        items.kinds,
        _each(items.qualities, bulk_rows.as_json),
        _each(items.detection_scores, float),
        _times(connection, items.created_us),
    )
    bulk_rows.insert(connection, templates, TEMPLATE_COLUMNS, zip(*columns, strict=True))
    sealed = gallery.seal.close_vectors(items.vectors, gallery.generation)
    generations = [gallery.generation] * len(keys)
    bulk_rows.insert(connection, vectors, VECTOR_COLUMNS, zip(keys, generations, sealed, strict=True))
    given = [(key, crop) for key, crop in zip(keys, items.crops, strict=True) if crop is not None]
    if given and gallery.settings.keep_crops:
        kept = [(key, seal_crop(gallery.seal, Crop(*crop))) for key, crop in given]
        bulk_rows.insert(connection, crops, ("template_pk", "sealed"), kept)


def _each(column: list[Any], convert: Callable[[Any], Any]) -> list[Any]:
    """Convert the values that are not None."""
    return column if column.count(None) == len(column) else [None if v is None else convert(v) for v in column]


def _times(connection: Connection, column: list[int | None]) -> list[datetime | str]:
    """Replace missing and future times by now: retention would never reach a future time."""
    at = datetime.now(UTC)
    now, latest = bulk_rows.as_time(connection, at), to_microseconds(at)
    given = {us for us in column if us is not None and us < latest}
    past = {us: bulk_rows.as_time(connection, from_microseconds(us)) for us in given}
    return [now if us is None else past.get(us, now) for us in column] if past else [now] * len(column)


class Export:
    """Snapshot of a gallery, read in blocks."""

    def __init__(self, connection: Connection, gallery: Gallery, embeddings: bool, with_crops: bool) -> None:
        self.gallery = gallery
        self.embeddings = embeddings
        self._connection = connection
        self._with_crops = with_crops

    def blocks(self) -> Iterator[GalleryItems]:
        """Yield all subjects by age with their templates by age. A subject without templates is one item.

        Only the first item of a subject has its name, tags and metadata.
        """
        size = min(rows_in_block(self.gallery.dimension), MAX_ITEMS_WITH_CROPS if self._with_crops else MAX_BLOCK_ITEMS)
        owners, keys = self._keys()
        first = owners != np.append(0, owners[:-1])
        for start in range(0, len(owners), size):
            part = slice(start, start + size)
            yield self._block(start + 1, owners[part].tolist(), keys[part].tolist(), first[part].tolist())

    def _keys(self) -> tuple[Keys, Keys]:
        """Return the (n,) keys of subjects and (n,) of their templates, 0 for none, in the order of the items.

        Reads indexes only: sorting in the database would move whole rows with their vectors.
        """
        query = (
            sa.select(subjects.c.pk, sa.func.coalesce(templates.c.pk, 0))
            .select_from(subjects.outerjoin(templates, templates.c.subject_pk == subjects.c.pk))
            .where(subjects.c.gallery_pk == self.gallery.pk)
            .execution_options(yield_per=KEYS_PER_READ)
        )
        parts = [np.array(part, np.int64) for part in self._connection.execute(query).partitions()]
        pairs = np.concatenate([np.empty((0, 2), np.int64), *parts])
        order = np.lexsort((pairs[:, 1], pairs[:, 0]))
        return pairs[order, 0], pairs[order, 1]

    def _block(self, number: int, owners: list[int], keys: list[int], first: list[bool]) -> GalleryItems:
        about_subjects = self._subjects(sorted(set(owners)))
        ids, *about = zip(*(about_subjects[owner] for owner in owners), strict=True)
        names, metadata, tags, created_at, updated_at = (
            [value if is_first else None for value, is_first in zip(column, first, strict=True)] for column in about
        )
        found = self._templates([key for key in keys if key])
        empty = (None,) * 7
        columns = zip(*(found.get(key, empty) for key in keys), strict=True)
        template_ids, kinds, qualities, scores, created, stored, sealed_crops = map(list, columns)
        seal, dimension = self.gallery.seal, self.gallery.dimension
        given = np.array([sealed is not None for sealed in stored], np.bool_)
        sealed_vectors = [sealed for sealed in stored if sealed is not None]
        block = seal.open_vectors(sealed_vectors, self.gallery.generation, dimension)
        if not given.all():
            block, opened = np.zeros((len(owners), dimension), np.float32), block
            block[given] = opened
        faces = [None if sealed is None else open_crop(seal, sealed) for sealed in sealed_crops]
        return GalleryItems(
            range(number, number + len(owners)),
            list(ids),
            names,
            metadata,
            tags,
            _each(created_at, to_microseconds),
            _each(updated_at, to_microseconds),
            template_ids,
            kinds,
            qualities,
            scores,
            _each(created, to_microseconds),
            [None if face is None else (face.image, face.landmarks_xy) for face in faces],
            block,
            given,
        )

    def _subjects(self, keys: list[int]) -> dict[int, Sequence[Any]]:
        columns = [subjects.c[c] for c in ("pk", "sealed", "created_at", "updated_at")]
        query = sa.select(*columns).where(bulk_rows.is_in(self._connection, subjects.c.pk, keys))
        opened = ((row, open_subject(self.gallery.seal, row.sealed)) for row in self._connection.execute(query))
        return {row.pk: (*vars(about).values(), row.created_at, row.updated_at) for row, about in opened}

    def _templates(self, keys: list[int]) -> dict[int, Sequence[Any]]:
        vector = vectors.c.vector if self.embeddings else sa.null()
        crop = crops.c.sealed if self._with_crops else sa.null()
        columns = [templates.c[name] for name in ("pk", "id", *SHOWN_COLUMNS)]
        query = sa.select(*columns, vector, crop).select_from(templates)
        if self.embeddings:
            own = (vectors.c.template_pk == templates.c.pk) & (vectors.c.generation == self.gallery.generation)
            query = query.outerjoin(vectors, own)
        if self._with_crops:
            query = query.outerjoin(crops, crops.c.template_pk == templates.c.pk)
        chosen = query.where(bulk_rows.is_in(self._connection, templates.c.pk, keys))
        return {row[0]: row[1:] for row in self._connection.execute(chosen)}
