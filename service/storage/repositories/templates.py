"""Templates: enrollment with idempotent answers, reads, moves and erasure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from models.runtime.network import Float
from service.core.errors import CropNotFoundError, IdempotencyConflictError, TemplateNotFoundError
from service.domain.events import Event
from service.domain.gallery import Crop, Gallery, IdempotentResponse, NewTemplate, Subject, Template
from service.storage.audit.log import note, pseudonym
from service.storage.db.engine import Database
from service.storage.db.key_vault import Vault
from service.storage.db.row_sealing import (
    ANSWER,
    DIGEST,
    REQUEST,
    SubjectRecord,
    open_crop,
    open_subject,
    seal_crop,
    subject_lookup,
)
from service.storage.db.tables import crops, generations, idempotency, subjects, templates, vectors
from service.storage.repositories import erasures
from service.storage.repositories.change_log import read_snapshot
from service.storage.repositories.erasures import Receipt
from service.storage.repositories.read_cache import ReadCache
from service.storage.repositories.subjects import find_subject_pk, insert_subject, read_subject, refuse_existing


class _AnsweredError(Exception):
    """Stored response to the same request. Rolls the transaction back, so that the gallery keeps its version."""


class TemplateStore:
    """Templates in SQL. Every method is one transaction and blocks."""

    def __init__(self, database: Database, cache: ReadCache) -> None:
        self._database = database
        self._cache = cache

    def enroll(
        self,
        gallery: Gallery,
        subject_id: str,
        new: list[NewTemplate],
        keyed: IdempotentResponse | None,
        only_new: bool = False,
        as_read: bool = False,
    ) -> str | None:
        """Store templates and a missing subject, all or nothing.

        If ``keyed`` was answered before, store nothing and return the stored response. Otherwise return None.
        ``as_read``: require that no template was enrolled or removed since ``gallery`` was read, so that checks of
        ``new`` still hold.

        Raises:
            IdempotencyConflictError: the idempotency key belongs to another request.
            SubjectErasedError: the subject was erased since ``gallery`` was read.
            SubjectExistsError: the subject exists, and ``only_new``.
            GalleryChangedError, GalleryNotFoundError, GalleryMovedError: as :meth:`Database.change`.
        """
        try:
            with self._database.change(gallery, as_read=as_read) as connection:
                now = datetime.now(UTC)
                if keyed and (earlier := _read_answer(connection, gallery, keyed.key, keyed.digest)):
                    raise _AnsweredError(earlier)
                erasures.refuse_erased(connection, gallery, subject_id)
                if only_new:
                    refuse_existing(connection, gallery, subject_id)
                subject_pk = add_templates(connection, gallery, subject_id, new, now)
                if keyed:
                    _insert_answer(connection, gallery, subject_pk, keyed, now)
                report_enrollment(self._database.vault, connection, gallery, subject_id, len(new))
        except _AnsweredError as answered:
            return str(answered)
        return None

    def existing_ids(self, gallery: Gallery, ids: Collection[str]) -> set[str]:
        """Return the template ids that the gallery has, of any subject."""
        with self._database.read() as connection:
            return existing_ids(connection, gallery, ids)

    def stored_answer(self, gallery: Gallery, key: str, digest: str) -> str | None:
        """Return the stored response to an idempotent request, if any. Raises IdempotencyConflictError."""
        with self._database.read() as connection:
            return _read_answer(connection, gallery, key, digest)

    def list_page(
        self, gallery: Gallery, subject_id: str, after: int | None = None, limit: int | None = None
    ) -> list[Template]:
        """Return ``limit`` templates after the row key ``after``, oldest first. Raises SubjectNotFoundError."""
        query = sa.select(templates).order_by(templates.c.pk).limit(limit)
        if after is not None:
            query = query.where(templates.c.pk > after)
        with self._database.read() as connection:
            subject = read_subject(connection, gallery, subject_id)
            rows = connection.execute(query.where(templates.c.subject_pk == subject.pk))
            return [_template_of(row, subject_id) for row in rows]

    def get(self, gallery: Gallery, subject_id: str, template_id: str) -> Template:
        """Raises SubjectNotFoundError, TemplateNotFoundError."""
        with self._database.read() as connection:
            row = _read_row(connection, read_subject(connection, gallery, subject_id), template_id)
        return _template_of(row, subject_id)

    def find(self, gallery: Gallery, template_id: str) -> Template:
        """Return a template of any subject. Raises TemplateNotFoundError."""
        with self._database.read() as connection:
            found = _read_with_subjects(connection, gallery, templates.c.id == template_id)
        if not found:
            raise TemplateNotFoundError(f"there is no template {template_id!r} in gallery {gallery.name!r}")
        return found[0]

    def list_by_offset(
        self, gallery: Gallery, subject_id: str | None, offset: int, limit: int | None
    ) -> list[Template]:
        """Return templates of a subject, or of all, oldest first, without ``offset``. Raises SubjectNotFoundError."""
        chosen: sa.ColumnElement[bool] = sa.true()
        with self._database.read() as connection:
            if subject_id is not None:
                chosen = templates.c.subject_pk == read_subject(connection, gallery, subject_id).pk
            return _read_with_subjects(connection, gallery, chosen, offset, limit)

    def by_pk(self, gallery: Gallery, pks: Sequence[int]) -> dict[int, Template]:
        """Return existing templates by row key."""
        with self._database.read() as connection:
            found = _read_with_subjects(connection, gallery, templates.c.pk.in_(list(pks)))
        return {template.pk: template for template in found}

    def crop(self, gallery: Gallery, subject_id: str, template_id: str) -> Crop:
        """Return a template's stored crop.

        Raises SubjectNotFoundError, TemplateNotFoundError, and CropNotFoundError if no crop is stored.
        """
        with self._database.read() as connection:
            template = _read_row(connection, read_subject(connection, gallery, subject_id), template_id)
            sealed = connection.execute(sa.select(crops.c.sealed).where(crops.c.template_pk == template.pk)).scalar()
        if sealed is None:
            raise CropNotFoundError(f"no crop of template {template_id!r} is stored")
        return open_crop(gallery.seal, sealed)

    def vectors(self, gallery: Gallery, subject_id: str) -> tuple[Float, Float]:
        """Return (n, d) vectors and (n,) quality scores, NaN for bare embeddings; n may be 0.

        Raises SubjectNotFoundError.
        """
        with self._database.read() as connection:
            subject = read_subject(connection, gallery, subject_id)
            stored = read_snapshot(connection, gallery, 0, templates.c.subject_pk == subject.pk)
        return stored.vectors, stored.qualities

    def delete(self, gallery: Gallery, subject_id: str, template_id: str) -> Receipt:
        """Erase a template. A repeated erasure returns the first receipt.

        Raises SubjectNotFoundError, TemplateNotFoundError.
        """
        with self._database.change(gallery) as connection:
            present = existing_ids(connection, gallery, [template_id])
            earlier = None if present else erasures.template_receipt(connection, gallery, subject_id, template_id)
            if earlier is None:
                _read_row(connection, read_subject(connection, gallery, subject_id), template_id)
                receipt = erasures.erase_template(self._database.vault, connection, gallery, subject_id, template_id)
            else:
                receipt = earlier
        self._cache.evict(gallery.name)
        return erasures.with_log_emptied(self._database, receipt)

    def delete_many(self, gallery: Gallery, template_ids: Sequence[str]) -> list[Template]:
        """Erase templates of any subjects, all or nothing, each with its receipt; return those that existed."""
        with self._database.change(gallery) as connection:
            found = _read_with_subjects(connection, gallery, templates.c.id.in_(template_ids))
            for template in found:
                erasures.erase_template(self._database.vault, connection, gallery, template.subject, template.id)
        self._cache.evict(gallery.name)
        self._database.truncate_wal()
        return found

    def move(self, gallery: Gallery, subject_id: str, template_id: str, to: str) -> None:
        """Move a template to another subject. Raises SubjectNotFoundError (of either), TemplateNotFoundError."""
        with self._database.change(gallery) as connection:
            source = read_subject(connection, gallery, subject_id)
            target = read_subject(connection, gallery, to)
            template_pk = _read_row(connection, source, template_id).pk
            moving = templates.update().where(templates.c.pk == template_pk)
            connection.execute(moving.values(subject_pk=target.pk, moved=True))
            connection.execute(idempotency.delete().where(idempotency.c.subject_pk == source.pk))
            details: dict[str, Any] = {"template": template_id, "to": pseudonym(gallery, to)}
            note(self._database.vault, connection, "template_moved", gallery, subject_id, **details)


# Rows, within a transaction of the caller


def add_templates(
    connection: Connection, gallery: Gallery, subject_id: str, new: Sequence[NewTemplate], now: datetime
) -> int:
    """Insert templates and a missing subject within ``Database.change``; return the subject's key."""
    subject_pk = find_subject_pk(connection, gallery, subject_id)
    if subject_pk is None:
        subject_pk = insert_subject(connection, gallery, SubjectRecord(subject_id, None, {}, []), now)
    for template in new:
        inserted = templates.insert().values(
            id=template.id,
            gallery_pk=gallery.pk,
            subject_pk=subject_pk,
            kind=template.kind,
            quality=template.quality,
            detection_score=template.detection_score,
            created_at=now,
        )
        template_pk: int = connection.execute(inserted.returning(templates.c.pk)).scalar_one()
        by_generation = {gallery.generation: template.vector, **_without_dropped(connection, gallery, template.others)}
        for generation, vector in by_generation.items():
            (sealed,) = gallery.seal.close_vectors(vector[None], generation)
            connection.execute(vectors.insert().values(template_pk=template_pk, generation=generation, vector=sealed))
        if template.crop is not None:
            face = seal_crop(gallery.seal, template.crop)
            connection.execute(crops.insert().values(template_pk=template_pk, sealed=face))
    return subject_pk


