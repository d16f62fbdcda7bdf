"""Repeats erasures after an older backup is restored, in the transaction of the restore.

A restored gallery has its old data key. The key's name identifies the gallery, and the key reproduces the keyed hashes
of its subjects. Receipts inside the backup are older than its rows and need no repetition. Merges and promotions are
not repeated: in the backup the data are still with the subject that was merged, who is erased with the other one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from service.domain.gallery import Gallery
from service.storage.audit.log import Entry, append
from service.storage.db.key_vault import Vault
from service.storage.db.tables import albums, decoys, erasures, strangers, subjects, templates
from service.storage.repositories import erasures as erasure
from service.storage.repositories.erasures import MOVED, Receipt
from service.storage.repositories.gallery_rows import gallery_of, gallery_rows

REPEATED: Final = "repeated"
"""Outcome in the audit line."""
Known = tuple[Receipt, str]
"""Receipt, and the name of the data key behind its hashes."""


def known(connection: Connection) -> list[Known]:
    """Return the receipts of all current and deleted galleries, the oldest first."""
    query = sa.select(erasures).order_by(erasures.c.pk)
    return [(erasure.receipt_of(row), row.key) for row in connection.execute(query)]


def repeat(vault: Vault, connection: Connection, before: Sequence[Known], as_of: datetime) -> list[Receipt]:
    """Erase everything that these receipts name and the restored database holds; return receipts that removed rows.

    What a backup of ``as_of`` has from after an erasure stays: the person enrolled again. All receipts are stored, and
    those of erasures have a new audit line, because the restored audit lacks the original lines. Galleries whose
    key is lost are skipped.
    """
    here = set(connection.execute(sa.select(erasures.c.id)).scalars())
    found = [gallery_of(row, vault) for row in connection.execute(gallery_rows()).all()]
    by_key = {name: gallery for gallery in found if (name := erasure.key_name(gallery.seal))}
    moves: defaultdict[tuple[str, str | None], set[str]] = defaultdict(set)
    """Who was merged or promoted into someone, directly or not, by data key and keyed hash."""
    repeated = []
    for receipt, key in before:
        if receipt.id in here:
            continue
        gallery = by_key.get(key)
        stored = replace(receipt, gallery_pk=0 if gallery is None else gallery.pk)
        erasure.insert_receipt(connection, stored, key)
        if receipt.kind == MOVED:
            assert receipt.subject is not None  # noqa: S101 - as record_erasure writes it
            moves[key, receipt.moved_to] |= moves[key, receipt.subject] | {receipt.subject}
            continue
        removed = Counter[str]()
        if receipt.kind == "gallery" and gallery is not None:
            erasure.delete_gallery(connection, gallery)
            removed["galleries"] = 1
            del by_key[key]
        elif gallery is not None:
            removed = _erase(connection, gallery, receipt, moves[key, receipt.subject], as_of)
        counts = {what: count for what, count in sorted(removed.items()) if count}
        about: dict[str, Any] = {"receipt": receipt.id, "removed": counts}
        if receipt.template is not None or receipt.kind in ("stranger", "album"):
            about[receipt.kind] = receipt.template or receipt.subject
        subject = receipt.subject if receipt.kind in ("subject", "template", "decoy") else None
        of = None if gallery is None else (gallery.pk, gallery.name)
        entry = Entry(erasure.EVENTS[receipt.kind], of, subject, REPEATED, about)
        append(vault, connection, [entry])
        if counts:
            repeated.append(stored)
    return repeated


def _erase(
    connection: Connection, gallery: Gallery, receipt: Receipt, merged: Collection[str], as_of: datetime
) -> Counter[str]:
    """Erase what a receipt names, and who was ``merged`` into it; return the removed rows by kind."""

    def chosen(table: sa.Table, condition: sa.ColumnElement[bool], since: str = "created_at") -> sa.ColumnElement[bool]:
        # Times tell only in a younger backup: the clock may have been wrong when an older one got its rows.
        older = sa.true() if as_of <= receipt.at else table.c[since] <= receipt.at
        return (table.c.gallery_pk == gallery.pk) & condition & older

    match receipt.kind:
        case "template":
            return erasure.delete_templates(connection, chosen(templates, templates.c.id == receipt.template))
        case "decoy":
            return erasure.delete_decoys(connection, chosen(decoys, decoys.c.id == receipt.template))
        case "album":
            return erasure.delete_albums(connection, chosen(albums, albums.c.id == receipt.subject))
        case "strangers":
            return erasure.delete_strangers(connection, gallery, chosen(strangers, sa.true(), "first_seen"))
        case "stranger":
            named = strangers.c.id.in_([receipt.subject, *merged])
            return erasure.delete_strangers(connection, gallery, chosen(strangers, named, "first_seen"))
    assert receipt.subject is not None  # noqa: S101 - receipts of subjects name them
    # Photos of a merged subject have receipts of their own: one that went to a third person since must stay.
    empty = subjects.c.lookup.in_(merged) & ~sa.exists().where(templates.c.subject_pk == subjects.c.pk)
    own = sa.select(subjects.c.pk).where(chosen(subjects, (subjects.c.lookup == receipt.subject) | empty))
    pks = connection.execute(own).scalars().all()
    removed = erasure.delete_strangers(connection, gallery, chosen(strangers, strangers.c.id.in_(merged), "first_seen"))
    removed += erasure.delete_templates(connection, templates.c.subject_pk.in_(pks))
    removed += erasure.delete_subjects(connection, gallery, pks)
    if as_of <= receipt.at:  # groups of albums can be named as someone who is no subject
        removed["album_faces"] += erasure.delete_named_groups(connection, gallery, [receipt.subject])
    return removed
