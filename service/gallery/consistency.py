"""What may be wrong with a database, found and mended in SQL: one :class:`Check` for each way.

The service never leaves any of it behind, however it is ended. Disks, restored copies and other hands do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray
from sqlalchemy.engine import Connection

from models.gallery_risk import ImpostorEvidence
from models.network import Float
from service.errors import StorageDamagedError, StorageError
from service.gallery.audit_log import record
from service.gallery.database import Database, new_version
from service.gallery.key_store import altered_keys
from service.gallery.labels import labels_of
from service.gallery.rows import highest
from service.gallery.sealed_rows import (
    ANSWER,
    ITEM,
    PROBLEM,
    About,
    lookup_of,
    open_about,
    open_crop,
    open_disagreement,
)
from service.gallery.store import ROWS_AT_ONCE
from service.gallery.subjects import Gallery
from service.gallery.tables import (
    audit,
    changes,
    crops,
    evidence,
    galleries,
    generations,
    idempotency,
    index_states,
    job_items,
    jobs,
    labels,
    metadata,
    subjects,
    templates,
    vectors,
)
from service.gallery.vault import Vault
from service.security.sealing import OVERHEAD_BYTES, VECTOR_TYPE, Seal, SealBrokenError

Value = TypeVar("Value")
LENGTH_TOLERANCE: Final = 1e-3
"""Of a unit vector's length: rounding is a thousand times smaller."""
REPAIRED: Final = "repaired"
Double = NDArray[np.float64]


def quarantine(generation: int) -> int:
    """Where a vector that cannot be used is kept, read by nobody, for whoever wants to see it."""
    return -1 - generation


@dataclass(frozen=True)
class Check:
    """``find`` says in how many places it is wrong; ``mend``, where there is a way, puts it right. ``action``: what
    mending does, or what is to be done by hand."""

    kind: str
    what: str
    find: Callable[[Connection, Gallery], int]
    mend: Callable[[Connection, Gallery], None] | None
    action: str


@dataclass(frozen=True)
class DatabaseCheck:
    """As :class:`Check`, of all galleries together."""

    kind: str
    what: str
    find: Callable[[Connection, Vault], int]
    mend: Callable[[Connection], None] | None
    action: str


