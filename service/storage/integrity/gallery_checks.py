"""Consistency checks of one gallery, with repairs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray
from sqlalchemy.engine import Connection

from models.risk.impostor_evidence import ImpostorEvidence
from models.runtime.network import Float
from service.domain.gallery import Gallery
from service.security.sealing import OVERHEAD_BYTES, VECTOR_TYPE, Seal, SealBrokenError
from service.storage.db.row_sealing import (
    ALBUM_FACE,
    ALBUM_GROUP,
    ANSWER,
    ITEM,
    PROBLEM,
    SubjectRecord,
    labels_of,
    open_crop,
    open_decoys,
    open_subject,
    subject_lookup,
)
from service.storage.db.tables import (
    album_faces,
    album_groups,
    albums,
    changes,
    crops,
    decoys,
    evidence,
    galleries,
    generations,
    idempotency,
    index_states,
    job_items,
    jobs,
    labels,
    last_change,
    stranger_templates,
    strangers,
    subjects,
    templates,
    vectors,
)
from service.storage.integrity.consistency import Check
from service.storage.repositories.change_log import ROWS_PER_READ

Value = TypeVar("Value")
LENGTH_TOLERANCE: Final = 1e-3
"""Largest deviation from unit length. Rounding errors are a thousand times smaller."""
Double = NDArray[np.float64]


def quarantine(generation: int) -> int:
    """Return the pseudo-generation, below zero, that keeps an unusable vector for inspection. No search reads it."""
    return -1 - generation


# Gallery rows and generations


def _current(gallery: Gallery) -> sa.ColumnElement[bool]:
    return (generations.c.gallery_pk == gallery.pk) & (generations.c.generation == gallery.generation)


def _no_generation(connection: Connection, gallery: Gallery) -> int:
    row = connection.execute(sa.select(generations).where(_current(gallery))).first()
    return int(row is None or (row.fingerprint, row.dimension) != (gallery.fingerprint, gallery.dimension))


def _add_generation(connection: Connection, gallery: Gallery) -> None:
    now = datetime.now(UTC)
    values = {"fingerprint": gallery.fingerprint, "dimension": gallery.dimension, "updated_at": now}
    if connection.execute(generations.update().where(_current(gallery)).values(**values)).rowcount:
        return
    keys = {"gallery_pk": gallery.pk, "generation": gallery.generation}
    connection.execute(generations.insert().values(**keys, **values, state="current", details={}, created_at=now))


def _counted(gallery: Gallery) -> dict[str, sa.ScalarSelect[int]]:
    return {
        f"{name}_count": sa.select(sa.func.count()).where(table.c.gallery_pk == gallery.pk).scalar_subquery()
        for name, table in (("subject", subjects), ("template", templates))
    }


def _wrong_counts(connection: Connection, gallery: Gallery) -> int:
    right = _counted(gallery)
    wrong = (sa.case((galleries.c[name] != count, 1), else_=0) for name, count in right.items())
    query = sa.select(*wrong).where(galleries.c.pk == gallery.pk)
    return sum(connection.execute(query).one())


# Sealed values


def _sealed(connection: Connection, gallery: Gallery) -> int:
    """Count the sealed values that do not open, except vectors, which have their own checks."""
    seal = gallery.seal
    own_jobs, own_templates = jobs.c.gallery_pk == gallery.pk, templates.c.gallery_pk == gallery.pk
    of_items = job_items.join(jobs, jobs.c.pk == job_items.c.job_pk)
    of_crops = crops.join(templates, templates.c.pk == crops.c.template_pk)
    named = sa.select(album_groups.c.sealed).join(albums, albums.c.pk == album_groups.c.album_pk)
    named = named.where(albums.c.gallery_pk == gallery.pk, album_groups.c.sealed.is_not(None))
    queries: list[tuple[sa.Select[Any], Callable[[bytes], object]]] = [
        (sa.select(idempotency.c.sealed).where(idempotency.c.gallery_pk == gallery.pk), lambda v: seal.open(v, ANSWER)),
        (sa.select(jobs.c.problem).where(own_jobs, ~jobs.c.problem.is_(None)), lambda v: seal.open_json(v, PROBLEM)),
        (sa.select(job_items.c.sealed).select_from(of_items).where(own_jobs), lambda v: seal.open_json(v, ITEM)),
        (sa.select(crops.c.sealed).select_from(of_crops).where(own_templates), lambda v: open_crop(seal, v)),
        (named, lambda v: seal.open_json(v, ALBUM_GROUP)),
    ]
    broken = sum(about is None for _, about in _subjects(connection, gallery))
    kept = sa.select(decoys.c.sealed, decoys.c.generation).where(decoys.c.gallery_pk == gallery.pk)
    for sealed, generation in connection.execute(kept):
        broken += not _opens(partial(open_decoys, seal, generation=generation), [sealed])
    remembered = stranger_templates.join(strangers, strangers.c.pk == stranger_templates.c.stranger_pk)
    columns = stranger_templates.c.vector, stranger_templates.c.crop, strangers.c.generation
    for vector, crop, generation in connection.execute(
        sa.select(*columns).select_from(remembered).where(strangers.c.gallery_pk == gallery.pk)
    ):
        broken += not _opens(partial(seal.open_vectors, generation=generation, dimension=-1), [vector])
        broken += crop is not None and not _opens(partial(open_crop, seal), crop)
    own_albums = albums.c.gallery_pk == gallery.pk
    owned = sa.select(album_faces, albums.c.generation).join(albums, albums.c.pk == album_faces.c.album_pk)
    for row in connection.execute(owned.where(own_albums).execution_options(yield_per=ROWS_PER_READ)):
        broken += not _opens(partial(seal.open_vectors, generation=row.generation, dimension=-1), [row.vector])
        broken += not _opens(partial(open_crop, seal), row.crop)
        broken += not _opens(partial(seal.open_json, purpose=ALBUM_FACE), row.sealed)
    for query, opening in queries:
        values = connection.execute(query.execution_options(yield_per=ROWS_PER_READ)).scalars()
        broken += sum(not _opens(opening, value) for value in values)
    return broken


def _opens(opening: Callable[[Value], object], value: Value) -> bool:
    try:
        opening(value)
    except SealBrokenError:
        return False
    return True


def _subjects(connection: Connection, gallery: Gallery) -> Iterator[tuple[int, SubjectRecord | None]]:
    """Yield subjects' keys and records; None for a row that does not open or belongs to another id."""
    query = sa.select(subjects).where(subjects.c.gallery_pk == gallery.pk)
    for row in connection.execute(query.execution_options(yield_per=ROWS_PER_READ)):
        try:
            about = open_subject(gallery.seal, row.sealed)
        except SealBrokenError:
            yield row.pk, None
        else:
            yield row.pk, about if subject_lookup(gallery.seal, about.id) == row.lookup else None


