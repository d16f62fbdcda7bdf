"""Repeats erasures after an older backup is restored, in the transaction of the restore.

The name of its old data key identifies a restored gallery, and the key reproduces the hashes of its subjects. Receipts
inside the backup are older than its rows. Merges and promotions are not repeated: who was merged is erased with the
other one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from kith.wire.common import ErasedKind
from service.storage.audit.log import Entry, append
from service.storage.db.key_vault import Vault
from service.storage.db.tables import erasures, galleries, jobs, subjects, templates
from service.storage.repositories import erasures as erasure
from service.storage.repositories.erasures import MOVED, NAMES, Receipt
from service.storage.repositories.gallery_rows import VISIBLE, gallery_of, gallery_rows

REPEATED: Final = "repeated"
"""Outcome in the audit line."""
Known = tuple[Receipt, str]
"""Receipt, and the name of the data key behind its hashes."""


def known(connection: Connection) -> list[Known]:
    """Return the receipts of all current and deleted galleries, the oldest first."""
    query = sa.select(erasures).order_by(erasures.c.pk)
    return [(Receipt.model_validate(row), row.key) for row in connection.execute(query)]


def repeat(vault: Vault, connection: Connection, before: Sequence[Known], as_of: datetime) -> list[Receipt]:
    """Erase what these receipts name and the restored database holds; return receipts that removed rows.

    What a backup of ``as_of`` has from after an erasure stays: the person enrolled again. All receipts are stored;
    those of erasures with a new audit line, which the restored audit lacks. Galleries whose key is lost are skipped.
    """
    here = set(connection.execute(sa.select(erasures.c.id)).scalars())
    found = [gallery_of(row, vault) for row in connection.execute(gallery_rows().where(VISIBLE)).all()]
    by_key = {name: gallery for gallery in found if (name := erasure.key_name(gallery.seal))}
    moves: defaultdict[tuple[str, str | None], set[str]] = defaultdict(set)
    """Who was merged or promoted into someone, directly or not, by data key and keyed hash."""
    repeated = []
    for receipt, key in before:
        if receipt.id in here:
            continue
        gallery = by_key.get(key)
        stored = receipt.model_copy(update={"gallery_pk": 0 if gallery is None else gallery.pk})
        erasure.insert_receipt(connection, stored, key)
        if receipt.kind == MOVED:
            assert receipt.subject is not None  # noqa: S101 - as record_erasure writes it
            moves[key, receipt.moved_to] |= moves[key, receipt.subject] | {receipt.subject}
            continue
        counts = {} if gallery is None else _erase(connection, stored, moves[key, receipt.subject], as_of)
        about: dict[str, Any] = {"receipt": receipt.id, "removed": counts}
        if receipt.template is not None or receipt.kind in ("stranger", "album"):
            about[receipt.kind] = receipt.template or receipt.subject
        subject = receipt.subject if receipt.kind in ("subject", "template", "decoy") else None
        of = None if gallery is None else (gallery.pk, gallery.name)
        append(vault, connection, [Entry(erasure.EVENTS[receipt.kind], of, subject, REPEATED, about)])
        if counts:
            repeated.append(stored)
        if receipt.kind == "gallery" and gallery is not None:
            del by_key[key]
    return repeated


def _erase(connection: Connection, receipt: Receipt, merged: Collection[str], as_of: datetime) -> dict[str, int]:
    """Erase what a receipt names, and who was ``merged`` into it; return how many rows went, by table."""
    if receipt.kind == "gallery":
        connection.execute(galleries.delete().where(galleries.c.pk == receipt.gallery_pk))
        return {"galleries": 1}
    removed = dict[str, int]()
    # Photos of a merged subject have receipts of their own: one that went to a third person since must stay.
    empty = subjects.c.lookup.in_(merged) & ~sa.exists().where(templates.c.subject_pk == subjects.c.pk)
    others: dict[ErasedKind, sa.ColumnElement[bool]] = {"subject": empty, "stranger": subjects.c.lookup.in_(merged)}
    kinds: tuple[ErasedKind, ...] = ("subject", "stranger") if receipt.kind == "subject" else (receipt.kind,)
    for kind in kinds:
        table = NAMES[kind].table
        # Times tell only in a younger backup: the clock may have been wrong when an older one got its rows.
        older = sa.true() if as_of <= receipt.at else table.c.created_at <= receipt.at
        own = erasure.named(receipt.gallery_pk, kind, receipt.template or receipt.subject)
        if kind in others:
            own |= erasure.named(receipt.gallery_pk, kind, None) & others[kind]
        removed |= erasure.counted(connection, kind, own & older)
        connection.execute(table.delete().where(own & older))
    if receipt.kind == "album":
        connection.execute(jobs.delete().where(jobs.c.id == receipt.subject))
    return removed
