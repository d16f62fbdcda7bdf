"""Templates: enrollment with idempotent answers, reads, moves and erasure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from models.runtime.network import Float
from service.core.errors import KithError, NotFoundError, RefusedError
from service.domain.events import Event
from service.domain.gallery import Gallery, IdempotentResponse, Item, NewTemplate, Person, Subject, Template
from service.domain.gallery_items import vector_bytes
from service.storage.audit.log import append, note, pseudonym
from service.storage.db import bulk_rows
from service.storage.db.engine import write_json
from service.storage.db.key_vault import Vault
from service.storage.db.row_sealing import (
    ANSWER,
    DIGEST,
    REQUEST,
    open_subject,
    seal_crop,
    subject_lookup,
)
from service.storage.db.tables import IS_PERSON, crops, idempotency, subjects, templates, vectors
from service.storage.repositories import erasures
from service.storage.repositories.change_log import read_snapshot
from service.storage.repositories.erasures import ErasingStore, Receipt, entry_of
from service.storage.repositories.subjects import find_subject_pk, insert_subjects, read_subject, refuse_existing

TEMPLATE_COLUMNS: Final = (
    "pk",
    "id",
    "gallery_pk",
    "subject_pk",
    "kind",
    "quality",
    "detection_score",
    "created_at",
)
DELETED_EVENT: Final = "template_deleted"
VECTOR_COLUMNS: Final = ("template_pk", "generation", "vector")


class TemplateStore(ErasingStore):
    """Templates in SQL. Every method is one transaction and blocks."""

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
        ``as_read``: as of Database.change, so that checks of ``new`` still hold.

        Raises idempotency_conflict: the key belongs to another request. SubjectErasedError: since ``gallery`` was
        read. SubjectExistsError: and ``only_new``. As :meth:`Database.change`.
        """
        with self._database.change(gallery, as_read=as_read) as connection:
            if keyed and (earlier := _read_answer(connection, gallery, keyed.key, keyed.digest)):
                return earlier
            if only_new:
                refuse_existing(connection, gallery, subject_id)
            items = [Item(subject_id, template) for template in new]
            admit(self._database.vault, connection, gallery, items).require_all()
            if keyed:
                _insert_answer(connection, gallery, subject_id, keyed)
        return None

    def stored_answer(self, gallery: Gallery, key: str, digest: str) -> str | None:
        """Return the stored response to an idempotent request, if any. Raises idempotency_conflict."""
        with self._database.read() as connection:
            return _read_answer(connection, gallery, key, digest)

    def list_page(
        self,
        gallery: Gallery,
        subject_id: str | None,
        after: int | None = None,
        limit: int | None = None,
        offset: int | None = None,
    ) -> list[Template]:
        """Return templates of a subject, or of all, oldest first. Raises SubjectNotFoundError.

        They are ``limit`` after the row key ``after``, or after the first ``offset`` of them.
        """
        with self._database.read() as connection:
            return _read(connection, gallery, templates.c.pk > (after or 0), subject_id, limit, offset)

    def get(self, gallery: Gallery, subject_id: str | None, template_id: str) -> Template:
        """Return a template of a subject, or of any. Raises SubjectNotFoundError, template_not_found."""
        with self._database.read() as connection:
            return _read_one(connection, gallery, subject_id, template_id)

    def owners(self, gallery: Gallery, template_ids: Collection[str]) -> dict[str, str]:
        """Return the ids of the subjects of existing templates, by template id."""
        with self._database.read() as connection:
            found = _read(connection, gallery, templates.c.id.in_(list(template_ids)))
        return {template.id: template.subject for template in found}

    def by_pk(self, gallery: Gallery, pks: Sequence[int]) -> dict[int, Template]:
        """Return existing templates by row key."""
        with self._database.read() as connection:
            found = _read(connection, gallery, templates.c.pk.in_(list(pks)))
        return {template.pk: template for template in found}

    def vectors(self, gallery: Gallery, subject_id: str) -> tuple[Float, Float]:
        """Return (n, d) vectors and (n,) quality scores, NaN for bare embeddings. Raises SubjectNotFoundError."""
        with self._database.read() as connection:
            subject = read_subject(connection, gallery, subject_id)
            stored = read_snapshot(connection, gallery, 0, templates.c.subject_pk == subject.pk)
        return stored.vectors, stored.qualities

    def delete(self, gallery: Gallery, subject_id: str, template_id: str) -> Receipt:
        """Erase a template; again: return the receipt. Raises SubjectNotFoundError, template_not_found."""

        def missing(connection: Connection, _: Receipt | None) -> KithError:
            read_subject(connection, gallery, subject_id)
            return _not_found(template_id)

        owner = pseudonym(gallery, subject_id)
        return self._erase(
            DELETED_EVENT,
            gallery,
            "template",
            owner,
            template_id,
            missing=missing,
            among=templates.c.subject_pk.in_(sa.select(subjects.c.pk).where(subjects.c.lookup == owner)),
            about=owner,
        )

    def delete_many(self, gallery: Gallery, template_ids: Sequence[str]) -> list[Template]:
        """Erase templates of any subjects, all or nothing, each with its receipt; return those that existed."""
        with self._database.change(gallery) as connection:
            found = _read(connection, gallery, templates.c.id.in_(template_ids))
            owners = [pseudonym(gallery, template.subject) for template in found]
            gone = [
                erasures.erase(connection, gallery, "template", owner, template.id)
                for owner, template in zip(owners, found, strict=True)
            ]
            lines = [entry_of(one, DELETED_EVENT, one.subject) for one in gone if one is not None]
            append(self._database.vault, connection, lines)
        self._cache.evict(gallery.name)
        self._database.truncate_wal()
        return found

    def move(self, gallery: Gallery, subject_id: str, template_id: str, to: str) -> None:
        """Move a template to another subject. Raises SubjectNotFoundError (of either), template_not_found."""
        with self._database.change(gallery) as connection:
            source = read_subject(connection, gallery, subject_id)
            target = read_subject(connection, gallery, to)
            template_pk = _read_one(connection, gallery, subject_id, template_id).pk
            moving = templates.update().where(templates.c.pk == template_pk)
            connection.execute(moving.values(subject_pk=target.pk, moved=True))
            connection.execute(idempotency.delete().where(idempotency.c.subject_pk == source.pk))
            details: dict[str, Any] = {"template": template_id, "to": pseudonym(gallery, to)}
            note(self._database.vault, connection, "template_moved", gallery, subject_id, **details)


