"""Repeats erasures after an older backup is restored, in the transaction of the restore.

A restored gallery has its old data key. The key's name identifies the gallery, and the key reproduces the keyed hashes
of its subjects. Receipts inside the backup are older than its rows and need no repetition.
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
from service.storage.audit.chain import OF_SERVICE
from service.storage.audit.log import End, Entry, append, note
from service.storage.db.engine import Database, new_version
from service.storage.db.key_vault import Vault
from service.storage.db.tables import albums, decoys, erasures, galleries, strangers, subjects, templates
from service.storage.repositories import erasures as erasure
from service.storage.repositories.erasures import Receipt
from service.storage.repositories.gallery_rows import gallery_of, gallery_rows

REPEATED: Final = "repeated"
"""Outcome in the audit line."""
Known = tuple[Receipt, str]
"""Receipt, and the name of the data key behind its hashes."""


def known(connection: Connection) -> list[Known]:
    """Return the receipts of all current and deleted galleries, the oldest first."""
    query = sa.select(erasures).order_by(erasures.c.pk)
    return [(erasure.receipt_of(row), row.key) for row in connection.execute(query)]


def repeat(vault: Vault, connection: Connection, before: Sequence[Known]) -> list[Receipt]:
    """Erase everything that these receipts name and the restored database holds; return receipts that removed rows.

    All receipts are stored, each with a new audit line, because the restored audit lacks the original lines. Lines of
    galleries outside the backup go to the service's chain. Galleries whose key is lost are skipped.
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
        was_there, end = _erase(vault, connection, gallery, receipt)
        chain = OF_SERVICE if gallery is None else gallery.pk
        moved = replace(receipt, gallery_pk=chain, line=end.lines, hash=end.hash)
        pk = erasure.insert_receipt(connection, moved, key)
        if was_there:
            repeated.append(moved)
        if receipt.kind == "gallery":
            by_key.pop(key, None)
        elif gallery is not None:
            connection.execute(galleries.update().where(galleries.c.pk == gallery.pk).values(erased=pk))
    return repeated


def _erase(vault: Vault, connection: Connection, gallery: Gallery | None, receipt: Receipt) -> tuple[bool, End]:
    """Return whether rows were removed, and the audit line."""
    event = erasure.EVENTS[receipt.kind]
    about: dict[str, Any] = {"receipt": receipt.id}
    if gallery is None:
        return False, append(vault, connection, OF_SERVICE, [Entry(event, None, receipt.subject, REPEATED, about)])
    if receipt.kind == "gallery":
        erasure.delete_gallery(connection, gallery)
        return True, note(vault, connection, event, gallery, outcome=REPEATED, **about)
    subject = receipt.subject
    if receipt.kind in ("stranger", "strangers"):
        # All strangers of an older backup were remembered before the receipt.
        chosen = strangers.c.id == subject if receipt.kind == "stranger" else sa.true()
        removed = erasure.delete_strangers(connection, gallery, chosen)
        about |= {} if subject is None else {"stranger": subject}
        subject = None
    elif receipt.kind == "album":
        removed = erasure.delete_albums(connection, (albums.c.gallery_pk == gallery.pk) & (albums.c.id == subject))
        about["album"] = subject
        subject = None
    elif receipt.kind == "template":
        chosen = (templates.c.gallery_pk == gallery.pk) & (templates.c.id == receipt.template)
        removed = erasure.delete_templates(connection, gallery, chosen)
        about["template"] = receipt.template
    elif receipt.kind == "decoy":
        removed = erasure.delete_decoys(
            connection, (decoys.c.gallery_pk == gallery.pk) & (decoys.c.id == receipt.template)
        )
        about["decoy"] = receipt.template
    else:
        own = (subjects.c.gallery_pk == gallery.pk) & (subjects.c.lookup == receipt.subject)
        pks = connection.execute(sa.select(subjects.c.pk).where(own)).scalars().all()
        assert subject is not None  # noqa: S101 - receipts of subjects name them
        # Groups of albums can be named as someone who is no subject.
        named = erasure.delete_named_groups(connection, gallery, [subject])
        removed = erasure.delete_templates(connection, gallery, templates.c.subject_pk.in_(pks))
        removed += erasure.delete_subjects(connection, gallery, pks)
        removed["album_faces"] += named
    counts = {what: count for what, count in sorted(removed.items()) if count}
    entry = Entry(event, (gallery.pk, gallery.name), subject, REPEATED, about | {"removed": counts})
    return bool(counts), append(vault, connection, gallery.pk, [entry])


def saved(connection: Connection) -> list[dict[str, Any]]:
    """Return all receipts as JSON for :func:`repeat_saved`."""
    return [receipt.document() | {"gallery_pk": receipt.gallery_pk, "key": key} for receipt, key in known(connection)]


def repeat_saved(database: Database, documents: Sequence[dict[str, Any]]) -> list[Receipt]:
    """Run :func:`repeat` in its own transaction.

    Raises:
      InvalidRequestError: the documents are not receipts.
      StorageError: the database cannot be written.
    """
    try:
        before = []
        for document in documents:
            values = {**document, "at": datetime.fromisoformat(document["at"])}
            key = values.pop("key")
            before.append((Receipt(**values), key))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidRequestError("the file holds no valid receipts; write them with 'kith erasures save'") from error
    with database.write(StorageError("the erasures violate a database constraint")) as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(sa.text("LOCK TABLE galleries IN EXCLUSIVE MODE"))
        repeated = repeat(database.vault, connection, before)
        for pk in {receipt.gallery_pk for receipt in repeated}:
            own = galleries.update().where(galleries.c.pk == pk)
            connection.execute(own.values(version=new_version()))
    database.truncate_wal()
    return repeated
