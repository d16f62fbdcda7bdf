"""Of single searches that a shadow answered differently nothing stands in clear; no time is yet to come.

The former are a shadow's latest twenty, and go: whoever looks at a migration that is under way sees new ones. A
template or subject whose import said a later time than now was never reached by retention; from now on it ages.
"""

from datetime import UTC, datetime

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"

TIME = sa.DateTime(timezone=True)
GENERATIONS = sa.table("generations", sa.column("gallery_pk"), sa.column("generation"), sa.column("details", sa.JSON))


def upgrade() -> None:
    connection = op.get_bind()
    for row in connection.execute(sa.select(GENERATIONS)).all():
        if "disagreements" in (details := row.details):
            own = (GENERATIONS.c.gallery_pk == row.gallery_pk) & (GENERATIONS.c.generation == row.generation)
            kept = {name: said for name, said in details.items() if name != "disagreements"}
            connection.execute(GENERATIONS.update().where(own).values(details=kept))
    now = datetime.now(UTC)
    for pk in connection.execute(sa.text("SELECT pk FROM galleries")).scalars().all():
        for name, columns in (("templates", ["created_at"]), ("subjects", ["created_at", "updated_at"])):
            table = sa.table(name, sa.column("gallery_pk"), *(sa.column(column, TIME) for column in columns))
            for column in columns:
                late = (table.c.gallery_pk == pk) & (table.c[column] > now)
                connection.execute(table.update().where(late).values({column: now}))


def downgrade() -> None:
    """What is gone is not needed."""
