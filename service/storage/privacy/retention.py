"""Retention: erases templates and strangers past their gallery's period, subjects left empty, and old answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

import sqlalchemy as sa

from kith.wire.fields import rfc3339
from service.core.errors import GalleryMovedError, GalleryNotFoundError, RefusedError, StorageError
from service.domain.gallery import Gallery
from service.storage.audit.log import note
from service.storage.db.engine import Database
from service.storage.db.tables import IS_PERSON, OF_PERSON, galleries, idempotency, subjects, templates
from service.storage.repositories.erasures import sizes
from service.storage.repositories.gallery_rows import VISIBLE, gallery_of, gallery_rows, gallery_value, strangers_of

BATCH_ROWS: Final = 500
"""Templates or subjects erased per transaction; the gallery's writers wait for it."""
ANSWERS_DAYS: Final = 14
"""Days for which the response to an enrollment with an Idempotency-Key is stored."""
_CONFLICT: Final = StorageError("a constraint of the retention was violated")
MAX_SHARE: Final = 0.1
"""Share of a gallery's templates, and of its subjects, that a new period erases without a confirmation."""


@dataclass
class SweepResult:
    """Result of a sweep. ``galleries``: those that lost rows. ``removed``: subjects and templates, with strangers."""

    galleries: list[Gallery] = field(default_factory=list)
    removed: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class _Due:
    """Keys of rows from ``before`` the period of a gallery's ``setting``."""

    setting: str
    before: datetime
    table: sa.Table
    keys: sa.Select[int]


class Retention:
    """Retention sweeps, of any number of processes. All methods block."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def sweep(self, now: datetime, stopped: Callable[[], bool] = lambda: False) -> SweepResult:
        """Erase what is past its period at ``now``, in batches, until ``stopped`` returns True. Raises StorageError."""
        result = SweepResult()
        with self._database.read() as connection:
            rows = connection.execute(gallery_rows().where(VISIBLE).order_by(galleries.c.pk)).all()
        for gallery in (gallery_of(row, self._database.vault) for row in rows):
            with suppress(GalleryNotFoundError, GalleryMovedError):  # deleted, or left to the next sweep
                for due in _all_due(gallery, now):
                    self._erase(gallery, due, stopped, result)
        old = idempotency.c.created_at < now - timedelta(days=ANSWERS_DAYS)
        with self._database.read() as connection:
            is_any_old = connection.execute(sa.select(sa.exists().where(old))).scalar_one()
        if is_any_old:
            with self._database.write(_CONFLICT) as connection:
                connection.execute(idempotency.delete().where(old))
        return result

    def _erase(self, gallery: Gallery, due: _Due, stopped: Callable[[], bool], result: SweepResult) -> None:
        """Adds what was erased to ``result`` after each batch."""
        with self._database.read() as connection:  # once: to find subjects compares all of them with all templates
            keys = connection.execute(due.keys).scalars().all()
        for start in range(0, len(keys), BATCH_ROWS):
            if stopped():
                return
            with self._database.change(gallery) as connection:
                settings = gallery_value(connection, gallery.pk, galleries.c.settings)
                if settings[due.setting] != getattr(gallery.settings, due.setting):
                    return  # changed in the meantime; left to the next sweep
                before, pk = sizes(connection, gallery.pk), due.table.c.pk
                still = due.keys.where(pk.in_(keys[start : start + BATCH_ROWS]))
                if not connection.execute(due.table.delete().where(pk.in_(still))).rowcount:
                    continue
                removed = before - sizes(connection, gallery.pk)
                details: dict[str, Any] = {"before": rfc3339(due.before), "removed": dict(removed)}
                note(self._database.vault, connection, "retention_applied", gallery, **details)
            result.removed += removed
            if gallery not in result.galleries:
                result.galleries.append(gallery)

    def require_confirmation(self, gallery: Gallery, days: int, now: datetime, confirmed: int) -> None:
        """Refuse a retention period of ``days`` that would erase more than a tenth of a gallery.

        ``confirmed``: number of templates, or of subjects if more, that may go. Raises retention_unconfirmed,
        GalleryNotFoundError.
        """
        before = now - timedelta(days=days)
        rows = _old(gallery, before).where(OF_PERSON), _fully_due(gallery, before).where(IS_PERSON)
        counts = sa.select(galleries.c.template_count, galleries.c.subject_count).where(galleries.c.pk == gallery.pk)
        with self._database.read() as connection:
            row = connection.execute(counts).first()
            if row is None:
                raise GalleryNotFoundError(f"gallery {gallery.name!r} was deleted in the meantime")
            numbers = (sa.select(sa.func.count()).select_from(due.subquery()) for due in rows)
            due = [connection.execute(number).scalar_one() for number in numbers]
        if max(due) > confirmed and any(count > MAX_SHARE * of for count, of in zip(due, row, strict=True)):
            raise RefusedError(
                "retention_unconfirmed",
                f"a retention of {days} days would erase {due[0]} of {row.template_count} templates and {due[1]} of "
                f"{row.subject_count} subjects of gallery {gallery.name!r}",
                f"If this is meant, repeat the change with confirm={max(due)}.",
                confirm=max(due),
            )


def _all_due(gallery: Gallery, now: datetime) -> Iterator[_Due]:
    """Yield what a gallery loses, in this order."""
    days = gallery.settings.retention_days
    if days is not None:
        before = now - timedelta(days=days)
        yield _Due("retention_days", before, subjects, _fully_due(gallery, before))
        yield _Due("retention_days", before, templates, _old(gallery, before))
    days = gallery.settings.remember_strangers_days
    before = now - timedelta(days=days or 0)
    last_seen = sa.true() if days is None else subjects.c.updated_at < before
    strangers = sa.select(subjects.c.pk).where(strangers_of(gallery.pk), last_seen)
    yield _Due("remember_strangers_days", before, subjects, strangers)


def _old(gallery: Gallery, before: datetime) -> sa.Select[int]:
    return sa.select(templates.c.pk).where(templates.c.gallery_pk == gallery.pk, templates.c.created_at < before)


def _fully_due(gallery: Gallery, before: datetime) -> sa.Select[int]:
    """Select subjects whose templates are all due, and those without templates that have not changed since."""
    own = templates.c.subject_pk == subjects.c.pk
    young = sa.exists().where(own, templates.c.created_at >= before)
    gone = sa.exists().where(own) | (subjects.c.updated_at < before)
    return sa.select(subjects.c.pk).where(subjects.c.gallery_pk == gallery.pk, ~young, gone)
