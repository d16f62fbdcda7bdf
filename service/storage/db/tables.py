"""Tables of the gallery database. From release 0.2.0 on, each change of them has an Alembic revision for upgrades."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import sqlalchemy as sa

metadata = sa.MetaData()

# SQLite generates only plain INTEGER keys.
Key = sa.BigInteger().with_variant(sa.Integer, "sqlite")


class Utc(sa.TypeDecorator[datetime]):
    """Aware UTC datetime. SQLite does not store the time zone."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        return value.astimezone(UTC) if value is not None else None

    def process_result_value(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        if value is None:
            return None
        return value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC)


class Stored(NamedTuple):
    """Row of docs/privacy.md: the personal data in a table, how they are protected, and when they are deleted."""

    personal: str
    form: str = "plain"
    deleted: str = "with the gallery"


def _table(name: str, stored: Stored, *items: sa.schema.SchemaItem, **options: Any) -> sa.Table:
    return sa.Table(name, metadata, *items, info={"stored": stored}, **options)


def _numbered(name: str, stored: Stored, *items: sa.schema.SchemaItem) -> sa.Table:
    """Define a table with row keys that are never reused, even those of deleted rows."""
    key = sa.Column("pk", Key, primary_key=True, autoincrement=True)
    return _table(name, stored, key, *items, sqlite_autoincrement=True)


# companion_of: the gallery whose strangers are the subjects of this one. The check of this key waits for the end of a
# restore, which may insert a companion first.
galleries = _numbered(
    "galleries",
    Stored("none: names, settings, counts", "plain", "on deletion"),
    sa.Column("name", sa.String(80), nullable=False, unique=True),
    sa.Column("fingerprint", sa.String(64), nullable=False),
    sa.Column("dimension", sa.Integer, nullable=False),
    sa.Column("current_generation", sa.Integer, nullable=False, server_default="0"),
    sa.Column("settings", sa.JSON, nullable=False),
    sa.Column("subject_count", sa.Integer, nullable=False, server_default="0"),
    sa.Column("template_count", sa.Integer, nullable=False, server_default="0"),
    sa.Column("log_floor", Key, nullable=False, server_default="0"),
    sa.Column("version", Key, nullable=False, server_default="0"),
    sa.Column(
        "companion_of",
        sa.ForeignKey("galleries.pk", ondelete="CASCADE", deferrable=True, initially="DEFERRED"),
        unique=True,
    ),
    sa.Column("created_at", Utc, nullable=False),
)

