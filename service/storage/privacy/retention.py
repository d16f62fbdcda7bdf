"""Retention: erases templates past their gallery's period, subjects left empty, and old stored answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from kith.wire.fields import rfc3339
from service.core.errors import GalleryMovedError, GalleryNotFoundError, KithError, RefusedError, StorageError
from service.domain.gallery import Gallery
from service.storage.audit.log import note
from service.storage.db.engine import Database
from service.storage.db.leases import Lease
from service.storage.db.tables import IS_PERSON, OF_PERSON, galleries, idempotency, subjects, templates
from service.storage.repositories.gallery_rows import VISIBLE, gallery_of, gallery_rows, strangers_of

BATCH_ROWS: Final = 500
"""Templates or subjects erased per transaction; the gallery's writers wait for it."""
ANSWERS_DAYS: Final = 14
"""Days for which the response to an enrollment with an Idempotency-Key is stored."""
LEASE: Final = "retention"
_CONFLICT: Final = StorageError("a constraint of the retention was violated")
MAX_SHARE: Final = 0.1
"""Share of a gallery's templates, and of its subjects, that a new period erases without a confirmation."""


@dataclass
class SweepResult:
    """Result of a sweep. ``galleries``: those that lost rows. ``failed``: keys of others, and why: a lost key."""

    galleries: list[Gallery] = field(default_factory=list)
    templates: int = 0
    subjects: int = 0
    strangers: int = 0
    answers: int = 0
    failed: list[tuple[int, KithError]] = field(default_factory=list)

    def add(self, gallery: Gallery, removed: Counter[str]) -> None:
        if removed.total() and gallery not in self.galleries:
            self.galleries.append(gallery)
        self.templates += removed["templates"]
        self.subjects += removed["subjects"]


