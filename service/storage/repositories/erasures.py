"""Erasures: deletion of subjects, templates, decoys and galleries, with receipts that prevent their return.

A receipt names a subject by a keyed hash of its id (service.security.sealing). Work that began before an erasure holds
the key of the gallery's last receipt at that time (``Gallery.erased``, ``Job.erased``), and must not store what later
receipts name. No clock is involved.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final, Literal

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from kith.wire.common import ErasedKind
from kith.wire.fields import rfc3339
from service.core.errors import MasterKeyError, ReceiptNotFoundError, SubjectErasedError
from service.domain.gallery import Gallery
from service.security.sealing import Seal
from service.storage.audit.log import note
from service.storage.db.engine import Database, new_version
from service.storage.db.key_vault import Vault
from service.storage.db.row_sealing import ITEM, subject_lookup
from service.storage.db.tables import (
    album_faces,
    album_groups,
    albums,
    audit,
    audit_heads,
    crops,
    decoys,
    erasures,
    events,
    galleries,
    idempotency,
    job_items,
    jobs,
    labels,
    stranger_templates,
    strangers,
    subjects,
    templates,
    vectors,
)
from service.storage.repositories.gallery_rows import gallery_value, update_gallery

EVENTS: Final[dict[ErasedKind, str]] = {
    "subject": "subject_deleted",
    "template": "template_deleted",
    "decoy": "decoy_deleted",
    "gallery": "gallery_deleted",
    "stranger": "stranger_forgotten",
    "strangers": "strangers_forgotten",
    "album": "album_deleted",
}


@dataclass(frozen=True)
class Receipt:
    """Proof of an erasure, with the audit line that records it."""

    id: str
    kind: ErasedKind
    gallery_pk: int
    gallery: str
    subject: str | None
    """Keyed hash of the subject's id; the random id of a stranger or an album."""
    template: str | None
    """Id of the erased template or decoy."""
    removed: dict[str, int] = field(hash=False)
    """Deleted rows by kind."""
    at: datetime
    line: int
    """Number of the audit line in the gallery's chain."""
    hash: str
    log_emptied: bool | None = None
    """True if SQLite's write-ahead log, which keeps old pages, was truncated since. None: unknown, or PostgreSQL."""

    def document(self) -> dict[str, Any]:
        """Return the receipt as JSON, without the gallery's row key."""
        return {name: value for name, value in vars(self).items() if name != "gallery_pk"} | {"at": rfc3339(self.at)}


@dataclass(frozen=True)
class ReceiptVerification:
    """Comparison of a receipt with the database."""

    receipt: Receipt
    line_found: bool
    """The audit has the line that the receipt names."""
    gone: bool
    """The erased object is absent."""
    enrolled_since: bool
    """A request that began after the erasure created it again."""

    @property
    def holds(self) -> bool:
        return self.line_found and (self.gone or self.enrolled_since)


