"""Whether a template was moved to its subject, as the audit has it of those that are there."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.add_column("templates", sa.Column("moved", sa.Boolean, nullable=False, server_default=sa.false()))
    connection = op.get_bind()
    lines = sa.text("SELECT gallery_pk, details FROM audit WHERE event = 'template_moved' AND gallery_pk IS NOT NULL")
    told = sa.text("UPDATE templates SET moved = :moved WHERE gallery_pk = :gallery AND id = :id")
    for row in connection.execute(lines).all():
        details = json.loads(row.details) if isinstance(row.details, str) else row.details
        connection.execute(told, {"moved": True, "gallery": row.gallery_pk, "id": details["template"]})


def downgrade() -> None:
    op.drop_column("templates", "moved")