class Consistency:
    """A database under examination. Every look is at one moment; every repair is one transaction, with its line in the
    audit."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def count(self, check: Check, gallery: Gallery) -> int:
        with self._database.read() as connection:
            return check.find(connection, gallery)

    def repair(self, check: Check, gallery: Gallery) -> None:
        assert check.mend is not None  # noqa: S101 - the caller asks first
        with self._database.change(gallery) as connection:
            found = check.find(connection, gallery)
            check.mend(connection, gallery)
            record(self._database.vault, connection, REPAIRED, gallery, kind=check.kind, count=found)

    def count_in_database(self, check: DatabaseCheck) -> int:
        try:
            with self._database.read() as connection:
                return check.find(connection, self._database.vault)
        except StorageDamagedError:
            if check is PAGES:
                return 1  # which the examination itself stumbled over
            raise

    def repair_database(self, check: DatabaseCheck) -> None:
        assert check.mend is not None  # noqa: S101 - the caller asks first
        with self._database.write(StorageError(f"mending {check.kind} broke a constraint")) as connection:
            # First, as it locks every gallery as its writers do (docs/decisions/0019).
            connection.execute(galleries.update().values(version=new_version()))
            found = check.find(connection, self._database.vault)
            check.mend(connection)
            record(self._database.vault, connection, REPAIRED, kind=check.kind, count=found)

    def job_ids(self) -> set[str]:
        with self._database.read() as connection:
            return set(connection.execute(sa.select(jobs.c.id)).scalars())


# A gallery's row and its generations


def _current(gallery: Gallery) -> sa.ColumnElement[bool]:
    return (generations.c.gallery_pk == gallery.pk) & (generations.c.generation == gallery.generation)


def _no_generation(connection: Connection, gallery: Gallery) -> int:
    row = connection.execute(sa.select(generations).where(_current(gallery))).first()
    return int(row is None or (row.fingerprint, row.dimension) != (gallery.fingerprint, gallery.dimension))


def _add_generation(connection: Connection, gallery: Gallery) -> None:
    now = datetime.now(UTC)
    said = {"fingerprint": gallery.fingerprint, "dimension": gallery.dimension, "updated_at": now}
    if connection.execute(generations.update().where(_current(gallery)).values(**said)).rowcount:
        return
    keys = {"gallery_pk": gallery.pk, "generation": gallery.generation}
    connection.execute(generations.insert().values(**keys, **said, state="current", details={}, created_at=now))


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


def _count_again(connection: Connection, gallery: Gallery) -> None:
    connection.execute(galleries.update().where(galleries.c.pk == gallery.pk).values(**_counted(gallery)))


# What is sealed


def _sealed(connection: Connection, gallery: Gallery) -> int:
    """Values that the gallery's key does not open; but for vectors, of which other checks tell."""
    seal = gallery.seal
    own_jobs, own_templates = jobs.c.gallery_pk == gallery.pk, templates.c.gallery_pk == gallery.pk
    of_items = job_items.join(jobs, jobs.c.pk == job_items.c.job_pk)
    of_crops = crops.join(templates, templates.c.pk == crops.c.template_pk)
    looked_at: list[tuple[sa.Select[Any], Callable[[bytes], object]]] = [
        (sa.select(idempotency.c.sealed).where(idempotency.c.gallery_pk == gallery.pk), lambda v: seal.open(v, ANSWER)),
        (sa.select(jobs.c.problem).where(own_jobs, ~jobs.c.problem.is_(None)), lambda v: seal.open_json(v, PROBLEM)),
        (sa.select(job_items.c.sealed).select_from(of_items).where(own_jobs), lambda v: seal.open_json(v, ITEM)),
        (sa.select(crops.c.sealed).select_from(of_crops).where(own_templates), lambda v: open_crop(seal, v)),
    ]
    broken = sum(about is None for _, about in _subjects(connection, gallery))
    details = connection.execute(
        sa.select(generations.c.details).where(generations.c.gallery_pk == gallery.pk)
    ).scalars()
    noted = [one["sealed"] for each in details for one in (each or {}).get("disagreements", [])]
    broken += sum(not _opens(partial(open_disagreement, seal), sealed) for sealed in noted)
    for query, opening in looked_at:
        values = connection.execute(query.execution_options(yield_per=ROWS_AT_ONCE)).scalars()
        broken += sum(not _opens(opening, value) for value in values)
    return broken


def _opens(opening: Callable[[Value], object], value: Value) -> bool:
    try:
        opening(value)
    except SealBrokenError:
        return False
    return True


def _subjects(connection: Connection, gallery: Gallery) -> Iterator[tuple[int, About | None]]:
    """Keys, and who they are; None: the row does not open, or is another's."""
    query = sa.select(subjects).where(subjects.c.gallery_pk == gallery.pk)
    for row in connection.execute(query.execution_options(yield_per=ROWS_AT_ONCE)):
        try:
            about = open_about(gallery.seal, row.sealed)
        except SealBrokenError:
            yield row.pk, None
        else:
            yield row.pk, about if lookup_of(gallery.seal, about.id) == row.lookup else None


# Labels


def _mislabelled(connection: Connection, gallery: Gallery) -> list[tuple[int, set[str]]]:
    """Subjects whose labels are not what their tags and metadata say, with what they should be."""
    borne: dict[int, set[str]] = {}
    for row in connection.execute(sa.select(labels).where(labels.c.gallery_pk == gallery.pk)):
        borne.setdefault(row.subject_pk, set()).add(row.label)
    known = ((pk, about) for pk, about in _subjects(connection, gallery) if about is not None)
    right = ((pk, labels_of(gallery.seal, about.tags, about.metadata)) for pk, about in known)
    return [(pk, said) for pk, said in right if borne.get(pk, set()) != said]


def _relabel(connection: Connection, gallery: Gallery) -> None:
    for pk, said in _mislabelled(connection, gallery):
        connection.execute(labels.delete().where(labels.c.subject_pk == pk))
        if said:
            one = {"gallery_pk": gallery.pk, "subject_pk": pk}
            connection.execute(labels.insert(), [one | {"label": label} for label in sorted(said)])