# Labels


def _mislabeled(connection: Connection, gallery: Gallery) -> list[tuple[int, set[str]]]:
    """Return subjects whose labels do not match their tags and metadata, with the right labels."""
    stored: dict[int, set[str]] = {}
    for row in connection.execute(sa.select(labels).where(labels.c.gallery_pk == gallery.pk)):
        stored.setdefault(row.subject_pk, set()).add(row.label)
    known = ((pk, about) for pk, about in _subjects(connection, gallery) if about is not None)
    right = ((pk, labels_of(gallery.seal, about.tags, about.metadata)) for pk, about in known)
    return [(pk, expected) for pk, expected in right if stored.get(pk, set()) != expected]


def _relabel(connection: Connection, gallery: Gallery) -> None:
    for pk, expected in _mislabeled(connection, gallery):
        connection.execute(labels.delete().where(labels.c.subject_pk == pk))
        if expected:
            keys = {"gallery_pk": gallery.pk, "subject_pk": pk}
            connection.execute(labels.insert(), [keys | {"label": label} for label in sorted(expected)])


# Vectors


def _stored_vectors(connection: Connection, gallery: Gallery) -> Iterator[tuple[int, list[sa.Row[Any]]]]:
    """Yield batches of rows (template_pk, generation, vector) with their generation's dimension."""
    known = connection.execute(
        sa.select(generations.c.generation, generations.c.dimension).where(generations.c.gallery_pk == gallery.pk)
    ).all()
    for generation, dimension in known:
        query = (
            sa.select(vectors)
            .join(templates, templates.c.pk == vectors.c.template_pk)
            .where(templates.c.gallery_pk == gallery.pk, vectors.c.generation == generation)
            .execution_options(yield_per=ROWS_PER_READ)
        )
        for rows in connection.execute(query).partitions():
            yield dimension, list(rows)


