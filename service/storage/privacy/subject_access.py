"""Export of all data about one subject: stored rows and audit lines."""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from kith.wire.fields import rfc3339
from service.core.errors import SubjectNotFoundError
from service.domain.gallery import Gallery
from service.storage.audit.log import record
from service.storage.db.engine import Database
from service.storage.db.row_sealing import (
    ALBUM_FACE,
    ALBUM_GROUP,
    ANSWER,
    EVENT,
    ITEM,
    open_crop,
    open_subject,
    subject_lookup,
)
from service.storage.db.tables import (
    album_faces,
    album_groups,
    albums,
    audit,
    changes,
    crops,
    decoys,
    events,
    generations,
    idempotency,
    job_items,
    jobs,
    labels,
    subjects,
    templates,
    vectors,
)
from service.storage.repositories.erasures import receipts

FORMAT: Final = 1
ELSEWHERE: Final = (
    "Search indexes in memory, in Milvus and in files hold only these embeddings, the keys of their templates, and "
    "links between those keys. Backups hold this data as of their creation. Archives of unfinished jobs are stored "
    "encrypted in the spool; the subjects in them are unknown until the job reads them."
)


SUBJECT_KEY: Final = 1
"""Key of the subject in the document."""


def everything_about(database: Database, gallery: Gallery, subject_id: str) -> dict[str, Any]:
    """Return a JSON document of one snapshot. Blocks.

    Of an erased subject, receipts and audit lines remain; of a subject past its retention period, audit lines.

    Raises:
      SubjectNotFoundError: no data and no audit lines exist.
      StorageError: the database cannot be read, or a value cannot be decrypted.
    """
    with database.change(gallery) as connection:
        record(database.vault, connection, "subject_exported", gallery, subject_id)
        found = _Search(connection, gallery, subject_id).document()
        audited = len(found["audit"]) > 1  # beyond the line of this export
        if not (audited or any(found[part] for part in ("subject", "album_faces", "job_items", "receipts"))):
            raise SubjectNotFoundError(f"gallery {gallery.name!r} has no subject {subject_id!r}")
        return found


