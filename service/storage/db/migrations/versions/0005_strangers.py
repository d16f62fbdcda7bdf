"""Add the strangers that a gallery remembers, and their templates."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

KEY = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.add_column("galleries", sa.Column("strangers", KEY, nullable=False, server_default="0"))
    op.create_table(
        "strangers",
        sa.Column("pk", KEY, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(32), nullable=False, unique=True),
        sa.Column("gallery_pk", KEY, sa.ForeignKey("galleries.pk", ondelete="CASCADE"), nullable=False),
        sa.Column("generation", sa.Integer, nullable=False),
        sa.Column("first_seen", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_seen", sa.DateTime(timezone=True), nullable=False),
        sa.Column("seen_count", sa.Integer, nullable=False),
        sa.Column("erased", KEY, nullable=False, server_default="0"),
        sqlite_autoincrement=True,
    )
    op.create_index("strangers_by_age", "strangers", ["gallery_pk", "last_seen"])
    op.create_table(
        "stranger_templates",
        sa.Column("pk", KEY, primary_key=True, autoincrement=True),
        sa.Column("stranger_pk", KEY, sa.ForeignKey("strangers.pk", ondelete="CASCADE"), nullable=False),
        sa.Column("vector", sa.LargeBinary, nullable=False),
        sa.Column("crop", sa.LargeBinary),
        sa.Column("quality", sa.JSON, nullable=False),
        sa.Column("detection_score", sa.Float),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("stranger_templates_by_stranger", "stranger_templates", ["stranger_pk"])
