"""Generations: a gallery's vectors by recognizer, and the transitions of a migration from one recognizer to another.

Each transition is one transaction with an audit line, and idempotent. Generation numbers are never reused, so that a
vector cannot end up in the wrong generation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from models.runtime.network import Float
from service.core.errors import InvalidRequestError, MigrationIncompleteError, MigrationStateError
from service.domain.decision import RiskTarget
from service.domain.gallery import Gallery, Generation
from service.storage.audit.log import Entry, append, record
from service.storage.db.engine import Database
from service.storage.db.row_sealing import open_disagreement, seal_disagreement
from service.storage.db.tables import (
    crops,
    evidence,
    galleries,
    generations,
    index_states,
    jobs,
    subjects,
    templates,
    vectors,
)
from service.storage.repositories.change_log import append_changes
from service.storage.repositories.job_records import ItemOutcome, Job, create_in, record_in

FILL: Final = "migrate"
"""Kind of job that embeds stored crops."""
DROP: Final = "drop_vectors"
"""Kind of job that deletes the vectors of a dropped generation."""
MAX_DISAGREEMENTS: Final = 20
MAX_SIMILARITY: Final = 0.99
"""A face more similar to a stored one is redundant: the next frame of a video, or the same photo."""


@dataclass(frozen=True)
class Coverage:
    """Number of a gallery's templates, of those ``embedded`` by a generation, and of others ``with_crop`` to embed.

    The remaining templates get a vector when their subject is identified again.
    """

    templates: int
    embedded: int
    with_crop: int

    @property
    def without_crop(self) -> int:
        return self.templates - self.embedded - self.with_crop


@dataclass(frozen=True)
class SealedCrop:
    """Crop of a template that a generation has not embedded (service.storage.db.row_sealing.open_crop)."""

    pk: int
    id: str
    sealed: bytes


@dataclass(frozen=True)
class Disagreement:
    """One search with different answers of two recognizers. A subject key is None if no subject was near.

    Stored sealed, with keyed hashes of its subjects, so that their erasure deletes it.
    """

    outcomes: tuple[str, str]
    subject_pks: tuple[int | None, int | None]
    similarities: tuple[float | None, float | None]


class GenerationStore:
    """Generations in SQL. Every method is one transaction and blocks.

    Methods that write raise GalleryMovedError if ``gallery`` was read before a transition: read it again.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def list_live(self, gallery: Gallery) -> list[Generation]:
        """Return all generations except dropped ones, the current one first."""
        with self._database.read() as connection:
            return _live(connection, gallery)

    def disagreements(self, gallery: Gallery, generation: Generation) -> list[Disagreement]:
        """Return the latest disagreements of a shadow generation.

        Raises:
            StorageError: they cannot be read.
            MasterKeyError: they cannot be opened.
        """
        stored = generation.details.get("disagreements", [])
        named = {lookup for one in stored for lookup in one["subjects"] if lookup is not None}
        keys: dict[str | None, int | None] = {None: None}
        own = (subjects.c.gallery_pk == gallery.pk) & subjects.c.lookup.in_(named)
        with self._database.read() as connection:
            if named:
                keys |= {row.lookup: row.pk for row in connection.execute(sa.select(subjects).where(own))}
            return [_opened(gallery, one, keys) for one in stored]

    def coverage(self, gallery: Gallery, generation: int) -> Coverage:
        with self._database.read() as connection:
            return _coverage(connection, gallery, generation)

    # Transitions

    def start(self, gallery: Gallery, fingerprint: str, dimension: int, model: str, on_sight: bool) -> None:
        """Begin a shadow generation, or resume one that was set aside.

        Raises:
            MigrationStateError: the gallery uses this recognizer, or another migration is not finished.
        """
        now = datetime.now(UTC)
        with self._database.change(gallery) as connection:
            current, *rest = _live(connection, gallery)
            if fingerprint == current.fingerprint:
                raise MigrationStateError(f"gallery {gallery.name!r} already uses this recognizer")
            if rest and (rest[0].fingerprint != fingerprint or rest[0].state == "previous"):
                raise MigrationStateError(
                    f"gallery {gallery.name!r} still keeps the vectors of {rest[0].model or rest[0].fingerprint[:12]}"
                )
            if rest:
                number, details = rest[0].number, {**rest[0].details, "on_sight": on_sight}
                changed = {"state": "shadow", "details": details, "updated_at": now}
                connection.execute(generations.update().where(_is(gallery, number)).values(**changed))
            else:
                number = (
                    1
                    + connection.execute(
                        sa.select(sa.func.max(generations.c.generation)).where(generations.c.gallery_pk == gallery.pk)
                    ).scalar_one()
                )
                connection.execute(
                    generations.insert().values(
                        gallery_pk=gallery.pk,
                        generation=number,
                        fingerprint=fingerprint,
                        dimension=dimension,
                        model=model,
                        state="shadow",
                        details={"on_sight": on_sight},
                        created_at=now,
                        updated_at=now,
                    )
                )
            repeated = bool(rest) and rest[0].state == "shadow"
            if not repeated:
                about: dict[str, Any] = {"recognizer": fingerprint, "model": model, "on_sight": on_sight}
                record(self._database.vault, connection, "migration_started", gallery, **about)
            _queue(connection, gallery, FILL, number, fingerprint, unless_running=repeated)

    def cut_over(self, gallery: Gallery, min_share: float, risk: RiskTarget | None) -> None:
        """Make the shadow generation current. ``risk`` replaces the gallery's, which a rollback restores.

        Raises:
            MigrationStateError: there is no shadow generation.
            MigrationIncompleteError: less than ``min_share`` of the templates have its vectors.
            InvalidRequestError: the gallery uses a similarity threshold, which another recognizer does not share.
        """
        with self._database.change(gallery) as connection:
            current, *rest = _live(connection, gallery)
            if rest and rest[0].state == "previous":
                return
            if not rest or rest[0].state != "shadow":
                raise MigrationStateError(f"gallery {gallery.name!r} has no shadow generation to cut over to")
            covered = _coverage(connection, gallery, rest[0].number)
            if covered.embedded < min_share * covered.templates:
                raise MigrationIncompleteError(
                    f"{covered.embedded} of {covered.templates} templates have vectors of the new recognizer",
                    embedded=covered.embedded,
                    templates=covered.templates,
                )
            settings = connection.execute(
                sa.select(galleries.c.settings).where(galleries.c.pk == gallery.pk)
            ).scalar_one()
            if risk is None and settings["risk"]["kind"] == "threshold":
                raise InvalidRequestError(
                    "risk: the gallery uses a similarity threshold, which another recognizer does not share. "
                    "Give a new risk or threshold."
                )
            details = {key: value for key, value in current.details.items() if key != "risk"}
            if risk is not None:
                details["risk"] = settings["risk"]
            _switch(connection, gallery, current, rest[0], "previous", details, asdict(risk) if risk else None)
            _queue(
                connection, gallery, FILL, rest[0].number, rest[0].fingerprint
            )  # templates enrolled since the last fill
            counts = {"templates": covered.templates, "embedded": covered.embedded}
            details = _fingerprints(current, rest[0]) | counts
            record(self._database.vault, connection, "migration_cut_over", gallery, **details)

    def roll_back(self, gallery: Gallery) -> None:
        """Make the previous generation current again, or set the shadow aside. Deletes nothing.

        Raises:
            MigrationStateError: there is no other generation.
        """
        with self._database.change(gallery) as connection:
            current, *rest = _live(connection, gallery)
            if not rest:
                raise MigrationStateError(f"gallery {gallery.name!r} has no other generation to roll back to")
            if rest[0].state == "set_aside":
                return
            if rest[0].state == "shadow":
                changed = {"state": "set_aside", "updated_at": datetime.now(UTC)}
                connection.execute(generations.update().where(_is(gallery, rest[0].number)).values(**changed))
                back = current
            else:
                back = rest[0]
                _switch(connection, gallery, current, back, "set_aside", current.details, back.details.get("risk"))
            # Templates enrolled meanwhile may lack its vectors.
            _queue(connection, gallery, FILL, back.number, back.fingerprint)
            covered = _coverage(connection, gallery, back.number)
            away = rest[0] if back is current else current
            counts = {"templates": covered.templates, "embedded": covered.embedded}
            details = _fingerprints(away, back) | counts
            record(self._database.vault, connection, "migration_rolled_back", gallery, **details)

    def finish(self, gallery: Gallery, force: bool) -> None:
        """Drop the generation that is not current.

        Raises:
            MigrationStateError: there is no migration, or it was not cut over.
            MigrationIncompleteError: a template would lose its only vector, and ``force`` is false.
        """
        with self._database.change(gallery) as connection:
            current, *rest = _live(connection, gallery)
            ended = sa.exists().where(generations.c.gallery_pk == gallery.pk, generations.c.state == "dropped")
            if not rest and connection.execute(sa.select(ended)).scalar():
                return
            if not rest or rest[0].state == "shadow":
                raise MigrationStateError(
                    f"gallery {gallery.name!r} has no migration to finish: cut it over or roll it back first"
                )
            away = rest[0]
            only_there = sa.select(sa.func.count()).select_from(templates)
            only_there = only_there.where(
                templates.c.gallery_pk == gallery.pk, ~_has(current.number), _has(away.number)
            )
            lost = connection.execute(only_there).scalar_one()
            if lost and not force:
                covered = _coverage(connection, gallery, current.number)
                raise MigrationIncompleteError(
                    f"{lost} templates have vectors of the dropped recognizer only",
                    embedded=covered.embedded,
                    templates=covered.templates,
                )
            changed = {"state": "dropped", "updated_at": datetime.now(UTC)}
            connection.execute(generations.update().where(_is(gallery, away.number)).values(**changed))
            for table in (evidence, index_states):
                connection.execute(
                    table.delete().where(table.c.gallery_pk == gallery.pk, table.c.generation == away.number)
                )
            _queue(connection, gallery, DROP, away.number, away.fingerprint)
            details = _fingerprints(away, current) | {"left_out": lost}
            record(self._database.vault, connection, "migration_finished", gallery, **details)

    def delete_vectors(self, gallery: Gallery, generation: int, keys: Sequence[int]) -> None:
        """Delete these templates' vectors of a dropped generation; do nothing for any other."""
        chosen = vectors.c.template_pk.in_(list(keys)) & (vectors.c.generation == generation)
        with self._database.change(gallery) as connection:
            if _state(connection, gallery, generation) == "dropped":
                connection.execute(vectors.delete().where(chosen))

    # Fill of a generation

    def missing_keys(self, gallery: Gallery, generation: int) -> list[int]:
        """Return the keys of templates with a crop that a generation has not embedded.

        Not paged, because each page would scan all templates again.
        """
        query = (
            sa.select(templates.c.pk)
            .join(crops, crops.c.template_pk == templates.c.pk)
            .where(templates.c.gallery_pk == gallery.pk, ~_has(generation))
        )
        with self._database.read() as connection:
            return sorted(connection.execute(query).scalars())

    def embedded_keys(self, gallery: Gallery, generation: int) -> list[int]:
        """Return the keys of templates that have a vector of a generation."""
        query = sa.select(templates.c.pk).where(templates.c.gallery_pk == gallery.pk, _has(generation))
        with self._database.read() as connection:
            return sorted(connection.execute(query).scalars())

    def crops(self, gallery: Gallery, keys: Sequence[int]) -> list[SealedCrop]:
        """Return the crops of these templates, without deleted ones."""
        query = (
            sa.select(templates.c.pk, templates.c.id, crops.c.sealed)
            .join(crops, crops.c.template_pk == templates.c.pk)
            .where(templates.c.gallery_pk == gallery.pk, templates.c.pk.in_(list(keys)))
        )
        with self._database.read() as connection:
            rows = connection.execute(query)
            return [SealedCrop(row.pk, row.id, row.sealed) for row in rows]

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
        with self._database.change(gallery) as connection:
            lacking = sa.select(templates.c.pk, templates.c.subject_pk).where(
                templates.c.gallery_pk == gallery.pk, templates.c.pk.in_(list(made)), ~_has(generation)
            )
            rows = connection.execute(lacking).all()
            if rows and _state(connection, gallery, generation) != "dropped":
                _insert_vectors(
                    connection, gallery, generation, [(row.pk, row.subject_pk, made[row.pk]) for row in rows]
                )
                _tally(connection, gallery, generation, by_crop=len(rows))
            return record_in(connection, job, outcomes, seconds)

    def has_subject(self, generation: int, subject_pk: int) -> bool:
        """Return whether a subject has a vector of this generation."""
        query = sa.select(templates.c.pk).where(templates.c.subject_pk == subject_pk, _has(generation)).limit(1)
        with self._database.read() as connection:
            return connection.execute(query).first() is not None

    def needs_sight(self, generation: int, subject_pk: int) -> bool:
        """Return whether a subject has a template without a crop and without a vector of this generation."""
        with self._database.read() as connection:
            return connection.execute(_templates_on_sight(generation, subject_pk)).first() is not None

    def add_on_sight(self, gallery: Gallery, generation: int, subject_pk: int, vector: Float) -> bool:
        """Store the (d,) vector of an identified face for one template that has no crop; return whether it was stored.

        A face that is nearly identical to a stored one is skipped.
        """
        with self._database.change(gallery) as connection:
            template = connection.execute(_templates_on_sight(generation, subject_pk)).first()
            if template is None or _state(connection, gallery, generation) != "shadow":
                return False
            known = connection.execute(
                sa.select(vectors.c.vector)
                .join(templates, templates.c.pk == vectors.c.template_pk)
                .where(templates.c.subject_pk == subject_pk, vectors.c.generation == generation)
            ).scalars()
            if (gallery.seal.open_vectors(known.all(), generation, len(vector)) @ vector).max(
                initial=-1
            ) > MAX_SIMILARITY:
                return False
            _insert_vectors(connection, gallery, generation, [(template.pk, subject_pk, vector)])
            _tally(connection, gallery, generation, by_sight=1)
            query = sa.select(subjects.c.lookup).where(subjects.c.pk == subject_pk)
            lookup, owner = connection.execute(query).scalar_one(), (gallery.pk, gallery.name)
            entry = Entry("template_on_sight", owner, lookup, details={"template": template.id})
            append(self._database.vault, connection, gallery.pk, [entry])
            return True

    def add_comparisons(
        self, gallery: Gallery, generation: int, counts: Mapping[str, int], disagreements: Sequence[Disagreement]
    ) -> None:
        """Add counts and disagreements of searches that a shadow generation answered too."""
        with self._database.change(gallery) as connection:
            if _state(connection, gallery, generation) == "shadow":
                # Drop disagreements about subjects that were erased since the search.
                named = {pk for one in disagreements for pk in one.subject_pks if pk is not None}
                own = (subjects.c.gallery_pk == gallery.pk) & subjects.c.pk.in_(named)
                there: dict[int | None, str | None] = {None: None}
                there |= {
                    row.pk: row.lookup
                    for row in connection.execute(sa.select(subjects.c.pk, subjects.c.lookup).where(own))
                }
                kept = [_closed(gallery, one, there) for one in disagreements if there.keys() >= set(one.subject_pks)]
                _tally(connection, gallery, generation, kept, **counts)


