"""Lines of the audit that cannot be altered, and every chain named in the service's own."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from alembic import context, op

from service.gallery.audit_guard import guard, unguard
from service.security.chain import BEFORE_ALL, Line, mac

revision = "0008"
down_revision = "0007"

KEY = sa.BigInteger().with_variant(sa.Integer, "sqlite")
AUDIT = sa.table(
    "audit",
    *(sa.column(name) for name in ("event", "outcome", "actor", "request_id", "gallery", "subject", "hash")),
    *(sa.column(name, KEY) for name in ("chain", "number", "gallery_pk")),
    sa.column("at", sa.DateTime(timezone=True)),
    sa.column("details", sa.JSON),
)
HEADS = sa.table("audit_heads", sa.column("chain", KEY), sa.column("number", KEY), sa.column("hash"), sa.column("mac"))


def upgrade() -> None:
    _name_chains(op.get_bind(), context.config.attributes["vault"])
    guard(op.get_bind())


def _name_chains(connection: sa.Connection, vault: Any) -> None:
    ends = {row.chain: (row.number, row.hash) for row in connection.execute(sa.select(HEADS))}
    named = {row.pk: row.name for row in connection.execute(sa.text("SELECT pk, name FROM galleries ORDER BY pk"))}
    gone = sorted(ends.keys() - named.keys() - {0})
    names = sa.select(AUDIT.c.chain, AUDIT.c.gallery).where(AUDIT.c.chain.in_(gone), AUDIT.c.number == 1)
    gone_names = {row.chain: row.gallery for row in connection.execute(names)}
    before = set(ends)

    def write(chain: int, event: str, gallery: str | None, details: dict[str, Any]) -> str:
        number, last = ends.get(chain, (0, BEFORE_ALL))
        at = datetime.now(UTC)
        line = Line(number + 1, at, event, "done", "service", None, gallery, None, details)
        now = line.hash(last)
        ends[chain] = line.number, now
        connection.execute(AUDIT.insert().values(**vars(line), chain=chain, gallery_pk=chain or None, hash=now))
        return now

    for chain, name in [*named.items(), *gone_names.items()]:
        if chain not in ends:
            write(chain, "audit_began", name, {})
        first = connection.execute(sa.select(AUDIT.c.hash).where(AUDIT.c.chain == chain, AUDIT.c.number == 1)).scalar()
        write(0, "audit_began", name, {"chain": first})
        if chain in gone_names:
            number, last = ends[chain]
            write(0, "gallery_deleted", name, {"chain": first, "lines": number, "last": last})
    secret = vault.secret(connection, "audit") if ends else b""
    for chain, (number, last) in ends.items():
        signed = {"number": number, "hash": last, "mac": mac(secret, number, last)}
        if chain in before:
            connection.execute(HEADS.update().where(HEADS.c.chain == chain).values(signed))
        else:
            connection.execute(HEADS.insert().values(chain=chain, **signed))


def downgrade() -> None:
    unguard(op.get_bind())
