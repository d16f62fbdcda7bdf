"""Galleries, subjects, templates, change log, idempotency keys."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

KEY = sa.BigInteger().with_variant(sa.Integer, "sqlite")
TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "galleries",
        sa.Column("pk", KEY, primary_key=True, autoincrement=True),
        sa.Column("name", sa.String(64), nullable=False, unique=True),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("dimension", sa.Integer, nullable=False),
        sa.Column("settings", sa.JSON, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "subjects",
        sa.Column("pk", KEY, primary_key=True, autoincrement=True),
        sa.Column("gallery_pk", KEY, sa.ForeignKey("galleries.pk", ondelete="CASCADE"), nullable=False),
        sa.Column("id", sa.String(128), nullable=False),
        sa.Column("name", sa.Text),
        sa.Column("metadata", sa.JSON, nullable=False),
        sa.Column("tags", sa.JSON, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("updated_at", TIME, nullable=False),
        sa.UniqueConstraint("gallery_pk", "id"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "templates",
        sa.Column("pk", KEY, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(32), nullable=False, unique=True),
        sa.Column("gallery_pk", KEY, sa.ForeignKey("galleries.pk", ondelete="CASCADE"), nullable=False),
        sa.Column("subject_pk", KEY, sa.ForeignKey("subjects.pk", ondelete="CASCADE"), nullable=False),
        sa.Column("vector", sa.LargeBinary, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("quality", sa.JSON),
        sa.Column("detection_score", sa.Float),
        sa.Column("created_at", TIME, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("templates_by_subject", "templates", ["subject_pk"])
    op.create_index("templates_by_gallery", "templates", ["gallery_pk"])
    op.create_table(
        "changes",
        sa.Column("sequence", KEY, primary_key=True, autoincrement=True),
        sa.Column("gallery_pk", KEY, sa.ForeignKey("galleries.pk", ondelete="CASCADE"), nullable=False),
        sa.Column("template_pk", KEY, nullable=False),
        sa.Column("subject_pk", KEY, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("changes_by_gallery", "changes", ["gallery_pk", "sequence"])
    op.create_table(
        "idempotency",
        sa.Column("gallery_pk", KEY, sa.ForeignKey("galleries.pk", ondelete="CASCADE"), primary_key=True),
        sa.Column("key", sa.String(255), primary_key=True),
        sa.Column("subject_pk", KEY, sa.ForeignKey("subjects.pk", ondelete="CASCADE"), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("response", sa.Text, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
    )


def downgrade() -> None:
    for table in ("idempotency", "changes", "templates", "subjects", "galleries"):
        op.drop_table(table)
