"""Export of all data about one subject or stranger: stored rows and audit lines."""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from kith.wire.fields import rfc3339
from service.core.errors import SubjectNotFoundError
from service.domain.gallery import Gallery
from service.security.sealing import Seal
from service.storage.audit.log import Entry, record_entries
from service.storage.db.engine import Database
from service.storage.db.row_sealing import (
    ALBUM_FACE,
    ANSWER,
    EVENT,
    ITEM,
    open_crop,
    open_subject,
    subject_lookup,
)
from service.storage.db.tables import (
    album_faces,
    albums,
    audit,
    crops,
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
from service.storage.repositories.strangers import read_stranger

FORMAT: Final = 1
ELSEWHERE: Final = (
    "Search indexes in memory, in Milvus and in files hold only these embeddings, the keys of their templates, and "
    "links between those keys. Backups hold this data as of their creation. Archives of unfinished jobs are stored "
    "encrypted in the spool; the subjects in them are unknown until the job reads them."
)
LINE: Final = ("number", "at", "event", "outcome", "actor", "request_id", "details", "hash")
Parts = dict[str, list[dict[str, Any]]]


def everything_about(database: Database, gallery: Gallery, subject_id: str) -> dict[str, Any]:
    """Return a JSON document of one snapshot, after an audit line of the export is written. Blocks.

    Reading takes no lock, however many audit lines are searched. Of an erased subject, receipts and audit lines remain.
    Raises SubjectNotFoundError: nothing exists. StorageError.
    """
    lookup = subject_lookup(gallery.seal, subject_id)
    with database.read() as connection:
        subject, parts = _read(connection, gallery, lookup)
    if subject is None and not any(parts[name] for name in ("job_items", "receipts", "audit")):
        raise SubjectNotFoundError(f"gallery {gallery.name!r} has no subject {subject_id!r}")
    record_entries(database, [Entry.about(gallery, "subject_exported", subject_id)])
    return {
        "kind": "kith-subject",
        "format": FORMAT,
        "at": rfc3339(datetime.now(UTC)),
        "gallery": gallery.name,
        "id": subject_id,
        "pseudonym": lookup,
        "subject": subject,
        **parts,
        "elsewhere": ELSEWHERE,
    }


def everything_about_stranger(database: Database, gallery: Gallery, stranger_id: str) -> dict[str, Any]:
    """As :func:`everything_about`, of a stranger. Raises stranger_not_found, StorageError."""
    with database.read() as connection:
        read_stranger(connection, gallery, stranger_id)
    record_entries(database, [Entry.about(gallery, "stranger_exported", stranger=stranger_id)])
    with database.read() as connection:
        stranger = read_stranger(connection, gallery, stranger_id)
        photos = _templates(connection, gallery, stranger.pk)
        return {
            "kind": "kith-stranger",
            "gallery": gallery.name,
            **stranger.sighting(),
            "templates": [{"embedding": one.pop("embeddings")[0]["embedding"], **one} for one in photos],
            "events": _events(connection, gallery, stranger.pk),
            "audit": _lines(connection, gallery, stranger_id),
        }


def _read(connection: Connection, gallery: Gallery, lookup: str) -> tuple[dict[str, Any] | None, Parts]:
    """Return the subject, None if it is not enrolled, and lists of what is stored of it by kind."""
    seal, here = gallery.seal, gallery.pk
    row = connection.execute(
        sa.select(subjects).where(subjects.c.gallery_pk == here, subjects.c.lookup == lookup)
    ).first()
    subject_pk = None if row is None else row.pk
    answers = sa.select(idempotency).where(idempotency.c.subject_pk == subject_pk).order_by(idempotency.c.created_at)
    items: sa.Select[Any] = (
        sa.select(job_items.c.sealed, job_items.c.at, jobs.c.id.label("job"), jobs.c.kind)
        .join(jobs, jobs.c.pk == job_items.c.job_pk)
        .where(job_items.c.subject == lookup, jobs.c.gallery_pk == here)
        .order_by(job_items.c.pk)
    )
    parts: Parts = {
        "templates": _templates(connection, gallery, subject_pk),
        "decoys": [] if row is None else _decoys(connection, gallery, row.pk),
        "answers": [
            {"request": each.lookup, "response": seal.open(each.sealed, ANSWER).decode()}
            | _plain(each, "digest", "created_at")
            for each in connection.execute(answers)
        ],
        "album_faces": [] if subject_pk is None else _album_faces(connection, gallery, subject_pk),
        "job_items": [
            _plain(each, "job", "kind", "at") | seal.open_json(each.sealed, ITEM) for each in connection.execute(items)
        ],
        "events": _events(connection, gallery, subject_pk),
        "receipts": [each.model_dump(mode="json") for each in receipts(connection, gallery, lookup)],
        "audit": _lines(connection, gallery, lookup),
    }
    if row is None:
        return None, parts
    borne = sa.select(labels.c.label).where(labels.c.subject_pk == row.pk).order_by(labels.c.label)
    subject = vars(open_subject(seal, row.sealed)) | _plain(row, "created_at", "updated_at")
    return subject | {"labels": list(connection.execute(borne).scalars())}, parts


def _events(connection: Connection, gallery: Gallery, subject_pk: int | None) -> list[dict[str, Any]]:
    sent = sa.select(events.c.sealed).where(events.c.subject_pk == subject_pk).order_by(events.c.pk)
    return [gallery.seal.open_json(sealed, EVENT) for sealed in connection.execute(sent).scalars()]


def _lines(connection: Connection, gallery: Gallery, name: str) -> list[dict[str, Any]]:
    """Return the audit lines about a subject or stranger, also among others."""
    named = (audit.c.subject == name) | sa.cast(audit.c.details, sa.Text).contains(name)
    lines = sa.select(audit).where(audit.c.gallery_pk == gallery.pk, named).order_by(audit.c.number)
    return [_plain(line, *LINE) for line in connection.execute(lines)]


def _templates(connection: Connection, gallery: Gallery, subject_pk: int | None) -> list[dict[str, Any]]:
    query = (
        sa.select(templates, crops.c.sealed, vectors.c.vector, vectors.c.generation)
        .add_columns(*_recognizer())
        .outerjoin(crops, crops.c.template_pk == templates.c.pk)
        .outerjoin(vectors, vectors.c.template_pk == templates.c.pk)
        .outerjoin(generations, _made_by(vectors.c.generation, gallery))
        .where(templates.c.subject_pk == subject_pk)
        .order_by(templates.c.pk, vectors.c.generation)
    )
    found: dict[int, dict[str, Any]] = {}
    for row in connection.execute(query):
        template = found.get(row.pk)
        if template is None:
            template = found[row.pk] = {
                **_plain(row, "id", "kind", "quality", "detection_score", "created_at"),
                "embeddings": [],
                "crop": None if row.sealed is None else _crop(gallery.seal, row.sealed),
            }
        if row.vector is not None:
            template["embeddings"].append(_plain(row, "generation", "recognizer", "model") | _embedding(gallery, row))
    return list(found.values())


def _decoys(connection: Connection, gallery: Gallery, subject_pk: int) -> list[dict[str, Any]]:
    """Return the outsiders who were mistaken for the subject, without vectors and crops: those are of other people."""
    query = (
        sa.select(subjects.c.lookup.label("id"), templates.c.kind, templates.c.created_at, vectors.c.generation)
        .add_columns(*_recognizer())
        .select_from(templates)
        .join(subjects, subjects.c.pk == templates.c.subject_pk)
        .join(vectors, vectors.c.template_pk == templates.c.pk)
        .join(generations, _made_by(vectors.c.generation, gallery))
        .where(subjects.c.owner_pk == subject_pk)
        .order_by(templates.c.pk, vectors.c.generation)
    )
    names = ("id", "kind", "created_at", "generation", "recognizer", "model")
    return [_plain(row, *names) for row in connection.execute(query)]


def _album_faces(connection: Connection, gallery: Gallery, subject_pk: int) -> list[dict[str, Any]]:
    """Return the faces in groups of albums that were enrolled as this subject, but for these faces."""
    seal = gallery.seal
    query = (
        sa.select(album_faces, albums.c.id.label("album"), albums.c.generation, albums.c.created_at)
        .add_columns(albums.c.expires_at, *_recognizer())
        .select_from(album_faces.join(albums))
        .join(generations, _made_by(albums.c.generation, gallery))
        .where(album_faces.c.subject_pk == subject_pk)
        .order_by(album_faces.c.pk)
    )
    return [
        {
            **_plain(row, "id", "album", "photo", "certainty", "created_at", "expires_at", "recognizer"),
            "group": f"g{row.group_number}",
            "about": seal.open_json(row.sealed, ALBUM_FACE),
            "crop": _crop(seal, row.crop),
            **_embedding(gallery, row),
        }
        for row in connection.execute(query)
    ]


def _recognizer() -> tuple[sa.ColumnElement[Any], ...]:
    return generations.c.fingerprint.label("recognizer"), generations.c.dimension, generations.c.model


def _made_by(generation: sa.ColumnElement[int], gallery: Gallery) -> sa.ColumnElement[bool]:
    return (generations.c.gallery_pk == gallery.pk) & (generations.c.generation == generation)


def _embedding(gallery: Gallery, row: sa.Row[Any]) -> dict[str, list[float]]:
    return {"embedding": gallery.seal.open_vectors([row.vector], row.generation, row.dimension)[0].tolist()}


def _crop(seal: Seal, sealed: bytes) -> dict[str, Any]:
    crop = open_crop(seal, sealed)
    return {"image": base64.b64encode(crop.image).decode(), "landmarks": crop.landmarks_xy}


def _plain(row: sa.Row[Any], *names: str) -> dict[str, Any]:
    """Return columns of a row as JSON values."""
    values = {name: getattr(row, name) for name in names}
    return {name: rfc3339(value) if isinstance(value, datetime) else value for name, value in values.items()}
