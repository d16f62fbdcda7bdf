"""Another name for a column that every writer reads: a process of before 0004, which changes galleries without giving
them another version, is told so by the database instead of leaving others with what was."""

from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.execute("ALTER TABLE galleries RENAME COLUMN generation TO current_generation")


def downgrade() -> None:
    op.execute("ALTER TABLE galleries RENAME COLUMN current_generation TO generation")
