"""Erasures: one DELETE, a tombstone and an audit line. Foreign keys and triggers delete the rest.

A tombstone is also the receipt. It names a subject (a person, a stranger or a decoy) by the keyed hash in its row; or a
template, an album or a gallery. Work that began before an erasure holds the key of the last tombstone at that time
(``Gallery.erased``, ``Job.erased``), and must not store what later ones name. A merge or promotion moves data and
erases nothing: its tombstone (kind moved) only tells where the data are.

Audit lines come after all deletions: a writer of events locks their subjects before the head of the audit, too.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
from service.storage.audit.log import Entry, append
from service.storage.db.engine import Database
from service.storage.db.row_sealing import subject_lookup
from service.storage.db.tables import albums, erasures, galleries, jobs, subjects, templates
from service.storage.repositories.gallery_rows import strangers_of
from service.storage.repositories.read_cache import ReadCache

MOVED: Final = "moved"
TABLES: Final[dict[ErasedKind, sa.Table]] = {
    "subject": subjects,
    "template": templates,
    "album": albums,
    "gallery": galleries,
}


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


def key_name(seal: Seal, may_be_lost: bool = False) -> str:
    """Return a name of a gallery's data key, which is the same after a restore; "" if it is lost and ``may_be_lost``.

    Raises MasterKeyError: it is lost, and a restore could not repeat the erasure.
    """
    try:
        return seal.pseudonym("gallery", "")
    except MasterKeyError:
        if may_be_lost:
            return ""
        raise


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
        event: str,
        gallery: Gallery,
        kind: ErasedKind,
        subject: str | None = None,
        template: str | None = None,
        *,
        missing: Callable[[Connection, Receipt | None], KithError],
        among: sa.ColumnElement[bool] | None = None,
        about: str | None = None,
        **details: str,
    ) -> Receipt:
        """Erase an object as :func:`erase`, with an audit line. A repeated erasure returns the first receipt.

        Args:
            missing: returns the error of what was never erased, or was merged or promoted, with that receipt.
            about: pseudonym of the person in the audit line, which has the ``details``.
        """
        with self._database.change(gallery) as connection:
            receipt = erase(connection, gallery, kind, subject, template, among)
            if receipt is not None:
                append(self._database.vault, connection, [entry_of(receipt, event, about, **details)])
            else:
                receipt = last_receipt(connection, gallery, kind, subject, template)
                if receipt is None or receipt.kind == MOVED:
                    raise missing(connection, receipt)
        self._cache.evict(gallery.name)
        return with_log_emptied(self._database, receipt)


# Erasure, within a transaction of Database.change


def erase(
    connection: Connection,
    gallery: Gallery,
    kind: ErasedKind,
    subject: str | None = None,
    template: str | None = None,
    among: sa.ColumnElement[bool] | None = None,
) -> Receipt | None:
    """Erase an object and everything that hangs on it; return its receipt, or None if there is no such object.

    Args:
        subject: keyed hash of the subject, or of the one that a template belongs to; None: all strangers. Of an album
            its id.
        among: restricts the rows.
    """
    key, before = key_name(gallery.seal, may_be_lost=kind == "gallery"), sizes(connection, gallery.pk)
    chosen = named(gallery.pk, kind, subject, template) & (sa.true() if among is None else among)
    moved: Sequence[str] = ()
    if kind == "subject":
        # In an older backup, they belong to another subject.
        own = templates.c.subject_pk.in_(sa.select(subjects.c.pk).where(chosen))
        moved_here = sa.select(templates.c.id).where(templates.c.moved, own).order_by(templates.c.pk)
        moved = connection.execute(moved_here).scalars().all()
    if not delete_rows(connection, kind, chosen) and (subject or kind == "gallery"):
        return None
    for each in moved:
        _bury(connection, gallery, key, "template", {}, subject, each)
    removed = before - sizes(connection, gallery.pk)
    return _bury(connection, gallery, key, kind, removed, subject, template)


def bury_moved(connection: Connection, gallery: Gallery, source: str, into: str, count: int) -> Receipt:
    """Delete a subject or stranger whose ``count`` templates another one has since. ``source``, ``into``: in rows."""
    delete_rows(connection, "subject", named(gallery.pk, "subject", source))
    removed = {"subjects": 1} | ({"templates": count} if count else {})
    return _bury(connection, gallery, key_name(gallery.seal), MOVED, removed, source, moved_to=into)


def named(
    gallery_pk: int, kind: ErasedKind, subject: str | None, template: str | None = None
) -> sa.ColumnElement[bool]:
    """Choose the rows that a tombstone names, whichever subject has the template since."""
    if kind == "gallery":
        return galleries.c.pk == gallery_pk
    if kind == "album":
        return (albums.c.gallery_pk == gallery_pk) & (albums.c.id == subject)
    if kind == "template":
        return templates.c.gallery_pk.in_(_with_companion(gallery_pk)) & (templates.c.id == template)
    return strangers_of(gallery_pk) if subject is None else is_named(gallery_pk, subjects.c.lookup == subject)


def is_named(gallery_pk: int, name: sa.ColumnElement[bool]) -> sa.ColumnElement[bool]:
    """Choose the subjects and strangers of a gallery with this name."""
    return subjects.c.gallery_pk.in_(_with_companion(gallery_pk)) & name


def _with_companion(gallery_pk: int) -> sa.Select[int]:
    """Select the keys of a gallery and of its gallery of strangers, where a promoted person's templates were before."""
    return sa.select(galleries.c.pk).where((galleries.c.pk == gallery_pk) | (galleries.c.companion_of == gallery_pk))