def report_enrollment(
    vault: Vault, connection: Connection, gallery: Gallery, subject_id: str, count: int, **details: Any
) -> None:
    """Write the audit line and the event of ``count`` enrolled templates, at the end of their transaction."""
    enrolled = Event("enrollment", {"subject": subject_id, "template_count": count, **details}, subject_id)
    note(vault, connection, "templates_enrolled", gallery, subject_id, published=[enrolled], templates=count, **details)


def existing_ids(connection: Connection, gallery: Gallery, ids: Collection[str]) -> set[str]:
    """Return the template ids that the gallery has."""
    query = sa.select(templates.c.id).where(templates.c.gallery_pk == gallery.pk, templates.c.id.in_(list(ids)))
    return set(connection.execute(query).scalars())


def owners_of_others(connection: Connection, gallery: Gallery, subject_id: str, ids: Collection[str]) -> dict[str, str]:
    """Return the ids of the subjects of those templates that belong to other subjects, by template id."""
    query = sa.select(templates.c.id, subjects.c.sealed).join(subjects, subjects.c.pk == templates.c.subject_pk)
    foreign = subjects.c.lookup != subject_lookup(gallery.seal, subject_id)
    found = query.where(templates.c.gallery_pk == gallery.pk, templates.c.id.in_(list(ids)), foreign)
    return {row.id: open_subject(gallery.seal, row.sealed).id for row in connection.execute(found)}


