"""Receipts of erasures, which work begun before and backups are checked against; leases; templates by age."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

BEARING = ("galleries", "jobs", "subjects", "templates")
"""Tables whose rows bear the number of the last erasure that who wrote them knew of."""
KEY = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.drop_table("erasures")  # which nothing wrote to
    op.create_table(
        "erasures",
        sa.Column("pk", KEY, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(32), nullable=False, unique=True),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("gallery_pk", KEY, nullable=False),
        sa.Column("gallery", sa.String(64), nullable=False),
        sa.Column("key", sa.String(32), nullable=False),
        sa.Column("subject", sa.String(32)),
        sa.Column("template", sa.String(32)),
        sa.Column("removed", sa.JSON, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("line", KEY, nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("erasures_by_subject", "erasures", ["gallery_pk", "subject"])
    op.create_table(
        "leases",
        sa.Column("name", sa.String(32), primary_key=True),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("until", sa.DateTime(timezone=True), nullable=False),
    )
    for table in BEARING:
        op.add_column(table, sa.Column("erased", KEY, nullable=False, server_default="0"))
    op.create_index("templates_by_age", "templates", ["gallery_pk", "created_at"])


def downgrade() -> None:
    op.drop_index("templates_by_age", "templates")
    for table in BEARING:
        op.drop_column(table, "erased")
    for name in ("leases", "erasures"):
        op.drop_table(name)
    op.create_table(
        "erasures",
        sa.Column("pk", KEY, primary_key=True, autoincrement=True),
        sa.Column("gallery_pk", KEY, sa.ForeignKey("galleries.pk", ondelete="CASCADE"), nullable=False),
        sa.Column("subject", sa.String(32), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("erasures_by_subject", "erasures", ["gallery_pk", "subject"])