def _lengths(seal: Seal, rows: list[sa.Row[Any]], dimension: int) -> tuple[Double, Double]:
    """Return (n, d) vectors of one generation, zero if damaged, and their (n,) lengths, NaN if not finite."""
    stacked = _opened(seal, rows, dimension).astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        return stacked, np.linalg.norm(stacked, axis=1)


def _opened(seal: Seal, rows: list[sa.Row[Any]], dimension: int) -> Float:
    sealed = [row.vector for row in rows]
    sound = all(len(value) == dimension * VECTOR_TYPE.itemsize + OVERHEAD_BYTES for value in sealed)
    try:
        if sound:
            return seal.open_vectors(sealed, rows[0].generation, dimension)
    except SealBrokenError:
        pass
    if len(rows) == 1:
        return np.zeros((1, dimension), np.float32)
    return np.concatenate([_opened(seal, [row], dimension) for row in rows])


def _damaged(connection: Connection, gallery: Gallery) -> list[sa.Row[Any]]:
    """Return vectors that do not open, have a wrong dimension, or are not finite or zero."""
    found = []
    for dimension, rows in _stored_vectors(connection, gallery):
        _, lengths = _lengths(gallery.seal, rows, dimension)
        found += [row for row, length in zip(rows, lengths, strict=True) if not (np.isfinite(length) and length > 0)]
    return found


def _set_aside(connection: Connection, gallery: Gallery) -> None:
    for row in _damaged(connection, gallery):
        kept = quarantine(row.generation)
        this = vectors.c.template_pk == row.template_pk
        connection.execute(vectors.delete().where(this, vectors.c.generation == kept))
        connection.execute(vectors.update().where(this, vectors.c.generation == row.generation).values(generation=kept))
        _log_again(connection, templates.c.pk == row.template_pk)


def _not_unit(connection: Connection, gallery: Gallery) -> list[tuple[sa.Row[Any], bytes]]:
    """Return rows whose vector is not of unit length, with the sealed unit vector."""
    found = []
    for dimension, rows in _stored_vectors(connection, gallery):
        stacked, lengths = _lengths(gallery.seal, rows, dimension)
        off = np.isfinite(lengths) & (lengths > 0) & (np.abs(lengths - 1) > LENGTH_TOLERANCE)
        mended = gallery.seal.close_vectors((stacked[off] / lengths[off, None]).astype(np.float32), rows[0].generation)
        found += [(rows[i], vector) for i, vector in zip(np.flatnonzero(off), mended, strict=True)]
    return found


def _normalize(connection: Connection, gallery: Gallery) -> None:
    for row, vector in _not_unit(connection, gallery):
        this = (vectors.c.template_pk == row.template_pk) & (vectors.c.generation == row.generation)
        connection.execute(vectors.update().where(this).values(vector=vector))
        _log_again(connection, templates.c.pk == row.template_pk)


def _unowned(gallery: Gallery) -> sa.ColumnElement[bool]:
    """Select vectors of generations that the gallery does not have, except quarantined ones."""
    of_gallery = sa.select(templates.c.pk).where(templates.c.gallery_pk == gallery.pk)
    known = sa.select(generations.c.generation).where(generations.c.gallery_pk == gallery.pk)
    generation = vectors.c.generation
    elsewhere = (generation >= 0) & (generation != gallery.generation) & generation.not_in(known)
    return vectors.c.template_pk.in_(of_gallery) & elsewhere


def _unseen(gallery: Gallery) -> sa.ColumnElement[bool]:
    """Select templates without any vector, which no search can find."""
    seen = sa.select(vectors.c.template_pk).where(vectors.c.template_pk == templates.c.pk, vectors.c.generation >= 0)
    return (templates.c.gallery_pk == gallery.pk) & ~seen.exists()


# Change log and derived rows


def _unlogged(gallery: Gallery) -> sa.ColumnElement[bool]:
    """Select templates that are missing from an untrimmed log. Followers of a trimmed log start from a snapshot."""
    # A set that is built once: the log has no index by template.
    logged = sa.select(changes.c.template_pk).where(changes.c.gallery_pk == gallery.pk)
    whole = sa.literal(gallery.log_floor) == 0
    return (templates.c.gallery_pk == gallery.pk) & whole & templates.c.pk.not_in(logged)


def _log_again(connection: Connection, chosen: sa.ColumnElement[bool]) -> None:
    """Append lines for the chosen templates, so that indexes read them again."""
    lines = sa.select(templates.c.gallery_pk, templates.c.pk, templates.c.subject_pk).where(chosen)
    columns = ["gallery_pk", "template_pk", "subject_pk"]
    connection.execute(changes.insert().from_select(columns, lines.order_by(templates.c.pk)))