# Vectors


def _stored_vectors(connection: Connection, gallery: Gallery) -> Iterator[tuple[int, list[sa.Row[Any]]]]:
    """Rows (template_pk, generation, vector), some at once, with the dimension that they should have."""
    known = connection.execute(
        sa.select(generations.c.generation, generations.c.dimension).where(generations.c.gallery_pk == gallery.pk)
    ).all()
    for generation, dimension in known:
        query = (
            sa.select(vectors)
            .join(templates, templates.c.pk == vectors.c.template_pk)
            .where(templates.c.gallery_pk == gallery.pk, vectors.c.generation == generation)
            .execution_options(yield_per=ROWS_AT_ONCE)
        )
        for rows in connection.execute(query).partitions():
            yield dimension, list(rows)


def _lengths(seal: Seal, rows: list[sa.Row[Any]], dimension: int) -> tuple[Double, Double]:
    """(n, d) vectors of one generation, zero where they do not open or have other dimensions, and their (n,) lengths,
    NaN where they are no numbers."""
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
    """Not to be opened, of other dimensions than the recogniser's, not finite, or without direction."""
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
        _log_again(connection, gallery, [row.template_pk])


def _not_unit(connection: Connection, gallery: Gallery) -> list[tuple[sa.Row[Any], bytes]]:
    """Rows, each with what its vector should be."""
    found = []
    for dimension, rows in _stored_vectors(connection, gallery):
        stacked, lengths = _lengths(gallery.seal, rows, dimension)
        off = np.isfinite(lengths) & (lengths > 0) & (np.abs(lengths - 1) > LENGTH_TOLERANCE)
        mended = gallery.seal.close_vectors((stacked[off] / lengths[off, None]).astype(np.float32), rows[0].generation)
        found += [(rows[i], vector) for i, vector in zip(np.flatnonzero(off), mended, strict=True)]
    return found


def _normalise(connection: Connection, gallery: Gallery) -> None:
    for row, vector in _not_unit(connection, gallery):
        this = (vectors.c.template_pk == row.template_pk) & (vectors.c.generation == row.generation)
        connection.execute(vectors.update().where(this).values(vector=vector))
        _log_again(connection, gallery, [row.template_pk])


def _unowned(gallery: Gallery) -> sa.ColumnElement[bool]:
    """Vectors of no generation that the gallery has; quarantine is none."""
    of_gallery = sa.select(templates.c.pk).where(templates.c.gallery_pk == gallery.pk)
    known = sa.select(generations.c.generation).where(generations.c.gallery_pk == gallery.pk)
    generation = vectors.c.generation
    elsewhere = (generation >= 0) & (generation != gallery.generation) & generation.not_in(known)
    return vectors.c.template_pk.in_(of_gallery) & elsewhere


def _count_unowned(connection: Connection, gallery: Gallery) -> int:
    return connection.execute(sa.select(sa.func.count()).where(_unowned(gallery))).scalar_one()


def _drop_unowned(connection: Connection, gallery: Gallery) -> None:
    connection.execute(vectors.delete().where(_unowned(gallery)))


def _unseen(gallery: Gallery) -> sa.Select[int]:
    """Templates that no generation has a vector of: nobody can be found by them."""
    seen = sa.select(vectors.c.template_pk).where(vectors.c.template_pk == templates.c.pk, vectors.c.generation >= 0)
    return sa.select(templates.c.pk).where(templates.c.gallery_pk == gallery.pk, ~seen.exists())


def _count_unseen(connection: Connection, gallery: Gallery) -> int:
    return connection.execute(sa.select(sa.func.count()).select_from(_unseen(gallery).subquery())).scalar_one()


# The change log, and what is derived from it


