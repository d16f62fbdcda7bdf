"""Repeats erasures after an older backup is restored, in the transaction of the restore.

The name of its old data key identifies a restored gallery, and the key reproduces the hashes of its subjects. Receipts
inside the backup are older than its rows. Merges and promotions are not repeated: who was merged is erased with the
other one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from service.storage.audit.log import append
from service.storage.db.key_vault import Vault
from service.storage.db.tables import erasures, subjects, templates
from service.storage.repositories import erasures as erasure
from service.storage.repositories.erasures import MOVED, TABLES, Receipt
from service.storage.repositories.gallery_rows import VISIBLE, gallery_of, gallery_rows, strangers_of

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
    by_key = {name: gallery.pk for gallery in found if (name := erasure.key_name(gallery.seal, may_be_lost=True))}
    moves: defaultdict[tuple[str, str | None], set[str]] = defaultdict(set)
    """Who was merged or promoted into someone, directly or not, by data key and keyed hash."""
    repeated = []
    for receipt, key in before:
        if receipt.id in here:
            continue
        stored = receipt.model_copy(update={"gallery_pk": by_key.get(key, 0)})
        erasure.insert_receipt(connection, stored, key)
        if receipt.kind == MOVED:
            assert receipt.subject is not None  # noqa: S101 - as bury_moved writes it
            moves[key, receipt.moved_to] |= moves[key, receipt.subject] | {receipt.subject}
            continue
        sizes = erasure.sizes(connection, stored.gallery_pk)
        if _erase(connection, stored, moves[key, receipt.subject], as_of):
            repeated.append(stored)
        line = stored.model_copy(update={"removed": dict(sizes - erasure.sizes(connection, stored.gallery_pk))})
        append(vault, connection, [erasure.entry_of(line, f"{receipt.kind}_deleted", receipt.subject, REPEATED)])
    return repeated


def _erase(connection: Connection, receipt: Receipt, merged: Collection[str], as_of: datetime) -> int:
    """Erase what a receipt names, and who was ``merged`` into it; return how many rows went."""
    chosen = erasure.named(receipt.gallery_pk, receipt.kind, receipt.subject, receipt.template)
    empty = ~sa.exists().where(templates.c.subject_pk == subjects.c.pk)
    if merged and receipt.kind == "subject":
        # Photos of a merged person have receipts of their own: one that went to a third person since must stay.
        theirs = erasure.is_named(receipt.gallery_pk, subjects.c.lookup.in_(merged))
        chosen |= theirs & (strangers_of(receipt.gallery_pk) | empty)
    # Times tell only in a younger backup: the clock may have been wrong when an older one got its rows.
    older = sa.true() if as_of <= receipt.at else TABLES[receipt.kind].c.created_at <= receipt.at
    erased = erasure.delete_rows(connection, receipt.kind, chosen & older)
    if receipt.kind == "template":  # of a stranger who was promoted since
        erasure.delete_rows(connection, "subject", strangers_of(receipt.gallery_pk) & empty)
    return erased
