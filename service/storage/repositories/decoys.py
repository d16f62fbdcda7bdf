"""Decoys: sealed vectors of strangers who were mistaken for a subject."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from kith.wire.common import TemplateKind
from kith.wire.fields import MAX_DECOYS
from models.runtime.network import Float
from service.core.errors import DecoyEnrolledError, DecoyNotFoundError, TooManyDecoysError
from service.domain.gallery import Decoy, Gallery
from service.storage.audit.log import note, pseudonym
from service.storage.db.bulk_rows import is_in
from service.storage.db.engine import Database
from service.storage.db.row_sealing import open_decoys, seal_decoy
from service.storage.db.tables import decoys, templates
from service.storage.repositories import erasures
from service.storage.repositories.change_log import read_snapshot
from service.storage.repositories.erasures import Receipt
from service.storage.repositories.subjects import find_subject_pk, read_subject

MAX_SIMILARITY: Final = 0.99
"""A face more similar to a stored one is redundant: the next frame of a video, or the same photo."""


class DecoyStore:
    """Decoys in SQL. Every method is one transaction and blocks.

    Searches read them from here, so that each process sees those that another one stored.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, gallery: Gallery, subject_id: str, vector: Float, kind: TemplateKind) -> tuple[Decoy, bool]:
        """Store a decoy, or return the one that has the same picture, and whether it is new.

        Raises:
            SubjectNotFoundError: the subject does not exist.
            SubjectErasedError: it was erased since ``gallery`` was read.
            DecoyEnrolledError: the picture is a template of the subject.
            TooManyDecoysError: the subject has MAX_DECOYS of this recognizer.
            GalleryMovedError, GalleryNotFoundError: as :meth:`Database.change`.
        """
        with self._database.change(gallery) as connection:
            subject = read_subject(connection, gallery, subject_id)
            erasures.refuse_erased(connection, gallery, subject_id)
            enrolled = read_snapshot(connection, gallery, 0, templates.c.subject_pk == subject.pk).vectors
            if (enrolled @ vector >= MAX_SIMILARITY).any():
                raise DecoyEnrolledError(f"the photo is a template of subject {subject_id!r}")
            own = (decoys.c.subject_pk == subject.pk) & (decoys.c.generation == gallery.generation)
            stored = connection.execute(sa.select(decoys).where(own).order_by(decoys.c.pk)).all()
            if stored:
                alike = open_decoys(gallery.seal, [row.sealed for row in stored], gallery.generation) @ vector
                if alike.max() >= MAX_SIMILARITY:
                    return _decoy_of(stored[int(alike.argmax())], gallery, subject_id), False
            if len(stored) >= MAX_DECOYS:
                raise TooManyDecoysError(f"subject {subject_id!r} has {len(stored)} decoys, the most allowed")
            row = {
                "id": uuid.uuid4().hex,
                "gallery_pk": gallery.pk,
                "subject_pk": subject.pk,
                "generation": gallery.generation,
                "kind": kind,
                "sealed": seal_decoy(gallery.seal, vector, gallery.generation),
                "created_at": datetime.now(UTC),
            }
            new = connection.execute(decoys.insert().values(row).returning(decoys)).one()
            note(self._database.vault, connection, "decoy_added", gallery, subject_id, decoy=new.id)
            return _decoy_of(new, gallery, subject_id), True

    def list_all(self, gallery: Gallery, subject_id: str) -> list[Decoy]:
        """Return the decoys of a subject, oldest first. Raises SubjectNotFoundError."""
        with self._database.read() as connection:
            subject = read_subject(connection, gallery, subject_id)
            query = sa.select(decoys).where(decoys.c.subject_pk == subject.pk).order_by(decoys.c.pk)
            return [_decoy_of(row, gallery, subject_id) for row in connection.execute(query)]

    def delete(self, gallery: Gallery, subject_id: str, decoy_id: str) -> Receipt:
        """Erase a decoy. A repeated erasure returns the first receipt.

        Raises SubjectNotFoundError, DecoyNotFoundError.
        """
        with self._database.change(gallery) as connection:
            subject_pk = find_subject_pk(connection, gallery, subject_id)
            own = (decoys.c.subject_pk == subject_pk) & (decoys.c.id == decoy_id)
            vault, receipt = self._database.vault, None
            if connection.execute(sa.select(decoys.c.pk).where(own)).first() is not None:
                receipt = erasures.erase(vault, connection, gallery, "decoy", decoy_id, subject_id)
            receipt = receipt or erasures.last_receipt(
                connection, gallery, "decoy", pseudonym(gallery, subject_id), decoy_id
            )
            if receipt is None:
                read_subject(connection, gallery, subject_id)
                raise DecoyNotFoundError(f"there is no decoy {decoy_id!r} of subject {subject_id!r}")
        return erasures.with_log_emptied(self._database, receipt)

    def vectors(self, gallery: Gallery, subject_pks: Sequence[int]) -> dict[int, Float]:
        """Return the (n, d) vectors, n >= 1, of those subjects that have decoys of the gallery's recognizer."""
        with self._database.read() as connection:
            return _read_vectors(connection, gallery, subject_pks)

    def of_subject(self, gallery: Gallery, subject_id: str) -> Float | None:
        """Return :meth:`vectors` of one subject, None without decoys. Raises SubjectNotFoundError."""
        with self._database.read() as connection:
            subject = read_subject(connection, gallery, subject_id)
            return _read_vectors(connection, gallery, [subject.pk]).get(subject.pk)


def _read_vectors(connection: Connection, gallery: Gallery, subject_pks: Sequence[int]) -> dict[int, Float]:
    own = is_in(connection, decoys.c.subject_pk, list(subject_pks))
    query = sa.select(decoys.c.subject_pk, decoys.c.sealed).where(own, decoys.c.generation == gallery.generation)
    sealed = defaultdict(list)
    for row in connection.execute(query):
        sealed[row.subject_pk].append(row.sealed)
    return {pk: open_decoys(gallery.seal, each, gallery.generation) for pk, each in sealed.items()}


def _decoy_of(row: sa.Row[Any], gallery: Gallery, subject_id: str) -> Decoy:
    return Decoy(row.id, subject_id, row.kind, row.generation == gallery.current_generation, row.created_at)
