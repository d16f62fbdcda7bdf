"""Reads audit lines for display."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from service.storage.db.engine import Database
from service.storage.db.tables import audit


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
