"""Tables of the gallery database, equal to what the Alembic migrations create (a test compares them)."""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Dialect,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    ScalarSelect,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    case,
    false,
    func,
    select,
)

metadata = MetaData()

# SQLite generates only plain INTEGER keys.
Key = BigInteger().with_variant(Integer, "sqlite")


class Utc(TypeDecorator[datetime]):
    """Aware UTC datetime. SQLite does not store the time zone."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return value.astimezone(UTC) if value is not None else None

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC)


galleries = Table(
    "galleries",
    metadata,
    Column("pk", Key, primary_key=True, autoincrement=True),
    Column("name", String(64), nullable=False, unique=True),
    Column("fingerprint", String(64), nullable=False),
    Column("dimension", Integer, nullable=False),
    Column("current_generation", Integer, nullable=False, server_default="0"),
    Column("settings", JSON, nullable=False),
    Column("subject_count", Integer, nullable=False, server_default="0"),
    Column("template_count", Integer, nullable=False, server_default="0"),
    Column("log_floor", Key, nullable=False, server_default="0"),
    Column("version", Key, nullable=False, server_default="0"),
    Column("erased", Key, nullable=False, server_default="0"),
    Column("created_at", Utc, nullable=False),
    sqlite_autoincrement=True,  # keys of deleted galleries are never reused
)

# A gallery's vectors by one recognizer. One generation is current (galleries.current_generation). A migration to
# another recognizer adds a second one, and keeps the first for a rollback.
generations = Table(
    "generations",
    metadata,
    Column("gallery_pk", ForeignKey("galleries.pk", ondelete="CASCADE"), primary_key=True),
    Column("generation", Integer, primary_key=True, autoincrement=False),
    Column("fingerprint", String(64), nullable=False),
    Column("dimension", Integer, nullable=False),
    Column("model", String(128)),
    Column("state", String(16), nullable=False),
    Column("details", JSON, nullable=False),
    Column("created_at", Utc, nullable=False),
    Column("updated_at", Utc, nullable=False),
)

# lookup: keyed hash of the id. sealed: id, name, metadata and tags (service.storage.db.row_sealing). erased, here and
# in other tables: key of the gallery's last receipt that the writing request knew.
subjects = Table(
    "subjects",
    metadata,
    Column("pk", Key, primary_key=True, autoincrement=True),
    Column("gallery_pk", ForeignKey("galleries.pk", ondelete="CASCADE"), nullable=False),
    Column("lookup", String(32), nullable=False),
    Column("sealed", LargeBinary, nullable=False),
    Column("created_at", Utc, nullable=False),
    Column("updated_at", Utc, nullable=False),
    Column("erased", Key, nullable=False, server_default="0"),
    UniqueConstraint("gallery_pk", "lookup"),
    sqlite_autoincrement=True,
)

# Keyed hashes of tags and metadata entries, so that a filter is an index lookup.
labels = Table(
    "labels",
    metadata,
    Column("gallery_pk", ForeignKey("galleries.pk", ondelete="CASCADE"), primary_key=True),
    Column("label", String(32), primary_key=True),
    Column("subject_pk", ForeignKey("subjects.pk", ondelete="CASCADE"), primary_key=True),
    Index("labels_by_subject", "subject_pk"),
)

# moved: the template belonged to another subject before, and still does in older backups.
templates = Table(
    "templates",
    metadata,
    Column("pk", Key, primary_key=True, autoincrement=True),
    Column("id", String(32), nullable=False),
    Column("gallery_pk", ForeignKey("galleries.pk", ondelete="CASCADE"), nullable=False),
    Column("subject_pk", ForeignKey("subjects.pk", ondelete="CASCADE"), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("quality", JSON),
    Column("detection_score", Float),
    Column("created_at", Utc, nullable=False),
    Column("erased", Key, nullable=False, server_default="0"),
    Column("moved", Boolean, nullable=False, server_default=false()),
    UniqueConstraint("gallery_pk", "id"),
    Index("templates_by_subject", "subject_pk"),
    Index("templates_by_age", "gallery_pk", "created_at"),
    sqlite_autoincrement=True,
)

# Sealed embeddings of a template, one for each generation.
vectors = Table(
    "vectors",
    metadata,
    Column("template_pk", ForeignKey("templates.pk", ondelete="CASCADE"), primary_key=True),
    Column("generation", Integer, primary_key=True, autoincrement=False),
    Column("vector", LargeBinary, nullable=False),
)

# Sealed face crops, if the gallery keeps them, so that another recognizer can embed them.
crops = Table(
    "crops",
    metadata,
    Column("template_pk", ForeignKey("templates.pk", ondelete="CASCADE"), primary_key=True),
    Column("sealed", LargeBinary, nullable=False),
)

# Change log. No foreign key to templates: the line of a removal outlives its template.
changes = Table(
    "changes",
    metadata,
    Column("sequence", Key, primary_key=True, autoincrement=True),
    Column("gallery_pk", ForeignKey("galleries.pk", ondelete="CASCADE"), nullable=False),
    Column("template_pk", Key, nullable=False),
    Column("subject_pk", Key, nullable=False),
    Index("changes_by_gallery", "gallery_pk", "sequence"),
    sqlite_autoincrement=True,
)


def last_change() -> ScalarSelect[int]:
    """Select the sequence of the latest change log entry of a gallery, even if the entry was deleted."""
    last = func.coalesce(func.max(changes.c.sequence), 0)
    own = select(last).where(changes.c.gallery_pk == galleries.c.pk).correlate(galleries).scalar_subquery()
    latest = case((own > galleries.c.log_floor, own), else_=galleries.c.log_floor)
    return select(latest).correlate(galleries).scalar_subquery()


# Idempotent answers. lookup, digest: keyed hashes of the key and of the request. sealed: the answer.
idempotency = Table(
    "idempotency",
    metadata,
    Column("gallery_pk", ForeignKey("galleries.pk", ondelete="CASCADE"), primary_key=True),
    Column("lookup", String(32), primary_key=True),
    Column("subject_pk", ForeignKey("subjects.pk", ondelete="CASCADE"), nullable=False),
    Column("digest", String(32), nullable=False),
    Column("sealed", LargeBinary, nullable=False),
    Column("created_at", Utc, nullable=False),
)

# Latest score distribution of each generation, derived by one process for all.
evidence = Table(
    "evidence",
    metadata,
    Column("gallery_pk", ForeignKey("galleries.pk", ondelete="CASCADE"), primary_key=True),
    Column("generation", Integer, primary_key=True, autoincrement=False),
    Column("sequence", Key, nullable=False),
    Column("fusion", String(32), nullable=False),
    Column("templates", Integer, nullable=False),
    Column("document", Text, nullable=False),
    Column("derived_at", Utc, nullable=False),
)

# Positions of shared indexes in a gallery's change log.
index_states = Table(
    "index_states",
    metadata,
    Column("gallery_pk", ForeignKey("galleries.pk", ondelete="CASCADE"), primary_key=True),
    Column("generation", Integer, primary_key=True, autoincrement=False),
    Column("engine", String(32), primary_key=True),
    Column("sequence", Key, nullable=False),
    Column("updated_at", Utc, nullable=False),
)

# Background jobs with leases. problem: sealed, because it may name a subject's file. actor: the requester.
jobs = Table(
    "jobs",
    metadata,
    Column("pk", Key, primary_key=True, autoincrement=True),
    Column("id", String(32), nullable=False, unique=True),
    Column("kind", String(32), nullable=False),
    Column("gallery_pk", ForeignKey("galleries.pk", ondelete="CASCADE"), nullable=False),
    Column("state", String(16), nullable=False),
    Column("parameters", JSON, nullable=False),
    Column("progress", JSON, nullable=False),
    Column("problem", LargeBinary),
    Column("actor", String(64), nullable=False),
    Column("cancel", Boolean, nullable=False),
    Column("owner", String(64)),
    Column("lease_until", Utc),
    Column("erased", Key, nullable=False, server_default="0"),
    Column("created_at", Utc, nullable=False),
    Column("updated_at", Utc, nullable=False),
    Index("jobs_by_state", "state"),
    Index("jobs_by_gallery", "gallery_pk"),
    sqlite_autoincrement=True,
)

# Finished items of jobs, so that a job can resume. lookup: keyed hash of the item. sealed: the item and its problem.
# subject: keyed hash of the subject's id.
job_items = Table(
    "job_items",
    metadata,
    Column("pk", Key, primary_key=True, autoincrement=True),
    Column("job_pk", ForeignKey("jobs.pk", ondelete="CASCADE"), nullable=False),
    Column("lookup", String(32), nullable=False),
    Column("sealed", LargeBinary, nullable=False),
    Column("failed", Boolean, nullable=False),
    Column("subject", String(32)),
    Column("at", Utc, nullable=False),
    UniqueConstraint("job_pk", "lookup"),
    Index("job_items_by_job", "job_pk", "pk"),
    Index("job_items_by_subject", "subject"),
    sqlite_autoincrement=True,
)

# Data keys of galleries, wrapped by the master key. Without its data key a gallery is unreadable.
data_keys = Table(
    "data_keys",
    metadata,
    Column("gallery_pk", ForeignKey("galleries.pk", ondelete="CASCADE"), primary_key=True),
    Column("wrapped", LargeBinary, nullable=False),
    Column("master_key", String(64), nullable=False),
    Column("created_at", Utc, nullable=False),
)

# Secrets of the service by purpose, wrapped by the master key.
secrets = Table(
    "secrets",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("wrapped", LargeBinary, nullable=False),
    Column("master_key", String(64), nullable=False),
    Column("created_at", Utc, nullable=False),
)

# digest: HMAC of the token by a secret of the service. galleries: names, or null for all. revoked: revoked for good.
# revoked_at without revoked: end of a rotated key. mac: HMAC of all columns except used_at by the same secret.
api_keys = Table(
    "api_keys",
    metadata,
    Column("pk", Key, primary_key=True, autoincrement=True),
    Column("id", String(16), nullable=False, unique=True),
    Column("digest", String(64), nullable=False),
    Column("name", String(128), nullable=False),
    Column("scopes", JSON, nullable=False),
    Column("galleries", JSON),
    Column("rate", Float),
    Column("burst", Integer),
    Column("created_at", Utc, nullable=False),
    Column("expires_at", Utc),
    Column("revoked_at", Utc),
    Column("used_at", Utc),
    Column("revoked", Boolean, nullable=False, server_default=false()),
    Column("mac", String(64), nullable=False),
    sqlite_autoincrement=True,
)

# One row with a random version, replaced whenever a column of api_keys except used_at changes.
api_key_versions = Table(
    "api_key_versions",
    metadata,
    Column("pk", Key, primary_key=True, autoincrement=False),
    Column("version", Key, nullable=False),
)

# Receipts of erasures, by keyed hashes, so that neither earlier requests nor backups restore the data. No foreign key
# to galleries: receipts outlive them. key: name of the data key of the hashes. line, hash: of the audit line.
erasures = Table(
    "erasures",
    metadata,
    Column("pk", Key, primary_key=True, autoincrement=True),
    Column("id", String(32), nullable=False, unique=True),
    Column("kind", String(16), nullable=False),
    Column("gallery_pk", Key, nullable=False),
    Column("gallery", String(64), nullable=False),
    Column("key", String(32), nullable=False),
    Column("subject", String(32)),
    Column("template", String(32)),
    Column("removed", JSON, nullable=False),
    Column("at", Utc, nullable=False),
    Column("line", Key, nullable=False),
    Column("hash", String(64), nullable=False),
    Index("erasures_by_subject", "gallery_pk", "subject"),
    sqlite_autoincrement=True,
)

# Leases of tasks that one process at a time runs for all.
leases = Table(
    "leases",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("owner", String(64), nullable=False),
    Column("until", Utc, nullable=False),
)

# Galleries whose retention waits for a confirmation since ``at``, with the counts of the latest sweep.
retention_holds = Table(
    "retention_holds",
    metadata,
    Column("gallery_pk", ForeignKey("galleries.pk", ondelete="CASCADE"), primary_key=True),
    Column("templates", Integer, nullable=False),
    Column("subjects", Integer, nullable=False),
    Column("at", Utc, nullable=False),
)

# sealed: address, secret, name and filter, so that write access to the database redirects no events.
webhooks = Table(
    "webhooks",
    metadata,
    Column("pk", Key, primary_key=True, autoincrement=True),
    Column("id", String(32), nullable=False, unique=True),
    Column("sealed", LargeBinary, nullable=False),
    Column("created_at", Utc, nullable=False),
    sqlite_autoincrement=True,
)

# Outbox: events that at least one webhook wants. subject: keyed hash of the subject's id, as in ``subjects.lookup``.
# sealed: the body.
events = Table(
    "events",
    metadata,
    Column("pk", Key, primary_key=True, autoincrement=True),
    Column("id", String(32), nullable=False, unique=True),
    Column("gallery_pk", ForeignKey("galleries.pk", ondelete="CASCADE"), nullable=False),
    Column("type", String(32), nullable=False),
    Column("subject", String(32)),
    Column("sealed", LargeBinary, nullable=False),
    Column("at", Utc, nullable=False),
    Index("events_by_subject", "gallery_pk", "subject"),
    Index("events_by_age", "at"),
    sqlite_autoincrement=True,
)

# One row for each webhook that wants an event, with the result of the last attempt.
deliveries = Table(
    "deliveries",
    metadata,
    Column("pk", Key, primary_key=True, autoincrement=True),
    Column("webhook_pk", ForeignKey("webhooks.pk", ondelete="CASCADE"), nullable=False),
    Column("gallery_pk", ForeignKey("galleries.pk", ondelete="CASCADE"), nullable=False),
    Column("event_pk", ForeignKey("events.pk", ondelete="CASCADE"), nullable=False),
    Column("state", String(16), nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("next_at", Utc, nullable=False),
    Column("status", Integer),
    Column("error", String(200)),
    Column("updated_at", Utc, nullable=False),
    Index("deliveries_by_stream", "state", "webhook_pk", "gallery_pk", "pk"),
    Index("deliveries_by_webhook", "webhook_pk", "pk"),
    Index("deliveries_by_gallery", "gallery_pk"),
    Index("deliveries_by_event", "event_pk"),
    sqlite_autoincrement=True,
)

# Audit lines. No foreign key to galleries: lines outlive them. chain: the gallery's key, 0 for the service. number:
# from 1 in each chain. hash: covers the line and the previous hash. subject: keyed hash of the id.
audit = Table(
    "audit",
    metadata,
    Column("pk", Key, primary_key=True, autoincrement=True),
    Column("chain", Key, nullable=False),
    Column("number", Key, nullable=False),
    Column("at", Utc, nullable=False),
    Column("event", String(64), nullable=False),
    Column("outcome", String(32), nullable=False),
    Column("actor", String(64), nullable=False),
    Column("request_id", String(64)),
    Column("gallery_pk", Key),
    Column("gallery", String(64)),
    Column("subject", String(32)),
    Column("details", JSON, nullable=False),
    Column("hash", String(64), nullable=False),
    Index("audit_by_gallery", "gallery_pk", "pk"),
    UniqueConstraint("chain", "number", name="audit_by_chain"),
    sqlite_autoincrement=True,
)

# Last line of each chain. mac: HMAC by a secret of the service, which write access to the database does not reveal.
audit_heads = Table(
    "audit_heads",
    metadata,
    Column("chain", Key, primary_key=True, autoincrement=False),
    Column("number", Key, nullable=False),
    Column("hash", String(64), nullable=False),
    Column("mac", String(64), nullable=False),
)
