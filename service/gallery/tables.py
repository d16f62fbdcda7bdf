"""The tables, as Alembic's migrations create them (a test keeps the two equal)."""

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
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    false,
)

metadata = MetaData()

# SQLite counts up by itself only in a plain INTEGER key.
Key = BigInteger().with_variant(Integer, "sqlite")


class Utc(TypeDecorator[datetime]):
    """An aware UTC datetime: SQLite forgets the zone."""

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
    sqlite_autoincrement=True,  # a deleted gallery's key must not name another one
)

# A gallery's vectors under one recogniser. One generation is current (galleries.current_generation); while a gallery
# moves to another recogniser there is a second, and afterwards the first stays for the way back.
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

# ``lookup``: a keyed hash of the id; ``sealed``: id, name, metadata and tags (service.gallery.sealed_rows).
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

# What a subject can be asked for by, tags and metadata alike: a keyed hash each, so that a filter is an index lookup.
labels = Table(
    "labels",
    metadata,
    Column("gallery_pk", ForeignKey("galleries.pk", ondelete="CASCADE"), primary_key=True),
    Column("label", String(32), primary_key=True),
    Column("subject_pk", ForeignKey("subjects.pk", ondelete="CASCADE"), primary_key=True),
    Index("labels_by_subject", "subject_pk"),
)

# ``moved``: it was another subject's before, whose it is in a backup of then.
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

# ``erased``, of a subject or a template: of the last erasure that the work knew of which stored it.

# A template's embedding by each recogniser that has seen it, sealed.
vectors = Table(
    "vectors",
    metadata,
    Column("template_pk", ForeignKey("templates.pk", ondelete="CASCADE"), primary_key=True),
    Column("generation", Integer, primary_key=True, autoincrement=False),
    Column("vector", LargeBinary, nullable=False),
)

# The face that a template was made from, where the gallery keeps it: what another recogniser can embed anew.
crops = Table(
    "crops",
    metadata,
    Column("template_pk", ForeignKey("templates.pk", ondelete="CASCADE"), primary_key=True),
    Column("sealed", LargeBinary, nullable=False),
)

# No foreign key to templates: a removal outlives its template, so that followers learn of it.
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

# ``lookup``, ``digest``: keyed hashes of the key and of what was asked; ``sealed``: the answer.
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

# The latest of each gallery's generations: derived once, read by every process.
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

# How far an index that all nodes share has followed a gallery's log.
index_states = Table(
    "index_states",
    metadata,
    Column("gallery_pk", ForeignKey("galleries.pk", ondelete="CASCADE"), primary_key=True),
    Column("generation", Integer, primary_key=True, autoincrement=False),
    Column("engine", String(32), primary_key=True),
    Column("sequence", Key, nullable=False),
    Column("updated_at", Utc, nullable=False),
)

# Long work. Whoever runs a job renews its lease; a job whose lease ran out belongs to whoever takes it. ``problem`` is
# sealed, as it may name a person's file; ``actor``: who asked for it.
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

# What a job has done already, so that it resumes, and what became of each item. ``lookup``: a keyed hash of the item;
# ``sealed``: the item and its problem; ``subject``: a keyed hash of whom it concerns.
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

# What opens a gallery's sealed columns, wrapped by the master key. Without it the gallery is gone.
data_keys = Table(
    "data_keys",
    metadata,
    Column("gallery_pk", ForeignKey("galleries.pk", ondelete="CASCADE"), primary_key=True),
    Column("wrapped", LargeBinary, nullable=False),
    Column("master_key", String(64), nullable=False),
    Column("created_at", Utc, nullable=False),
)

# The service's own keys, by purpose, wrapped by the master key.
secrets = Table(
    "secrets",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("wrapped", LargeBinary, nullable=False),
    Column("master_key", String(64), nullable=False),
    Column("created_at", Utc, nullable=False),
)

# ``digest``: of the key's token, under a secret of the service. ``galleries``: names, or null for all. ``revoked``: for
# every clock; ``revoked_at`` alone: when the other takes over that was made in its place. ``mac``: of all this but
# ``used_at``, under that secret.
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
    Column("mac", String(64), nullable=False, server_default=""),
    sqlite_autoincrement=True,
)

# One row: ``version`` is drawn anew whenever anything above is changed but ``used_at``.
api_key_versions = Table(
    "api_key_versions",
    metadata,
    Column("pk", Key, primary_key=True, autoincrement=False),
    Column("version", Key, nullable=False),
)

# What was erased, by keyed hashes, so that neither work begun before nor a backup brings it back. Without a foreign key
# to galleries, which it outlives. ``key``: names the data key that the hash was made with. ``line``, ``hash``: of the
# audit's line that says so.
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

# What one process at a time does for all.
leases = Table(
    "leases",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("owner", String(64), nullable=False),
    Column("until", Utc, nullable=False),
)

# Galleries whose retention waits for a confirmation, since ``at``: how much would have gone in the latest sweep.
retention_holds = Table(
    "retention_holds",
    metadata,
    Column("gallery_pk", ForeignKey("galleries.pk", ondelete="CASCADE"), primary_key=True),
    Column("templates", Integer, nullable=False),
    Column("subjects", Integer, nullable=False),
    Column("at", Utc, nullable=False),
)

# No foreign key to galleries: what happened outlives them. ``chain``: the gallery's key, 0 for what concerns none; the
# lines of a chain are numbered from 1, and each ``hash`` covers its line and the hash before. ``subject``: a keyed hash
# of the id.
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

# The last line of each chain. ``mac``: of both under a secret of the service, which who can write here need not have.
audit_heads = Table(
    "audit_heads",
    metadata,
    Column("chain", Key, primary_key=True, autoincrement=False),
    Column("number", Key, nullable=False),
    Column("hash", String(64), nullable=False),
    Column("mac", String(64), nullable=False),
)