class ErasureStore:
    """Receipts in SQL. All methods block."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def list_page(
        self, gallery: Gallery, subject_id: str | None = None, before: int | None = None, limit: int = 100
    ) -> list[tuple[int, Receipt]]:
        """Return row keys and receipts of a gallery or of one subject, latest first: ``limit`` of them before a key."""
        query = sa.select(erasures).where(erasures.c.gallery_pk == gallery.pk).order_by(erasures.c.pk.desc())
        if subject_id is not None:
            query = query.where(erasures.c.subject == subject_lookup(gallery.seal, subject_id))
        if before is not None:
            query = query.where(erasures.c.pk < before)
        with self._database.read() as connection:
            return [(row.pk, receipt_of(row)) for row in connection.execute(query.limit(limit))]

    def of_deleted_gallery(self, name: str) -> Receipt | None:
        """Return the receipt of the latest deleted gallery of this name."""
        query = sa.select(erasures).where(erasures.c.gallery == name, erasures.c.kind == "gallery")
        with self._database.read() as connection:
            row = connection.execute(query.order_by(erasures.c.pk.desc()).limit(1)).first()
        return None if row is None else with_log_emptied(self._database, receipt_of(row))

    def verify(self, receipt_id: str) -> ReceiptVerification:
        """Compare a receipt with the audit and the gallery. Raises ReceiptNotFoundError."""
        with self._database.read() as connection:
            row = connection.execute(sa.select(erasures).where(erasures.c.id == receipt_id)).first()
            if row is None:
                raise ReceiptNotFoundError(f"there is no receipt {receipt_id!r}")
            receipt = receipt_of(row)
            named = (audit.c.chain == receipt.gallery_pk) & (audit.c.number == receipt.line)
            line = connection.execute(sa.select(audit.c.hash, audit.c.details).where(named)).first()
            line_found = line is not None and (line.hash, line.details.get("receipt")) == (receipt.hash, receipt.id)
            last_known = connection.execute(_last_known_erasure(receipt)).scalar()
            enrolled_since = last_known is not None and last_known >= row.pk
            return ReceiptVerification(receipt, line_found, last_known is None, enrolled_since)


def _last_known_erasure(receipt: Receipt) -> sa.Select[int]:
    """Select the last erasure that the request knew which stored the receipt's object; no row if it is gone."""
    match receipt.kind:
        case "subject":
            own = (subjects.c.gallery_pk == receipt.gallery_pk) & (subjects.c.lookup == receipt.subject)
            named = (albums.c.gallery_pk == receipt.gallery_pk) & (album_groups.c.subject == receipt.subject)
            groups = sa.select(album_groups.c.erased).join(albums).where(named)
            stored = sa.union_all(sa.select(subjects.c.erased).where(own), groups).subquery()
            return sa.select(sa.func.min(stored.c.erased))
        case "template":
            own = (templates.c.gallery_pk == receipt.gallery_pk) & (templates.c.id == receipt.template)
            return sa.select(templates.c.erased).where(own)
        case "decoy":
            own = (decoys.c.gallery_pk == receipt.gallery_pk) & (decoys.c.id == receipt.template)
            return sa.select(sa.literal(0)).where(own)  # its id is not used again
        case "stranger":
            return sa.select(strangers.c.erased).where(strangers.c.id == receipt.subject)
        case "strangers":
            everyone = sa.select(strangers.c.erased).where(strangers.c.gallery_pk == receipt.gallery_pk)
            return everyone.order_by(strangers.c.erased).limit(1)
        case "album":
            return sa.select(sa.literal(0)).where(albums.c.id == receipt.subject)  # its id is not used again
        case "gallery":
            return sa.select(galleries.c.erased).where(galleries.c.pk == receipt.gallery_pk)


def key_name(seal: Seal) -> str:
    """Return a name of a gallery's data key, the same after a restore; "" for a lost key."""
    try:
        return seal.pseudonym("gallery", "")
    except MasterKeyError:
        return ""


def with_log_emptied(database: Database, receipt: Receipt) -> Receipt:
    """Truncate SQLite's write-ahead log, which still holds the erased pages, and note the result in the receipt."""
    return replace(receipt, log_emptied=database.truncate_wal())


# Deletion, within a transaction of Database.change


def erase_subject(vault: Vault, connection: Connection, gallery: Gallery, subject_pk: int, subject_id: str) -> Receipt:
    """Erase a subject and everything stored about it.

    A template that was moved to it gets its own receipt, because in an older backup it belongs to another subject.
    """
    moved = sa.select(templates.c.id).where(templates.c.subject_pk == subject_pk, templates.c.moved)
    for template_id in connection.execute(moved.order_by(templates.c.pk)).scalars().all():
        record_erasure(vault, connection, gallery, Counter(), subject_id, template_id)
    removed = delete_templates(connection, gallery, templates.c.subject_pk == subject_pk)
    removed += delete_subjects(connection, gallery, [subject_pk])
    return record_erasure(vault, connection, gallery, removed, subject_id)


def erase_named_groups(vault: Vault, connection: Connection, gallery: Gallery, subject_id: str) -> Receipt | None:
    """Erase the groups of albums that are named as someone who is no subject. Return None if there are none."""
    faces = delete_named_groups(connection, gallery, [subject_lookup(gallery.seal, subject_id)])
    if not faces:
        return None
    return record_erasure(vault, connection, gallery, Counter(album_faces=faces), subject_id)


def erase_template(
    vault: Vault, connection: Connection, gallery: Gallery, subject_id: str, template_id: str
) -> Receipt:
    """Erase one existing template."""
    chosen = (templates.c.gallery_pk == gallery.pk) & (templates.c.id == template_id)
    removed = delete_templates(connection, gallery, chosen)
    return record_erasure(vault, connection, gallery, removed, subject_id, template_id)


