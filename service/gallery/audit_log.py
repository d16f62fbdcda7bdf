"""The audit in SQL: written with what it tells of, in the same transaction, one chain a gallery.

A gallery's writers take turns already (Database.change), so that chains by gallery cost no writer a wait.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from service.gallery.subjects import Gallery
from service.gallery.tables import audit, audit_heads
from service.gallery.vault import Vault
from service.security.acting import acting
from service.security.chain import BEFORE_ALL, Line, mac

OF_SERVICE: Final = 0
"""The chain of what concerns no gallery."""
PURPOSE: Final = "audit"
"""Of the service's secret that heads are signed with."""


def record(
    vault: Vault,
    connection: Connection,
    event: str,
    gallery: Gallery | None = None,
    subject: str | None = None,
    outcome: str = "done",
    **details: Any,
) -> tuple[int, str]:
    """Write a line, within a transaction that holds the gallery's turn; returns its number and hash. ``subject``: its
    id, of which a pseudonym is kept that only who has the gallery's key can make. Raises MasterKeyError."""
    known = None if gallery is None or subject is None else gallery.seal.pseudonym("subject", subject)
    return record_of(vault, connection, event, gallery, known, outcome, **details)


def record_of(
    vault: Vault,
    connection: Connection,
    event: str,
    gallery: Gallery | None,
    known: str | None,
    outcome: str,
    **details: Any,
) -> tuple[int, str]:
    """As :func:`record`; ``known``: the subject's pseudonym."""
    chain = OF_SERVICE if gallery is None else gallery.pk
    query = sa.select(audit_heads.c.number, audit_heads.c.hash).where(audit_heads.c.chain == chain)
    head = connection.execute(query.with_for_update()).first()
    actor, name = acting(), None if gallery is None else gallery.name
    line = Line(
        1 if head is None else head.number + 1,
        datetime.now(UTC),
        event,
        outcome,
        actor.name,
        actor.request_id,
        name,
        known,
        details,
    )
    last = line.hash(BEFORE_ALL if head is None else head.hash)
    whose = {"chain": chain, "gallery_pk": None if gallery is None else gallery.pk, "hash": last}
    connection.execute(audit.insert().values(**vars(line), **whose))
    now = {"number": line.number, "hash": last, "mac": mac(vault.secret(connection, PURPOSE), line.number, last)}
    if head is None:
        connection.execute(audit_heads.insert().values(chain=chain, **now))
    else:
        connection.execute(audit_heads.update().where(audit_heads.c.chain == chain).values(**now))
    return line.number, last
