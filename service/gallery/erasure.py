"""Erasing people: what goes with them in SQL, what is written down of it, and that neither work begun before nor an
older backup brings them back.

Who is erased is remembered by a keyed hash of the id (service.security.sealing), which nobody can make without the
gallery's key. Whatever began before an erasure holds the number that the gallery's last erasure had then
(``Gallery.erased``, ``Job.erased``), and what is erased since is not for it to store. No clock is asked.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final, Literal

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from service.errors import MasterKeyAwayError, MasterKeyError, ReceiptNotFoundError, SubjectErasedError
from service.gallery.audit_log import record
from service.gallery.database import Database
from service.gallery.sealed_rows import ITEM, lookup_of
from service.gallery.subjects import ErasedKind, Gallery
from service.gallery.tables import (
    audit,
    changes,
    crops,
    data_keys,
    erasures,
    evidence,
    galleries,
    generations,
    idempotency,
    job_items,
    jobs,
    labels,
    subjects,
    templates,
    vectors,
)
from service.gallery.vault import Vault
from service.security.sealing import Seal

EVENTS: Final[dict[ErasedKind, str]] = {
    "subject": "subject_deleted",
    "template": "template_deleted",
    "gallery": "gallery_deleted",
}


@dataclass(frozen=True)
class Receipt:
    """What was erased, and the audit's line that says so: ``line`` is its number in the gallery's chain. ``subject``: a
    keyed hash of the id. ``removed``: rows by kind. ``log_emptied``: whether SQLite's write-ahead log, in which pages
    stand as they were, is empty since; None: there is none, or it was not asked."""

    id: str
    kind: ErasedKind
    gallery_pk: int
    gallery: str
    subject: str | None
    template: str | None
    removed: dict[str, int] = field(hash=False)
    at: datetime
    line: int
    hash: str
    log_emptied: bool | None = None

    def document(self) -> dict[str, Any]:
        """As JSON, to be kept by whoever asked."""
        return {name: value for name, value in vars(self).items() if name != "gallery_pk"} | {"at": self.at.isoformat()}


@dataclass(frozen=True)
class Examined:
    """What the database says of a receipt. ``line_found``: the audit has the line that it names; ``gone``: what it
    names is not there; ``enrolled_since``: it is, by a request that began after the erasure."""

    receipt: Receipt
    line_found: bool
    gone: bool
    enrolled_since: bool

    @property
    def holds(self) -> bool:
        return self.line_found and (self.gone or self.enrolled_since)


class Erasures:
    """What was erased. All methods block."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def listed(
        self, gallery: Gallery, subject_id: str | None = None, before: int | None = None, limit: int = 100
    ) -> list[tuple[int, Receipt]]:
        """A gallery's receipts with their keys, latest first; of one subject, if given."""
        query = sa.select(erasures).where(erasures.c.gallery_pk == gallery.pk).order_by(erasures.c.pk.desc())
        if subject_id is not None:
            query = query.where(erasures.c.subject == lookup_of(gallery.seal, subject_id))
        if before is not None:
            query = query.where(erasures.c.pk < before)
        with self._database.read() as connection:
            return [(row.pk, receipt_of(row)) for row in connection.execute(query.limit(limit))]

    def verdict(self, receipt_id: str) -> Examined:
        """Raises ReceiptNotFoundError."""
        with self._database.read() as connection:
            row = connection.execute(sa.select(erasures).where(erasures.c.id == receipt_id)).first()
            if row is None:
                raise ReceiptNotFoundError(f"there is no receipt {receipt_id!r}")
            receipt = receipt_of(row)
            named = (audit.c.chain == receipt.gallery_pk) & (audit.c.number == receipt.line)
            line = connection.execute(sa.select(audit.c.hash, audit.c.details).where(named)).first()
            line_found = line is not None and (line.hash, line.details.get("receipt")) == (receipt.hash, receipt.id)
            knew = connection.execute(_what_is_there(receipt)).scalar()
            return Examined(receipt, line_found, knew is None, knew is not None and knew >= row.pk)


def _what_is_there(receipt: Receipt) -> sa.Select[int]:
    """If what the receipt names is there: the last erasure that the work knew of which stored it."""
    match receipt.kind:
        case "subject":
            own = (subjects.c.gallery_pk == receipt.gallery_pk) & (subjects.c.lookup == receipt.subject)
            return sa.select(subjects.c.erased).where(own)
        case "template":
            own = (templates.c.gallery_pk == receipt.gallery_pk) & (templates.c.id == receipt.template)
            return sa.select(templates.c.erased).where(own)
        case "gallery":
            return sa.select(galleries.c.erased).where(galleries.c.pk == receipt.gallery_pk)


def key_name(seal: Seal) -> str:
    """Names a gallery's data key, which a restored gallery has in common with the one that the backup was made of; one
    that is lost has "". Raises MasterKeyAwayError."""
    try:
        return seal.pseudonym("gallery", "")
    except MasterKeyAwayError:
        raise
    except MasterKeyError:
        return ""