def _unlogged(gallery: Gallery) -> sa.Select[Any]:
    """Templates that a follower from the log's beginning would not meet. Of a log that was trimmed there is no
    saying: who comes late to it starts from a snapshot."""
    # As a set that is made once: there is no index of the log by template.
    logged = sa.select(changes.c.template_pk).where(changes.c.gallery_pk == gallery.pk)
    whole = sa.literal(gallery.log_floor) == 0
    return sa.select(templates.c.pk, templates.c.subject_pk).where(
        templates.c.gallery_pk == gallery.pk, whole, templates.c.pk.not_in(logged)
    )


def _count_unlogged(connection: Connection, gallery: Gallery) -> int:
    return connection.execute(sa.select(sa.func.count()).select_from(_unlogged(gallery).subquery())).scalar_one()


def _log_missing(connection: Connection, gallery: Gallery) -> None:
    _log_again(connection, gallery, [row.pk for row in connection.execute(_unlogged(gallery)).all()])


def _log_again(connection: Connection, gallery: Gallery, template_pks: Iterable[int]) -> None:
    """Have every follower look at these templates again."""
    for template_pk in template_pks:
        subject_pk = connection.execute(sa.select(templates.c.subject_pk).where(templates.c.pk == template_pk)).scalar()
        line = {"gallery_pk": gallery.pk, "template_pk": template_pk, "subject_pk": subject_pk}
        connection.execute(changes.insert().values(**line))


def _last_line(gallery: Gallery) -> sa.ScalarSelect[int]:
    last = sa.func.coalesce(sa.func.max(changes.c.sequence), 0)
    own = sa.select(last).where(changes.c.gallery_pk == gallery.pk).scalar_subquery()
    return sa.select(sa.case((own > gallery.log_floor, own), else_=gallery.log_floor)).scalar_subquery()


def _wrong_evidence(connection: Connection, gallery: Gallery) -> list[int]:
    """Generations whose evidence is of a future that the log does not have, or cannot be read. That it lags is
    no fault: the next search sees to it."""
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


def _count_ahead(connection: Connection, gallery: Gallery) -> int:
    return connection.execute(sa.select(sa.func.count()).where(_ahead(gallery))).scalar_one()


def _start_over(connection: Connection, gallery: Gallery) -> None:
    connection.execute(index_states.delete().where(_ahead(gallery)))


# The whole database


def _damaged_pages(connection: Connection, _: Vault) -> int:
    """SQLite's own examination; PostgreSQL has no such statement, and checks pages as it reads them."""
    if connection.dialect.name != "sqlite":
        return 0
    said = connection.exec_driver_sql("PRAGMA integrity_check").scalars().all()
    return 0 if said == ["ok"] else len(said)


def _parentless() -> Iterator[tuple[sa.Table, sa.ColumnElement[bool]]]:
    """Of each reference between tables, the rows that lead nowhere; owners before what they own."""
    for table in metadata.sorted_tables:
        for key in table.foreign_keys:
            parent = key.column.table.alias()
            there = sa.select(parent.c[key.column.name]).where(parent.c[key.column.name] == key.parent)
            yield table, ~there.exists()


def _count_orphans(connection: Connection, _: Vault) -> int:
    return sum(
        connection.execute(sa.select(sa.func.count()).select_from(table).where(lost)).scalar_one()
        for table, lost in _parentless()
    )


def _delete_orphans(connection: Connection) -> None:
    for table, lost in _parentless():
        if table is templates:
            # An index that knows them must forget them, where there still is a gallery to search.
            alive = sa.select(galleries.c.pk)
            gone = sa.select(templates.c.gallery_pk, templates.c.pk, templates.c.subject_pk).where(
                lost, templates.c.gallery_pk.in_(alive)
            )
            connection.execute(changes.insert().from_select(["gallery_pk", "template_pk", "subject_pk"], gone))
        connection.execute(table.delete().where(lost))


def _highest(connection: Connection) -> dict[sa.Table, int]:
    """Of each table that counts its keys up, the highest that was ever given, as far as anything remembers."""
    remembered = {
        galleries: [audit.c.gallery_pk],
        subjects: [changes.c.subject_pk],
        templates: [changes.c.template_pk],
        changes: [galleries.c.log_floor, evidence.c.sequence, index_states.c.sequence],
        jobs: [],
        audit: [],
    }
    return {
        table: max(
            connection.execute(sa.select(sa.func.max(column))).scalar() or 0
            for column in (next(iter(table.primary_key)), *others)
        )
        for table, others in remembered.items()
    }


