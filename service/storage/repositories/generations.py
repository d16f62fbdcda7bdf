"""Generations: a gallery's vectors by recognizer, and the transitions of a migration from one recognizer to another.

Each transition is one transaction with an audit line, and idempotent. Generation numbers are never reused, so that a
vector cannot end up in the wrong generation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from models.runtime.network import Float
from service.core.errors import InvalidRequestError, MigrationIncompleteError, MigrationStateError
from service.domain.gallery import Gallery, Generation
from service.domain.outcomes import RiskTarget
from service.storage.audit.log import note
from service.storage.db.engine import Database
from service.storage.db.tables import (
    albums,
    crops,
    decoys,
    evidence,
    galleries,
    generations,
    index_states,
    jobs,
    templates,
    vectors,
)
from service.storage.repositories.change_log import append_changes
from service.storage.repositories.erasures import delete_albums, delete_strangers
from service.storage.repositories.gallery_rows import gallery_value, is_embedded, update_gallery
from service.storage.repositories.jobs import ItemOutcome, Job, create_in, record_in

FILL: Final = "migrate"
"""Kind of job that embeds stored crops."""
DROP: Final = "drop_vectors"
"""Kind of job that deletes the vectors of a dropped generation."""


@dataclass(frozen=True)
class Coverage:
    """Number of a gallery's templates, of those ``embedded`` by a generation, and of others ``with_crop`` to embed.

    Searches by this generation do not find the remaining templates.
    """

    templates: int
    embedded: int
    with_crop: int

    @property
    def without_crop(self) -> int:
        return self.templates - self.embedded - self.with_crop

    @property
    def counts(self) -> dict[str, Any]:
        return {"templates": self.templates, "embedded": self.embedded}


@dataclass(frozen=True)
class SealedCrop:
    """Crop of a template that a generation has not embedded (service.storage.db.row_sealing.open_crop)."""

    pk: int
    id: str
    sealed: bytes


class GenerationStore:
    """Generations in SQL. Every method is one transaction and blocks.

    Methods that write raise GalleryMovedError if ``gallery`` was read before a transition: read it again.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def list_live(self, gallery: Gallery) -> list[Generation]:
        """Return all generations except dropped ones, the current one first."""
        with self._database.read() as connection:
            return [one for one in _live(connection, gallery) if one is not None]

    def coverage(self, gallery: Gallery, generation: int) -> Coverage:
        with self._database.read() as connection:
            return _coverage(connection, gallery, generation)

    # Transitions

    def start(self, gallery: Gallery, fingerprint: str, dimension: int, model: str) -> None:
        """Begin to fill a generation (state shadow), or resume one that was set aside.

        Raises MigrationStateError if the gallery uses this recognizer, or another migration is not finished.
        """
        now = datetime.now(UTC)
        with self._database.change(gallery) as connection:
            current, other = _live(connection, gallery)
            if fingerprint == current.fingerprint:
                raise MigrationStateError(f"gallery {gallery.name!r} already uses this recognizer")
            if other is not None and (other.fingerprint != fingerprint or other.state == "previous"):
                raise MigrationStateError(
                    f"gallery {gallery.name!r} still keeps the vectors of {other.model or other.fingerprint[:12]}"
                )
            if other is not None:
                number = other.number
                _update(connection, gallery, number, state="shadow")
            else:
                last = sa.select(sa.func.max(generations.c.generation)).where(generations.c.gallery_pk == gallery.pk)
                number = connection.execute(last).scalar_one() + 1
                key = {"gallery_pk": gallery.pk, "generation": number, "created_at": now, "updated_at": now}
                about = {"fingerprint": fingerprint, "dimension": dimension, "model": model}
                new = generations.insert().values(**key, **about, state="shadow", details={})
                connection.execute(new)
            repeated = other is not None and other.state == "shadow"
            if not repeated:
                details: dict[str, Any] = {"recognizer": fingerprint, "model": model}
                note(self._database.vault, connection, "migration_started", gallery, **details)
            _queue_job(connection, gallery, FILL, number, fingerprint, unless_running=repeated)

    def cut_over(self, gallery: Gallery, min_share: float, risk: RiskTarget | None) -> None:
        """Make the filled generation current. ``risk`` replaces the gallery's, which a rollback restores.

        Raises:
            MigrationStateError: no generation is being filled.
            MigrationIncompleteError: less than ``min_share`` of the templates have its vectors.
            InvalidRequestError: the gallery uses a similarity threshold, which another recognizer does not share.
        """
        with self._database.change(gallery) as connection:
            current, other = _live(connection, gallery)
            if other is not None and other.state == "previous":
                return
            if other is None or other.state != "shadow":
                raise MigrationStateError(
                    f"gallery {gallery.name!r} has no new recognizer to cut over to: start a migration first"
                )
            covered = _coverage(connection, gallery, other.number)
            if covered.embedded < min_share * covered.templates:
                raise MigrationIncompleteError(
                    f"{covered.embedded} of {covered.templates} templates have vectors of the new recognizer",
                    **covered.counts,
                )
            before = gallery_value(connection, gallery.pk, galleries.c.settings)["risk"]
            if risk is None and before["kind"] == "threshold":
                raise InvalidRequestError(
                    "risk: the gallery uses a similarity threshold, which another recognizer does not share. "
                    "Give a new risk or threshold."
                )
            kept = {key: value for key, value in current.details.items() if key != "risk"}
            if risk is not None:
                kept["risk"] = before
            _update(connection, gallery, current.number, state="previous", details=kept)
            _make_current(connection, gallery, other, asdict(risk) if risk else None)
            # For templates enrolled since the last fill.
            _queue_job(connection, gallery, FILL, other.number, other.fingerprint)
            details = _fingerprints(current, other) | covered.counts
            note(self._database.vault, connection, "migration_cut_over", gallery, **details)

    def roll_back(self, gallery: Gallery) -> None:
        """Make the previous generation current again, or set the new one aside; delete nothing.

        Raises MigrationStateError.
        """
        with self._database.change(gallery) as connection:
            current, other = _live(connection, gallery)
            if other is None:
                raise MigrationStateError(f"gallery {gallery.name!r} has no other generation to roll back to")
            if other.state == "set_aside":
                return
            away, back = (other, current) if other.state == "shadow" else (current, other)
            _update(connection, gallery, away.number, state="set_aside")
            if back is other:
                _make_current(connection, gallery, back, back.details.get("risk"))
            # Templates enrolled meanwhile may lack its vectors.
            _queue_job(connection, gallery, FILL, back.number, back.fingerprint)
            details = _fingerprints(away, back) | _coverage(connection, gallery, back.number).counts
            note(self._database.vault, connection, "migration_rolled_back", gallery, **details)

    def finish(self, gallery: Gallery, force: bool) -> None:
        """Drop the generation that is not current.

        Raises:
            MigrationStateError: there is no migration, or it was not cut over.
            MigrationIncompleteError: a template would lose its only vector, and ``force`` is false.
        """
        with self._database.change(gallery) as connection:
            current, away = _live(connection, gallery)
            ended = sa.exists().where(generations.c.gallery_pk == gallery.pk, generations.c.state == "dropped")
            if away is None and connection.execute(sa.select(ended)).scalar():
                return
            if away is None or away.state == "shadow":
                raise MigrationStateError(
                    f"gallery {gallery.name!r} has no migration to finish: cut it over or roll it back first"
                )
            only_there = _templates_of(gallery, ~_has_vector(current.number), _has_vector(away.number))
            lost = connection.execute(only_there.with_only_columns(sa.func.count())).scalar_one()
            if lost and not force:
                raise MigrationIncompleteError(
                    f"{lost} templates have vectors of the dropped recognizer only",
                    **_coverage(connection, gallery, current.number).counts,
                )
            _update(connection, gallery, away.number, state="dropped")
            for table in (evidence, index_states):
                own = (table.c.gallery_pk == gallery.pk) & (table.c.generation == away.number)
                connection.execute(table.delete().where(own))
            _queue_job(connection, gallery, DROP, away.number, away.fingerprint)
            theirs = (decoys.c.gallery_pk == gallery.pk) & (decoys.c.generation == away.number)
            forgotten = connection.execute(decoys.delete().where(theirs)).rowcount
            unreadable = delete_strangers(connection, gallery, ~is_embedded(current.number))["strangers"]
            outdated = (albums.c.gallery_pk == gallery.pk) & (albums.c.generation == away.number)
            unusable = delete_albums(connection, outdated)["albums"]
            details = _fingerprints(away, current) | {"left_out": lost, "decoys": forgotten}
            details |= {"strangers": unreadable, "albums": unusable}
            note(self._database.vault, connection, "migration_finished", gallery, **details)

    def delete_vectors(self, gallery: Gallery, generation: int, keys: Sequence[int]) -> None:
        """Delete these templates' vectors of a dropped generation; do nothing for any other."""
        chosen = vectors.c.template_pk.in_(list(keys)) & (vectors.c.generation == generation)
        with self._database.change(gallery) as connection:
            if _value(connection, gallery, generation, generations.c.state) == "dropped":
                connection.execute(vectors.delete().where(chosen))

    # Fill of a generation

    def missing_keys(self, gallery: Gallery, generation: int) -> list[int]:
        """Return the keys of templates with a crop that a generation has not embedded.

        Not paged, because each page would scan all templates again.
        """
        cropped = _templates_of(gallery, ~_has_vector(generation)).join(crops, crops.c.template_pk == templates.c.pk)
        with self._database.read() as connection:
            return sorted(connection.execute(cropped).scalars())

    def embedded_keys(self, gallery: Gallery, generation: int) -> list[int]:
        """Return the keys of templates that have a vector of a generation."""
        with self._database.read() as connection:
            return sorted(connection.execute(_templates_of(gallery, _has_vector(generation))).scalars())

    def crops(self, gallery: Gallery, keys: Sequence[int]) -> list[SealedCrop]:
        """Return the crops of these templates, without deleted ones."""
        chosen = _templates_of(gallery, templates.c.pk.in_(list(keys)))
        query = chosen.join(crops, crops.c.template_pk == templates.c.pk).add_columns(templates.c.id, crops.c.sealed)
        with self._database.read() as connection:
            return [SealedCrop(*row) for row in connection.execute(query)]

    def add(
        self,
        gallery: Gallery,
        generation: int,
        made: Mapping[int, Float],
        job: Job,
        outcomes: Sequence[ItemOutcome],
        seconds: float,
    ) -> bool:
        """Store (d,) vectors of existing templates that lack one, and record the outcomes in the job.

        Returns whether a cancellation of the job was requested. Raises LeaseLostError.
        """
        lacking = _templates_of(gallery, templates.c.pk.in_(list(made)), ~_has_vector(generation))
        with self._database.change(gallery) as connection:
            rows = connection.execute(lacking.add_columns(templates.c.subject_pk)).all()
            if rows and _value(connection, gallery, generation, generations.c.state) != "dropped":
                new = [(row.pk, row.subject_pk, made[row.pk]) for row in rows]
                _insert_vectors(connection, gallery, generation, new)
                _count_by_crop(connection, gallery, generation, len(rows))
            return record_in(connection, job, outcomes, seconds)