class _Search:
    """One subject's data, read in one transaction."""

    def __init__(self, connection: Connection, gallery: Gallery, subject_id: str) -> None:
        self._connection = connection
        self._gallery = gallery
        self._id = subject_id
        self._lookup = subject_lookup(gallery.seal, subject_id)
        self._numbers: dict[int, int] = {}

    def document(self) -> dict[str, Any]:
        own = (subjects.c.gallery_pk == self._gallery.pk) & (subjects.c.lookup == self._lookup)
        row = self._connection.execute(sa.select(subjects).where(own)).first()
        return {
            "kind": "kith-subject",
            "format": FORMAT,
            "at": rfc3339(datetime.now(UTC)),
            "gallery": self._gallery.name,
            "id": self._id,
            "pseudonym": self._lookup,
            "subject": None if row is None else self._subject(row),
            "templates": [] if row is None else self._templates(row.pk),
            "decoys": [] if row is None else self._decoys(row.pk),
            "answers": [] if row is None else self._answers(row.pk),
            "changes": [] if row is None else self._changes(row.pk),
            "album_faces": self._album_faces(),
            "job_items": self._job_items(),
            "events": self._events(),
            "receipts": [each.document() for each in receipts(self._connection, self._gallery, self._lookup)],
            "audit": self._audit(),
            "elsewhere": ELSEWHERE,
        }

    def _number(self, template_pk: int) -> int:
        """Return a template's number in this document. The database's keys would reveal activity in other galleries."""
        return self._numbers.setdefault(template_pk, len(self._numbers) + 1)

    def _subject(self, row: sa.Row[Any]) -> dict[str, Any]:
        borne = sa.select(labels.c.label).where(labels.c.subject_pk == row.pk).order_by(labels.c.label)
        return {
            "key": SUBJECT_KEY,
            **vars(open_subject(self._gallery.seal, row.sealed)),
            **_plain(row, "created_at", "updated_at"),
            "labels": list(self._connection.execute(borne).scalars()),
        }

    def _templates(self, subject_pk: int) -> list[dict[str, Any]]:
        query = (
            sa.select(templates, crops.c.sealed)
            .outerjoin(crops, crops.c.template_pk == templates.c.pk)
            .where(templates.c.subject_pk == subject_pk)
            .order_by(templates.c.pk)
        )
        embeddings = self._embeddings(subject_pk)
        return [
            {
                "key": self._number(row.pk),
                **_plain(row, "id", "kind", "quality", "detection_score", "created_at"),
                "embeddings": embeddings.get(row.pk, []),
                "crop": None if row.sealed is None else self._crop(row.sealed),
            }
            for row in self._connection.execute(query)
        ]

    def _crop(self, sealed: bytes) -> dict[str, Any]:
        crop = open_crop(self._gallery.seal, sealed)
        return {"image": base64.b64encode(crop.image).decode(), "landmarks": crop.landmarks_xy}

    def _embeddings(self, subject_pk: int) -> dict[int, list[dict[str, Any]]]:
        made_by = (generations.c.gallery_pk == self._gallery.pk) & (generations.c.generation == vectors.c.generation)
        query = (
            sa.select(vectors, generations.c.fingerprint, generations.c.dimension, generations.c.model)
            .join(templates, templates.c.pk == vectors.c.template_pk)
            .join(generations, made_by)
            .where(templates.c.subject_pk == subject_pk)
            .order_by(vectors.c.template_pk, vectors.c.generation)
        )
        found: dict[int, list[dict[str, Any]]] = {}
        for row in self._connection.execute(query):
            (vector,) = self._gallery.seal.open_vectors([row.vector], row.generation, row.dimension)
            made = {"generation": row.generation, "recognizer": row.fingerprint, "model": row.model}
            found.setdefault(row.template_pk, []).append({**made, "embedding": vector.tolist()})
        return found

    def _decoys(self, subject_pk: int) -> list[dict[str, Any]]:
        """Return the strangers who were mistaken for the subject, without their vectors: those are of other people."""
        made_by = (generations.c.gallery_pk == self._gallery.pk) & (generations.c.generation == decoys.c.generation)
        query = (
            sa.select(decoys, generations.c.fingerprint, generations.c.model)
            .join(generations, made_by)
            .where(decoys.c.subject_pk == subject_pk)
            .order_by(decoys.c.pk)
        )
        return [
            {**_plain(row, "id", "kind", "created_at", "generation", "model"), "recognizer": row.fingerprint}
            for row in self._connection.execute(query)
        ]

    def _answers(self, subject_pk: int) -> list[dict[str, Any]]:
        """Return stored responses to requests with an idempotency key."""
        query = sa.select(idempotency).where(idempotency.c.subject_pk == subject_pk)
        return [
            {
                "request": row.lookup,
                "digest": row.digest,
                "response": self._gallery.seal.open(row.sealed, ANSWER).decode(),
                "created_at": rfc3339(row.created_at),
            }
            for row in self._connection.execute(query.order_by(idempotency.c.created_at))
        ]

    def _changes(self, subject_pk: int) -> list[dict[str, int]]:
        """Return entries of the change log that indexes follow: templates added or removed."""
        own = (changes.c.gallery_pk == self._gallery.pk) & (changes.c.subject_pk == subject_pk)
        query = sa.select(changes.c.sequence, changes.c.template_pk).where(own).order_by(changes.c.sequence)
        return [
            {"number": number, "template": self._number(row.template_pk)}
            for number, row in enumerate(self._connection.execute(query), 1)
        ]

    def _events(self) -> list[dict[str, Any]]:
        """Return the stored events about this subject that webhooks receive, or received recently."""
        own = (events.c.gallery_pk == self._gallery.pk) & (events.c.subject == self._lookup)
        query = sa.select(events.c.sealed).where(own).order_by(events.c.pk)
        return [self._gallery.seal.open_json(sealed, EVENT) for sealed in self._connection.execute(query).scalars()]

    def _job_items(self) -> list[dict[str, Any]]:
        query = (
            sa.select(job_items.c.sealed, job_items.c.at, jobs.c.id, jobs.c.kind)
            .join(jobs, jobs.c.pk == job_items.c.job_pk)
            .where(job_items.c.subject == self._lookup, jobs.c.gallery_pk == self._gallery.pk)
            .order_by(job_items.c.pk)
        )
        return [
            {"job": row.id, "kind": row.kind, "at": rfc3339(row.at)} | self._gallery.seal.open_json(row.sealed, ITEM)
            for row in self._connection.execute(query)
        ]

    def _album_faces(self) -> list[dict[str, Any]]:
        """Return the faces in groups of albums that are named as this subject, and not enrolled yet."""
        seal = self._gallery.seal
        owned = album_faces.join(album_groups, album_groups.c.pk == album_faces.c.group_pk)
        query = (
            sa.select(album_faces, album_groups.c.number, album_groups.c.sealed.label("person"))
            .add_columns(albums.c.id.label("album"), albums.c.generation, albums.c.created_at, albums.c.expires_at)
            .add_columns(generations.c.fingerprint, generations.c.dimension)
            .select_from(owned.join(albums, albums.c.pk == album_faces.c.album_pk))
            .join(generations, _made_by(albums))
            .where(albums.c.gallery_pk == self._gallery.pk, album_groups.c.subject == self._lookup)
            .order_by(album_faces.c.pk)
        )
        return [
            {
                **_plain(row, "id", "album", "photo", "certainty", "created_at", "expires_at"),
                "group": f"g{row.number}",
                "person": seal.open_json(row.person, ALBUM_GROUP),
                "about": seal.open_json(row.sealed, ALBUM_FACE),
                "recognizer": row.fingerprint,
                "embedding": seal.open_vectors([row.vector], row.generation, row.dimension)[0].tolist(),
                "crop": self._crop(row.crop),
            }
            for row in self._connection.execute(query)
        ]

    def _audit(self) -> list[dict[str, Any]]:
        """Return audit lines about the subject, or that list it among others."""
        named = sa.cast(audit.c.details, sa.Text).contains(self._lookup)
        own = (audit.c.chain == self._gallery.pk) & ((audit.c.subject == self._lookup) | named)
        rows = self._connection.execute(sa.select(audit).where(own).order_by(audit.c.number))
        names = ("number", "at", "event", "outcome", "actor", "request_id", "details", "hash")
        return [_plain(row, *names) for row in rows]


def _made_by(table: sa.Table) -> sa.ColumnElement[bool]:
    own = generations.c.gallery_pk == table.c.gallery_pk
    return own & (generations.c.generation == table.c.generation)


def _plain(row: sa.Row[Any], *names: str) -> dict[str, Any]:
    """Return columns of a row as JSON values."""
    values = {name: getattr(row, name) for name in names}
    return {name: rfc3339(value) if isinstance(value, datetime) else value for name, value in values.items()}
