"""Links between lookalikes, such as twins: pairs of subjects."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from kith.wire.fields import MAX_LOOKALIKES
from service.core.errors import InvalidRequestError
from service.domain.gallery import Gallery, Snapshot, Subject
from service.storage.audit.log import pseudonym, record
from service.storage.db.bulk_rows import is_in
from service.storage.db.engine import Database
from service.storage.db.tables import lookalikes, templates
from service.storage.repositories import erasures
from service.storage.repositories.change_log import read_snapshot
from service.storage.repositories.subjects import linked_keys, read_subject, read_subjects


class LookalikeStore:
    """Links in SQL. Every method is one transaction and blocks."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def list_all(self, gallery: Gallery, subject_id: str) -> list[Subject]:
        """Return the lookalikes of a subject, oldest first. Raises SubjectNotFoundError."""
        with self._database.read() as connection:
            return _lookalikes_of(connection, gallery, read_subject(connection, gallery, subject_id))

    def link(self, gallery: Gallery, subject_id: str, other_id: str) -> list[Subject]:
        """Link two subjects, if they are not; return the lookalikes of the first.

        Raises:
            InvalidRequestError: both ids are equal, or a subject has MAX_LOOKALIKES.
            SubjectNotFoundError, SubjectErasedError.
        """
        if subject_id == other_id:
            raise InvalidRequestError("other: must be another subject")
        with self._database.change(gallery) as connection:
            one, other = (read_subject(connection, gallery, each) for each in (subject_id, other_id))
            for each in (one, other):
                erasures.refuse_erased(connection, gallery, each.id)
            if other.pk not in linked_keys(connection, one.pk):
                for each in (one, other):
                    if len(linked_keys(connection, each.pk)) >= MAX_LOOKALIKES:
                        raise InvalidRequestError(
                            f"subject {each.id!r} has {MAX_LOOKALIKES} lookalikes, the most allowed. Unlink some."
                        )
                first, second = sorted((one.pk, other.pk))
                row = {"one_pk": first, "other_pk": second, "gallery_pk": gallery.pk, "created_at": datetime.now(UTC)}
                connection.execute(lookalikes.insert().values(row))
                self._record(connection, gallery, "subject_linked", subject_id, other_id)
            return _lookalikes_of(connection, gallery, one)

    def unlink(self, gallery: Gallery, subject_id: str, other_id: str) -> list[Subject]:
        """Remove the link of two subjects, if there is one; return the lookalikes that the first still has.

        Raises SubjectNotFoundError.
        """
        with self._database.change(gallery) as connection:
            one, other = (read_subject(connection, gallery, each) for each in (subject_id, other_id))
            first, second = sorted((one.pk, other.pk))
            own = (lookalikes.c.one_pk == first) & (lookalikes.c.other_pk == second)
            if connection.execute(lookalikes.delete().where(own)).rowcount:
                self._record(connection, gallery, "subject_unlinked", subject_id, other_id)
            return _lookalikes_of(connection, gallery, one)

    def linked_among(self, gallery: Gallery, subject_pks: Sequence[int]) -> set[int]:
        """Return which of these subjects have lookalikes."""
        with self._database.read() as connection:
            own = lookalikes.c.gallery_pk == gallery.pk
            columns = (lookalikes.c.one_pk, lookalikes.c.other_pk)
            each = (sa.select(c).where(own, is_in(connection, c, list(subject_pks))) for c in columns)
            return set(connection.execute(sa.union(*each)).scalars())

    def templates(self, gallery: Gallery, subject_pk: int) -> Snapshot:
        """Return the templates of a subject and of at most MAX_LOOKALIKES lookalikes: a merge may add more."""
        with self._database.read() as connection:
            linked = linked_keys(connection, subject_pk)[:MAX_LOOKALIKES]
            return read_snapshot(connection, gallery, 0, templates.c.subject_pk.in_([subject_pk, *linked]))

    def _record(self, connection: Connection, gallery: Gallery, event: str, subject_id: str, other_id: str) -> None:
        record(self._database.vault, connection, event, gallery, subject_id, other=pseudonym(gallery, other_id))


def _lookalikes_of(connection: Connection, gallery: Gallery, subject: Subject) -> list[Subject]:
    return read_subjects(connection, gallery, linked_keys(connection, subject.pk))
