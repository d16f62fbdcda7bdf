"""Audit lines in SQL, written in the transaction of the operation that they record.

Each writer locks the chain's head at the end of its transaction, after the rows of galleries and webhooks: in another
order, two would wait for each other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from service.core.actor import Actor, current_actor
from service.core.errors import StorageError
from service.domain.events import Event
from service.domain.gallery import Gallery
from service.storage.db.audit_chain import PRUNED_LINES, prune
from service.storage.db.audit_chain import append as append_lines
from service.storage.db.engine import Database
from service.storage.db.key_vault import Vault
from service.storage.db.tables import audit, galleries
from service.storage.events.outbox import publish

CONFLICT: Final = StorageError("two audit lines were assigned the same number")
INCOMPLETE: Final = "incomplete"
"""Outcome of a line whose content the database rejected."""
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


@dataclass(frozen=True)
class AuditFilter:
    """Filter of audit lines; all given conditions apply. ``gallery_pk``: a gallery's key. ``subject``: a pseudonym."""

    gallery_pk: int | None = None
    gallery: str | None = None
    event: str | None = None
    actor: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    subject: str | None = None


def note(
    vault: Vault,
    connection: Connection,
    event: str,
    gallery: Gallery | None = None,
    subject: str | None = None,
    outcome: str = "done",
    published: Sequence[Event] = (),
    **details: Any,
) -> None:
    """Append the line of one effect, and its events, in the effect's transaction, which must hold the gallery's lock.

    Call it at the end of the transaction: other writers wait from here on. ``subject``: the id; the line holds its
    pseudonym. Raises MasterKeyError.
    """
    if gallery is None:
        append(vault, connection, [Entry(event, None, None, outcome, details)])
        return
    publish(vault, connection, gallery, published)
    append(vault, connection, [Entry.about(gallery, event, subject, outcome, **details)])


def record_entries(
    database: Database, entries: Iterable[Entry], reported: Iterable[tuple[Gallery, Sequence[Event]]] = ()
) -> None:
    """Append lines that belong to no other write, and events, in one transaction, which is on disk on return.

    A line whose content the database rejects is written without it. Raises StorageError, MasterKeyError.
    """
    events: dict[int, tuple[Gallery, list[Event]]] = {}
    for gallery, new in reported:
        events.setdefault(gallery.pk, (gallery, []))[1].extend(new)
    found = list(entries)
    with database.write(CONFLICT) as connection:
        # Before the head of the audit: no two writers wait for each other. Deleted galleries report nothing.
        for pk in connection.execute(LOCK_GALLERIES, {"pks": list(events)}).scalars().all() if events else ():
            publish(database.vault, connection, *events[pk])
        _append_any(database.vault, connection, found)


def _append_any(vault: Vault, connection: Connection, entries: Sequence[Entry]) -> None:
    """Append lines; those that the database rejects alone lose their content, so that they block no others."""
    with suppress(*REJECTED), connection.begin_nested():
        append(vault, connection, entries)
        return
    for entry in entries:
        try:
            with connection.begin_nested():
                append(vault, connection, [entry])
        except REJECTED as error:
            bare = Entry(entry.event, entry.gallery, outcome=INCOMPLETE, actor=Actor("service"), at=entry.at)
            append(vault, connection, [bare])  # fails if the reason is not the content
            log.warning("an audit line %r was written without its content: %s", entry.event, error)


def append(vault: Vault, connection: Connection, entries: Sequence[Entry]) -> None:
    """Append lines, whose numbers follow the last one's. Raises MasterKeyError."""
    lines = []
    for entry in entries:
        pk, name = entry.gallery or (None, None)
        who = {"actor": entry.actor.name, "request_id": entry.actor.request_id}
        lines.append(vars(entry) | who | {"gallery_pk": pk, "gallery": name})
    if lines:
        append_lines(vault, connection, lines)


def prune_lines(database: Database, before: datetime, stopped: Callable[[], bool] = lambda: False) -> int:
    """Delete lines from before a time, in short transactions, and return their number. Raises StorageError."""
    total, count = 0, PRUNED_LINES
    while count == PRUNED_LINES and not stopped():
        with database.write(CONFLICT) as connection:
            count = prune(database.vault, connection, before)
        total += count
    return total


def listed_lines(
    database: Database, chosen: AuditFilter, before: int | None, limit: int
) -> Sequence[sa.Row[tuple[Any, ...]]]:
    """Return rows of ``audit``, the latest first. ``before``: only those with a smaller number. Raises StorageError."""
    query = sa.select(audit).where(*_conditions(chosen)).order_by(audit.c.number.desc()).limit(limit)
    if before is not None:
        query = query.where(audit.c.number < before)
    with database.read() as connection:
        return connection.execute(query).all()


def _conditions(chosen: AuditFilter) -> Iterator[sa.ColumnElement[bool]]:
    for name in ("gallery_pk", "gallery", "event", "actor"):
        if (wanted := getattr(chosen, name)) is not None:
            yield audit.c[name] == wanted
    if chosen.since is not None:
        yield audit.c.at >= chosen.since
    if chosen.until is not None:
        yield audit.c.at < chosen.until
    if chosen.subject is not None:
        # A search that found several subjects lists them in its details.
        among = sa.cast(audit.c.details, sa.Text).contains(chosen.subject, autoescape=True)
        yield (audit.c.subject == chosen.subject) | among


def pseudonym(gallery: Gallery, subject: str) -> str:
    """Return the keyed hash of a subject's id, 32 hexadecimal digits."""
    return gallery.seal.pseudonym("subject", subject)


REJECTED: Final = (sa.exc.StatementError, TypeError, ValueError)
"""Errors of the database, and of a value that cannot be serialized for it."""
LOCK_GALLERIES: Final = (
    sa.select(galleries.c.pk)
    .where(galleries.c.pk.in_(sa.bindparam("pks", expanding=True)))
    .order_by(galleries.c.pk)
    .with_for_update(read=True, key_share=True)
)