def _behind(connection: Connection) -> dict[sa.Table, int]:
    """Tables whose next key may be one that was given before, with the highest."""
    return {table: held for table, held in _highest(connection).items() if highest(connection, table) < held}


def _count_on(connection: Connection) -> None:
    for table, held in _behind(connection).items():
        values = {"table": table.name, "highest": held}
        if connection.dialect.name == "sqlite":
            connection.execute(sa.text("DELETE FROM sqlite_sequence WHERE name = :table"), values)
            connection.execute(sa.text("INSERT INTO sqlite_sequence (name, seq) VALUES (:table, :highest)"), values)
        else:
            key = next(iter(table.primary_key)).name
            sequence = sa.func.pg_get_serial_sequence(table.name, key)
            connection.execute(sa.select(sa.func.setval(sequence, held)))


PAGES: Final = DatabaseCheck(
    "pages",
    "damaged pages of the database file",
    _damaged_pages,
    None,
    "Stop the service, keep a copy of the file, and restore a backup.",
)
DATABASE_CHECKS: Final = (
    PAGES,
    DatabaseCheck(
        "orphans",
        "rows whose owner is not there",
        _count_orphans,
        _delete_orphans,
        "They are deleted, and indexes told of it.",
    ),
    DatabaseCheck(
        "counters",
        "tables whose next key may have been given before",
        lambda connection, _: len(_behind(connection)),
        _count_on,
        "Counting goes on behind the highest key known.",
    ),
    DatabaseCheck(
        "api_keys",
        "API keys were altered by somebody who had not the service's secret, and are refused",
        lambda connection, vault: len(altered_keys(connection, vault)),
        None,
        "'kith keys list --ended' names them: revoke them, make others, and see who can write to the database.",
    ),
)

GALLERY_CHECKS: Final = (
    Check(
        "generation",
        "the gallery's recogniser is not among its generations",
        _no_generation,
        _add_generation,
        "It is entered as the gallery names it.",
    ),
    Check(
        "sealed",
        "subjects, crops or answers were altered, or are another's: the gallery's key does not open them",
        _sealed,
        None,
        "Restore a backup, or delete the gallery and enrol everybody again.",
    ),
    Check("counts", "counts are not those of the rows", _wrong_counts, _count_again, "The rows are counted again."),
    Check(
        "labels",
        "subjects would be filtered by other tags or metadata than they have",
        lambda connection, gallery: len(_mislabelled(connection, gallery)),
        _relabel,
        "They are labelled anew.",
    ),
    Check(
        "vectors_unowned",
        "vectors are of no recogniser that the gallery has had",
        _count_unowned,
        _drop_unowned,
        "They are deleted.",
    ),
    Check(
        "vectors_damaged",
        "vectors do not open, are of the wrong length, not finite, or zero: searches of the gallery may fail",
        lambda connection, gallery: len(_damaged(connection, gallery)),
        _set_aside,
        "They are set aside, where no search reads them.",
    ),
    Check(
        "vectors_length",
        "vectors are not of unit length: their similarities are wrong",
        lambda connection, gallery: len(_not_unit(connection, gallery)),
        _normalise,
        "They are brought to unit length.",
    ),
    Check(
        "vectors_missing",
        "templates have no vector that can be searched",
        _count_unseen,
        None,
        "Delete these templates and enrol the photos again, or restore a backup.",
    ),
    Check(
        "log",
        "templates are not in the change log: an index made from it would miss them",
        _count_unlogged,
        _log_missing,
        "They are entered.",
    ),
    Check(
        "evidence",
        "the evidence of its risk is ahead of the change log, or cannot be read",
        lambda connection, gallery: len(_wrong_evidence(connection, gallery)),
        _drop_evidence,
        "It is deleted; the next search has it derived anew.",
    ),
    Check(
        "index_states",
        "shared indexes are said to have followed further than the change log goes",
        _count_ahead,
        _start_over,
        "They follow from the beginning again.",
    ),
)
