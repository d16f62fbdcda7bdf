"""Erasures: deletion of subjects, templates, decoys and galleries, with receipts that prevent their return.

A receipt is a tombstone: it names a subject by a keyed hash of its id (service.security.sealing). Work that began
before an erasure holds the key of the gallery's last receipt at that time (``Gallery.erased``, ``Job.erased``), and
must not store what later receipts name. No clock is involved. A merge or promotion moves data and erases nothing: its
receipt, of the kind "moved", only tells where the data are.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from kith.wire.common import ErasedKind
from kith.wire.fields import rfc3339
from service.core.errors import MasterKeyError, SubjectErasedError
from service.domain.gallery import Gallery
from service.security.sealing import Seal
from service.storage.audit.log import note
from service.storage.db.bulk_rows import is_in
from service.storage.db.engine import Database, new_version
from service.storage.db.key_vault import Vault
from service.storage.db.row_sealing import ITEM, subject_lookup
from service.storage.db.tables import (
    album_faces,
    album_groups,
    albums,
    audit_head,
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
from service.storage.repositories.gallery_rows import update_gallery

MOVED: Final = "moved"
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
    """What was erased, or moved."""

    id: str
    kind: ErasedKind
    gallery_pk: int
    gallery: str
    subject: str | None
    """Keyed hash of the subject's id; the random id of a stranger or an album."""
    template: str | None
    """Id of the erased template or decoy."""
    removed: dict[str, int] = field(hash=False)
    """Deleted rows by kind; of a subject that was moved, the rows that left it."""
    at: datetime
    moved_to: str | None = None
    """Of the kind moved: keyed hash of the subject, or id of the stranger, that has the data since."""
    log_emptied: bool | None = None
    """True if SQLite's write-ahead log, which keeps old pages, was truncated since. None: unknown, or PostgreSQL."""

    def document(self) -> dict[str, Any]:
        """Return the receipt as JSON, without the gallery's row key."""
        return {name: value for name, value in vars(self).items() if name != "gallery_pk"} | {"at": rfc3339(self.at)}


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
    removed = delete_templates(connection, templates.c.subject_pk == subject_pk)
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
    removed = delete_templates(connection, chosen)
    return record_erasure(vault, connection, gallery, removed, subject_id, template_id)


def erase_decoy(vault: Vault, connection: Connection, gallery: Gallery, subject_id: str, decoy_id: str) -> Receipt:
    """Erase one existing decoy."""
    chosen = (decoys.c.gallery_pk == gallery.pk) & (decoys.c.id == decoy_id)
    removed = delete_decoys(connection, chosen)
    return record_erasure(vault, connection, gallery, removed, subject_id, decoy_id, kind="decoy")


def delete_decoys(connection: Connection, chosen: sa.ColumnElement[bool]) -> Counter[str]:
    """Delete decoys, and return their number by kind of row."""
    return Counter(decoys=connection.execute(decoys.delete().where(chosen)).rowcount)


def delete_templates(connection: Connection, chosen: sa.ColumnElement[bool]) -> Counter[str]:
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
    connection.execute(sa.select(audit_head.c.pk).with_for_update())
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
    moved_to: str | None = None,
) -> Receipt:
    """Write the audit line and the receipt of an erasure. Work that began earlier can no longer store the object.

    Args:
        subject_id, template_id, stranger_id, album_id: of the erased subject, template or decoy, stranger, album. None
            for a gallery.
        key: name of the gallery's data key, if the caller computed it before deleting the key.
        event: audit event, if it differs from a plain deletion.
        details: further details of the audit line.
        kind: of the erased object, if the ids do not tell.
        moved_to: see :attr:`Receipt.moved_to`.
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
    note(vault, connection, event or EVENTS[what], gallery, subject_id, **about)
    other = stranger_id or album_id
    subject, now = other if subject_id is None else subject_lookup(gallery.seal, subject_id), datetime.now(UTC)
    receipt = Receipt(receipt_id, what, gallery.pk, gallery.name, subject, template_id, counts, now, moved_to)
    insert_receipt(connection, receipt, key_name(gallery.seal) if key is None else key)
    return receipt


def insert_receipt(connection: Connection, receipt: Receipt, key: str) -> None:
    """Insert a receipt. ``key``: name of the data key behind its hashes."""
    row = {name: value for name, value in vars(receipt).items() if name != "log_emptied"}
    connection.execute(erasures.insert().values(**row, key=key))


# Checks of later work


def erased_since(
    connection: Connection, gallery_pk: int, seal: Seal, subject_ids: Collection[str], since: int
) -> set[str]:
    """Return the subjects that were erased or merged after the receipt with key ``since``."""
    named = {subject_lookup(seal, subject_id): subject_id for subject_id in subject_ids}
    chosen = erasures.c.kind.in_(["subject", MOVED]) & is_in(connection, erasures.c.subject, list(named))
    return {named[lookup] for lookup in _since(connection, gallery_pk, since, erasures.c.subject, chosen)}


def erased_templates_since(connection: Connection, gallery_pk: int, ids: Collection[str], since: int) -> set[str]:
    """Return the template ids that were erased, not with their subject, after the receipt with key ``since``."""
    chosen = (erasures.c.kind == "template") & is_in(connection, erasures.c.template, list(ids))
    return set(_since(connection, gallery_pk, since, erasures.c.template, chosen))


def is_any_since(connection: Connection, gallery: Gallery) -> bool:
    """Return whether anything was erased since ``gallery`` was read."""
    later = (erasures.c.gallery_pk == gallery.pk) & (erasures.c.pk > gallery.erased)
    return connection.execute(sa.select(erasures.c.pk).where(later).limit(1)).first() is not None


def _since(
    connection: Connection, gallery_pk: int, since: int, column: sa.Column[Any], chosen: sa.ColumnElement[bool]
) -> Iterable[str]:
    own = (erasures.c.gallery_pk == gallery_pk) & (erasures.c.pk > since)
    return connection.execute(sa.select(column).where(own, chosen)).scalars()


def refuse_erased(connection: Connection, gallery: Gallery, subject_id: str) -> None:
    """Raises SubjectErasedError if the subject was erased since ``gallery`` was read."""
    if erased_since(connection, gallery.pk, gallery.seal, [subject_id], gallery.erased):
        raise erased_error()


def erased_error(kind: str = "subject") -> SubjectErasedError:
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
    """Return the receipt of the subject's latest erasure or merge."""
    found = receipts(connection, gallery, subject_lookup(gallery.seal, subject_id))
    return next((receipt for receipt in found if receipt.kind in ("subject", MOVED)), None)


def template_receipt(
    connection: Connection, gallery: Gallery, subject_id: str, template_id: str, kind: ErasedKind = "template"
) -> Receipt | None:
    """Return the receipt of a template's latest erasure, or of a decoy's."""
    found = receipts(connection, gallery, subject_lookup(gallery.seal, subject_id))
    return next((one for one in found if (one.kind, one.template) == (kind, template_id)), None)


def receipt_of(row: sa.Row[Any]) -> Receipt:
    return Receipt(
        row.id, row.kind, row.gallery_pk, row.gallery, row.subject, row.template, row.removed, row.at, row.moved_to
    )