# Rows, within a transaction of the caller


def _live(connection: Connection, gallery: Gallery) -> tuple[Generation, Generation | None]:
    """Return the current generation, and the other one that is not dropped."""
    query = sa.select(generations).where(generations.c.gallery_pk == gallery.pk, generations.c.state != "dropped")
    found = [
        Generation(row.generation, row.fingerprint, row.dimension, row.model, row.state, row.details)
        for row in connection.execute(query)
    ]
    current, *rest = sorted(found, key=lambda one: one.state != "current")
    return current, rest[0] if rest else None


def _is_generation(gallery: Gallery, generation: int) -> sa.ColumnElement[bool]:
    return (generations.c.gallery_pk == gallery.pk) & (generations.c.generation == generation)


def _value(connection: Connection, gallery: Gallery, generation: int, column: sa.ColumnElement[Any]) -> Any:
    return connection.execute(sa.select(column).where(_is_generation(gallery, generation))).scalar_one()


def _update(connection: Connection, gallery: Gallery, generation: int, **values: Any) -> None:
    changing = generations.update().where(_is_generation(gallery, generation))
    connection.execute(changing.values(**values, updated_at=datetime.now(UTC)))


def _has_vector(generation: int) -> sa.ColumnElement[bool]:
    own = (vectors.c.template_pk == templates.c.pk) & (vectors.c.generation == generation)
    return sa.exists().where(own).correlate(templates)


