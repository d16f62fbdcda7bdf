"""Erasures: a tombstone, an audit line and one DELETE. Foreign keys and triggers delete the rest.

A tombstone is also the receipt. It names a subject by a keyed hash. Work that began before an erasure holds the key of
the last receipt at that time (``Gallery.erased``, ``Job.erased``), and must not store what later receipts name. A merge
or promotion moves data and erases nothing: its receipt (kind moved) only tells where the data are.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from typing import Any, Final

import sqlalchemy as sa
from pydantic import ConfigDict, Field
from sqlalchemy.engine import Connection

from kith.wire.common import ErasedKind
from kith.wire.erasures import ReceiptOut
from service.core.errors import KithError, MasterKeyError, SubjectErasedError
from service.domain.gallery import Gallery
from service.security.sealing import Seal
from service.storage.audit.log import note
from service.storage.db.bulk_rows import is_in
from service.storage.db.engine import Database
from service.storage.db.key_vault import Vault
from service.storage.db.row_sealing import subject_lookup
from service.storage.db.tables import (
    IS_PERSON,
    album_faces,
    albums,
    erasures,
    jobs,
    subjects,
    templates,
)
from service.storage.repositories.gallery_rows import strangers_of
from service.storage.repositories.read_cache import ReadCache

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
NAMES: Final[Mapping[ErasedKind, sa.Column[str]]] = {
    "subject": subjects.c.lookup,
    "template": templates.c.id,
    "decoy": subjects.c.lookup,
    "stranger": subjects.c.lookup,
    "strangers": subjects.c.lookup,
    "album": albums.c.id,
}
"""Column that names an object of this kind in its row, and in its receipt."""
COUNTED: Final = (templates.c.subject_pk, subjects.c.owner_pk, album_faces.c.subject_pk, album_faces.c.album_pk)
"""Rows that a receipt counts, by their owner."""
STRANGERS: Final[tuple[ErasedKind, ...]] = ("stranger", "strangers")


class Receipt(ReceiptOut):
    """What was erased, or moved. ``log_emptied``: None if it is not known."""

    model_config = ConfigDict(from_attributes=True)

    gallery_pk: int = Field(exclude=True)


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
            return [(row.pk, Receipt.model_validate(row)) for row in connection.execute(query.limit(limit))]

    def of_deleted_gallery(self, name: str) -> Receipt | None:
        """Return the receipt of the latest deleted gallery of this name."""
        query = sa.select(erasures).where(erasures.c.gallery == name, erasures.c.kind == "gallery")
        with self._database.read() as connection:
            row = connection.execute(query.order_by(erasures.c.pk.desc()).limit(1)).first()
        return None if row is None else with_log_emptied(self._database, Receipt.model_validate(row))


def key_name(seal: Seal) -> str:
    """Return a name of a gallery's data key, the same after a restore; "" for a lost key."""
    try:
        return seal.pseudonym("gallery", "")
    except MasterKeyError:
        return ""


def with_log_emptied(database: Database, receipt: Receipt) -> Receipt:
    """Truncate SQLite's write-ahead log, which still holds the erased pages, and note the result in the receipt."""
    return receipt.model_copy(update={"log_emptied": database.truncate_wal()})


class ErasingStore:
    """Store of objects that can be erased, and the cache of what was read of them."""

    def __init__(self, database: Database, cache: ReadCache) -> None:
        self._database = database
        self._cache = cache

    def _erase(
        self,
        gallery: Gallery,
        kind: ErasedKind,
        object_id: str,
        missing: Callable[[Connection, Receipt | None], KithError],
        subject_id: str | None = None,
    ) -> Receipt:
        """Erase an object as :func:`erase`. A repeated erasure returns the first receipt.

        ``missing``: returns the error of what was never erased, or was merged or promoted, with that receipt.
        """
        with self._database.change(gallery) as connection:
            receipt = erase(self._database.vault, connection, gallery, kind, object_id, subject_id)
            receipt = receipt or last_receipt(connection, gallery, kind, object_id, subject_id)
            if receipt is None or receipt.kind == MOVED:
                raise missing(connection, receipt)
        self._cache.evict(gallery.name)
        return with_log_emptied(self._database, receipt)


# Erasure, within a transaction of Database.change


