"""Decoys: strangers who were mistaken for a subject, stored as outsiders (``subjects.owner_pk``) with one template.

The id of a decoy is the keyed hash of the outsider's id.
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from kith.wire.fields import MAX_DECOYS
from kith.wire.subjects import DecoyOut
from models.runtime.network import Float
from service.core.errors import KithError, LimitReachedError, NotFoundError, RefusedError
from service.domain.gallery import Gallery, Item, NewTemplate, Subject
from service.storage.audit.log import pseudonym
from service.storage.db.tables import subjects, templates, vectors
from service.storage.repositories import erasures
from service.storage.repositories.change_log import read_snapshot
from service.storage.repositories.erasures import ErasingStore, Receipt
from service.storage.repositories.subjects import read_subject
from service.storage.repositories.templates import admit

MAX_SIMILARITY: Final = 0.99
"""A face more similar to a stored one is redundant: the next frame of a video, or the same photo."""


class DecoyStore(ErasingStore):
    """Decoys in SQL. Every method is one transaction and blocks."""

    def add(self, gallery: Gallery, subject_id: str, template: NewTemplate) -> tuple[DecoyOut, bool]:
        """Store a decoy, or return the one that has the same picture, and whether it is new.

        Raises SubjectNotFoundError; SubjectErasedError: since ``gallery`` was read; decoy_enrolled: the picture is
        a template of the subject; too_many_decoys: it has MAX_DECOYS of this recognizer; as :meth:`Database.change`.
        """
        with self._database.change(gallery) as connection:
            subject = read_subject(connection, gallery, subject_id)
            erasures.refuse_erased(connection, gallery, subject_id)
            enrolled = read_snapshot(connection, gallery, 0, templates.c.subject_pk == subject.pk).vectors
            if (enrolled @ template.vector >= MAX_SIMILARITY).any():
                raise RefusedError("decoy_enrolled", f"the photo is a template of subject {subject_id!r}")
            stored = read_snapshot(connection, gallery, 0, _mistaken_for(subject.pk))
            alike = stored.template_pks[stored.vectors @ template.vector >= MAX_SIMILARITY].tolist()
            if alike:
                return _read(connection, gallery, subject, templates.c.pk == alike[0])[0], False
            if len(stored.template_pks) >= MAX_DECOYS:
                raise LimitReachedError(
                    "too_many_decoys", f"subject {subject_id!r} has {MAX_DECOYS} decoys, the most allowed"
                )
            outsider = Item(f"/{template.id}", template)  # no caller can send this id: ids have no slash
            admit(self._database.vault, connection, gallery, [outsider], outsider_of=subject)
            return _read(connection, gallery, subject, templates.c.id == template.id)[0], True

    def list_all(self, gallery: Gallery, subject_id: str) -> list[DecoyOut]:
        """Return the decoys of a subject, oldest first. Raises SubjectNotFoundError."""
        with self._database.read() as connection:
            return _read(connection, gallery, read_subject(connection, gallery, subject_id))

    def delete(self, gallery: Gallery, subject_id: str, decoy_id: str) -> Receipt:
        """Erase a decoy. A repetition returns the first receipt. Raises SubjectNotFoundError, decoy_not_found."""

        def missing(connection: Connection, _: Receipt | None) -> KithError:
            read_subject(connection, gallery, subject_id)
            return NotFoundError("decoy", f"there is no decoy {decoy_id!r} of subject {subject_id!r}")

        owner = pseudonym(gallery, subject_id)
        own = sa.select(subjects.c.pk).where(subjects.c.gallery_pk == gallery.pk, subjects.c.lookup == owner)
        return self._erase(
            "decoy_deleted",
            gallery,
            "subject",
            decoy_id,
            missing=missing,
            among=subjects.c.owner_pk.in_(own),
            about=owner,
            decoy=decoy_id,
        )

    def vectors(self, gallery: Gallery, subject_id: str) -> Float:
        """Return the (n, d) vectors of a subject's decoys; n may be 0. Raises SubjectNotFoundError."""
        with self._database.read() as connection:
            subject = read_subject(connection, gallery, subject_id)
            return read_snapshot(connection, gallery, 0, _mistaken_for(subject.pk)).vectors


def _mistaken_for(subject_pk: int) -> sa.ColumnElement[bool]:
    return templates.c.subject_pk.in_(sa.select(subjects.c.pk).where(subjects.c.owner_pk == subject_pk))


def _read(
    connection: Connection, gallery: Gallery, subject: Subject, chosen: sa.ColumnElement[bool] | None = None
) -> list[DecoyOut]:
    current = vectors.c.generation == gallery.current_generation
    in_use = sa.exists().where(vectors.c.template_pk == templates.c.pk, current).label("in_use")
    columns = subjects.c.lookup.label("id"), templates.c.kind, in_use, templates.c.created_at
    query = sa.select(*columns).select_from(templates).join(subjects, subjects.c.pk == templates.c.subject_pk)
    query = query.where(subjects.c.owner_pk == subject.pk, sa.true() if chosen is None else chosen)
    return [DecoyOut.model_validate(row._mapping) for row in connection.execute(query.order_by(templates.c.pk))]