def _last_line(gallery: Gallery) -> sa.ScalarSelect[int]:
    return sa.select(last_change()).where(galleries.c.pk == gallery.pk).scalar_subquery()


def _wrong_evidence(connection: Connection, gallery: Gallery) -> list[int]:
    """Return generations whose evidence is unreadable or ahead of the log. Evidence that lags is sound."""
    rows = connection.execute(
        sa.select(evidence, _last_line(gallery).label("last")).where(evidence.c.gallery_pk == gallery.pk)
    )
    return [row.generation for row in rows if row.sequence > row.last or not _readable(row.document)]


def _readable(document: str) -> bool:
    try:
        ImpostorEvidence.from_document(json.loads(document))
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def _drop_evidence(connection: Connection, gallery: Gallery) -> None:
    wrong = _wrong_evidence(connection, gallery)
    connection.execute(evidence.delete().where(evidence.c.gallery_pk == gallery.pk, evidence.c.generation.in_(wrong)))


def _ahead(gallery: Gallery) -> sa.ColumnElement[bool]:
    return (index_states.c.gallery_pk == gallery.pk) & (index_states.c.sequence > _last_line(gallery))


def _counting(damaged: Callable[[Gallery], sa.ColumnElement[bool]]) -> Callable[[Connection, Gallery], int]:
    def count(connection: Connection, gallery: Gallery) -> int:
        return connection.execute(sa.select(sa.func.count()).where(damaged(gallery))).scalar_one()

    return count


GALLERY_CHECKS: Final = (
    Check[Gallery](
        "generation",
        "the gallery's recognizer is not among its generations",
        _no_generation,
        _add_generation,
        "The repair adds it as the gallery's row names it.",
    ),
    Check[Gallery](
        "sealed",
        "subjects, crops, decoys, strangers, albums or answers were altered, or are another gallery's",
        _sealed,
        None,
        "Restore a backup, or delete the gallery and enroll all subjects again.",
    ),
    Check[Gallery](
        "counts",
        "subject or template counts are wrong",
        _wrong_counts,
        lambda connection, gallery: connection.execute(
            galleries.update().where(galleries.c.pk == gallery.pk).values(**_counted(gallery))
        ),
        "The repair counts the rows again.",
    ),
    Check[Gallery](
        "labels",
        "labels do not match subjects' tags and metadata: filters give wrong results",
        lambda connection, gallery: len(_mislabeled(connection, gallery)),
        _relabel,
        "The repair writes the labels again.",
    ),
    Check[Gallery](
        "vectors_unowned",
        "vectors belong to no recognizer of the gallery",
        _counting(_unowned),
        lambda connection, gallery: connection.execute(vectors.delete().where(_unowned(gallery))),
        "The repair deletes them.",
    ),
    Check[Gallery](
        "vectors_damaged",
        "vectors do not open, have a wrong dimension, or are not finite or zero: searches of the gallery may fail",
        lambda connection, gallery: len(_damaged(connection, gallery)),
        _set_aside,
        "The repair moves them to quarantine, where no search reads them.",
    ),
    Check[Gallery](
        "vectors_length",
        "vectors do not have unit length: their similarities are wrong",
        lambda connection, gallery: len(_not_unit(connection, gallery)),
        _normalize,
        "The repair normalizes them.",
    ),
    Check[Gallery](
        "vectors_missing",
        "templates have no searchable vector",
        _counting(_unseen),
        None,
        "Delete these templates and enroll the photos again, or restore a backup.",
    ),
    Check[Gallery](
        "log",
        "templates are missing from the change log: a new index would miss them",
        _counting(_unlogged),
        lambda connection, gallery: _log_again(connection, _unlogged(gallery)),
        "The repair appends them.",
    ),
    Check[Gallery](
        "evidence",
        "the gallery's evidence is unreadable or ahead of the change log",
        lambda connection, gallery: len(_wrong_evidence(connection, gallery)),
        _drop_evidence,
        "The repair deletes it; the next search derives it again.",
    ),
    Check[Gallery](
        "index_states",
        "positions of shared indexes are ahead of the change log",
        _counting(_ahead),
        lambda connection, gallery: connection.execute(index_states.delete().where(_ahead(gallery))),
        "The repair resets them: the indexes are rebuilt.",
    ),
)