# Erasing, within a transaction of Database.change


def erase_subject(vault: Vault, connection: Connection, gallery: Gallery, subject_pk: int, subject_id: str) -> Receipt:
    """Remove a subject with all that is stored of it. A template that was moved to it has a receipt of its own, by
    which a backup from before the move is rid of it, too."""
    moved = sa.select(templates.c.id).where(templates.c.subject_pk == subject_pk, templates.c.moved)
    for template_id in connection.execute(moved.order_by(templates.c.pk)).scalars().all():
        write_down(vault, connection, gallery, "template", Counter(), subject_id, template_id)
    removed = remove_templates(connection, gallery, templates.c.subject_pk == subject_pk)
    removed += remove_subjects(connection, gallery, [subject_pk])
    return write_down(vault, connection, gallery, "subject", removed, subject_id)


def erase_template(
    vault: Vault, connection: Connection, gallery: Gallery, subject_id: str, template_id: str
) -> Receipt:
    """Remove one template, which is there."""
    chosen = (templates.c.gallery_pk == gallery.pk) & (templates.c.id == template_id)
    removed = remove_templates(connection, gallery, chosen)
    return write_down(vault, connection, gallery, "template", removed, subject_id, template_id)


def remove_templates(connection: Connection, gallery: Gallery, chosen: sa.ColumnElement[bool]) -> Counter[str]:
    """Delete the chosen templates with their vectors of every generation and their crops, and log each for the indexes;
    returns rows by kind.

    Their subjects' remembered answers go too: they describe their photos, and a request repeated after a deletion means
    to enrol again.
    """
    doomed = connection.execute(sa.select(templates.c.pk, templates.c.subject_pk).where(chosen)).all()
    if not doomed:
        return Counter()
    keys, owners = (sa.select(templates.c[name]).where(chosen) for name in ("pk", "subject_pk"))
    removed = Counter(
        answers=connection.execute(idempotency.delete().where(idempotency.c.subject_pk.in_(owners))).rowcount,
        vectors=connection.execute(vectors.delete().where(vectors.c.template_pk.in_(keys))).rowcount,
        crops=connection.execute(crops.delete().where(crops.c.template_pk.in_(keys))).rowcount,
        templates=connection.execute(templates.delete().where(chosen)).rowcount,
    )
    connection.execute(
        changes.insert(),
        [{"gallery_pk": gallery.pk, "template_pk": pk, "subject_pk": subject_pk} for pk, subject_pk in doomed],
    )
    _count(connection, gallery, template_count=galleries.c.template_count - len(doomed))
    return removed


def remove_subjects(connection: Connection, gallery: Gallery, subject_pks: Sequence[int]) -> Counter[str]:
    """Delete subjects who have no templates any more, with what else names them; returns rows by kind."""
    if not subject_pks:
        return Counter()
    lookups = connection.execute(sa.select(subjects.c.lookup).where(subjects.c.pk.in_(subject_pks))).scalars().all()
    own = job_items.c.job_pk.in_(sa.select(jobs.c.pk).where(jobs.c.gallery_pk == gallery.pk))
    blank = {"sealed": blank_item(gallery.seal), "subject": None}
    blanked = job_items.update().where(job_items.c.subject.in_(lookups), own).values(**blank)
    removed = Counter(
        job_items=connection.execute(blanked).rowcount,
        labels=connection.execute(labels.delete().where(labels.c.subject_pk.in_(subject_pks))).rowcount,
        answers=connection.execute(idempotency.delete().where(idempotency.c.subject_pk.in_(subject_pks))).rowcount,
        disagreements=_remove_disagreements(connection, gallery, frozenset(lookups)),
        subjects=connection.execute(subjects.delete().where(subjects.c.pk.in_(subject_pks))).rowcount,
    )
    _count(connection, gallery, subject_count=galleries.c.subject_count - removed["subjects"])
    return removed


def remove_gallery(connection: Connection, gallery: Gallery) -> None:
    """Delete everything of a gallery but receipts and audit; its key first: without it the rest is noise, wherever else
    it may lie."""
    # Vectors and crops go with their templates, a job's items with the job.
    for table in (data_keys, evidence, idempotency, jobs, changes, labels, templates, subjects):
        connection.execute(table.delete().where(table.c.gallery_pk == gallery.pk))
    connection.execute(galleries.delete().where(galleries.c.pk == gallery.pk))


def _remove_disagreements(connection: Connection, gallery: Gallery, lookups: frozenset[str]) -> int:
    """Of what a shadow answered differently, all that concerns these subjects."""
    query = sa.select(generations.c.generation, generations.c.details).where(generations.c.gallery_pk == gallery.pk)
    removed = 0
    for generation, details in connection.execute(query).all():
        noted = details.get("disagreements", [])
        kept = [one for one in noted if lookups.isdisjoint(one["subjects"])]
        if len(kept) < len(noted):
            own = (generations.c.gallery_pk == gallery.pk) & (generations.c.generation == generation)
            changed = {**details, "disagreements": kept}
            connection.execute(generations.update().where(own).values(details=changed))
            removed += len(noted) - len(kept)
    return removed