# Rows, within a transaction of the caller


@dataclass(frozen=True)
class Admission:
    """Outcome of items by their place: rows whose template was ``enrolled``, and why others were ``refused``.

    ``subjects``: number of new ones. ``present``: number of templates that existed.
    """

    subjects: int
    enrolled: list[int]
    present: int
    refused: dict[int, KithError]

    def require_all(self) -> None:
        """Raises the error of the first refused item."""
        for error in self.refused.values():
            raise error


def admit(
    vault: Vault,
    connection: Connection,
    gallery: Gallery,
    items: Sequence[Item],
    imported: Mapping[str, Person] | None = None,
    outsider_of: Subject | None = None,
    **details: Any,
) -> Admission:
    """Store templates and missing subjects within ``Database.change``, with their audit line and event.

    Refused is what was erased since ``gallery`` was read, and a template of another subject. Those that exist are
    skipped.

    Args:
        imported: what new subjects of an import get. Its templates must have the same vector as those that exist.
        outsider_of: makes the new subject of one item an outsider, which no event reports.
        details: of the audit line and the event.
    """
    ids = [item.template.id for item in items if item.template is not None]
    gone = erasures.erased_since(connection, gallery.pk, gallery.erased)
    known = _owners_and_vectors(connection, gallery, ids)
    new, refused, present = list[tuple[int, str, NewTemplate]](), dict[int, KithError](), 0
    for row, item in enumerate(items):
        if gone and subject_lookup(gallery.seal, item.subject) in gone:
            refused[row] = erasures.erased_error()
        elif (template := item.template) is None:
            continue
        elif (earlier := known.get(template.id)) is None:
            if template.id in gone:
                refused[row] = erasures.erased_error("template")
            else:
                known[template.id] = item.subject, template.vector
                new.append((row, item.subject, template))
        elif earlier[0] != item.subject:
            refused[row] = RefusedError(
                "template_conflict", f"template {template.id} belongs to subject {earlier[0]!r}"
            )
        elif imported is not None and not _same(earlier[1], template.vector):
            refused[row] = RefusedError("template_conflict", f"template {template.id} has another embedding")
        else:
            present += 1
    accepted = dict.fromkeys(item.subject for row, item in enumerate(items) if row not in refused)
    owners = _subject_pks(connection, gallery, accepted)
    missing = {subject: (imported or {}).get(subject, Person()) for subject in accepted if subject not in owners}
    owners |= insert_subjects(connection, gallery, missing, None if outsider_of is None else outsider_of.pk)
    insert_templates(connection, gallery, [(owners[subject], template) for _, subject, template in new])
    if imported is not None:
        enrolled = Event("enrollment", {"subject_count": len(missing), "template_count": len(new)})
        details = {"subjects": len(missing), "templates": len(new), "refused": len(refused)}
        note(vault, connection, "gallery_imported", gallery, published=[enrolled] if new else [], **details)
    elif outsider_of is not None:
        note(vault, connection, "decoy_added", gallery, outsider_of.id, decoy=pseudonym(gallery, items[0].subject))
    elif new:
        subject = items[0].subject
        enrolled = Event("enrollment", {"subject": subject, "template_count": len(new), **details}, subject)
        details |= {"templates": len(new)}
        note(vault, connection, "templates_enrolled", gallery, subject, published=[enrolled], **details)
    return Admission(len(missing), [row for row, _, _ in new], present, refused)


