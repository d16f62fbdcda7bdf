"""The truth about galleries, in SQL. What a method returns after writing is on disk.

SQLite runs in WAL mode with full synchronisation: a commit is flushed before it is acknowledged. Every change of a
gallery's templates writes lines into its change log in the same transaction, which the indexes follow.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import alembic.command
import alembic.config
import numpy as np
import sqlalchemy as sa
from alembic.util import CommandError
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError

from models.gallery_risk import ImpostorEvidence
from models.quality import QualityGate
from models.runtime import Float
from service.decision import RiskTarget
from service.errors import (
    GalleryExistsError,
    GalleryNotFoundError,
    IdempotencyConflictError,
    KithError,
    StorageError,
    SubjectNotFoundError,
    TemplateNotFoundError,
)
from service.gallery.subjects import (
    AuditLine,
    Change,
    Gallery,
    GallerySettings,
    Idempotent,
    NewTemplate,
    Snapshot,
    StoredEvidence,
    Subject,
    SubjectFilter,
    Template,
)
from service.gallery.tables import audit, changes, evidence, galleries, idempotency, subjects, templates

VECTOR_TYPE = np.dtype("<f4")
BUSY_TIMEOUT_MS = 10_000
MIGRATIONS = Path(__file__).parent / "migrations"


def open_engine(url: str) -> Engine:
    """Open the database and bring its tables up to date.

    Raises:
        StorageError: it cannot be opened or migrated.
    """
    try:
        engine = sa.create_engine(url)
        if engine.dialect.name == "sqlite":
            if engine.url.database:
                Path(engine.url.database).parent.mkdir(parents=True, exist_ok=True)
            sa.event.listen(engine, "connect", _prepare_sqlite)
            sa.event.listen(engine, "begin", _begin_sqlite)
        config = alembic.config.Config()
        config.set_main_option("script_location", str(MIGRATIONS))
        with engine.connect() as connection:
            config.attributes["connection"] = connection
            alembic.command.upgrade(config, "head")
        return engine
    except (SQLAlchemyError, CommandError, OSError) as error:
        raise StorageError(f"the database cannot be opened: {error}") from error


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # transactions are begun below, not by the driver's guess
    for pragma in (
        "journal_mode=WAL",
        "synchronous=FULL",
        "foreign_keys=ON",
        "secure_delete=ON",
        f"busy_timeout={BUSY_TIMEOUT_MS}",
    ):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection) -> None:
    # A writer that takes the lock only at its first write may find that what it read is stale, and fails.
    write = connection.get_execution_options().get("write")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


class Store:
    """Galleries, subjects, templates and the change log. Every method is one transaction; all block."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._writer = engine.execution_options(write=True)

    def close(self) -> None:
        self._engine.dispose()

    def check(self) -> None:
        """Prove that the database answers.

        Raises:
            StorageError: it does not.
        """
        with self._read() as connection:
            connection.execute(sa.select(sa.func.count()).select_from(galleries)).scalar_one()

    @contextmanager
    def _read(self) -> Iterator[Connection]:
        try:
            with self._engine.begin() as connection:
                yield connection
        except DBAPIError as error:
            raise StorageError(f"reading failed: {error.orig}") from error

    @contextmanager
    def _write(self, conflict: KithError) -> Iterator[Connection]:
        """One writing transaction; ``conflict`` is raised where a constraint refuses it."""
        try:
            with self._writer.begin() as connection:
                yield connection
        except IntegrityError as error:
            raise conflict from error
        except DBAPIError as error:
            raise StorageError(f"writing failed: {error.orig}") from error

    # Galleries

    def create_gallery(self, name: str, fingerprint: str, dimension: int, settings: GallerySettings) -> Gallery:
        """Raises GalleryExistsError."""
        now = _now()
        with self._write(GalleryExistsError(f"gallery {name!r} exists")) as connection:
            pk = connection.execute(
                galleries.insert().values(
                    name=name,
                    fingerprint=fingerprint,
                    dimension=dimension,
                    settings=asdict(settings),
                    created_at=now,
                )
            ).inserted_primary_key
        return Gallery(int(pk[0]) if pk else 0, name, fingerprint, dimension, settings, now)

    def gallery(self, name: str) -> Gallery:
        """Raises GalleryNotFoundError."""
        with self._read() as connection:
            row = connection.execute(_gallery_rows().where(galleries.c.name == name)).first()
        if row is None:
            raise GalleryNotFoundError(f"there is no gallery {name!r}")
        return _gallery(row)

    def list_galleries(self, after: str | None, limit: int) -> list[Gallery]:
        query = _gallery_rows().order_by(galleries.c.name).limit(limit)
        if after is not None:
            query = query.where(galleries.c.name > after)
        with self._read() as connection:
            return [_gallery(row) for row in connection.execute(query)]

    def update_gallery(self, name: str, change: Callable[[GallerySettings], GallerySettings]) -> Gallery:
        """Replace the settings by ``change`` of what they are. Raises GalleryNotFoundError."""
        missing = GalleryNotFoundError(f"there is no gallery {name!r}")
        with self._write(missing) as connection:
            row = connection.execute(_gallery_rows().where(galleries.c.name == name)).first()
            if row is None:
                raise missing
            settings = change(_gallery(row).settings)
            connection.execute(galleries.update().where(galleries.c.name == name).values(settings=asdict(settings)))
        return self.gallery(name)

    def delete_gallery(self, name: str) -> Gallery:
        """Delete it with everyone in it; return what it was. Raises GalleryNotFoundError."""
        gallery = self.gallery(name)
        with self._write(_deleted(gallery)) as connection:
            for table in (evidence, idempotency, changes, templates, subjects):
                connection.execute(table.delete().where(table.c.gallery_pk == gallery.pk))
            connection.execute(galleries.delete().where(galleries.c.pk == gallery.pk))
        return gallery

    # Subjects

    def put_subject(
        self, gallery: Gallery, subject_id: str, name: str | None, metadata: dict[str, Any], tags: list[str]
    ) -> tuple[Subject, bool]:
        """Create or replace; returns whether it was created."""
        now = _now()
        values = {"name": name, "metadata": metadata, "tags": tags, "updated_at": now}
        with self._write(_deleted(gallery)) as connection:
            updated = connection.execute(subjects.update().where(_is(gallery, subject_id)).values(values)).rowcount
            if not updated:
                connection.execute(
                    subjects.insert().values(gallery_pk=gallery.pk, id=subject_id, created_at=now, **values)
                )
        return self.subject(gallery, subject_id), not updated

    def patch_subject(self, gallery: Gallery, subject_id: str, given: dict[str, Any]) -> Subject:
        """Change the given columns (name, metadata, tags). Raises SubjectNotFoundError."""
        with self._write(_deleted(gallery)) as connection:
            connection.execute(subjects.update().where(_is(gallery, subject_id)).values(**given, updated_at=_now()))
        return self.subject(gallery, subject_id)

    def subject(self, gallery: Gallery, subject_id: str) -> Subject:
        """Raises SubjectNotFoundError."""
        with self._read() as connection:
            row = connection.execute(_subject_rows().where(_is(gallery, subject_id))).first()
        if row is None:
            raise SubjectNotFoundError(f"there is no subject {subject_id!r} in gallery {gallery.name!r}")
        return _subject(row)

    def list_subjects(self, gallery: Gallery, after: str | None, limit: int, chosen: SubjectFilter) -> list[Subject]:
        """Page by id: those after ``after``, at most ``limit``, that pass the filter."""
        found: list[Subject] = []
        query = _subject_rows().where(subjects.c.gallery_pk == gallery.pk).order_by(subjects.c.id)
        if after is not None:
            query = query.where(subjects.c.id > after)
        with self._read() as connection:
            for row in connection.execute(query):
                if passes(chosen, row.tags, row.metadata):
                    found.append(_subject(row))
                if len(found) == limit:
                    break
        return found

    def subjects_by_pk(self, pks: Sequence[int]) -> dict[int, Subject]:
        with self._read() as connection:
            rows = connection.execute(_subject_rows().where(subjects.c.pk.in_(list(pks))))
            return {row.pk: _subject(row) for row in rows}

    def matching_subjects(self, gallery: Gallery, chosen: SubjectFilter) -> set[int]:
        """Keys of the subjects that pass the filter."""
        query = sa.select(subjects.c.pk, subjects.c.tags, subjects.c.metadata).where(
            subjects.c.gallery_pk == gallery.pk
        )
        with self._read() as connection:
            return {row.pk for row in connection.execute(query) if passes(chosen, row.tags, row.metadata)}

    def delete_subject(self, gallery: Gallery, subject_id: str) -> int:
        """Delete a subject with its templates; return how many there were. Raises SubjectNotFoundError."""
        subject = self.subject(gallery, subject_id)
        with self._write(_deleted(gallery)) as connection:
            removed = self._remove(connection, gallery, subject.pk, templates.c.subject_pk == subject.pk)
            connection.execute(subjects.delete().where(subjects.c.pk == subject.pk))
        return removed

    # Templates

    def enrol(self, gallery: Gallery, subject_id: str, new: list[NewTemplate], keyed: Idempotent | None) -> str | None:
        """Store templates, their subject if need be, and their log lines, all or nothing.

        Returns the earlier response if ``keyed`` was answered before, and stores nothing then; else None.

        Raises:
            IdempotencyConflictError: the key belongs to another request.
            GalleryNotFoundError: the gallery was deleted meanwhile.
        """
        now = _now()
        with self._write(_deleted(gallery)) as connection:
            if keyed and (earlier := self._answered(connection, gallery, keyed.key, keyed.digest)):
                return earlier
            subject_pk = connection.execute(sa.select(subjects.c.pk).where(_is(gallery, subject_id))).scalar()
            if subject_pk is None:
                inserted = connection.execute(
                    subjects.insert().values(
                        gallery_pk=gallery.pk, id=subject_id, metadata={}, tags=[], created_at=now, updated_at=now
                    )
                ).inserted_primary_key
                subject_pk = inserted[0] if inserted else None
            for template in new:
                row = connection.execute(
                    templates.insert().values(
                        id=template.id,
                        gallery_pk=gallery.pk,
                        subject_pk=subject_pk,
                        vector=template.vector.astype(VECTOR_TYPE).tobytes(),
                        kind=template.kind,
                        quality=template.quality,
                        detection_score=template.detection_score,
                        created_at=now,
                    )
                ).inserted_primary_key
                connection.execute(
                    changes.insert().values(
                        gallery_pk=gallery.pk, template_pk=row[0] if row else None, subject_pk=subject_pk
                    )
                )
            if keyed:
                connection.execute(
                    idempotency.insert().values(
                        gallery_pk=gallery.pk,
                        key=keyed.key,
                        subject_pk=subject_pk,
                        digest=keyed.digest,
                        response=keyed.response,
                        created_at=now,
                    )
                )
        return None

    def answered(self, gallery: Gallery, key: str, digest: str) -> str | None:
        """The response given to this keyed request before, if any. Raises IdempotencyConflictError."""
        with self._read() as connection:
            return self._answered(connection, gallery, key, digest)

    @staticmethod
    def _answered(connection: Connection, gallery: Gallery, key: str, digest: str) -> str | None:
        row = connection.execute(
            sa.select(idempotency.c.digest, idempotency.c.response).where(
                idempotency.c.gallery_pk == gallery.pk, idempotency.c.key == key
            )
        ).first()
        if row is None:
            return None
        if row.digest != digest:
            raise IdempotencyConflictError(f"the key {key!r} was used for another request")
        return str(row.response)

    def list_templates(self, gallery: Gallery, subject_id: str) -> list[Template]:
        """A subject's templates, oldest first. Raises SubjectNotFoundError."""
        subject = self.subject(gallery, subject_id)
        query = sa.select(templates).where(templates.c.subject_pk == subject.pk).order_by(templates.c.pk)
        with self._read() as connection:
            return [
                Template(row.id, subject_id, row.kind, row.quality, row.detection_score, row.created_at)
                for row in connection.execute(query)
            ]

    def templates_by_pk(self, pks: Sequence[int]) -> dict[int, Template]:
        query = (
            sa.select(templates, subjects.c.id.label("subject_id"))
            .join(subjects, subjects.c.pk == templates.c.subject_pk)
            .where(templates.c.pk.in_(list(pks)))
        )
        with self._read() as connection:
            return {
                row.pk: Template(row.id, row.subject_id, row.kind, row.quality, row.detection_score, row.created_at)
                for row in connection.execute(query)
            }

    def subject_vectors(self, gallery: Gallery, subject_id: str) -> tuple[Float, Float]:
        """(n, d) templates of a subject and their (n,) quality scores, NaN for bare embeddings; n may be 0. Raises
        SubjectNotFoundError."""
        subject = self.subject(gallery, subject_id)
        with self._read() as connection:
            rows = connection.execute(_template_rows(gallery).where(templates.c.subject_pk == subject.pk)).all()
        stored = _snapshot(gallery, 0, rows)
        return stored.vectors, stored.qualities

    def delete_template(self, gallery: Gallery, subject_id: str, template_id: str) -> None:
        """Raises SubjectNotFoundError, TemplateNotFoundError."""
        subject = self.subject(gallery, subject_id)
        with self._write(_deleted(gallery)) as connection:
            chosen = (templates.c.subject_pk == subject.pk) & (templates.c.id == template_id)
            if not self._remove(connection, gallery, subject.pk, chosen):
                raise TemplateNotFoundError(f"there is no template {template_id!r} of subject {subject_id!r}")

    @staticmethod
    def _remove(connection: Connection, gallery: Gallery, subject_pk: int, chosen: sa.ColumnElement[bool]) -> int:
        """Delete the chosen templates of a subject and log each removal.

        The subject's remembered answers go too: they describe its photos, and a request repeated after a deletion
        means to enrol again.
        """
        doomed = connection.execute(sa.select(templates.c.pk).where(chosen)).scalars().all()
        if doomed:
            connection.execute(idempotency.delete().where(idempotency.c.subject_pk == subject_pk))
            connection.execute(templates.delete().where(chosen))
            connection.execute(
                changes.insert(),
                [{"gallery_pk": gallery.pk, "template_pk": pk, "subject_pk": subject_pk} for pk in doomed],
            )
        return len(doomed)

    def snapshot(self, gallery: Gallery) -> Snapshot:
        """All templates at one moment."""
        with self._read() as connection:
            sequence = connection.execute(
                sa.select(sa.func.coalesce(sa.func.max(changes.c.sequence), 0)).where(
                    changes.c.gallery_pk == gallery.pk
                )
            ).scalar_one()
            rows = connection.execute(_template_rows(gallery)).all()
        return _snapshot(gallery, sequence, rows)

    def changed_subjects(self, gallery: Gallery, sequence: int) -> tuple[set[int], Snapshot]:
        """Keys of the subjects that the log names later than ``sequence``, and the templates that they have now."""
        later = (changes.c.gallery_pk == gallery.pk) & (changes.c.sequence > sequence)
        with self._read() as connection:
            lines = connection.execute(sa.select(changes.c.sequence, changes.c.subject_pk).where(later)).all()
            rows: Sequence[sa.Row[Any]] = []
            if lines:
                # By a subquery, as a list of keys may exceed what a statement can bind.
                changed = templates.c.subject_pk.in_(sa.select(changes.c.subject_pk).where(later))
                rows = connection.execute(_template_rows(gallery).where(changed)).all()
        last = max((line.sequence for line in lines), default=sequence)
        return {line.subject_pk for line in lines}, _snapshot(gallery, last, rows)

    # Evidence and audit

    def evidence(self, gallery: Gallery) -> StoredEvidence | None:
        with self._read() as connection:
            row = connection.execute(sa.select(evidence).where(evidence.c.gallery_pk == gallery.pk)).first()
        if row is None:
            return None
        scores = ImpostorEvidence.from_document(json.loads(row.document))
        return StoredEvidence(row.sequence, row.fusion, row.templates, scores, row.derived_at)

    def changes_since(self, gallery: Gallery, sequence: int) -> int:
        """How many templates came or went."""
        query = sa.select(sa.func.count()).where(changes.c.gallery_pk == gallery.pk, changes.c.sequence > sequence)
        with self._read() as connection:
            return int(connection.execute(query).scalar_one())

    def put_evidence(self, gallery: Gallery, new: StoredEvidence, event: str | None, details: dict[str, Any]) -> None:
        """Replace a gallery's evidence and write ``event`` to the audit with it; not if a later one is there, or the
        gallery's rule of fusion is another by now."""
        values = {
            "sequence": new.sequence,
            "fusion": new.fusion,
            "templates": new.templates,
            "document": json.dumps(new.scores.document()),
            "derived_at": new.derived_at,
        }
        with self._write(_deleted(gallery)) as connection:
            stored = connection.execute(sa.select(evidence).where(evidence.c.gallery_pk == gallery.pk)).first()
            settings = connection.execute(
                sa.select(galleries.c.settings).where(galleries.c.pk == gallery.pk)
            ).scalar_one_or_none()
            overtaken = stored is not None and stored.sequence > new.sequence
            if overtaken or settings is None or settings["fusion"] != new.fusion:
                return
            if stored is None:
                connection.execute(evidence.insert().values(gallery_pk=gallery.pk, **values))
            else:
                connection.execute(evidence.update().where(evidence.c.gallery_pk == gallery.pk).values(**values))
            if event is not None:
                line = {"at": new.derived_at, "event": event, "gallery_pk": gallery.pk, "gallery": gallery.name}
                connection.execute(audit.insert().values(**line, details=details))

    def audit_lines(self, gallery: Gallery, before: int | None, limit: int) -> list[AuditLine]:
        """A gallery's lines, latest first; ``before``: only those of a smaller key."""
        query = sa.select(audit).where(audit.c.gallery_pk == gallery.pk).order_by(audit.c.pk.desc()).limit(limit)
        if before is not None:
            query = query.where(audit.c.pk < before)
        with self._read() as connection:
            return [AuditLine(row.pk, row.at, row.event, row.gallery, row.details) for row in connection.execute(query)]

    # The change log

    def changes_after(self, gallery_pk: int, sequence: int) -> list[Change]:
        """Log lines later than ``sequence``, in order. A line whose template still exists carries its vector: state,
        not history, so that applying a line twice, or a line whose template went away later, does no harm."""
        query = (
            sa.select(changes.c.sequence, changes.c.template_pk, changes.c.subject_pk, templates.c.vector)
            .outerjoin(templates, templates.c.pk == changes.c.template_pk)
            .where(changes.c.gallery_pk == gallery_pk, changes.c.sequence > sequence)
            .order_by(changes.c.sequence)
        )
        with self._read() as connection:
            return [
                Change(
                    row.sequence,
                    row.template_pk,
                    row.subject_pk,
                    None if row.vector is None else np.frombuffer(row.vector, VECTOR_TYPE).astype(np.float32),
                )
                for row in connection.execute(query)
            ]