def erase_decoy(vault: Vault, connection: Connection, gallery: Gallery, subject_id: str, decoy_id: str) -> Receipt:
    """Erase one existing decoy."""
    chosen = (decoys.c.gallery_pk == gallery.pk) & (decoys.c.id == decoy_id)
    removed = delete_decoys(connection, chosen)
    return record_erasure(vault, connection, gallery, removed, subject_id, decoy_id, kind="decoy")


def delete_decoys(connection: Connection, chosen: sa.ColumnElement[bool]) -> Counter[str]:
    """Delete decoys, and return their number by kind of row."""
    return Counter(decoys=connection.execute(decoys.delete().where(chosen)).rowcount)


def delete_templates(connection: Connection, gallery: Gallery, chosen: sa.ColumnElement[bool]) -> Counter[str]:
    """Delete templates with all vectors and crops, and return deleted rows by kind.

    Idempotent answers of their subjects are deleted too: they describe the photos, and a request that is repeated after
    a deletion is meant to enroll again.
    """
    keys, owners = (sa.select(templates.c[name]).where(chosen) for name in ("pk", "subject_pk"))
    return Counter(
        answers=connection.execute(idempotency.delete().where(idempotency.c.subject_pk.in_(owners))).rowcount,
        vectors=connection.execute(vectors.delete().where(vectors.c.template_pk.in_(keys))).rowcount,
        crops=connection.execute(crops.delete().where(crops.c.template_pk.in_(keys))).rowcount,
        templates=connection.execute(templates.delete().where(chosen)).rowcount,
    )


def delete_subjects(connection: Connection, gallery: Gallery, subject_pks: Sequence[int]) -> Counter[str]:
    """Delete subjects without templates, and all about them, also their names in jobs; return deleted rows by kind."""
    if not subject_pks:
        return Counter()
    # Events are stored under this lock: none is stored for these subjects from here on.
    head = sa.select(audit_heads.c.chain).where(audit_heads.c.chain == gallery.pk)
    connection.execute(head.with_for_update())
    lookups = connection.execute(sa.select(subjects.c.lookup).where(subjects.c.pk.in_(subject_pks))).scalars().all()
    items_of_gallery = job_items.c.job_pk.in_(sa.select(jobs.c.pk).where(jobs.c.gallery_pk == gallery.pk))
    named = job_items.update().where(job_items.c.subject.in_(lookups), items_of_gallery)
    reported = events.delete().where(events.c.subject_pk.in_(subject_pks))
    return Counter(
        job_items=connection.execute(named.values(sealed=blank_item(gallery.seal), subject=None)).rowcount,
        labels=connection.execute(labels.delete().where(labels.c.subject_pk.in_(subject_pks))).rowcount,
        answers=connection.execute(idempotency.delete().where(idempotency.c.subject_pk.in_(subject_pks))).rowcount,
        events=connection.execute(reported).rowcount,
        decoys=connection.execute(decoys.delete().where(decoys.c.subject_pk.in_(subject_pks))).rowcount,
        album_faces=delete_named_groups(connection, gallery, lookups),
        subjects=connection.execute(subjects.delete().where(subjects.c.pk.in_(subject_pks))).rowcount,
    )


def delete_strangers(connection: Connection, gallery: Gallery, chosen: sa.ColumnElement[bool]) -> Counter[str]:
    """Delete chosen strangers of a gallery with their templates and events, and return deleted rows by kind.

    The transaction must hold the lock of the gallery's row.
    """
    own = (strangers.c.gallery_pk == gallery.pk) & chosen
    doomed = connection.execute(sa.select(strangers.c.pk).where(own)).all()
    if not doomed:
        return Counter()
    keys = [row.pk for row in doomed]
    reported = events.delete().where(events.c.stranger_pk.in_(keys))
    owned = stranger_templates.delete().where(stranger_templates.c.stranger_pk.in_(keys))
    removed = Counter(
        events=connection.execute(reported).rowcount,
        stranger_templates=connection.execute(owned).rowcount,
        strangers=connection.execute(strangers.delete().where(strangers.c.pk.in_(keys))).rowcount,
    )
    update_gallery(connection, gallery.pk, strangers=new_version())
    return removed


