"""What is old enough goes: templates past their gallery's age, subjects left with none, answers to keyed requests."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from service.errors import GalleryMovedError, GalleryNotFoundError, MasterKeyError, StorageError
from service.gallery.audit_log import record
from service.gallery.database import Database
from service.gallery.erasure import remove_subjects, remove_templates
from service.gallery.store import gallery_of, gallery_rows
from service.gallery.subjects import Gallery
from service.gallery.tables import galleries, idempotency, leases, subjects, templates

log = logging.getLogger(__name__)
AT_ONCE: Final = 500
"""Templates, or subjects, that go in one transaction, for which the gallery's writers wait."""
LEASE: Final = "retention"
_UNFORESEEN: Final = StorageError("a constraint of the leases was refused")


@dataclass(frozen=True)
class Swept:
    """``galleries``: in which somebody's templates went."""

    galleries: tuple[Gallery, ...] = ()
    templates: int = 0
    subjects: int = 0
    answers: int = 0


class Retention:
    """All methods block."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def take_turn(self, owner: str, now: datetime, lasting: timedelta) -> bool:
        """Whether ``owner`` is the process that sweeps from now on, for so long: nobody else is."""
        mine = (leases.c.name == LEASE) & ((leases.c.owner == owner) | (leases.c.until < now))
        taken = {"owner": owner, "until": now + lasting}
        with self._database.read() as connection:
            row = connection.execute(sa.select(leases).where(leases.c.name == LEASE)).first()
        if row is not None and row.owner != owner and row.until >= now:
            return False
        try:
            with self._database.write(_UNFORESEEN) as connection:
                if row is None:
                    connection.execute(leases.insert().values(name=LEASE, **taken))
                    return True
                return connection.execute(leases.update().where(mine).values(**taken)).rowcount == 1
        except StorageError as error:
            if error is _UNFORESEEN:  # another one took the first turn of all
                return False
            raise

    def end_turn(self, owner: str) -> None:
        """Raises StorageError."""
        with self._database.write(_UNFORESEEN) as connection:
            connection.execute(leases.delete().where(leases.c.name == LEASE, leases.c.owner == owner))

    def sweep(self, now: datetime, answers_days: float, stopped: Callable[[], bool] = lambda: False) -> Swept:
        """Erase all that is past its age at ``now``, in blocks, until ``stopped`` says so between two.

        Raises:
            StorageError: the database cannot be read or written.
        """
        gone = {gallery: self._sweep_gallery(gallery, now, stopped) for gallery in self._limited()}
        touched = tuple(gallery for gallery, counts in gone.items() if any(counts))
        answers = self._forget_answers(now - timedelta(days=answers_days), stopped)
        return Swept(touched, sum(t for t, _ in gone.values()), sum(s for _, s in gone.values()), answers)

    def _limited(self) -> list[Gallery]:
        """Those with an age."""
        with self._database.read() as connection:
            settings = connection.execute(sa.select(galleries.c.pk, galleries.c.settings)).all()
            chosen = [row.pk for row in settings if row.settings.get("retention_days") is not None]
            return [
                gallery_of(row, self._database.vault)
                for pk in chosen
                for row in connection.execute(gallery_rows().where(galleries.c.pk == pk))
            ]

    def _sweep_gallery(self, gallery: Gallery, now: datetime, stopped: Callable[[], bool]) -> tuple[int, int]:
        assert gallery.settings.retention_days is not None  # noqa: S101 - of those with an age
        before = now - timedelta(days=gallery.settings.retention_days)
        summed = 0, 0
        while not stopped():
            try:
                gone = self._sweep_some(gallery, before)
            except (GalleryNotFoundError, GalleryMovedError):
                break  # deleted, or the next sweep's
            except MasterKeyError as error:  # the others' people do not stay for it
                log.warning("what is past its age in gallery %s could not be erased: %s", gallery.pk, error.detail)
                break
            if not any(gone):
                break
            summed = summed[0] + gone[0], summed[1] + gone[1]
        return summed

    def _sweep_some(self, gallery: Gallery, before: datetime) -> tuple[int, int]:
        """How many templates and subjects went."""
        with self._database.read() as connection:  # a look first: it takes no lock from those who write
            if not connection.execute(_old(gallery, before).limit(1)).first() and not _empty(
                connection, gallery, before, 1
            ):
                return 0, 0
        with self._database.change(gallery) as connection:
            row = connection.execute(sa.select(galleries.c.settings).where(galleries.c.pk == gallery.pk)).scalar_one()
            if row.get("retention_days") != gallery.settings.retention_days:
                return 0, 0  # changed since: the next sweep knows
            doomed = connection.execute(_old(gallery, before).limit(AT_ONCE)).all()
            owners = {each.subject_pk for each in doomed}
            chosen = templates.c.pk.in_([each.pk for each in doomed])
            removed = remove_templates(connection, gallery, chosen)
            left = sa.select(templates.c.subject_pk).where(templates.c.subject_pk.in_(owners))
            alone = owners - set(connection.execute(left).scalars())
            alone |= set(_empty(connection, gallery, before, AT_ONCE))
            removed += remove_subjects(connection, gallery, sorted(alone))
            counts = {what: count for what, count in sorted(removed.items()) if count}
            if counts:
                past = before.isoformat(timespec="seconds")
                record(self._database.vault, connection, "retention_applied", gallery, before=past, removed=counts)
        return removed["templates"], removed["subjects"]

    def _forget_answers(self, before: datetime, stopped: Callable[[], bool]) -> int:
        key = sa.tuple_(*idempotency.primary_key.columns)
        old = sa.select(*idempotency.primary_key.columns).where(idempotency.c.created_at < before).limit(AT_ONCE)
        forgotten = 0
        while not stopped():
            with self._database.read() as connection:
                if connection.execute(old.limit(1)).first() is None:
                    break
            with self._database.write(_UNFORESEEN) as connection:
                forgotten += connection.execute(idempotency.delete().where(key.in_(old))).rowcount
        return forgotten


def _old(gallery: Gallery, before: datetime) -> sa.Select[Any]:
    own = (templates.c.gallery_pk == gallery.pk) & (templates.c.created_at < before)
    return sa.select(templates.c.pk, templates.c.subject_pk).where(own).order_by(templates.c.created_at)


def _empty(connection: Connection, gallery: Gallery, before: datetime, at_most: int) -> list[int]:
    """Subjects who have no templates, and have not been changed since."""
    owned = sa.exists().where(templates.c.subject_pk == subjects.c.pk)
    own = (subjects.c.gallery_pk == gallery.pk) & (subjects.c.updated_at < before) & ~owned
    return list(connection.execute(sa.select(subjects.c.pk).where(own).limit(at_most)).scalars())
