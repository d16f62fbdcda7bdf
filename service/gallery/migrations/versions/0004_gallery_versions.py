"""A number on each gallery's row that is another after every change of it, or of anything in it."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

KEY = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.add_column("galleries", sa.Column("version", KEY, nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("galleries", "version")
