"""Change log: the template changes of a gallery, in commit order, that indexes follow.

Triggers (service.storage.db.triggers) append a line for each vector that is added and each template that is removed,
two for a template that moves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Final

import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from service.core.errors import GalleryMovedError, GalleryNotFoundError
from service.domain.gallery import Gallery, LogTrimmedError, Snapshot
from service.storage.db.engine import Database, deleted_meanwhile
from service.storage.db.tables import OF_PERSON, changes, galleries, index_states, last_change, templates, vectors
from service.storage.repositories.gallery_rows import gallery_of, gallery_rows, gallery_value, update_gallery

ROWS_PER_READ: Final = 4096
"""Rows per fetch. While a gallery is read, so many templates are in memory twice."""
MIN_KEPT_LINES: Final = 10_000
"""Lines that trimming leaves for processes that follow the log."""
INDEX_EXPIRY: Final = timedelta(days=7)
"""Age at which a shared index that did not advance counts as abandoned. An equally distant future time was written by
a wrong clock."""


class ChangeLog:
    """Change log in SQL. Every method but those that trim is one transaction; all block."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def snapshot(self, gallery: Gallery, of_people: bool = False) -> Snapshot:
        """Return all templates, or those of people only, without outsiders, with the log's last sequence number."""
        with self._database.read() as connection:
            sequence = gallery_value(connection, gallery.pk, last_change())
            return read_snapshot(connection, gallery, sequence or 0, OF_PERSON if of_people else None)

    def changed_subjects(self, gallery: Gallery, sequence: int, limit: int) -> tuple[set[int], Snapshot, bool]:
        """Return :func:`read_changes` of a transaction of its own. Raises LogTrimmedError."""
        with self._database.read() as connection:
            return read_changes(connection, gallery, sequence, limit)

    def count_lags(self, sequences: Mapping[int, int], limit: int) -> dict[int, int]:
        """Count, up to ``limit``, the lines after a sequence number in each gallery, by gallery key."""
        after = (
            sa.select(sa.literal(1))
            .where(changes.c.gallery_pk == sa.bindparam("gallery"), changes.c.sequence > sa.bindparam("after"))
            .limit(limit)
            .subquery()
        )
        count = sa.select(sa.func.count()).select_from(after)
        with self._database.read() as connection:
            return {
                pk: connection.execute(count, {"gallery": pk, "after": sequence}).scalar_one()
                for pk, sequence in sequences.items()
            }

    def trim(self, gallery: Gallery, keep: int = MIN_KEPT_LINES, stopped: Callable[[], bool] = lambda: False) -> int:
        """Delete the oldest lines, in batches until ``stopped`` returns true, and return their number.

        These stay: the last ``keep``, as many as there are templates (beyond that, a snapshot is cheaper), those that a
        shared index needs unless it is abandoned, and those that the evidence has not counted.

        Raises GalleryNotFoundError, GalleryMovedError, StorageError.
        """
        trimmed = 0
        while not stopped() and (lines := self._trim_batch(gallery, keep)):
            trimmed += lines
        return trimmed

    def trim_all(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Trim the logs of all galleries until ``stopped`` returns true. Raises StorageError."""
        with self._database.read() as connection:
            rows = connection.execute(gallery_rows()).all()
        for gallery in (gallery_of(row, self._database.vault) for row in rows):
            with suppress(GalleryNotFoundError, GalleryMovedError):  # deleted, or left to the next call
                self.trim(gallery, stopped=stopped)

    def _trim_batch(self, gallery: Gallery, keep: int) -> int:
        own, at = changes.c.gallery_pk == gallery.pk, datetime.now(UTC)
        followed = sa.select(sa.func.min(index_states.c.sequence)).where(
            index_states.c.gallery_pk == gallery.pk,
            index_states.c.updated_at.between(at - INDEX_EXPIRY, at + INDEX_EXPIRY),
        )
        with self._database.read() as connection:
            row = connection.execute(gallery_rows().where(galleries.c.pk == gallery.pk)).first()
            if row is None:
                raise deleted_meanwhile(gallery)
            now = gallery_of(row, self._database.vault)
            latest = sa.select(changes.c.sequence).where(own).order_by(changes.c.sequence.desc())
            last = connection.execute(latest.offset(max(keep, now.templates)).limit(1)).scalar()
            if last is None:
                return 0
            bounds = [last, connection.execute(followed).scalar(), now.evidence_sequence]
            end = min(bound for bound in bounds if bound is not None)
            oldest = sa.select(changes.c.sequence).where(own, changes.c.sequence <= end)
            doomed = connection.execute(oldest.order_by(changes.c.sequence).limit(ROWS_PER_READ)).scalars().all()
        if not doomed:
            return 0
        with self._database.change(now) as connection:
            # Never lower the floor: another process may have trimmed further meanwhile.
            floor = sa.case((galleries.c.log_floor > doomed[-1], galleries.c.log_floor), else_=doomed[-1])
            update_gallery(connection, gallery.pk, log_floor=floor)
            return connection.execute(changes.delete().where(own, changes.c.sequence <= doomed[-1])).rowcount


def read_snapshot(
    connection: Connection, gallery: Gallery, sequence: int, chosen: sa.ColumnElement[bool] | None = None
) -> Snapshot:
    """Read all or the chosen templates that have a vector of the gallery's recognizer, by subject and age."""
    query = (
        sa.select(templates.c.pk, templates.c.subject_pk, templates.c.quality, vectors.c.vector)
        .join(vectors, vectors.c.template_pk == templates.c.pk)
        .where(templates.c.gallery_pk == gallery.pk, vectors.c.generation == gallery.generation)
        .where(sa.true() if chosen is None else chosen)
        .execution_options(yield_per=ROWS_PER_READ)
    )
    pks, owners, qualities, blocks = [], [], [], [np.empty((0, gallery.dimension), np.float32)]
    for rows in connection.execute(query).partitions():
        pks += [row.pk for row in rows]
        owners += [row.subject_pk for row in rows]
        qualities += [(row.quality or {}).get("score", np.nan) for row in rows]
        sealed = [row.vector for row in rows]
        blocks.append(gallery.seal.open_vectors(sealed, gallery.generation, gallery.dimension))
    template_pks, subject_pks = np.array(pks, np.int64), np.array(owners, np.int64)
    order = np.lexsort((template_pks, subject_pks))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    stored = np.empty((len(order), gallery.dimension), np.float32)
    # Frees each block once it is copied, last block first, so that the gallery is in memory only once.
    end = len(order)
    while blocks:
        block = blocks.pop()
        stored[place[end - len(block) : end]] = block
        end -= len(block)
    return Snapshot(sequence, template_pks[order], subject_pks[order], stored, np.array(qualities, np.float32)[order])


def read_changes(
    connection: Connection, gallery: Gallery, sequence: int, limit: int
) -> tuple[set[int], Snapshot, bool]:
    """Read the subjects that the next ``limit`` lines after ``sequence`` name. Raises LogTrimmedError.

    Return their keys, all their templates with the last line's sequence number, and whether more lines may follow.
    """
    later = _lines_after(gallery, sequence)
    query = sa.select(changes.c.sequence, changes.c.subject_pk).where(later).order_by(changes.c.sequence)
    floor = gallery_value(connection, gallery.pk, galleries.c.log_floor)
    if floor is not None and sequence < floor:
        raise LogTrimmedError
    lines = connection.execute(query.limit(limit)).all()
    last = lines[-1].sequence if lines else sequence
    # A subquery, because a list of keys may exceed the number of parameters of a statement.
    named = sa.select(changes.c.subject_pk).where(later, changes.c.sequence <= last)
    changed = templates.c.subject_pk.in_(named)
    now = read_snapshot(connection, gallery, last, changed if lines else sa.false())
    return {line.subject_pk for line in lines}, now, len(lines) == limit


def _lines_after(gallery: Gallery, sequence: int) -> sa.ColumnElement[bool]:
    return (changes.c.gallery_pk == gallery.pk) & (changes.c.sequence > sequence)