def _read_with_subjects(
    connection: Connection,
    gallery: Gallery,
    chosen: sa.ColumnElement[bool],
    offset: int | None = None,
    limit: int | None = None,
) -> list[Template]:
    query = (
        sa.select(templates, subjects.c.sealed)
        .join(subjects, subjects.c.pk == templates.c.subject_pk)
        .where(templates.c.gallery_pk == gallery.pk, chosen)
        .order_by(templates.c.pk)
        .offset(offset)
        .limit(limit)
    )
    rows = connection.execute(query).all()
    return [_template_of(row, open_subject(gallery.seal, row.sealed).id) for row in rows]


def _insert_answer(
    connection: Connection, gallery: Gallery, subject_pk: int, keyed: IdempotentResponse, now: datetime
) -> None:
    inserted = idempotency.insert().values(
        gallery_pk=gallery.pk,
        lookup=gallery.seal.pseudonym(REQUEST, keyed.key),
        subject_pk=subject_pk,
        digest=gallery.seal.pseudonym(DIGEST, keyed.digest),
        sealed=gallery.seal.close(keyed.response.encode(), ANSWER),
        created_at=now,
    )
    connection.execute(inserted)


def _read_answer(connection: Connection, gallery: Gallery, key: str, digest: str) -> str | None:
    lookup = gallery.seal.pseudonym(REQUEST, key)
    own = (idempotency.c.gallery_pk == gallery.pk) & (idempotency.c.lookup == lookup)
    row = connection.execute(sa.select(idempotency.c.digest, idempotency.c.sealed).where(own)).first()
    if row is None:
        return None
    if row.digest != gallery.seal.pseudonym(DIGEST, digest):
        raise IdempotencyConflictError(f"the key {key!r} was used for another request")
    return gallery.seal.open(row.sealed, ANSWER).decode()


def _without_dropped(connection: Connection, gallery: Gallery, others: Mapping[int, Float]) -> dict[int, Float]:
    """Return the vectors of ``others`` without generations that were dropped meanwhile."""
    if not others:
        return {}
    live = (generations.c.gallery_pk == gallery.pk) & (generations.c.state != "dropped")
    kept = set(connection.execute(sa.select(generations.c.generation).where(live)).scalars())
    return {generation: vector for generation, vector in others.items() if generation in kept}


def _read_row(connection: Connection, subject: Subject, template_id: str) -> sa.Row[Any]:
    """Raises TemplateNotFoundError."""
    own = (templates.c.subject_pk == subject.pk) & (templates.c.id == template_id)
    row = connection.execute(sa.select(templates).where(own)).first()
    if row is None:
        raise TemplateNotFoundError(f"there is no template {template_id!r} of subject {subject.id!r}")
    return row


def _template_of(row: sa.Row[Any], subject_id: str) -> Template:
    return Template(row.pk, row.id, subject_id, row.kind, row.quality, row.detection_score, row.created_at)