class Retention:
    """Retention sweeps. All methods block."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.lease = Lease(database, LEASE)
        """Lease of the process that sweeps."""

    def sweep(self, now: datetime, stopped: Callable[[], bool] = lambda: False) -> SweepResult:
        """Erase what is past its period at ``now``, in batches, until ``stopped`` returns True. Raises StorageError."""
        result = SweepResult()
        for gallery in self._galleries():
            try:
                self._sweep_gallery(gallery, now, stopped, result)
                result.strangers += self._forget_strangers(gallery, now, stopped)
            except (GalleryNotFoundError, GalleryMovedError):
                pass  # deleted, or left to the next sweep
            except KithError as error:  # of this gallery only; the others are still swept
                result.failed.append((gallery.pk, error))
        result.answers = self._forget_answers(now - timedelta(days=ANSWERS_DAYS), stopped)
        return result

    def require_confirmation(self, gallery: Gallery, days: int, now: datetime, confirmed: int) -> None:
        """Refuse a retention period of ``days`` that would erase more than a tenth of a gallery.

        ``confirmed``: number of templates, or of subjects if more, that may go. Raises retention_unconfirmed,
        GalleryNotFoundError.
        """
        before = now - timedelta(days=days)
        sizes = sa.select(galleries.c.template_count, galleries.c.subject_count).where(galleries.c.pk == gallery.pk)
        with self._database.read() as connection:
            row = connection.execute(sizes).first()
            if row is None:
                raise GalleryNotFoundError(f"gallery {gallery.name!r} was deleted in the meantime")
            due = [
                connection.execute(sa.select(sa.func.count()).select_from(rows.subquery())).scalar_one()
                for rows in (_old(gallery, before).where(OF_PERSON).order_by(None), _fully_due(gallery, before))
            ]
        if max(due) > confirmed and any(count > MAX_SHARE * of for count, of in zip(due, row, strict=True)):
            raise RefusedError(
                "retention_unconfirmed",
                f"a retention of {days} days would erase {due[0]} of {row.template_count} templates and {due[1]} of "
                f"{row.subject_count} subjects of gallery {gallery.name!r}",
                f"If this is meant, repeat the change with confirm={max(due)}.",
                confirm=max(due),
            )

    def _galleries(self) -> list[Gallery]:
        with self._database.read() as connection:
            rows = connection.execute(gallery_rows().where(VISIBLE).order_by(galleries.c.pk))
            return [gallery_of(row, self._database.vault) for row in rows]

    def _sweep_gallery(self, gallery: Gallery, now: datetime, stopped: Callable[[], bool], result: SweepResult) -> None:
        """Adds the erased templates and subjects to ``result`` after each batch."""
        if gallery.settings.retention_days is None:
            return
        before = now - timedelta(days=gallery.settings.retention_days)
        while not stopped() and self._is_any_old(gallery, before):
            result.add(gallery, self._sweep_some(gallery, before))
        with self._database.read() as connection:  # once per sweep: it compares all subjects with all templates
            empty = connection.execute(_empty(gallery, before)).scalars().all()
        for start in range(0, len(empty), BATCH_ROWS):
            if stopped():
                break
            result.add(gallery, self._sweep_some(gallery, before, empty[start : start + BATCH_ROWS]))

    def _is_any_old(self, gallery: Gallery, before: datetime) -> bool:
        """Return whether any template is due, without locking out writers."""
        with self._database.read() as connection:
            due = _old(gallery, before).limit(1)
            return _is_as_read(connection, gallery, "retention_days") and connection.execute(due).first() is not None

    def _sweep_some(self, gallery: Gallery, before: datetime, empty: Sequence[int] = ()) -> Counter[str]:
        """Return the numbers of erased rows by kind. ``empty``: subjects recently seen without templates."""
        with self._database.change(gallery) as connection:
            if not _is_as_read(connection, gallery, "retention_days"):
                return Counter()  # changed in the meantime; left to the next sweep
            doomed = [] if empty else connection.execute(_old(gallery, before).limit(BATCH_ROWS)).all()
            owners = {each.subject_pk for each in doomed}
            chosen = templates.c.pk.in_([each.pk for each in doomed])
            left = sa.select(templates.c.subject_pk).where(templates.c.subject_pk.in_(owners), ~chosen)
            alone = owners - set(connection.execute(left).scalars())
            still = _empty(gallery, before).where(subjects.c.pk.in_(empty))
            alone |= set(connection.execute(still).scalars()) if empty else set()
            removed = +Counter(subjects=len(alone), templates=len(doomed))
            if removed:
                past, counts = rfc3339(before), dict(removed)
                note(self._database.vault, connection, "retention_applied", gallery, before=past, removed=counts)
            connection.execute(templates.delete().where(chosen))
            connection.execute(subjects.delete().where(subjects.c.pk.in_(alone)))
        return removed

    def _forget_strangers(self, gallery: Gallery, now: datetime, stopped: Callable[[], bool]) -> int:
        """Erase strangers without a sighting within the period of their gallery; all if it no longer remembers them."""
        days, forgotten = gallery.settings.remember_strangers_days, 0
        last = subjects.c.updated_at < now - timedelta(days=days) if days is not None else sa.true()
        old = sa.select(subjects.c.pk).where(strangers_of(gallery.pk), last).order_by(subjects.c.pk).limit(BATCH_ROWS)
        while not stopped():
            with self._database.read() as connection:
                if connection.execute(old.limit(1)).first() is None:
                    break
            with self._database.change(gallery) as connection:
                if not _is_as_read(connection, gallery, "remember_strangers_days"):
                    break  # changed in the meantime; left to the next sweep
                removed = connection.execute(subjects.delete().where(subjects.c.pk.in_(old))).rowcount
                note(self._database.vault, connection, "retention_applied", gallery, removed={"subjects": removed})
            forgotten += removed
        return forgotten

    def _forget_answers(self, before: datetime, stopped: Callable[[], bool]) -> int:
        columns = idempotency.primary_key.columns
        old = sa.select(*columns).where(idempotency.c.created_at < before).limit(BATCH_ROWS)
        forgotten = 0
        while not stopped():
            with self._database.read() as connection:
                if connection.execute(old.limit(1)).first() is None:
                    break
            with self._database.write(_CONFLICT) as connection:
                forgotten += connection.execute(idempotency.delete().where(sa.tuple_(*columns).in_(old))).rowcount
        return forgotten


def _is_as_read(connection: Connection, gallery: Gallery, setting: str) -> bool:
    """Return whether the gallery exists and a period of its settings is that of ``gallery``."""
    now = connection.execute(sa.select(galleries.c.settings).where(galleries.c.pk == gallery.pk)).scalar()
    return now is not None and now.get(setting) == getattr(gallery.settings, setting)


def _old(gallery: Gallery, before: datetime) -> sa.Select[Any]:
    own = (templates.c.gallery_pk == gallery.pk) & (templates.c.created_at < before)
    return sa.select(templates.c.pk, templates.c.subject_pk).where(own).order_by(templates.c.created_at)


def _fully_due(gallery: Gallery, before: datetime) -> sa.Select[int]:
    """Select subjects whose templates are all due, and those of :func:`_empty`."""
    own = templates.c.subject_pk == subjects.c.pk
    young = sa.exists().where(own, templates.c.created_at >= before)
    gone = sa.exists().where(own) | (subjects.c.updated_at < before)
    return sa.select(subjects.c.pk).where(subjects.c.gallery_pk == gallery.pk, IS_PERSON, ~young, gone)


def _empty(gallery: Gallery, before: datetime) -> sa.Select[int]:
    """Select subjects without templates that have not changed since."""
    owned = sa.exists().where(templates.c.subject_pk == subjects.c.pk)
    own = (subjects.c.gallery_pk == gallery.pk) & (subjects.c.updated_at < before) & ~owned
    return sa.select(subjects.c.pk).where(own)