def _count(connection: Connection, gallery: Gallery, **values: sa.ColumnElement[int]) -> None:
    connection.execute(galleries.update().where(galleries.c.pk == gallery.pk).values(**values))


def write_down(
    vault: Vault,
    connection: Connection,
    gallery: Gallery,
    kind: ErasedKind,
    removed: Counter[str],
    subject_id: str | None = None,
    template_id: str | None = None,
    key: str | None = None,
    event: str | None = None,
    said: Mapping[str, Any] = MappingProxyType({}),
) -> Receipt:
    """Write the audit's line and the receipt; ``key``: the data key's name, if it is known already; ``event`` and what
    is ``said`` of it: the line's, where it is no mere deletion. From here on nothing that began before may bring back
    who was erased."""
    receipt_id, counts = uuid.uuid4().hex, {what: count for what, count in sorted(removed.items()) if count}
    about: dict[str, Any] = {"receipt": receipt_id, "removed": counts, **said}
    if template_id is not None:
        about["template"] = template_id
    end = record(vault, connection, event or EVENTS[kind], gallery, subject_id, **about)
    receipt = Receipt(
        receipt_id,
        kind,
        gallery.pk,
        gallery.name,
        None if subject_id is None else lookup_of(gallery.seal, subject_id),
        template_id,
        counts,
        datetime.now(UTC),
        end.lines,
        end.hash,
    )
    pk = remember(connection, receipt, key_name(gallery.seal) if key is None else key)
    if kind != "gallery":
        connection.execute(galleries.update().where(galleries.c.pk == gallery.pk).values(erased=pk))
    return receipt


def remember(connection: Connection, receipt: Receipt, key: str) -> int:
    """Store a receipt; returns its key."""
    row = {name: value for name, value in vars(receipt).items() if name != "log_emptied"}
    inserted = connection.execute(erasures.insert().values(**row, key=key)).inserted_primary_key
    assert inserted is not None  # noqa: S101 - of a single insert
    return int(inserted[0])


# What was erased


def erased_since(
    connection: Connection, gallery_pk: int, seal: Seal, subject_ids: Collection[str], since: int
) -> set[str]:
    """Those of a gallery's subjects that were erased after the erasure of number ``since``."""
    if not subject_ids or not _any_since(connection, gallery_pk, since):
        return set()
    own = (erasures.c.gallery_pk == gallery_pk) & (erasures.c.kind == "subject") & (erasures.c.pk > since)
    erased = set(connection.execute(sa.select(erasures.c.subject).where(own)).scalars())
    return {subject_id for subject_id in subject_ids if lookup_of(seal, subject_id) in erased}


def erased_templates_since(connection: Connection, gallery_pk: int, ids: Collection[str], since: int) -> set[str]:
    """Those of a gallery's template ids that were erased alone after the erasure of number ``since``."""
    if not ids or not _any_since(connection, gallery_pk, since):
        return set()
    own = (erasures.c.gallery_pk == gallery_pk) & (erasures.c.kind == "template") & (erasures.c.pk > since)
    return set(ids) & set(connection.execute(sa.select(erasures.c.template).where(own)).scalars())


def _any_since(connection: Connection, gallery_pk: int, since: int) -> bool:
    last = connection.execute(sa.select(galleries.c.erased).where(galleries.c.pk == gallery_pk)).scalar()
    return last is not None and last > since


def refuse_erased(connection: Connection, gallery: Gallery, subject_id: str) -> None:
    """Within a transaction of ``Database.change``. Raises SubjectErasedError: since ``gallery`` was read."""
    if erased_since(connection, gallery.pk, gallery.seal, [subject_id], gallery.erased):
        raise was_erased()


def was_erased(what: Literal["subject", "template"] = "subject") -> SubjectErasedError:
    return SubjectErasedError(f"the {what} was erased after this had begun")


def blank_item(seal: Seal) -> bytes:
    """What is left of a job's item: that there was one, so that it is not done again."""
    return seal.close_json({"item": "", "problem": None}, ITEM)


def receipts(connection: Connection, gallery: Gallery, subject: str) -> list[Receipt]:
    """Of a subject, by its keyed hash, and of its templates; the latest first."""
    own = (erasures.c.gallery_pk == gallery.pk) & (erasures.c.subject == subject)
    return [
        receipt_of(row) for row in connection.execute(sa.select(erasures).where(own).order_by(erasures.c.pk.desc()))
    ]


def last_receipt(connection: Connection, gallery: Gallery, subject_id: str) -> Receipt | None:
    """Of the subject's latest erasure."""
    found = receipts(connection, gallery, lookup_of(gallery.seal, subject_id))
    return next((receipt for receipt in found if receipt.kind == "subject"), None)


def said_of(connection: Connection, receipt: Receipt, event: str) -> dict[str, Any] | None:
    """Details of the audit's line that a receipt names, if it is of this event."""
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
