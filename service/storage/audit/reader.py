"""Reads audit lines for display."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from datetime import datetime

import sqlalchemy as sa

from service.storage.db.audit_chain import Line
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


@dataclass(frozen=True)
class ListedLine:
    """Audit line with its hash."""

    line: Line
    hash: str


def listed_lines(database: Database, chosen: AuditFilter, before: int | None, limit: int) -> list[ListedLine]:
    """Return the latest lines first. ``before``: only lines with a smaller number. Raises StorageError."""
    query = sa.select(audit).where(*_conditions(chosen)).order_by(audit.c.number.desc()).limit(limit)
    if before is not None:
        query = query.where(audit.c.number < before)
    with database.read() as connection:
        rows = connection.execute(query).all()
    names = [field.name for field in fields(Line)]
    return [ListedLine(Line(*(getattr(row, name) for name in names)), row.hash) for row in rows]


def _conditions(chosen: AuditFilter) -> Iterator[sa.ColumnElement[bool]]:
    if chosen.gallery_pk is not None:
        yield audit.c.gallery_pk == chosen.gallery_pk
    for name in ("gallery", "event", "actor"):
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