def delete_named_groups(connection: Connection, gallery: Gallery, lookups: Sequence[str]) -> int:
    """Delete the groups of albums that are named as these subjects; return the number of their faces."""
    own = album_groups.c.album_pk.in_(sa.select(albums.c.pk).where(albums.c.gallery_pk == gallery.pk))
    named = own & album_groups.c.subject.in_(lookups)
    owned = album_faces.c.group_pk.in_(sa.select(album_groups.c.pk).where(named))
    removed = connection.execute(album_faces.delete().where(owned)).rowcount
    connection.execute(album_groups.delete().where(named))
    return removed


def delete_albums(connection: Connection, chosen: sa.ColumnElement[bool], with_jobs: bool = True) -> Counter[str]:
    """Delete chosen albums with their groups and faces, and return deleted rows by kind.

    ``with_jobs``: also the jobs that made them, whose items name the photos. A running job stops then.
    """
    doomed = connection.execute(sa.select(albums.c.pk, albums.c.id).where(chosen)).all()
    if not doomed:
        return Counter()
    keys, ids = [row.pk for row in doomed], [row.id for row in doomed]
    made_by = jobs.c.id.in_(ids)
    items = job_items.c.job_pk.in_(sa.select(jobs.c.pk).where(made_by))
    removed = Counter[str]()
    if with_jobs:
        # Jobs first: a job that stores faces locks its row first, too.
        connection.execute(sa.select(jobs.c.pk).where(made_by).with_for_update())
        removed["job_items"] = connection.execute(job_items.delete().where(items)).rowcount
        connection.execute(jobs.delete().where(made_by))
    removed["album_faces"] = connection.execute(album_faces.delete().where(album_faces.c.album_pk.in_(keys))).rowcount
    connection.execute(album_groups.delete().where(album_groups.c.album_pk.in_(keys)))
    removed["albums"] = connection.execute(albums.delete().where(albums.c.pk.in_(keys))).rowcount
    return removed


def delete_gallery(connection: Connection, gallery: Gallery) -> None:
    """Delete all rows of a gallery, by cascade, but receipts and audit lines. Copies are unreadable without its key."""
    connection.execute(galleries.delete().where(galleries.c.pk == gallery.pk))


def record_erasure(
    vault: Vault,
    connection: Connection,
    gallery: Gallery,
    removed: Counter[str],
    subject_id: str | None = None,
    template_id: str | None = None,
    key: str | None = None,
    event: str | None = None,
    details: Mapping[str, Any] = MappingProxyType({}),
    stranger_id: str | None = None,
    kind: ErasedKind | None = None,
    album_id: str | None = None,
) -> Receipt:
    """Write the audit line and the receipt of an erasure. Work that began earlier can no longer store the object.

    Args:
        subject_id, template_id, stranger_id, album_id: of the erased subject, template or decoy, stranger, album. None
            for a gallery.
        key: name of the gallery's data key, if the caller computed it before deleting the key.
        event: audit event, if it differs from a plain deletion.
        details: further details of the audit line.
        kind: of the erased object, if the ids do not tell.
    """
    receipt_id, counts = uuid.uuid4().hex, {kind: count for kind, count in sorted(removed.items()) if count}
    about: dict[str, Any] = {"receipt": receipt_id, "removed": counts, **details}
    if template_id is not None:
        about["decoy" if kind == "decoy" else "template"] = template_id
    if stranger_id is not None:
        about["stranger"] = stranger_id
    if album_id is not None:
        about["album"] = album_id
    ids: dict[ErasedKind, str | None] = {
        "template": template_id,
        "subject": subject_id,
        "stranger": stranger_id,
        "album": album_id,
    }
    named: Iterator[ErasedKind] = (each for each, given in ids.items() if given is not None)
    what: ErasedKind = next(named, "gallery") if kind is None else kind
    end = note(vault, connection, event or EVENTS[what], gallery, subject_id, **about)
    other = stranger_id or album_id
    subject, now = other if subject_id is None else subject_lookup(gallery.seal, subject_id), datetime.now(UTC)
    receipt = Receipt(
        receipt_id, what, gallery.pk, gallery.name, subject, template_id, counts, now, end.lines, end.hash
    )
    pk = insert_receipt(connection, receipt, key_name(gallery.seal) if key is None else key)
    if what != "gallery":
        update_gallery(connection, gallery.pk, erased=pk)
    return receipt