def erase(
    vault: Vault,
    connection: Connection,
    gallery: Gallery,
    kind: ErasedKind,
    object_id: str,
    subject_id: str | None = None,
) -> Receipt | None:
    """Erase an object and everything that hangs on it; return its receipt, or None if there is no such object.

    The receipt comes first: whoever stores events takes the audit's lock before those of subjects, too. ``subject_id``:
    of the subject that a template or decoy belongs to.
    """
    name = subject_lookup(gallery.seal, object_id) if kind == "subject" else object_id
    chosen = named(gallery.pk, kind, name)
    if subject_id is not None:
        owner = named(gallery.pk, "subject", subject_lookup(gallery.seal, subject_id))
        pk = connection.execute(sa.select(subjects.c.pk).where(owner)).scalar()
        chosen &= (templates.c.subject_pk if kind == "template" else subjects.c.owner_pk) == pk
    removed = counted(connection, kind, chosen)
    if not removed:
        return None
    if kind == "album":
        delete_albums(connection, chosen)  # before the audit's lock, in the order of jobs that store faces
    if kind == "subject":
        # In an older backup, a template that was moved to it belongs to another subject.
        moved = sa.select(templates.c.id).where(templates.c.subject_pk.in_(sa.select(subjects.c.pk).where(chosen)))
        for each in connection.execute(moved.where(templates.c.moved).order_by(templates.c.pk)).scalars().all():
            record_erasure(vault, connection, gallery, "template", {}, object_id, each)
        receipt = record_erasure(vault, connection, gallery, kind, removed, object_id)
    else:
        receipt = record_erasure(vault, connection, gallery, kind, removed, subject_id, object_id)
    connection.execute(NAMES[kind].table.delete().where(chosen))
    return receipt


def named(gallery_pk: int, kind: ErasedKind, name: str | None) -> sa.ColumnElement[bool]:
    """Choose the object of a gallery with this name in its row; all of its kind without a name."""
    column = NAMES[kind]
    own = strangers_of(gallery_pk) if kind in STRANGERS else column.table.c.gallery_pk == gallery_pk
    if column.table is subjects:
        own &= ~IS_PERSON if kind == "decoy" else IS_PERSON
    return own & (sa.true() if name is None else column == name)


def counted(connection: Connection, kind: ErasedKind, chosen: sa.ColumnElement[bool]) -> Counter[str]:
    """Count the chosen objects of a kind, and what a person asks for that hangs on them, by table."""
    table = NAMES[kind].table
    count, pks = sa.select(sa.func.count()), sa.select(table.c.pk).where(chosen)
    removed = Counter({table.name: connection.execute(count.select_from(table).where(chosen)).scalar_one()})
    for owner in COUNTED:
        if owner.references(table.c.pk):
            name = "decoys" if owner.table is subjects else owner.table.name
            removed[name] = connection.execute(count.where(owner.in_(pks))).scalar_one()
    if kind == "decoy":
        return +Counter(decoys=removed["subjects"])
    if kind in STRANGERS:
        return +Counter(strangers=removed["subjects"], stranger_templates=removed["templates"])
    return +removed


def delete_strangers(connection: Connection, gallery: Gallery, chosen: sa.ColumnElement[bool]) -> Counter[str]:
    """Delete chosen strangers of a gallery, and return what went. The transaction must hold the gallery's row."""
    own = strangers_of(gallery.pk) & chosen
    removed = counted(connection, "stranger", own)
    connection.execute(subjects.delete().where(own))
    return removed


def delete_albums(connection: Connection, chosen: sa.ColumnElement[bool], with_jobs: bool = True) -> Counter[str]:
    """Delete chosen albums, and return what went.

    ``with_jobs``: also the jobs that made them, whose items name the photos. A running job stops then.
    """
    ids = connection.execute(sa.select(albums.c.id).where(chosen)).scalars().all()
    removed = counted(connection, "album", chosen)
    if with_jobs and ids:
        # Jobs first: a job that stores faces locks its row first, too.
        connection.execute(jobs.delete().where(jobs.c.id.in_(ids)))
    connection.execute(albums.delete().where(chosen))
    return removed


