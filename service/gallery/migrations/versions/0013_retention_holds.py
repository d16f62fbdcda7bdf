"""Galleries whose retention waits for a confirmation."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
KEY = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "retention_holds",
        sa.Column("gallery_pk", KEY, sa.ForeignKey("galleries.pk", ondelete="CASCADE"), primary_key=True),
        sa.Column("templates", sa.Integer, nullable=False),
        sa.Column("subjects", sa.Integer, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
    )


def downgrade() -> None:
    op.drop_table("retention_holds")