def _templates_of(gallery: Gallery, *conditions: sa.ColumnElement[bool]) -> sa.Select[Any]:
    return sa.select(templates.c.pk).where(templates.c.gallery_pk == gallery.pk, *conditions)


def _coverage(connection: Connection, gallery: Gallery, generation: int) -> Coverage:
    own = sa.select(sa.func.count()).select_from(templates).where(templates.c.gallery_pk == gallery.pk)
    cropped = own.join(crops, crops.c.template_pk == templates.c.pk)
    counted = (own, own.where(_has_vector(generation)), cropped.where(~_has_vector(generation)))
    return Coverage(*(int(connection.execute(query).scalar_one()) for query in counted))


def _make_current(connection: Connection, gallery: Gallery, chosen: Generation, risk: Mapping[str, Any] | None) -> None:
    _update(connection, gallery, chosen.number, state="current")
    values: dict[str, Any] = {"fingerprint": chosen.fingerprint, "dimension": chosen.dimension}
    if risk is not None:
        values["settings"] = gallery_value(connection, gallery.pk, galleries.c.settings) | {"risk": dict(risk)}
    update_gallery(connection, gallery.pk, current_generation=chosen.number, **values)


def _insert_vectors(
    connection: Connection, gallery: Gallery, generation: int, made: Sequence[tuple[int, int, Float]]
) -> None:
    """Insert (template key, subject key, (d,) vector) rows with change log lines."""
    sealed = gallery.seal.close_vectors(np.stack([vector for *_, vector in made]), generation)
    pairs = zip(made, sealed, strict=True)
    rows = [{"template_pk": pk, "generation": generation, "vector": value} for (pk, *_), value in pairs]
    connection.execute(vectors.insert(), rows)
    append_changes(connection, gallery, [(pk, subject_pk) for pk, subject_pk, _ in made])


def _count_by_crop(connection: Connection, gallery: Gallery, generation: int, count: int) -> None:
    details = _value(connection, gallery, generation, generations.c.details)
    counts = {"by_crop": details.get("counts", {}).get("by_crop", 0) + count}
    _update(connection, gallery, generation, details={**details, "counts": counts})


def _queue_job(
    connection: Connection,
    gallery: Gallery,
    kind: str,
    generation: int,
    fingerprint: str,
    unless_running: bool = False,
) -> None:
    """Queue a job unless an equal one is queued, or running and ``unless_running``.

    A running job may already have listed its templates, and a canceled one will not finish: neither suffices.
    """
    wanted = {"generation": generation, "fingerprint": fingerprint}
    unfinished = sa.select(jobs.c.parameters).where(
        jobs.c.gallery_pk == gallery.pk,
        jobs.c.kind == kind,
        jobs.c.state.in_(["queued", "running"] if unless_running else ["queued"]),
        ~jobs.c.cancel,
    )
    if wanted not in connection.execute(unfinished).scalars().all():
        create_in(connection, gallery, kind, wanted)


def _fingerprints(left: Generation, entered: Generation) -> dict[str, Any]:
    return {"from": left.fingerprint, "to": entered.fingerprint}
