"""What was erased stays so when an older backup is restored: it is erased anew, in the same transaction.

A gallery of a backup has the data key that it had, by whose name it is known again, and with the key the keyed hashes
of its people. A receipt that the backup holds is of before it, and tells nothing of who is in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from service.core.errors import InvalidRequestError, StorageError
from service.domain.gallery import Gallery
from service.storage.audit.log import End, Entry, append, record
from service.storage.audit.verifier import OF_SERVICE
from service.storage.db.engine import Database, new_version
from service.storage.db.key_vault import Vault
from service.storage.db.tables import erasures, galleries, subjects, templates
from service.storage.repositories import erasures as erasure
from service.storage.repositories.erasures import Receipt
from service.storage.repositories.gallery_rows import gallery_of, gallery_rows

REPEATED: Final = "repeated"
"""Outcome of the audit's line."""
Known = tuple[Receipt, str]
"""A receipt, and the name of the data key by which its hashes were made."""


def known(connection: Connection) -> list[Known]:
    """Of all galleries that are or were, the oldest first."""
    query = sa.select(erasures).order_by(erasures.c.pk)
    return [(erasure.receipt_of(row), row.key) for row in connection.execute(query)]


def repeat(vault: Vault, connection: Connection, before: Sequence[Known]) -> list[Receipt]:
    """Erase what these receipts name and is there again; returns those of which something was. All are remembered, with
    a new line of the audit each, as the one that they named is of after the backup; of galleries that are not here the
    service's chain has it.

    Nobody is erased again from a gallery whose key is lost.

    Raises:
        MasterKeyUnavailableError: who unwraps galleries' keys cannot be asked.
    """
    here = set(connection.execute(sa.select(erasures.c.id)).scalars())
    missing = [(receipt, key) for receipt, key in before if receipt.id not in here]
    if not missing:
        return []
    found = [gallery_of(row, vault) for row in connection.execute(gallery_rows()).all()]
    by_key = {name: gallery for gallery in found if (name := erasure.key_name(gallery.seal))}
    repeated = []
    for receipt, key in missing:
        gallery = by_key.get(key)
        if gallery is None:
            entry = Entry(erasure.EVENTS[receipt.kind], None, receipt.subject, REPEATED, {"receipt": receipt.id})
            end = append(vault, connection, OF_SERVICE, [entry])
            erasure.insert_receipt(
                connection, replace(receipt, gallery_pk=OF_SERVICE, line=end.lines, hash=end.hash), key
            )
            continue
        was_there, end = _erase(vault, connection, gallery, receipt)
        moved = replace(receipt, gallery_pk=gallery.pk, line=end.lines, hash=end.hash)
        pk = erasure.insert_receipt(connection, moved, key)
        if receipt.kind != "gallery":
            connection.execute(galleries.update().where(galleries.c.pk == gallery.pk).values(erased=pk))
        if was_there:
            repeated.append(moved)
        if receipt.kind == "gallery":
            del by_key[key]
    return repeated


def _erase(vault: Vault, connection: Connection, gallery: Gallery, receipt: Receipt) -> tuple[bool, End]:
    """Whether anything was there, and the audit's line of it."""
    about: dict[str, Any] = {"receipt": receipt.id}
    if receipt.kind == "gallery":
        erasure.delete_gallery(connection, gallery)
        return True, record(vault, connection, erasure.EVENTS["gallery"], gallery, outcome=REPEATED, **about)
    if receipt.kind == "template":
        chosen = (templates.c.gallery_pk == gallery.pk) & (templates.c.id == receipt.template)
        removed = erasure.delete_templates(connection, gallery, chosen)
        about["template"] = receipt.template
    else:
        own = (subjects.c.gallery_pk == gallery.pk) & (subjects.c.lookup == receipt.subject)
        pks = connection.execute(sa.select(subjects.c.pk).where(own)).scalars().all()
        removed = erasure.delete_templates(connection, gallery, templates.c.subject_pk.in_(pks))
        removed += erasure.delete_subjects(connection, gallery, pks)
    counts = {what: count for what, count in sorted(removed.items()) if count}
    event, of = erasure.EVENTS[receipt.kind], (gallery.pk, gallery.name)
    entry = Entry(event, of, receipt.subject, REPEATED, about | {"removed": counts})
    return bool(counts), append(vault, connection, gallery.pk, [entry])


def saved(connection: Connection) -> list[dict[str, Any]]:
    """All receipts as JSON, for :func:`repeat_saved`."""
    return [receipt.document() | {"gallery_pk": receipt.gallery_pk, "key": key} for receipt, key in known(connection)]


def repeat_saved(database: Database, documents: Sequence[dict[str, Any]]) -> list[Receipt]:
    """As :func:`repeat`, in a transaction of its own.

    Raises:
        InvalidRequestError: these are no receipts.
        StorageError: it cannot be written.
    """
    try:
        before = [
            (Receipt(**(one | {"at": datetime.fromisoformat(one["at"])})), key)
            for document in documents
            for one, key in [({k: v for k, v in document.items() if k != "key"}, document["key"])]
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidRequestError("the file holds no receipts as 'kith erasures save' writes them") from error
    with database.write(StorageError("a constraint of the erasures was refused"), erasing=True) as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(sa.text("LOCK TABLE galleries IN EXCLUSIVE MODE"))
        repeated = repeat(database.vault, connection, before)
        for pk in {receipt.gallery_pk for receipt in repeated}:
            own = galleries.update().where(galleries.c.pk == pk)
            connection.execute(own.values(version=new_version()))
    database.truncate_wal()
    return repeated
