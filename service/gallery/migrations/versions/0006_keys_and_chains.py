"""Keys (data keys, the service's secrets, API keys), erasures, and an audit whose lines are chained."""

from datetime import UTC

import sqlalchemy as sa
from alembic import context, op

from service.gallery.vault import Vault
from service.security.chain import BEFORE_ALL, Line, mac

revision = "0006"
down_revision = "0005"

KEY = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def _gallery(primary_key: bool = False) -> sa.Column[int]:
    target = sa.ForeignKey("galleries.pk", ondelete="CASCADE")
    return sa.Column("gallery_pk", KEY, target, primary_key=primary_key, nullable=False)


def upgrade() -> None:
    vault, connection = context.config.attributes["vault"], op.get_bind()
    op.create_table(
        "data_keys",
        _gallery(primary_key=True),
        sa.Column("wrapped", sa.LargeBinary, nullable=False),
        sa.Column("master_key", sa.String(64), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
    )
    op.create_table(
        "secrets",
        sa.Column("name", sa.String(32), primary_key=True),
        sa.Column("wrapped", sa.LargeBinary, nullable=False),
        sa.Column("master_key", sa.String(64), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
    )
    op.create_table(
        "api_keys",
        sa.Column("pk", KEY, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(16), nullable=False, unique=True),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("scopes", sa.JSON, nullable=False),
        sa.Column("galleries", sa.JSON),
        sa.Column("rate", sa.Float),
        sa.Column("burst", sa.Integer),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True)),
        sa.Column("revoked_at", sa.DateTime(timezone=True)),
        sa.Column("used_at", sa.DateTime(timezone=True)),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "erasures",
        sa.Column("pk", KEY, primary_key=True, autoincrement=True),
        _gallery(),
        sa.Column("subject", sa.String(32), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("erasures_by_subject", "erasures", ["gallery_pk", "subject"])
    op.create_table(
        "audit_heads",
        sa.Column("chain", KEY, primary_key=True, autoincrement=False),
        sa.Column("number", KEY, nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
        sa.Column("mac", sa.String(64), nullable=False),
    )
    for pk in connection.execute(sa.text("SELECT pk FROM galleries")).scalars().all():
        vault.create(connection, pk)
    for name in ("audit", "api keys"):
        vault.create_secret(connection, name)
    _chain_the_audit(connection, vault)


def _chain_the_audit(connection: sa.Connection, vault: Vault) -> None:
    with op.batch_alter_table("audit") as table:
        table.add_column(sa.Column("chain", KEY, nullable=False, server_default="0"))
        table.add_column(sa.Column("number", KEY, nullable=False, server_default="0"))
        table.add_column(sa.Column("outcome", sa.String(32), nullable=False, server_default="done"))
        table.add_column(sa.Column("actor", sa.String(64), nullable=False, server_default="service"))
        table.add_column(sa.Column("request_id", sa.String(64)))
        table.add_column(sa.Column("subject", sa.String(32)))
        table.add_column(sa.Column("hash", sa.String(64), nullable=False, server_default=""))
    connection.execute(sa.text("UPDATE audit SET chain = COALESCE(gallery_pk, 0)"))
    connection.execute(
        sa.text(
            "UPDATE audit SET number = (SELECT COUNT(*) FROM audit AS earlier "
            "WHERE earlier.chain = audit.chain AND earlier.pk <= audit.pk)"
        )
    )
    with op.batch_alter_table("audit", table_kwargs={"sqlite_autoincrement": True}) as table:
        for column in ("chain", "number", "outcome", "actor", "hash"):
            table.alter_column(column, server_default=None)
        table.create_unique_constraint("audit_by_chain", ["chain", "number"])
    audit = sa.table(
        "audit",
        sa.column("pk", KEY),
        sa.column("chain", KEY),
        sa.column("number", KEY),
        sa.column("at", sa.DateTime(timezone=True)),
        sa.column("event", sa.String),
        sa.column("gallery", sa.String),
        sa.column("details", sa.JSON),
        sa.column("hash", sa.String),
    )
    heads = dict[int, tuple[int, str]]()
    for row in connection.execute(sa.select(audit).order_by(audit.c.pk)).all():
        at = row.at if row.at.tzinfo else row.at.replace(tzinfo=UTC)  # SQLite forgets the zone
        line = Line(row.number, at, row.event, "done", "service", None, row.gallery, None, row.details)
        last = line.hash(heads.get(row.chain, (0, BEFORE_ALL))[1])
        heads[row.chain] = (line.number, last)
        connection.execute(audit.update().where(audit.c.pk == row.pk).values(hash=last))
    secret = vault.secret(connection, "audit")
    ends = sa.table("audit_heads", *(sa.column(name) for name in ("chain", "number", "hash", "mac")))
    for chain, (number, last) in heads.items():
        connection.execute(ends.insert().values(chain=chain, number=number, hash=last, mac=mac(secret, number, last)))


def downgrade() -> None:
    with op.batch_alter_table("audit") as table:
        for column in ("chain", "number", "outcome", "actor", "request_id", "subject", "hash"):
            table.drop_column(column)
    for name in ("audit_heads", "erasures", "api_keys", "secrets", "data_keys"):
        op.drop_table(name)