def insert_receipt(connection: Connection, receipt: Receipt, key: str) -> int:
    """Insert a receipt and return its row key."""
    row = {name: value for name, value in vars(receipt).items() if name != "log_emptied"}
    inserted = erasures.insert().values(**row, key=key)
    return int(connection.execute(inserted.returning(erasures.c.pk)).scalar_one())


# Checks of later work


def erased_since(
    connection: Connection, gallery_pk: int, seal: Seal, subject_ids: Collection[str], since: int
) -> set[str]:
    """Return the subjects that were erased after the receipt with key ``since``."""
    erased = _names_since(connection, gallery_pk, "subject", since) if subject_ids else None
    if not erased:
        return set()
    return {subject_id for subject_id in subject_ids if subject_lookup(seal, subject_id) in erased}


def erased_templates_since(connection: Connection, gallery_pk: int, ids: Collection[str], since: int) -> set[str]:
    """Return the template ids that were erased, not with their subject, after the receipt with key ``since``."""
    return set(ids) & _names_since(connection, gallery_pk, "template", since) if ids else set()


def _names_since(connection: Connection, gallery_pk: int, kind: Literal["subject", "template"], since: int) -> set[str]:
    """Return what receipts after the one with key ``since`` name: keyed hashes of subjects, or ids of templates."""
    last = gallery_value(connection, gallery_pk, galleries.c.erased)
    if last is None or last <= since:
        return set()
    own = (erasures.c.gallery_pk == gallery_pk) & (erasures.c.kind == kind) & (erasures.c.pk > since)
    return set(connection.execute(sa.select(erasures.c[kind]).where(own)).scalars())


def refuse_erased(connection: Connection, gallery: Gallery, subject_id: str) -> None:
    """Raises SubjectErasedError if the subject was erased since ``gallery`` was read."""
    if erased_since(connection, gallery.pk, gallery.seal, [subject_id], gallery.erased):
        raise erased_error()


def erased_error(kind: Literal["subject", "template"] = "subject") -> SubjectErasedError:
    return SubjectErasedError(f"the {kind} was erased after this request began. Enroll it again with a new request.")


def blank_item(seal: Seal) -> bytes:
    """Return an anonymous job item, which keeps the job from processing the item again."""
    return seal.close_json({"item": "", "problem": None}, ITEM)


def receipts(connection: Connection, gallery: Gallery, subject: str) -> list[Receipt]:
    """Return the receipts of a subject, by its keyed hash, and of its templates, latest first."""
    own = (erasures.c.gallery_pk == gallery.pk) & (erasures.c.subject == subject)
    rows = connection.execute(sa.select(erasures).where(own).order_by(erasures.c.pk.desc()))
    return [receipt_of(row) for row in rows]


def last_receipt(connection: Connection, gallery: Gallery, subject_id: str) -> Receipt | None:
    """Return the receipt of the subject's latest erasure."""
    found = receipts(connection, gallery, subject_lookup(gallery.seal, subject_id))
    return next((receipt for receipt in found if receipt.kind == "subject"), None)


def template_receipt(
    connection: Connection, gallery: Gallery, subject_id: str, template_id: str, kind: ErasedKind = "template"
) -> Receipt | None:
    """Return the receipt of a template's latest erasure, or of a decoy's."""
    found = receipts(connection, gallery, subject_lookup(gallery.seal, subject_id))
    return next((one for one in found if (one.kind, one.template) == (kind, template_id)), None)


def audit_details(connection: Connection, receipt: Receipt, event: str) -> dict[str, Any] | None:
    """Return the details of the receipt's audit line, if the line has this event."""
    named = (audit.c.chain == receipt.gallery_pk) & (audit.c.number == receipt.line) & (audit.c.event == event)
    return connection.execute(sa.select(audit.c.details).where(named)).scalar()


def receipt_of(row: sa.Row[Any]) -> Receipt:
    return Receipt(
        row.id,
        row.kind,
        row.gallery_pk,
        row.gallery,
        row.subject,
        row.template,
        row.removed,
        row.at,
        row.line,
        row.hash,
    )