def _closed(gallery: Gallery, one: Disagreement, lookups: Mapping[int | None, str | None]) -> dict[str, Any]:
    return {
        "subjects": [lookups[pk] for pk in one.subject_pks],
        "sealed": seal_disagreement(gallery.seal, one.outcomes, one.similarities),
    }


def _opened(gallery: Gallery, stored: Mapping[str, Any], keys: Mapping[str | None, int | None]) -> Disagreement:
    first, second = stored["subjects"]
    outcomes, similarities = open_disagreement(gallery.seal, stored["sealed"])
    pks = keys.get(first), keys.get(second)
    return Disagreement((outcomes[0], outcomes[1]), pks, (similarities[0], similarities[1]))


def _live(connection: Connection, gallery: Gallery) -> list[Generation]:
    query = sa.select(generations).where(generations.c.gallery_pk == gallery.pk, generations.c.state != "dropped")
    found = [
        Generation(row.generation, row.fingerprint, row.dimension, row.model, row.state, row.details)
        for row in connection.execute(query)
    ]
    return sorted(found, key=lambda one: one.state != "current")


def _is(gallery: Gallery, generation: int) -> sa.ColumnElement[bool]:
    return (generations.c.gallery_pk == gallery.pk) & (generations.c.generation == generation)


def _has(generation: int) -> sa.ColumnElement[bool]:
    """Return a condition: the template has a vector of this generation."""
    own = (vectors.c.template_pk == templates.c.pk) & (vectors.c.generation == generation)
    return sa.exists().where(own).correlate(templates)


