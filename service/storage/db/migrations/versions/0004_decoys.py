"""Add the decoys of subjects, strangers who were mistaken for them, and the links between lookalikes."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

KEY = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "decoys",
        sa.Column("pk", KEY, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("gallery_pk", KEY, sa.ForeignKey("galleries.pk", ondelete="CASCADE"), nullable=False),
        sa.Column("subject_pk", KEY, sa.ForeignKey("subjects.pk", ondelete="CASCADE"), nullable=False),
        sa.Column("generation", sa.Integer, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("sealed", sa.LargeBinary, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.UniqueConstraint("gallery_pk", "id"),
        sqlite_autoincrement=True,
    )
    op.create_index("decoys_by_subject", "decoys", ["subject_pk"])
    op.create_table(
        "lookalikes",
        sa.Column("one_pk", KEY, sa.ForeignKey("subjects.pk", ondelete="CASCADE"), primary_key=True),
        sa.Column("other_pk", KEY, sa.ForeignKey("subjects.pk", ondelete="CASCADE"), primary_key=True),
        sa.Column("gallery_pk", KEY, sa.ForeignKey("galleries.pk", ondelete="CASCADE"), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
    )
    op.create_index("lookalikes_by_other", "lookalikes", ["other_pk"])
    op.create_index("lookalikes_by_gallery", "lookalikes", ["gallery_pk"])