def record_erasure(
    vault: Vault,
    connection: Connection,
    gallery: Gallery,
    kind: ErasedKind,
    removed: Mapping[str, int],
    subject_id: str | None = None,
    object_id: str | None = None,
    *,
    event: str | None = None,
    key: str | None = None,
    moved_to: str | None = None,
    **details: Any,
) -> Receipt:
    """Write the audit line and the receipt. Work that began earlier can no longer store the object.

    Args:
        object_id: of what is no subject. With ``subject_id``, that is its owner.
        event: audit event, if it differs from a plain deletion.
        key: name of the gallery's data key, if the caller computed it before deleting the key.
        details: further details of the audit line.
    """
    counts, now = {table: count for table, count in sorted(removed.items()) if count}, datetime.now(UTC)
    receipt_id = uuid.uuid4().hex
    about: dict[str, Any] = {"receipt": receipt_id, "removed": counts, **details}
    if object_id is not None:
        about["stranger" if kind == MOVED else kind] = object_id
    note(vault, connection, event or EVENTS[kind], gallery, subject_id, **about)
    name, part = (object_id, None) if subject_id is None else (subject_lookup(gallery.seal, subject_id), object_id)
    receipt = Receipt(
        id=receipt_id,
        kind=kind,
        gallery_pk=gallery.pk,
        gallery=gallery.name,
        subject=name,
        template=part,
        removed=counts,
        at=now,
        moved_to=moved_to,
    )
    insert_receipt(connection, receipt, key_name(gallery.seal) if key is None else key)
    return receipt


def insert_receipt(connection: Connection, receipt: Receipt, key: str) -> None:
    """Insert a receipt. ``key``: name of the data key behind its hashes."""
    row = {name: value for name, value in vars(receipt).items() if name != "log_emptied"}
    connection.execute(erasures.insert().values(**row, key=key))


def last_receipt(
    connection: Connection, gallery: Gallery, kind: ErasedKind, object_id: str, subject_id: str | None = None
) -> Receipt | None:
    """Return the latest receipt of an erasure or move. Ids as of :func:`erase`."""
    subject, part = (object_id, None) if subject_id is None else (subject_id, object_id)
    is_subject = kind == "subject" or subject_id is not None
    found = receipts(connection, gallery, subject_lookup(gallery.seal, subject) if is_subject else subject)
    return next((one for one in found if one.kind in (kind, MOVED) and one.template == part), None)


def receipts(connection: Connection, gallery: Gallery, name: str) -> list[Receipt]:
    """Return the receipts of a subject, by its keyed hash, and of its templates, latest first."""
    own = (erasures.c.gallery_pk == gallery.pk) & (erasures.c.subject == name)
    rows = connection.execute(sa.select(erasures).where(own).order_by(erasures.c.pk.desc()))
    return [Receipt.model_validate(row) for row in rows]


# Checks of later work


def erased_since(
    connection: Connection, gallery_pk: int, seal: Seal, subject_ids: Collection[str], since: int
) -> set[str]:
    """Return the subjects that were erased or merged after the receipt with key ``since``."""
    by_name = {subject_lookup(seal, subject_id): subject_id for subject_id in subject_ids}
    later = (erasures.c.gallery_pk == gallery_pk) & (erasures.c.pk > since) & erasures.c.kind.in_(["subject", MOVED])
    query = sa.select(erasures.c.subject).where(later, is_in(connection, erasures.c.subject, list(by_name)))
    return {by_name[name] for name in connection.execute(query).scalars()}


def erased_templates_since(connection: Connection, gallery: Gallery, ids: Collection[str]) -> set[str]:
    """Return the template ids that were erased, not with their subject, since ``gallery`` was read."""
    later = (erasures.c.gallery_pk == gallery.pk) & (erasures.c.pk > gallery.erased) & (erasures.c.kind == "template")
    query = sa.select(erasures.c.template).where(later, is_in(connection, erasures.c.template, list(ids)))
    return set(connection.execute(query).scalars())


def is_any_since(connection: Connection, gallery: Gallery) -> bool:
    """Return whether anything was erased since ``gallery`` was read."""
    later = (erasures.c.gallery_pk == gallery.pk) & (erasures.c.pk > gallery.erased)
    return connection.execute(sa.select(erasures.c.pk).where(later).limit(1)).first() is not None


def refuse_erased(connection: Connection, gallery: Gallery, subject_id: str) -> None:
    """Raises SubjectErasedError if the subject was erased since ``gallery`` was read."""
    if erased_since(connection, gallery.pk, gallery.seal, [subject_id], gallery.erased):
        raise erased_error()


def erased_error(kind: str = "subject") -> SubjectErasedError:
    return SubjectErasedError(f"the {kind} was erased after this request began. Enroll it again with a new request.")
