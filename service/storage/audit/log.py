"""Audit lines in SQL, written in the transaction of the operation that they record. One chain per gallery.

Writers of a gallery already take turns (Database.change), so a chain per gallery adds no waiting. A transaction that
writes several chains locks gallery chains in ascending order and the service's chain last, which prevents deadlocks.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

from service.core.actor import Actor, current_actor
from service.core.errors import StorageError
from service.domain.events import Event
from service.domain.gallery import Gallery
from service.storage.audit.chain import BEFORE_ALL, BEGINS, ENDS, OF_SERVICE, Line, mac
from service.storage.db.engine import Database
from service.storage.db.key_vault import Vault
from service.storage.db.tables import audit, audit_heads, galleries
from service.storage.events.outbox import publish

PURPOSE: Final = "audit"
"""Name of the service's secret that signs the heads."""
UNSIGNED: Final = ""
CONFLICT: Final = StorageError("two audit lines were assigned the same number")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """Content of a line before it gets a number. ``gallery``: key and name. ``subject``: a pseudonym."""

    event: str
    gallery: tuple[int, str] | None = None
    subject: str | None = None
    outcome: str = "done"
    details: dict[str, Any] = field(default_factory=dict)
    actor: Actor = field(default_factory=current_actor)
    at: datetime = field(default_factory=lambda: datetime.now(UTC))

    @classmethod
    def about(
        cls, gallery: Gallery, event: str, subject: str | None = None, outcome: str = "done", **details: Any
    ) -> Entry:
        """Return an entry about a gallery. ``subject``: the id, which the entry replaces by its pseudonym."""
        known = None if subject is None else pseudonym(gallery, subject)
        return cls(event, (gallery.pk, gallery.name), known, outcome, details)


class End(NamedTuple):
    """Line count and last hash of a chain."""

    lines: int
    hash: str


def note(
    vault: Vault,
    connection: Connection,
    event: str,
    gallery: Gallery | None = None,
    subject: str | None = None,
    outcome: str = "done",
    published: Sequence[Event] = (),
    **details: Any,
) -> End:
    """Append the line of one effect, and its events, in the effect's transaction, which must hold the gallery's lock.

    Call it at the end of the transaction: other writers of the chain wait from here on. Creating or deleting a gallery
    also adds a line to the service's chain. ``subject``: the id; the line holds a pseudonym under the gallery's key.
    ``published``: events of the gallery for webhooks and streams. Raises MasterKeyError.
    """
    if gallery is None:
        return append(vault, connection, OF_SERVICE, [Entry(event, None, None, outcome, details)])
    entry = Entry.about(gallery, event, subject, outcome, **details)
    end = append(vault, connection, gallery.pk, [entry])
    if event in (BEGINS, ENDS):
        first = connection.execute(FIRST, {"chain": gallery.pk}).scalar()
        said = {"chain": first} if event == BEGINS else {"chain": first, "lines": end.lines, "last": end.hash}
        append(vault, connection, OF_SERVICE, [replace(entry, details=said)])
    publish(vault, connection, gallery, published)
    return end


def record_entries(
    database: Database, entries: Iterable[Entry], reported: Iterable[tuple[Gallery, Sequence[Event]]] = ()
) -> None:
    """Append lines that belong to no other write, and events to the outbox, in one transaction. They are on disk on
    return.

    Lines of galleries that no longer exist go to the service's chain.

    Raises:
      StorageError: the database cannot be written.
      MasterKeyError: the audit's secret cannot be unwrapped.
    """
    by_chain: dict[int, list[Entry]] = {}
    for entry in entries:
        by_chain.setdefault(OF_SERVICE if entry.gallery is None else entry.gallery[0], []).append(entry)
    own = by_chain.pop(OF_SERVICE, [])
    events: dict[int, tuple[Gallery, list[Event]]] = {}
    for gallery, new in reported:
        events.setdefault(gallery.pk, (gallery, []))[1].extend(new)
    with database.write(CONFLICT, uncached=True) as connection:
        for chain in sorted(by_chain.keys() | events.keys()):
            if chain in events:
                publish(database.vault, connection, *events[chain])
            if chain not in by_chain:
                continue
            # Lock the head first: the gallery then cannot be deleted before these lines are written.
            head = connection.execute(HEAD, {"chain": chain}).first()
            if head is None or connection.execute(THERE, {"chain": chain}).first() is None:
                own += by_chain[chain]
            else:
                append(database.vault, connection, chain, by_chain[chain])
        if own:
            append(database.vault, connection, OF_SERVICE, own)


def append(vault: Vault, connection: Connection, chain: int, entries: Sequence[Entry]) -> End:
    """Append lines to a chain. Raises MasterKeyError.

    A chain with an unsigned head stays unsigned: a new line must not certify forged ones.
    """
    head = connection.execute(HEAD, {"chain": chain}).first() or _begin(connection, chain)
    secret = _known(vault, head) or vault.secret(connection, PURPOSE)
    sound = head.number == 0 or _is_signed(secret, head)
    if not sound:
        log.error("audit chain %d was tampered with: its head is not signed by the service", chain)
    number, last, rows = head.number, head.hash, []
    for entry in entries:
        number += 1
        line = Line(
            number=number,
            at=entry.at,
            event=entry.event,
            outcome=entry.outcome,
            actor=entry.actor.name,
            request_id=entry.actor.request_id,
            gallery=None if entry.gallery is None else entry.gallery[1],
            subject=entry.subject,
            details=entry.details,
        )
        last = line.hash(last)
        rows.append({**vars(line), "chain": chain, "gallery_pk": chain or None, "hash": last})
    connection.execute(LINE, rows)
    signed = mac(secret, number, last) if sound else UNSIGNED
    connection.execute(SIGN, {"of": chain, "now": number, "last": last, "signed": signed})
    return End(number, last)


def pseudonym(gallery: Gallery, subject: str) -> str:
    """Return the keyed hash of a subject's id, 32 hexadecimal digits."""
    return gallery.seal.pseudonym("subject", subject)


def _known(vault: Vault, head: Any) -> bytes | None:
    """Return the cached secret if it signed this head, which proves that it belongs to this database.

    Unwrapping can take seconds while all other writers wait.
    """
    known = vault.cached_secret(PURPOSE)
    return known if known is not None and _is_signed(known, head) else None


def _is_signed(secret: bytes, head: Any) -> bool:
    return hmac.compare_digest(mac(secret, head.number, head.hash).encode(), str(head.mac).encode())


def _begin(connection: Connection, chain: int) -> Any:
    """Create the chain's head. When two processes create it at once, the second waits for the first."""
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    first = insert(audit_heads).values(chain=chain, number=0, hash=BEFORE_ALL, mac=UNSIGNED)
    connection.execute(first.on_conflict_do_nothing())
    return connection.execute(HEAD, {"chain": chain}).one()


# Built once: building a statement takes longer in SQLAlchemy than SQLite takes to run it.
HEAD: Final = (
    sa.select(audit_heads.c.number, audit_heads.c.hash, audit_heads.c.mac)
    .where(audit_heads.c.chain == sa.bindparam("chain"))
    .with_for_update()
)
THERE: Final = sa.select(galleries.c.pk).where(galleries.c.pk == sa.bindparam("chain"))
FIRST: Final = sa.select(audit.c.hash).where(audit.c.chain == sa.bindparam("chain"), audit.c.number == 1)
LINE: Final = audit.insert()
SIGN: Final = (
    audit_heads.update()
    .where(audit_heads.c.chain == sa.bindparam("of"))
    .values(number=sa.bindparam("now"), hash=sa.bindparam("last"), mac=sa.bindparam("signed"))
)
