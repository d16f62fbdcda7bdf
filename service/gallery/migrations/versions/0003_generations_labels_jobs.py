"""Vectors by recogniser, labels to filter by, counts kept up, crops, jobs, and how far shared indexes have come."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

KEY = sa.BigInteger().with_variant(sa.Integer, "sqlite")
TIME = sa.DateTime(timezone=True)


def _reference(name: str, target: str, primary_key: bool = False) -> sa.Column[int]:
    return sa.Column(name, KEY, sa.ForeignKey(target, ondelete="CASCADE"), primary_key=primary_key, nullable=False)


def upgrade() -> None:
    for column in (
        sa.Column("generation", sa.Integer, nullable=False, server_default="0"),
        sa.Column("subject_count", sa.Integer, nullable=False, server_default="0"),
        sa.Column("template_count", sa.Integer, nullable=False, server_default="0"),
        sa.Column("log_floor", KEY, nullable=False, server_default="0"),
    ):
        op.add_column("galleries", column)
    for table in ("subject", "template"):
        op.execute(
            f"UPDATE galleries SET {table}_count = "  # noqa: S608
            f"(SELECT count(*) FROM {table}s WHERE {table}s.gallery_pk = galleries.pk)"
        )
    op.create_table(
        "generations",
        _reference("gallery_pk", "galleries.pk", primary_key=True),
        sa.Column("generation", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("dimension", sa.Integer, nullable=False),
        sa.Column("model", sa.String(128)),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("details", sa.JSON, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("updated_at", TIME, nullable=False),
    )
    op.execute(
        "INSERT INTO generations (gallery_pk, generation, fingerprint, dimension, state, details, created_at, "
        "updated_at) SELECT pk, 0, fingerprint, dimension, 'current', '{}', created_at, created_at FROM galleries"
    )
    _split_templates()
    _make_labels()
    op.create_table(
        "crops",
        _reference("template_pk", "templates.pk", primary_key=True),
        sa.Column("image", sa.LargeBinary, nullable=False),
        sa.Column("landmarks", sa.JSON, nullable=False),
    )
    # Evidence is derived: the next change of a gallery, or its next search, makes it anew.
    op.drop_table("evidence")
    op.create_table(
        "evidence",
        _reference("gallery_pk", "galleries.pk", primary_key=True),
        sa.Column("generation", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("sequence", KEY, nullable=False),
        sa.Column("fusion", sa.String(32), nullable=False),
        sa.Column("templates", sa.Integer, nullable=False),
        sa.Column("document", sa.Text, nullable=False),
        sa.Column("derived_at", TIME, nullable=False),
    )
    op.create_table(
        "index_states",
        _reference("gallery_pk", "galleries.pk", primary_key=True),
        sa.Column("generation", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("engine", sa.String(32), primary_key=True),
        sa.Column("sequence", KEY, nullable=False),
        sa.Column("updated_at", TIME, nullable=False),
    )
    op.create_table(
        "jobs",
        sa.Column("pk", KEY, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(32), nullable=False, unique=True),
        sa.Column("kind", sa.String(32), nullable=False),
        _reference("gallery_pk", "galleries.pk"),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("parameters", sa.JSON, nullable=False),
        sa.Column("progress", sa.JSON, nullable=False),
        sa.Column("problem", sa.JSON),
        sa.Column("cancel", sa.Boolean, nullable=False),
        sa.Column("owner", sa.String(64)),
        sa.Column("lease_until", TIME),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("updated_at", TIME, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("jobs_by_state", "jobs", ["state"])
    op.create_index("jobs_by_gallery", "jobs", ["gallery_pk"])
    op.create_table(
        "job_items",
        _reference("job_pk", "jobs.pk", primary_key=True),
        sa.Column("item", sa.String(512), primary_key=True),
        sa.Column("problem", sa.JSON),
        sa.Column("at", TIME, nullable=False),
    )


def _split_templates() -> None:
    """Move the vectors into a table of their own, and make template ids unique within a gallery only."""
    for index in ("templates_by_subject", "templates_by_gallery"):
        op.drop_index(index, "templates")
    op.rename_table("templates", "templates_before")
    op.create_table(
        "templates",
        sa.Column("pk", KEY, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(32), nullable=False),
        _reference("gallery_pk", "galleries.pk"),
        _reference("subject_pk", "subjects.pk"),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("quality", sa.JSON),
        sa.Column("detection_score", sa.Float),
        sa.Column("created_at", TIME, nullable=False),
        sa.UniqueConstraint("gallery_pk", "id"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "vectors",
        _reference("template_pk", "templates.pk", primary_key=True),
        sa.Column("generation", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("vector", sa.LargeBinary, nullable=False),
    )
    kept = "pk, id, gallery_pk, subject_pk, kind, quality, detection_score, created_at"
    op.execute(f"INSERT INTO templates ({kept}) SELECT {kept} FROM templates_before ORDER BY pk")  # noqa: S608
    op.execute("INSERT INTO vectors SELECT pk, 0, vector FROM templates_before ORDER BY pk")
    # A deleted template's key must not name another one: counting goes on where it was.
    if op.get_bind().dialect.name == "sqlite":
        op.execute("DELETE FROM sqlite_sequence WHERE name = 'templates'")
        op.execute(
            "INSERT INTO sqlite_sequence (name, seq) SELECT 'templates', seq FROM sqlite_sequence "
            "WHERE name = 'templates_before'"
        )
    else:
        op.execute(
            "SELECT setval(pg_get_serial_sequence('templates', 'pk'), "
            "nextval(pg_get_serial_sequence('templates_before', 'pk')))"
        )
    op.drop_table("templates_before")
    op.create_index("templates_by_subject", "templates", ["subject_pk"])


def _make_labels() -> None:
    """Empty: 0007 labels everybody, by keyed hashes."""
    op.create_table(
        "labels",
        _reference("gallery_pk", "galleries.pk", primary_key=True),
        sa.Column("label", sa.String(32), primary_key=True),
        _reference("subject_pk", "subjects.pk", primary_key=True),
    )
    op.create_index("labels_by_subject", "labels", ["subject_pk"])


def downgrade() -> None:
    raise RuntimeError("vectors of several recognisers do not fit the tables before: restore a backup")