def _templates_on_sight(generation: int, subject_pk: int) -> sa.Select[Any]:
    cropped = sa.exists().where(crops.c.template_pk == templates.c.pk).correlate(templates)
    waiting = (templates.c.subject_pk == subject_pk) & ~_has(generation) & ~cropped
    return sa.select(templates.c.pk, templates.c.id).where(waiting).order_by(templates.c.pk).limit(1)


def _coverage(connection: Connection, gallery: Gallery, generation: int) -> Coverage:
    own = sa.select(sa.func.count()).select_from(templates).where(templates.c.gallery_pk == gallery.pk)
    cropped = own.join(crops, crops.c.template_pk == templates.c.pk)
    counted = (own, own.where(_has(generation)), cropped.where(~_has(generation)))
    return Coverage(*(int(connection.execute(query).scalar_one()) for query in counted))


def _state(connection: Connection, gallery: Gallery, generation: int) -> str:
    return str(connection.execute(sa.select(generations.c.state).where(_is(gallery, generation))).scalar_one())


def _switch(
    connection: Connection,
    gallery: Gallery,
    current: Generation,
    chosen: Generation,
    new_state: str,
    details: Mapping[str, Any],
    risk: Mapping[str, Any] | None,
) -> None:
    """Make ``chosen`` current, with ``risk`` if given; ``current`` gets ``new_state`` and ``details``."""
    now = datetime.now(UTC)
    for number, changed in (
        (current.number, {"state": new_state, "details": dict(details)}),
        (chosen.number, {"state": "current"}),
    ):
        connection.execute(generations.update().where(_is(gallery, number)).values(**changed, updated_at=now))
    values: dict[str, Any] = {
        "current_generation": chosen.number,
        "fingerprint": chosen.fingerprint,
        "dimension": chosen.dimension,
    }
    own = galleries.c.pk == gallery.pk
    if risk is not None:
        settings = connection.execute(sa.select(galleries.c.settings).where(own)).scalar_one()
        values["settings"] = {**settings, "risk": dict(risk)}
    connection.execute(galleries.update().where(own).values(**values))


