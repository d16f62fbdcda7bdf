"""What a gallery's strangers say, and the audit of what the service changed by itself."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

KEY = sa.BigInteger().with_variant(sa.Integer, "sqlite")
TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "evidence",
        sa.Column("gallery_pk", KEY, sa.ForeignKey("galleries.pk", ondelete="CASCADE"), primary_key=True),
        sa.Column("sequence", KEY, nullable=False),
        sa.Column("fusion", sa.String(32), nullable=False),
        sa.Column("templates", sa.Integer, nullable=False),
        sa.Column("document", sa.Text, nullable=False),
        sa.Column("derived_at", TIME, nullable=False),
    )
    op.create_table(
        "audit",
        sa.Column("pk", KEY, primary_key=True, autoincrement=True),
        sa.Column("at", TIME, nullable=False),
        sa.Column("event", sa.String(64), nullable=False),
        sa.Column("gallery_pk", KEY),
        sa.Column("gallery", sa.String(64)),
        sa.Column("details", sa.JSON, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("audit_by_gallery", "audit", ["gallery_pk", "pk"])


def downgrade() -> None:
    for table in ("audit", "evidence"):
        op.drop_table(table)
