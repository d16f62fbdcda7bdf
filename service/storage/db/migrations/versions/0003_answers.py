"""Add the stored answers of creations with an Idempotency-Key, and the secret that seals them."""

import sqlalchemy as sa
from alembic import context, op

revision = "0003"
down_revision = "0002"

KEY = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "answers",
        sa.Column("lookup", sa.String(32), primary_key=True),
        sa.Column("gallery_pk", KEY, sa.ForeignKey("galleries.pk", ondelete="CASCADE")),
        sa.Column("digest", sa.String(32), nullable=False),
        sa.Column("sealed", sa.LargeBinary),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
    )
    op.create_index("answers_by_gallery", "answers", ["gallery_pk"])
    op.create_index("answers_by_age", "answers", ["created_at"])
    context.config.attributes["vault"].create_secret(op.get_bind(), "answers")
