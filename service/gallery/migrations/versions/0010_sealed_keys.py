"""API keys' rows bear a MAC, a revocation that asks no clock, and a version that every change of them draws anew."""

import secrets
from datetime import UTC, datetime

import sqlalchemy as sa
from alembic import context, op

from service.security.keys import ApiKey, Rights, mac

revision = "0010"
down_revision = "0009"

KEY = sa.BigInteger().with_variant(sa.Integer, "sqlite")
TIME = sa.DateTime(timezone=True)
API_KEYS = sa.table(
    "api_keys",
    *(sa.column(name, sa.String) for name in ("id", "digest", "name", "mac")),
    *(sa.column(name, sa.JSON) for name in ("scopes", "galleries")),
    *(sa.column(name, TIME) for name in ("created_at", "expires_at", "revoked_at")),
    sa.column("rate", sa.Float),
    sa.column("burst", sa.Integer),
    sa.column("revoked", sa.Boolean),
)


def upgrade() -> None:
    op.add_column("api_keys", sa.Column("revoked", sa.Boolean, nullable=False, server_default=sa.false()))
    op.add_column("api_keys", sa.Column("mac", sa.String(64), nullable=False, server_default=""))
    versions = op.create_table(
        "api_key_versions",
        sa.Column("pk", KEY, primary_key=True, autoincrement=False),
        sa.Column("version", KEY, nullable=False),
    )
    op.bulk_insert(versions, [{"pk": 1, "version": secrets.randbits(63)}])
    _seal(op.get_bind())


def _seal(connection: sa.Connection) -> None:
    """What stands there is believed this once: nothing says whether somebody altered it before."""
    rows, now = connection.execute(sa.select(API_KEYS)).all(), datetime.now(UTC)
    secret = context.config.attributes["vault"].secret(connection, "api keys") if rows else b""
    for row in rows:
        created, expires, revoked_at = _aware(row.created_at), _ends(row.expires_at), _ends(row.revoked_at)
        revoked = revoked_at is not None and revoked_at <= now
        try:
            galleries = None if row.galleries is None else frozenset(row.galleries)
            rights, limits = Rights(frozenset(row.scopes), galleries), (row.rate, row.burst)
            key = ApiKey(row.id, row.digest, row.name, rights, *limits, created, expires, revoked_at, revoked=revoked)
            seal = mac(key, secret)
        except (TypeError, ValueError, AttributeError):
            continue  # by no seal it is refused, and it alone
        connection.execute(API_KEYS.update().where(API_KEYS.c.id == row.id).values(revoked=revoked, mac=seal))


def _ends(at: datetime | None) -> datetime | None:
    return None if at is None else _aware(at)


def _aware(at: datetime) -> datetime:
    """SQLite forgets the zone."""
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def downgrade() -> None:
    op.drop_table("api_key_versions")
    for column in ("mac", "revoked"):
        op.drop_column("api_keys", column)