# A gallery's vectors by one recognizer. One generation is current (galleries.current_generation). A migration to
# another recognizer adds a second one, and keeps the first for a rollback.
generations = _table(
    "generations",
    Stored("none: recognizers, counts"),
    sa.Column("gallery_pk", sa.ForeignKey("galleries.pk", ondelete="CASCADE"), primary_key=True),
    sa.Column("generation", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("fingerprint", sa.String(64), nullable=False),
    sa.Column("dimension", sa.Integer, nullable=False),
    sa.Column("model", sa.String(128)),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("created_at", Utc, nullable=False),
)

# lookup: keyed hash of the id. sealed: id, name, metadata and tags (service.storage.db.row_sealing). seen_count: visits
# of a stranger, the last at updated_at. owner_pk: of an outsider, who has one template, the subject that it was
# mistaken for. The check of this key waits for the end of a restore, which may insert an outsider first.
subjects = _numbered(
    "subjects",
    Stored(
        "id, name, metadata, tags; visits of strangers",
        "encrypted; visits plain",
        "on deletion, or after `retention_days`; strangers by age",
    ),
    sa.Column("gallery_pk", sa.ForeignKey("galleries.pk", ondelete="CASCADE"), nullable=False),
    sa.Column("owner_pk", sa.ForeignKey("subjects.pk", ondelete="CASCADE", deferrable=True, initially="DEFERRED")),
    sa.Column("lookup", sa.String(32), nullable=False),
    sa.Column("sealed", sa.LargeBinary, nullable=False),
    sa.Column("created_at", Utc, nullable=False),
    sa.Column("updated_at", Utc, nullable=False),
    sa.Column("seen_count", sa.Integer, nullable=False, server_default="1"),
    sa.UniqueConstraint("gallery_pk", "lookup"),
)
IS_PERSON: Final = subjects.c.owner_pk.is_(None)
"""Condition of subjects that callers see: outsiders only compete in searches."""
for _name, *_columns in (
    ("subjects_by_owner", subjects.c.owner_pk),
    ("outsiders_by_gallery", subjects.c.gallery_pk, subjects.c.owner_pk),
):
    sa.Index(_name, *_columns, sqlite_where=~IS_PERSON, postgresql_where=~IS_PERSON)

# Keyed hashes of tags and metadata entries, so that a filter is an index lookup.
labels = _table(
    "labels",
    Stored("tags and metadata of subjects", "keyed hashes", "with the subject"),
    sa.Column("gallery_pk", sa.ForeignKey("galleries.pk", ondelete="CASCADE"), primary_key=True),
    sa.Column("label", sa.String(32), primary_key=True),
    sa.Column("subject_pk", sa.ForeignKey("subjects.pk", ondelete="CASCADE"), primary_key=True),
    sa.Index("labels_by_subject", "subject_pk"),
)

# moved: the template belonged to another subject before, and still does in older backups.
templates = _numbered(
    "templates",
    Stored("time, kind, quality", "plain", "on deletion, or after `retention_days`"),
    sa.Column("id", sa.String(32), nullable=False),
    sa.Column("gallery_pk", sa.ForeignKey("galleries.pk", ondelete="CASCADE"), nullable=False),
    sa.Column("subject_pk", sa.ForeignKey("subjects.pk", ondelete="CASCADE"), nullable=False),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("quality", sa.JSON),
    sa.Column("detection_score", sa.Float),
    sa.Column("created_at", Utc, nullable=False),
    sa.Column("moved", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.UniqueConstraint("gallery_pk", "id"),
    sa.Index("templates_by_subject", "subject_pk"),
    sa.Index("templates_by_age", "gallery_pk", "created_at"),
)
_outsiders = subjects.alias()
OF_PERSON: Final = templates.c.subject_pk.not_in(sa.select(_outsiders.c.pk).where(_outsiders.c.owner_pk.is_not(None)))
"""Condition of templates whose subject callers see."""

# Sealed embeddings of a template, one for each generation.
vectors = _table(
    "vectors",
    Stored("biometric templates, also of decoys and strangers", "encrypted", "with the template"),
    sa.Column("template_pk", sa.ForeignKey("templates.pk", ondelete="CASCADE"), primary_key=True),
    sa.Column("generation", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("vector", sa.LargeBinary, nullable=False),
)

# Sealed face crops, if the gallery keeps them, so that another recognizer can embed them.
crops = _table(
    "crops",
    Stored("face crops and landmarks, if the gallery keeps crops", "encrypted", "with the template"),
    sa.Column("template_pk", sa.ForeignKey("templates.pk", ondelete="CASCADE"), primary_key=True),
    sa.Column("sealed", sa.LargeBinary, nullable=False),
)

# Albums: faces of uploaded photos, grouped into people. id: of the job that makes it. generation: of the vectors.
albums = _numbered(
    "albums",
    Stored("none: numbers of photos and faces, times", "plain", "on deletion; after `KITH_RETENTION_ALBUMS_DAYS`"),
    sa.Column("id", sa.String(32), nullable=False, unique=True),
    sa.Column("gallery_pk", sa.ForeignKey("galleries.pk", ondelete="CASCADE"), nullable=False),
    sa.Column("generation", sa.Integer, nullable=False),
    sa.Column("risk", sa.Float, nullable=False),
    sa.Column("threshold", sa.Float),
    sa.Column("photo_count", sa.Integer, nullable=False, server_default="0"),
    sa.Column("next_group", sa.Integer, nullable=False, server_default="1"),
    sa.Column("grouped_at", Utc),
    sa.Column("created_at", Utc, nullable=False),
    sa.Column("expires_at", Utc, nullable=False),
    sa.Index("albums_by_gallery", "gallery_pk"),
    sa.Index("albums_by_expiry", "expires_at"),
)

# id, photo: keyed hashes of the photo's content, the first with the face's number. group_number: null until the faces
# are grouped. subject_pk: who the rest of the group was enrolled as. certainty: null also if a person chose the group.
# sealed: the photo's name, box, quality and what else enrollment needs. Short columns come first: SQLite reads a row up
# to the last one that it needs.
album_faces = _numbered(
    "album_faces",
    Stored("photo name, quality, template and crop of each face", "encrypted", "with the album; when enrolled"),
    sa.Column("id", sa.String(32), nullable=False),
    sa.Column("album_pk", sa.ForeignKey("albums.pk", ondelete="CASCADE"), nullable=False),
    sa.Column("group_number", sa.Integer),
    sa.Column("subject_pk", sa.ForeignKey("subjects.pk", ondelete="CASCADE")),
    sa.Column("certainty", sa.Float),
    sa.Column("photo", sa.String(32), nullable=False),
    sa.Column("sealed", sa.LargeBinary, nullable=False),
    sa.Column("vector", sa.LargeBinary, nullable=False),
    sa.Column("crop", sa.LargeBinary, nullable=False),
    sa.UniqueConstraint("album_pk", "id"),
    sa.Index("album_faces_by_group", "album_pk", "group_number"),
    sa.Index("album_faces_by_photo", "album_pk", "photo"),
    sa.Index("album_faces_by_subject", "subject_pk"),
)

# Change log. No foreign key to templates: the line of a removal outlives its template.
changes = _table(
    "changes",
    Stored("none: row numbers", "plain", "when the log is trimmed"),
    sa.Column("sequence", Key, primary_key=True, autoincrement=True),
    sa.Column("gallery_pk", sa.ForeignKey("galleries.pk", ondelete="CASCADE"), nullable=False),
    sa.Column("template_pk", Key, nullable=False),
    sa.Column("subject_pk", Key, nullable=False),
    sa.Index("changes_by_gallery", "gallery_pk", "sequence"),
    sqlite_autoincrement=True,
)


def last_change() -> sa.ScalarSelect[int]:
    """Select the sequence of the latest change log entry of a gallery, even if the entry was deleted."""
    last = sa.func.coalesce(sa.func.max(changes.c.sequence), 0)
    own = sa.select(last).where(changes.c.gallery_pk == galleries.c.pk).correlate(galleries).scalar_subquery()
    latest = sa.case((own > galleries.c.log_floor, own), else_=galleries.c.log_floor)
    return sa.select(latest).correlate(galleries).scalar_subquery()


# Answers to enrollments with an Idempotency-Key, which are deleted with their subject. lookup, digest: keyed hashes of
# the key and of the request. sealed: the answer, under the gallery's key.
idempotency = _table(
    "idempotency",
    Stored("answers to enrollments: template ids, quality", "encrypted", "with the subject; after 14 days"),
    sa.Column("gallery_pk", sa.ForeignKey("galleries.pk", ondelete="CASCADE"), primary_key=True),
    sa.Column("lookup", sa.String(32), primary_key=True),
    sa.Column("subject_pk", sa.ForeignKey("subjects.pk", ondelete="CASCADE"), nullable=False),
    sa.Column("digest", sa.String(32), nullable=False),
    sa.Column("sealed", sa.LargeBinary, nullable=False),
    sa.Column("created_at", Utc, nullable=False),
    sa.Index("idempotency_by_subject", "subject_pk"),
)

# Latest score distribution of each generation, derived by one process for all.
evidence = _table(
    "evidence",
    Stored(
        "distributions of similarities, and how much strangers resemble the subject of each row number",
        deleted="with the gallery; a subject's number with the next estimate",
    ),
    sa.Column("gallery_pk", sa.ForeignKey("galleries.pk", ondelete="CASCADE"), primary_key=True),
    sa.Column("generation", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("sequence", Key, nullable=False),
    sa.Column("templates", sa.Integer, nullable=False),
    sa.Column("document", sa.Text, nullable=False),
    sa.Column("derived_at", Utc, nullable=False),
)

# Positions of shared indexes in a gallery's change log. scanned: last subject that a first scan copied; null after it.
index_states = _table(
    "index_states",
    Stored("none: positions"),
    sa.Column("gallery_pk", sa.ForeignKey("galleries.pk", ondelete="CASCADE"), primary_key=True),
    sa.Column("generation", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("engine", sa.String(32), primary_key=True),
    sa.Column("sequence", Key, nullable=False),
    sa.Column("scanned", Key),
    sa.Column("updated_at", Utc, nullable=False),
)

# Background jobs with leases. problem: sealed, because it may name a subject's file. actor: the requester. lease_until:
# end of the owner's lease; of a queued job, when it may be claimed. attempts: those since the last finished item that
# failed. erased: key of the gallery's last receipt when the job was queued.
jobs = _numbered(
    "jobs",
    Stored("progress, caller's key id, problem", "plain; problem encrypted", "after `KITH_RETENTION_JOBS_DAYS`"),
    sa.Column("id", sa.String(32), nullable=False, unique=True),
    sa.Column("kind", sa.String(32), nullable=False),
    sa.Column("gallery_pk", sa.ForeignKey("galleries.pk", ondelete="CASCADE"), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("parameters", sa.JSON, nullable=False),
    sa.Column("progress", sa.JSON, nullable=False),
    sa.Column("problem", sa.LargeBinary),
    sa.Column("actor", sa.String(64), nullable=False),
    sa.Column("cancel", sa.Boolean, nullable=False),
    sa.Column("owner", sa.String(64)),
    sa.Column("lease_until", Utc),
    sa.Column("attempts", sa.Integer, nullable=False, server_default="0"),
    sa.Column("erased", Key, nullable=False, server_default="0"),
    sa.Column("created_at", Utc, nullable=False),
    sa.Column("updated_at", Utc, nullable=False),
    sa.Index("jobs_by_state", "state"),
    sa.Index("jobs_by_gallery", "gallery_pk"),
)

# Finished items of jobs, so that a job can resume. lookup: keyed hash of the item. sealed: the item and its problem.
# subject: keyed hash of the subject's id. Both are null once the subject was erased (service.storage.db.triggers).
job_items = _numbered(
    "job_items",
    Stored("files and subjects; of an album the refused photos", "encrypted", "with the job; with the subject"),
    sa.Column("job_pk", sa.ForeignKey("jobs.pk", ondelete="CASCADE"), nullable=False),
    sa.Column("lookup", sa.String(32), nullable=False),
    sa.Column("sealed", sa.LargeBinary),
    sa.Column("failed", sa.Boolean, nullable=False),
    sa.Column("subject", sa.String(32)),
    sa.Column("at", Utc, nullable=False),
    sa.UniqueConstraint("job_pk", "lookup"),
    sa.Index("job_items_by_job", "job_pk", "pk"),
    sa.Index("job_items_by_subject", "subject"),
)

# Data keys of galleries, wrapped by the master key. Without its data key a gallery is unreadable.
data_keys = _table(
    "data_keys",
    Stored("none: keys of the galleries", "wrapped by the master key", "with the gallery"),
    sa.Column("gallery_pk", sa.ForeignKey("galleries.pk", ondelete="CASCADE"), primary_key=True),
    sa.Column("wrapped", sa.LargeBinary, nullable=False),
    sa.Column("master_key", sa.String(64), nullable=False),
    sa.Column("created_at", Utc, nullable=False),
)

# Secrets of the service by purpose, wrapped by the master key.
secrets = _table(
    "secrets",
    Stored("none: keys of the service", "wrapped by the master key", "never"),
    sa.Column("name", sa.String(32), primary_key=True),
    sa.Column("wrapped", sa.LargeBinary, nullable=False),
    sa.Column("master_key", sa.String(64), nullable=False),
    sa.Column("created_at", Utc, nullable=False),
)

# digest: HMAC of the token by a secret of the service. galleries: names, or null for all. revoked: revoked for good.
# revoked_at without revoked: end of a rotated key. mac: HMAC of all columns except used_at by the same secret.
api_keys = _numbered(
    "api_keys",
    Stored("names of keys, last use", "plain; the token as keyed hash", "never"),
    sa.Column("id", sa.String(16), nullable=False, unique=True),
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("name", sa.String(128), nullable=False),
    sa.Column("scopes", sa.JSON, nullable=False),
    sa.Column("galleries", sa.JSON),
    sa.Column("created_at", Utc, nullable=False),
    sa.Column("expires_at", Utc),
    sa.Column("revoked_at", Utc),
    sa.Column("used_at", Utc),
    sa.Column("revoked", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("mac", sa.String(64), nullable=False),
)

# One row with a random version, replaced whenever a column of api_keys except used_at changes.
api_key_versions = _table(
    "api_key_versions",
    Stored("none: a number", "plain", "never"),
    sa.Column("pk", Key, primary_key=True, autoincrement=False),
    sa.Column("version", Key, nullable=False),
)

# Tombstones, by keyed hashes, so that neither earlier work nor backups restore the data. No foreign key to galleries:
# they outlive them. key: name of the data key of the hashes. subject: of an album, its random id; null of the kind
# subject: all strangers. moved_to: subject or stranger that has the data of a merged or promoted one (kind moved).
erasures = _numbered(
    "erasures",
    Stored("who was erased, and when", "keyed hash; of albums a random id", "never"),
    sa.Column("id", sa.String(32), nullable=False, unique=True),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("gallery_pk", Key, nullable=False),
    sa.Column("gallery", sa.String(64), nullable=False),
    sa.Column("key", sa.String(32), nullable=False),
    sa.Column("subject", sa.String(32)),
    sa.Column("template", sa.String(32)),
    sa.Column("removed", sa.JSON, nullable=False),
    sa.Column("at", Utc, nullable=False),
    sa.Column("moved_to", sa.String(32)),
    sa.Index("erasures_by_gallery", "gallery_pk", "pk"),
    sa.Index("erasures_by_subject", "gallery_pk", "subject"),
)

# Leases of tasks that one process at a time runs for all.
leases = _table(
    "leases",
    Stored("none: names of tasks", "plain", "never"),
    sa.Column("name", sa.String(32), primary_key=True),
    sa.Column("owner", sa.String(64), nullable=False),
    sa.Column("until", Utc, nullable=False),
)

# Receivers of events: webhooks, the MQTT broker and event streams. sealed: address, secret, name
# and filter, so that write access to the database redirects no events. xid, event_pk: position in ``events`` up to
# which all were sent. failing_s: seconds of failing since failing_since. announced: topics of devices at a broker.
receivers = _numbered(
    "receivers",
    Stored("webhooks: address, filter, secret; MQTT: galleries", "encrypted; galleries plain", "on deletion"),
    sa.Column("id", sa.String(32), nullable=False, unique=True),
    sa.Column("sealed", sa.LargeBinary, nullable=False),
    sa.Column("xid", Key, nullable=False),
    sa.Column("event_pk", Key, nullable=False),
    sa.Column("failing_since", Utc),
    sa.Column("failing_s", sa.Float, nullable=False, server_default="0"),
    sa.Column("error", sa.String(200)),
    sa.Column("announced", sa.JSON(none_as_null=True)),
    sa.Column("used_at", Utc, nullable=False),
    sa.Column("created_at", Utc, nullable=False),
)

# Log of the events that at least one receiver wants, read in the order of xid and pk. xid: of PostgreSQL's transaction;
# 0 in SQLite, whose writers take turns. subject_pk: the subject or stranger that the sealed body names.
events = _numbered(
    "events",
    Stored("subject or stranger, name, decision, similarity", "encrypted", "with the subject; after a week"),
    sa.Column("id", sa.String(32), nullable=False, unique=True),
    sa.Column("xid", Key, nullable=False),
    sa.Column("gallery_pk", sa.ForeignKey("galleries.pk", ondelete="CASCADE"), nullable=False),
    sa.Column("type", sa.String(32), nullable=False),
    sa.Column("subject_pk", sa.ForeignKey("subjects.pk", ondelete="CASCADE")),
    sa.Column("sealed", sa.LargeBinary, nullable=False),
    sa.Column("at", Utc, nullable=False),
    sa.Index("events_by_position", "xid", "pk"),
    sa.Index("events_by_gallery", "gallery_pk"),
    sa.Index("events_by_subject", "subject_pk"),
    sa.Index("events_by_age", "at"),
)

# Audit lines, pruned by age. No foreign key to galleries: lines outlive them. hash: covers the line and the previous
# hash. subject: keyed hash of the id.
audit = _table(
    "audit",
    Stored("actor, action, subject or stranger, time", "plain; subjects as keyed hashes", "after `KITH_AUDIT_DAYS`"),
    sa.Column("number", Key, primary_key=True, autoincrement=False),
    sa.Column("at", Utc, nullable=False),
    sa.Column("event", sa.String(64), nullable=False),
    sa.Column("outcome", sa.String(32), nullable=False),
    sa.Column("actor", sa.String(64), nullable=False),
    sa.Column("request_id", sa.String(64)),
    sa.Column("gallery_pk", Key),
    sa.Column("gallery", sa.String(64)),
    sa.Column("subject", sa.String(32)),
    sa.Column("details", sa.JSON, nullable=False),
    sa.Column("hash", sa.String(64), nullable=False),
    sa.Index("audit_by_gallery", "gallery_pk", "number"),
)

# Ends of the audit's chain in one row, which writers of lines lock. pruned, before: number and hash of the last deleted
# line. number, hash: of the last line. mac: under a secret of the service, which write access to the database does not
# reveal.
audit_head = _table(
    "audit_head",
    Stored("none: numbers and hashes", "plain", "never"),
    sa.Column("pk", Key, primary_key=True, autoincrement=False),
    sa.Column("pruned", Key, nullable=False),
    sa.Column("before", sa.String(64), nullable=False),
    sa.Column("number", Key, nullable=False),
    sa.Column("hash", sa.String(64), nullable=False),
    sa.Column("mac", sa.String(64), nullable=False),
)