def passes(chosen: SubjectFilter, tags: list[str], metadata: dict[str, Any]) -> bool:
    return set(chosen.tags) <= set(tags) and all(key in metadata and metadata[key] == v for key, v in chosen.metadata)


def _now() -> datetime:
    return datetime.now(UTC)


def _deleted(gallery: Gallery) -> KithError:
    return GalleryNotFoundError(f"gallery {gallery.name!r} was deleted meanwhile")


def _is(gallery: Gallery, subject_id: str) -> sa.ColumnElement[bool]:
    return (subjects.c.gallery_pk == gallery.pk) & (subjects.c.id == subject_id)


def _count_of(table: sa.Table, condition: sa.ColumnElement[bool]) -> Any:
    return sa.select(sa.func.count()).select_from(table).where(condition).scalar_subquery()


def _gallery_rows() -> sa.Select[Any]:
    return sa.select(
        galleries,
        _count_of(subjects, subjects.c.gallery_pk == galleries.c.pk).label("subject_count"),
        _count_of(templates, templates.c.gallery_pk == galleries.c.pk).label("template_count"),
        sa.select(evidence.c.sequence)
        .where(evidence.c.gallery_pk == galleries.c.pk)
        .scalar_subquery()
        .label("evidence_sequence"),
    )


def _subject_rows() -> sa.Select[Any]:
    return sa.select(subjects, _count_of(templates, templates.c.subject_pk == subjects.c.pk).label("template_count"))