def _insert_vectors(
    connection: Connection, gallery: Gallery, generation: int, made: Sequence[tuple[int, int, Float]]
) -> None:
    """Insert (template key, subject key, (d,) vector) rows with change log lines."""
    sealed = gallery.seal.close_vectors(np.stack([vector for *_, vector in made]), generation)
    connection.execute(
        vectors.insert(),
        [
            {"template_pk": pk, "generation": generation, "vector": value}
            for (pk, *_), value in zip(made, sealed, strict=True)
        ],
    )
    append_changes(connection, gallery, [(pk, subject_pk) for pk, subject_pk, _ in made])


def _tally(
    connection: Connection,
    gallery: Gallery,
    generation: int,
    disagreements: Sequence[Mapping[str, Any]] = (),
    **counts: int,
) -> None:
    """Add counts and stored disagreements to a generation's details."""
    details = connection.execute(sa.select(generations.c.details).where(_is(gallery, generation))).scalar_one()
    latest = [*details.get("disagreements", []), *disagreements][-MAX_DISAGREEMENTS:]
    summed = dict(Counter(details.get("counts", {})) + Counter(counts))
    changed = {"details": {**details, "counts": summed, "disagreements": latest}, "updated_at": datetime.now(UTC)}
    connection.execute(generations.update().where(_is(gallery, generation)).values(**changed))


def _queue(
    connection: Connection,
    gallery: Gallery,
    kind: str,
    generation: int,
    fingerprint: str,
    unless_running: bool = False,
) -> None:
    """Queue a job unless an equal one is queued, or running and ``unless_running``.

    A running job may already have listed its templates, and a cancelled one will not finish: neither suffices.
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