def _owners_and_vectors(
    connection: Connection, gallery: Gallery, ids: Sequence[str]
) -> dict[str, tuple[str, Float | None]]:
    """Return the subject and the vector of those templates that exist."""
    query = (
        sa.select(templates.c.id, subjects.c.sealed, vectors.c.vector)
        .join(subjects, subjects.c.pk == templates.c.subject_pk)
        .outerjoin(vectors, (vectors.c.template_pk == templates.c.pk) & (vectors.c.generation == gallery.generation))
        .where(templates.c.gallery_pk == gallery.pk, templates.c.id.in_(ids))
    )
    found = connection.execute(query).all() if ids else []
    sealed = [row.vector for row in found if row.vector is not None]
    opened = iter(gallery.seal.open_vectors(sealed, gallery.generation, gallery.dimension))
    return {
        row.id: (open_subject(gallery.seal, row.sealed).id, None if row.vector is None else next(opened))
        for row in found
    }


def _same(stored: Float | None, given: Float) -> bool:
    return stored is None or vector_bytes(stored) == vector_bytes(given)


def _subject_pks(connection: Connection, gallery: Gallery, ids: Iterable[str]) -> dict[str, int]:
    """Return the row keys of those subjects that exist."""
    lookups = {subject_lookup(gallery.seal, subject): subject for subject in ids}
    query = sa.select(subjects.c.lookup, subjects.c.pk).where(subjects.c.gallery_pk == gallery.pk)
    found = connection.execute(query.where(subjects.c.lookup.in_(lookups)))
    return {lookups[row.lookup]: row.pk for row in found}


def insert_templates(connection: Connection, gallery: Gallery, new: Sequence[tuple[int, NewTemplate]]) -> None:
    """Insert templates of the subjects with these row keys."""
    if not new:
        return
    keys, now, seal = bulk_rows.reserve_keys(connection, templates, len(new)), datetime.now(UTC), gallery.seal
    rows = [
        (
            key,
            template.id,
            gallery.pk,
            owner,
            template.kind,
            None if template.quality is None else write_json(template.quality),
            template.detection_score,
            bulk_rows.as_time(connection, template.created_at, now),
        )
        for key, (owner, template) in zip(keys, new, strict=True)
    ]
    bulk_rows.insert(connection, templates, TEMPLATE_COLUMNS, rows)
    sealed = seal.close_vectors(np.stack([template.vector for _, template in new]), gallery.generation)
    made_by = [gallery.generation] * len(keys)
    bulk_rows.insert(connection, vectors, VECTOR_COLUMNS, zip(keys, made_by, sealed, strict=True))
    faces = [(key, t.crop) for key, (_, t) in zip(keys, new, strict=True) if t.crop is not None]
    kept_crops = ((key, seal_crop(seal, crop)) for key, crop in faces)
    bulk_rows.insert(connection, crops, ("template_pk", "sealed"), kept_crops)


def _read(
    connection: Connection,
    gallery: Gallery,
    chosen: sa.ColumnElement[bool],
    subject_id: str | None = None,
    limit: int | None = None,
    offset: int | None = None,
) -> list[Template]:
    """Return the chosen templates of a subject, or of all. Raises SubjectNotFoundError."""
    if subject_id is not None:
        chosen &= templates.c.subject_pk == read_subject(connection, gallery, subject_id).pk
    query = (
        sa.select(templates, subjects.c.sealed)
        .join(subjects, subjects.c.pk == templates.c.subject_pk)
        .where(templates.c.gallery_pk == gallery.pk, IS_PERSON, chosen)
        .order_by(templates.c.pk)
        .offset(offset)
        .limit(limit)
    )
    named = ((row, open_subject(gallery.seal, row.sealed).id) for row in connection.execute(query))
    return [Template.model_validate({**row._mapping, "subject": subject}) for row, subject in named]


def _read_one(connection: Connection, gallery: Gallery, subject_id: str | None, template_id: str) -> Template:
    """Raises SubjectNotFoundError, template_not_found."""
    for found in _read(connection, gallery, templates.c.id == template_id, subject_id):
        return found
    raise _not_found(template_id)


def _not_found(template_id: str) -> KithError:
    return NotFoundError("template", f"no such template: {template_id!r}")


def _insert_answer(connection: Connection, gallery: Gallery, subject_id: str, keyed: IdempotentResponse) -> None:
    inserted = idempotency.insert().values(
        gallery_pk=gallery.pk,
        lookup=gallery.seal.pseudonym(REQUEST, keyed.key),
        subject_pk=find_subject_pk(connection, gallery, subject_id),
        digest=gallery.seal.pseudonym(DIGEST, keyed.digest),
        sealed=gallery.seal.close(keyed.response.encode(), ANSWER),
        created_at=datetime.now(UTC),
    )
    connection.execute(inserted)


def _read_answer(connection: Connection, gallery: Gallery, key: str, digest: str) -> str | None:
    lookup = gallery.seal.pseudonym(REQUEST, key)
    own = (idempotency.c.gallery_pk == gallery.pk) & (idempotency.c.lookup == lookup)
    row = connection.execute(sa.select(idempotency.c.digest, idempotency.c.sealed).where(own)).first()
    if row is None:
        return None
    if row.digest != gallery.seal.pseudonym(DIGEST, digest):
        raise RefusedError("idempotency_conflict", f"the key {key!r} was used for another request")
    return gallery.seal.open(row.sealed, ANSWER).decode()
