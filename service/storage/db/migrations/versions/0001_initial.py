"""Create all tables, indexes and audit triggers of Kith 0.2.0. Released: never change this file."""

import secrets

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.engine import Connection

revision = "0001"
down_revision = None

KEY = sa.BigInteger().with_variant(sa.Integer, "sqlite")
TIME = sa.DateTime(timezone=True)
SERVICE_SECRETS = ("audit", "api keys")
AUDIT_REFUSAL = "the audit is append-only"


def upgrade() -> None:
    _create_galleries()
    _create_change_log()
    _create_subjects()
    _create_jobs()
    _create_keys()
    _create_audit()
    vault, connection = context.config.attributes["vault"], op.get_bind()
    for name in SERVICE_SECRETS:
        vault.create_secret(connection, name)
    _protect_audit(connection)


def _gallery(primary_key: bool = False) -> sa.Column[int]:
    target = sa.ForeignKey("galleries.pk", ondelete="CASCADE")
    return sa.Column("gallery_pk", KEY, target, primary_key=primary_key, nullable=False)


def _create_galleries() -> None:
    op.create_table(
        "galleries",
        sa.Column("pk", KEY, primary_key=True, autoincrement=True),
        sa.Column("name", sa.String(64), nullable=False, unique=True),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("dimension", sa.Integer, nullable=False),
        sa.Column("current_generation", sa.Integer, nullable=False, server_default="0"),
        sa.Column("settings", sa.JSON, nullable=False),
        sa.Column("subject_count", sa.Integer, nullable=False, server_default="0"),
        sa.Column("template_count", sa.Integer, nullable=False, server_default="0"),
        sa.Column("log_floor", KEY, nullable=False, server_default="0"),
        sa.Column("version", KEY, nullable=False, server_default="0"),
        sa.Column("erased", KEY, nullable=False, server_default="0"),
        sa.Column("created_at", TIME, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "generations",
        _gallery(primary_key=True),
        sa.Column("generation", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("dimension", sa.Integer, nullable=False),
        sa.Column("model", sa.String(128)),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("details", sa.JSON, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("updated_at", TIME, nullable=False),
    )
    op.create_table(
        "data_keys",
        _gallery(primary_key=True),
        sa.Column("wrapped", sa.LargeBinary, nullable=False),
        sa.Column("master_key", sa.String(64), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
    )
    op.create_table(
        "evidence",
        _gallery(primary_key=True),
        sa.Column("generation", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("sequence", KEY, nullable=False),
        sa.Column("fusion", sa.String(32), nullable=False),
        sa.Column("templates", sa.Integer, nullable=False),
        sa.Column("document", sa.Text, nullable=False),
        sa.Column("derived_at", TIME, nullable=False),
    )


def _create_change_log() -> None:
    op.create_table(
        "changes",
        sa.Column("sequence", KEY, primary_key=True, autoincrement=True),
        _gallery(),
        sa.Column("template_pk", KEY, nullable=False),
        sa.Column("subject_pk", KEY, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("changes_by_gallery", "changes", ["gallery_pk", "sequence"])
    op.create_table(
        "index_states",
        _gallery(primary_key=True),
        sa.Column("generation", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("engine", sa.String(32), primary_key=True),
        sa.Column("sequence", KEY, nullable=False),
        sa.Column("updated_at", TIME, nullable=False),
    )
    op.create_table(
        "retention_holds",
        _gallery(primary_key=True),
        sa.Column("templates", sa.Integer, nullable=False),
        sa.Column("subjects", sa.Integer, nullable=False),
        sa.Column("at", TIME, nullable=False),
    )


def _create_subjects() -> None:
    op.create_table(
        "subjects",
        sa.Column("pk", KEY, primary_key=True, autoincrement=True),
        _gallery(),
        sa.Column("lookup", sa.String(32), nullable=False),
        sa.Column("sealed", sa.LargeBinary, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("updated_at", TIME, nullable=False),
        sa.Column("erased", KEY, nullable=False, server_default="0"),
        sa.UniqueConstraint("gallery_pk", "lookup"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "labels",
        _gallery(primary_key=True),
        sa.Column("label", sa.String(32), primary_key=True),
        sa.Column("subject_pk", KEY, sa.ForeignKey("subjects.pk", ondelete="CASCADE"), primary_key=True),
    )
    op.create_index("labels_by_subject", "labels", ["subject_pk"])
    op.create_table(
        "templates",
        sa.Column("pk", KEY, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(32), nullable=False),
        _gallery(),
        sa.Column("subject_pk", KEY, sa.ForeignKey("subjects.pk", ondelete="CASCADE"), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("quality", sa.JSON),
        sa.Column("detection_score", sa.Float),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("erased", KEY, nullable=False, server_default="0"),
        sa.Column("moved", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.UniqueConstraint("gallery_pk", "id"),
        sqlite_autoincrement=True,
    )
    op.create_index("templates_by_age", "templates", ["gallery_pk", "created_at"])
    op.create_index("templates_by_subject", "templates", ["subject_pk"])
    op.create_table(
        "vectors",
        sa.Column("template_pk", KEY, sa.ForeignKey("templates.pk", ondelete="CASCADE"), primary_key=True),
        sa.Column("generation", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("vector", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "crops",
        sa.Column("template_pk", KEY, sa.ForeignKey("templates.pk", ondelete="CASCADE"), primary_key=True),
        sa.Column("sealed", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "idempotency",
        _gallery(primary_key=True),
        sa.Column("lookup", sa.String(32), primary_key=True),
        sa.Column("subject_pk", KEY, sa.ForeignKey("subjects.pk", ondelete="CASCADE"), nullable=False),
        sa.Column("digest", sa.String(32), nullable=False),
        sa.Column("sealed", sa.LargeBinary, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
    )


def _create_jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("pk", KEY, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(32), nullable=False, unique=True),
        sa.Column("kind", sa.String(32), nullable=False),
        _gallery(),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("parameters", sa.JSON, nullable=False),
        sa.Column("progress", sa.JSON, nullable=False),
        sa.Column("problem", sa.LargeBinary),
        sa.Column("actor", sa.String(64), nullable=False),
        sa.Column("cancel", sa.Boolean, nullable=False),
        sa.Column("owner", sa.String(64)),
        sa.Column("lease_until", TIME),
        sa.Column("erased", KEY, nullable=False, server_default="0"),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("updated_at", TIME, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("jobs_by_gallery", "jobs", ["gallery_pk"])
    op.create_index("jobs_by_state", "jobs", ["state"])
    op.create_table(
        "job_items",
        sa.Column("pk", KEY, primary_key=True, autoincrement=True),
        sa.Column("job_pk", KEY, sa.ForeignKey("jobs.pk", ondelete="CASCADE"), nullable=False),
        sa.Column("lookup", sa.String(32), nullable=False),
        sa.Column("sealed", sa.LargeBinary, nullable=False),
        sa.Column("failed", sa.Boolean, nullable=False),
        sa.Column("subject", sa.String(32)),
        sa.Column("at", TIME, nullable=False),
        sa.UniqueConstraint("job_pk", "lookup"),
        sqlite_autoincrement=True,
    )
    op.create_index("job_items_by_job", "job_items", ["job_pk", "pk"])
    op.create_index("job_items_by_subject", "job_items", ["subject"])
    op.create_table(
        "leases",
        sa.Column("name", sa.String(32), primary_key=True),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("until", TIME, nullable=False),
    )


def _create_keys() -> None:
    op.create_table(
        "secrets",
        sa.Column("name", sa.String(32), primary_key=True),
        sa.Column("wrapped", sa.LargeBinary, nullable=False),
        sa.Column("master_key", sa.String(64), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
    )
    op.create_table(
        "api_keys",
        sa.Column("pk", KEY, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(16), nullable=False, unique=True),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("scopes", sa.JSON, nullable=False),
        sa.Column("galleries", sa.JSON),
        sa.Column("rate", sa.Float),
        sa.Column("burst", sa.Integer),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("expires_at", TIME),
        sa.Column("revoked_at", TIME),
        sa.Column("used_at", TIME),
        sa.Column("revoked", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("mac", sa.String(64), nullable=False),
        sqlite_autoincrement=True,
    )
    versions = op.create_table(
        "api_key_versions",
        sa.Column("pk", KEY, primary_key=True, autoincrement=False),
        sa.Column("version", KEY, nullable=False),
    )
    op.bulk_insert(versions, [{"pk": 1, "version": secrets.randbits(63)}])


def _create_audit() -> None:
    op.create_table(
        "audit",
        sa.Column("pk", KEY, primary_key=True, autoincrement=True),
        sa.Column("chain", KEY, nullable=False),
        sa.Column("number", KEY, nullable=False),
        sa.Column("at", TIME, nullable=False),
        sa.Column("event", sa.String(64), nullable=False),
        sa.Column("outcome", sa.String(32), nullable=False),
        sa.Column("actor", sa.String(64), nullable=False),
        sa.Column("request_id", sa.String(64)),
        sa.Column("gallery_pk", KEY),
        sa.Column("gallery", sa.String(64)),
        sa.Column("subject", sa.String(32)),
        sa.Column("details", sa.JSON, nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
        sa.UniqueConstraint("chain", "number", name="audit_by_chain"),
        sqlite_autoincrement=True,
    )
    op.create_index("audit_by_gallery", "audit", ["gallery_pk", "pk"])
    op.create_table(
        "audit_heads",
        sa.Column("chain", KEY, primary_key=True, autoincrement=False),
        sa.Column("number", KEY, nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
        sa.Column("mac", sa.String(64), nullable=False),
    )
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
        sa.Column("at", TIME, nullable=False),
        sa.Column("line", KEY, nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("erasures_by_subject", "erasures", ["gallery_pk", "subject"])


def _protect_audit(connection: Connection) -> None:
    """Reject changes of audit lines, unless a restore replaces the whole audit (service.storage.db.audit_triggers)."""
    if connection.dialect.name == "sqlite":
        for operation in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER audit_{operation.lower()} BEFORE {operation} ON audit "
                f"BEGIN SELECT RAISE(ABORT, '{AUDIT_REFUSAL}'); END"
            )
        return
    op.execute(
        "CREATE FUNCTION audit_guard() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "IF current_setting('kith.restoring', true) = 'on' THEN RETURN NULL; END IF; "
        f"RAISE EXCEPTION '{AUDIT_REFUSAL}'; END $$"
    )
    op.execute(
        "CREATE TRIGGER audit_guard BEFORE UPDATE OR DELETE OR TRUNCATE ON audit "
        "FOR EACH STATEMENT EXECUTE FUNCTION audit_guard()"
    )