def delete_rows(connection: Connection, kind: ErasedKind, chosen: sa.ColumnElement[bool]) -> int:
    """Delete chosen rows of a kind, of albums with the jobs that made them. Return their number."""
    if kind == "album":
        # Jobs first: a job that stores faces locks its row first, too.
        connection.execute(jobs.delete().where(jobs.c.id.in_(sa.select(albums.c.id).where(chosen))))
    return connection.execute(TABLES[kind].delete().where(chosen)).rowcount


def sizes(connection: Connection, gallery_pk: int) -> Counter[str]:
    """Count the people and photos of a gallery, with its strangers."""
    own = (galleries.c.pk == gallery_pk) | (galleries.c.companion_of == gallery_pk)
    counts = sa.func.sum(galleries.c.subject_count), sa.func.sum(galleries.c.template_count)
    people, photos = connection.execute(sa.select(*counts).where(own)).one()
    return Counter(subjects=int(people or 0), templates=int(photos or 0))


def entry_of(receipt: Receipt, event: str, about: str | None = None, outcome: str = "done", **details: Any) -> Entry:
    """Return the audit line of an erasure. ``about``: pseudonym of the person."""
    known = {"receipt": receipt.id, "removed": receipt.removed, **details}
    if receipt.template is not None:
        known["template"] = receipt.template
    return Entry(event, (receipt.gallery_pk, receipt.gallery), about, outcome, known)


def _bury(
    connection: Connection,
    gallery: Gallery,
    key: str,
    kind: ErasedKind,
    removed: Mapping[str, int],
    subject: str | None,
    template: str | None = None,
    moved_to: str | None = None,
) -> Receipt:
    receipt = Receipt(
        id=uuid.uuid4().hex,
        kind=kind,
        gallery_pk=gallery.pk,
        gallery=gallery.name,
        subject=subject,
        template=template,
        removed=dict(removed),
        at=datetime.now(UTC),
        moved_to=moved_to,
    )
    insert_receipt(connection, receipt, key)
    return receipt


def insert_receipt(connection: Connection, receipt: Receipt, key: str) -> None:
    """Insert a tombstone. ``key``: name of the data key behind its hashes."""
    row = {name: value for name, value in vars(receipt).items() if name != "log_emptied"}
    connection.execute(erasures.insert().values(**row, key=key))


def last_receipt(
    connection: Connection, gallery: Gallery, kind: ErasedKind, subject: str | None, template: str | None = None
) -> Receipt | None:
    """Return the latest receipt of an erasure or move. Names as of :func:`erase`."""
    found = receipts(connection, gallery, subject)
    return next((one for one in found if one.kind in (kind, MOVED) and one.template == template), None)


def receipts(connection: Connection, gallery: Gallery, name: str | None) -> list[Receipt]:
    """Return the receipts of a subject, by its keyed hash, and of its templates, latest first."""
    own = (erasures.c.gallery_pk == gallery.pk) & (erasures.c.subject == name)
    rows = connection.execute(sa.select(erasures).where(own).order_by(erasures.c.pk.desc()))
    return [Receipt.model_validate(row) for row in rows]


# Checks of later work


def erased_since(connection: Connection, gallery_pk: int, since: int) -> set[str | None]:
    """Return the names of subjects and templates that were erased or merged after the receipt with key ``since``.

    None stands for all strangers. Names of subjects are keyed hashes.
    """
    own = (erasures.c.gallery_pk == gallery_pk) & (erasures.c.pk > since)
    name = sa.func.coalesce(erasures.c.template, erasures.c.subject)
    return set(connection.execute(sa.select(name).where(own)).scalars())


def refuse_erased(connection: Connection, gallery: Gallery, subject_id: str) -> None:
    """Raises SubjectErasedError if the subject was erased since ``gallery`` was read."""
    if subject_lookup(gallery.seal, subject_id) in erased_since(connection, gallery.pk, gallery.erased):
        raise erased_error()


def erased_error(kind: str = "subject") -> SubjectErasedError:
    return SubjectErasedError(f"the {kind} was erased after this request began. Enroll it again with a new request.")