def _template_rows(gallery: Gallery) -> sa.Select[Any]:
    return (
        sa.select(templates.c.pk, templates.c.subject_pk, templates.c.vector, templates.c.quality)
        .where(templates.c.gallery_pk == gallery.pk)
        .order_by(templates.c.subject_pk, templates.c.pk)
    )


def _snapshot(gallery: Gallery, sequence: int, rows: Sequence[sa.Row[Any]]) -> Snapshot:
    vectors = np.frombuffer(b"".join(row.vector for row in rows), VECTOR_TYPE).reshape(-1, gallery.dimension)
    return Snapshot(
        sequence,
        np.array([row.pk for row in rows], np.int64),
        np.array([row.subject_pk for row in rows], np.int64),
        vectors.astype(np.float32),
        np.array([(row.quality or {}).get("score", np.nan) for row in rows], np.float32),
    )


def _gallery(row: sa.Row[Any]) -> Gallery:
    stored = row.settings
    # What a gallery was created before keeps its default.
    others = {name: stored[name] for name in ("review_factor", "min_margin") if name in stored}
    settings = GallerySettings(
        RiskTarget(**stored["risk"]), stored["fusion"], QualityGate(**stored["quality_gate"]), **others
    )
    return Gallery(
        row.pk,
        row.name,
        row.fingerprint,
        row.dimension,
        settings,
        row.created_at,
        row.subject_count,
        row.template_count,
        row.evidence_sequence,
    )


def _subject(row: sa.Row[Any]) -> Subject:
    return Subject(row.pk, row.id, row.name, row.metadata, row.tags, row.created_at, row.updated_at, row.template_count)
