"""Add webhooks, the outbox of their events, and the secret that seals them."""

import sqlalchemy as sa
from alembic import context, op

revision = "0002"
down_revision = "0001"

KEY = sa.BigInteger().with_variant(sa.Integer, "sqlite")
TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "webhooks",
        sa.Column("pk", KEY, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(32), nullable=False, unique=True),
        sa.Column("sealed", sa.LargeBinary, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "events",
        sa.Column("pk", KEY, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(32), nullable=False, unique=True),
        sa.Column("gallery_pk", KEY, sa.ForeignKey("galleries.pk", ondelete="CASCADE"), nullable=False),
        sa.Column("type", sa.String(32), nullable=False),
        sa.Column("subject", sa.String(32)),
        sa.Column("sealed", sa.LargeBinary, nullable=False),
        sa.Column("at", TIME, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("events_by_subject", "events", ["gallery_pk", "subject"])
    op.create_index("events_by_age", "events", ["at"])
    op.create_table(
        "deliveries",
        sa.Column("pk", KEY, primary_key=True, autoincrement=True),
        sa.Column("webhook_pk", KEY, sa.ForeignKey("webhooks.pk", ondelete="CASCADE"), nullable=False),
        sa.Column("gallery_pk", KEY, sa.ForeignKey("galleries.pk", ondelete="CASCADE"), nullable=False),
        sa.Column("event_pk", KEY, sa.ForeignKey("events.pk", ondelete="CASCADE"), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("next_at", TIME, nullable=False),
        sa.Column("status", sa.Integer),
        sa.Column("error", sa.String(200)),
        sa.Column("updated_at", TIME, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("deliveries_by_stream", "deliveries", ["state", "webhook_pk", "gallery_pk", "pk"])
    op.create_index("deliveries_by_webhook", "deliveries", ["webhook_pk", "pk"])
    op.create_index("deliveries_by_gallery", "deliveries", ["gallery_pk"])
    op.create_index("deliveries_by_event", "deliveries", ["event_pk"])
    context.config.attributes["vault"].create_secret(op.get_bind(), "webhooks")
