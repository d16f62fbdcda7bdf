"""Generations: a gallery's vectors by recognizer, and the transitions of a migration from one recognizer to another.

Each transition is one transaction with an audit line, and idempotent. Generation numbers are never reused, so that a
vector cannot end up in the wrong generation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final

import sqlalchemy as sa

from models.runtime.network import Float
from service.core.errors import InvalidRequestError, MigrationIncompleteError, MigrationStateError
from service.domain.gallery import Gallery, Generation
from service.domain.outcomes import RiskTarget
from service.storage.audit.log import Entry, append, record
from service.storage.db.engine import Database
from service.storage.db.tables import (
    crops,
    evidence,
    galleries,
    generations,
    index_states,
    subjects,
    templates,
    vectors,
)
from service.storage.repositories.generation_rows import (
    Coverage,
    Disagreement,
    add_to_details,
    close_disagreement,
    coverage_of,
    fingerprints,
    has_vector,
    insert_vectors,
    is_generation,
    live_generations,
    queue_job,
    read_disagreement,
    state_of,
    switch_current,
    templates_on_sight,
)
from service.storage.repositories.job_records import ItemOutcome, Job, record_in

FILL: Final = "migrate"
"""Kind of job that embeds stored crops."""
DROP: Final = "drop_vectors"
"""Kind of job that deletes the vectors of a dropped generation."""
MAX_SIMILARITY: Final = 0.99
"""A face more similar to a stored one is redundant: the next frame of a video, or the same photo."""


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
            return live_generations(connection, gallery)

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
            return [read_disagreement(gallery, one, keys) for one in stored]

    def coverage(self, gallery: Gallery, generation: int) -> Coverage:
        with self._database.read() as connection:
            return coverage_of(connection, gallery, generation)

    # Transitions

    def start(self, gallery: Gallery, fingerprint: str, dimension: int, model: str, on_sight: bool) -> None:
        """Begin a shadow generation, or resume one that was set aside.

        Raises:
            MigrationStateError: the gallery uses this recognizer, or another migration is not finished.
        """
        now = datetime.now(UTC)
        with self._database.change(gallery) as connection:
            current, *rest = live_generations(connection, gallery)
            if fingerprint == current.fingerprint:
                raise MigrationStateError(f"gallery {gallery.name!r} already uses this recognizer")
            if rest and (rest[0].fingerprint != fingerprint or rest[0].state == "previous"):
                raise MigrationStateError(
                    f"gallery {gallery.name!r} still keeps the vectors of {rest[0].model or rest[0].fingerprint[:12]}"
                )
            if rest:
                number, details = rest[0].number, {**rest[0].details, "on_sight": on_sight}
                changed = {"state": "shadow", "details": details, "updated_at": now}
                connection.execute(generations.update().where(is_generation(gallery, number)).values(**changed))
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
            queue_job(connection, gallery, FILL, number, fingerprint, unless_running=repeated)

    def cut_over(self, gallery: Gallery, min_share: float, risk: RiskTarget | None) -> None:
        """Make the shadow generation current. ``risk`` replaces the gallery's, which a rollback restores.

        Raises:
            MigrationStateError: there is no shadow generation.
            MigrationIncompleteError: less than ``min_share`` of the templates have its vectors.
            InvalidRequestError: the gallery uses a similarity threshold, which another recognizer does not share.
        """
        with self._database.change(gallery) as connection:
            current, *rest = live_generations(connection, gallery)
            if rest and rest[0].state == "previous":
                return
            if not rest or rest[0].state != "shadow":
                raise MigrationStateError(f"gallery {gallery.name!r} has no shadow generation to cut over to")
            covered = coverage_of(connection, gallery, rest[0].number)
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
            switch_current(connection, gallery, current, rest[0], "previous", details, asdict(risk) if risk else None)
            queue_job(
                connection, gallery, FILL, rest[0].number, rest[0].fingerprint
            )  # templates enrolled since the last fill
            counts = {"templates": covered.templates, "embedded": covered.embedded}
            details = fingerprints(current, rest[0]) | counts
            record(self._database.vault, connection, "migration_cut_over", gallery, **details)

    def roll_back(self, gallery: Gallery) -> None:
        """Make the previous generation current again, or set the shadow aside. Deletes nothing.

        Raises:
            MigrationStateError: there is no other generation.
        """
        with self._database.change(gallery) as connection:
            current, *rest = live_generations(connection, gallery)
            if not rest:
                raise MigrationStateError(f"gallery {gallery.name!r} has no other generation to roll back to")
            if rest[0].state == "set_aside":
                return
            if rest[0].state == "shadow":
                changed = {"state": "set_aside", "updated_at": datetime.now(UTC)}
                connection.execute(generations.update().where(is_generation(gallery, rest[0].number)).values(**changed))
                back = current
            else:
                back = rest[0]
                switch_current(
                    connection, gallery, current, back, "set_aside", current.details, back.details.get("risk")
                )
            # Templates enrolled meanwhile may lack its vectors.
            queue_job(connection, gallery, FILL, back.number, back.fingerprint)
            covered = coverage_of(connection, gallery, back.number)
            away = rest[0] if back is current else current
            counts = {"templates": covered.templates, "embedded": covered.embedded}
            details = fingerprints(away, back) | counts
            record(self._database.vault, connection, "migration_rolled_back", gallery, **details)

    def finish(self, gallery: Gallery, force: bool) -> None:
        """Drop the generation that is not current.

        Raises:
            MigrationStateError: there is no migration, or it was not cut over.
            MigrationIncompleteError: a template would lose its only vector, and ``force`` is false.
        """
        with self._database.change(gallery) as connection:
            current, *rest = live_generations(connection, gallery)
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
                templates.c.gallery_pk == gallery.pk, ~has_vector(current.number), has_vector(away.number)
            )
            lost = connection.execute(only_there).scalar_one()
            if lost and not force:
                covered = coverage_of(connection, gallery, current.number)
                raise MigrationIncompleteError(
                    f"{lost} templates have vectors of the dropped recognizer only",
                    embedded=covered.embedded,
                    templates=covered.templates,
                )
            changed = {"state": "dropped", "updated_at": datetime.now(UTC)}
            connection.execute(generations.update().where(is_generation(gallery, away.number)).values(**changed))
            for table in (evidence, index_states):
                connection.execute(
                    table.delete().where(table.c.gallery_pk == gallery.pk, table.c.generation == away.number)
                )
            queue_job(connection, gallery, DROP, away.number, away.fingerprint)
            details = fingerprints(away, current) | {"left_out": lost}
            record(self._database.vault, connection, "migration_finished", gallery, **details)

    def delete_vectors(self, gallery: Gallery, generation: int, keys: Sequence[int]) -> None:
        """Delete these templates' vectors of a dropped generation; do nothing for any other."""
        chosen = vectors.c.template_pk.in_(list(keys)) & (vectors.c.generation == generation)
        with self._database.change(gallery) as connection:
            if state_of(connection, gallery, generation) == "dropped":
                connection.execute(vectors.delete().where(chosen))

    # Fill of a generation

    def missing_keys(self, gallery: Gallery, generation: int) -> list[int]:
        """Return the keys of templates with a crop that a generation has not embedded.

        Not paged, because each page would scan all templates again.
        """
        query = (
            sa.select(templates.c.pk)
            .join(crops, crops.c.template_pk == templates.c.pk)
            .where(templates.c.gallery_pk == gallery.pk, ~has_vector(generation))
        )
        with self._database.read() as connection:
            return sorted(connection.execute(query).scalars())

    def embedded_keys(self, gallery: Gallery, generation: int) -> list[int]:
        """Return the keys of templates that have a vector of a generation."""
        query = sa.select(templates.c.pk).where(templates.c.gallery_pk == gallery.pk, has_vector(generation))
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
                templates.c.gallery_pk == gallery.pk, templates.c.pk.in_(list(made)), ~has_vector(generation)
            )
            rows = connection.execute(lacking).all()
            if rows and state_of(connection, gallery, generation) != "dropped":
                insert_vectors(
                    connection, gallery, generation, [(row.pk, row.subject_pk, made[row.pk]) for row in rows]
                )
                add_to_details(connection, gallery, generation, by_crop=len(rows))
            return record_in(connection, job, outcomes, seconds)

    def has_subject(self, generation: int, subject_pk: int) -> bool:
        """Return whether a subject has a vector of this generation."""
        query = sa.select(templates.c.pk).where(templates.c.subject_pk == subject_pk, has_vector(generation)).limit(1)
        with self._database.read() as connection:
            return connection.execute(query).first() is not None

    def needs_sight(self, generation: int, subject_pk: int) -> bool:
        """Return whether a subject has a template without a crop and without a vector of this generation."""
        with self._database.read() as connection:
            return connection.execute(templates_on_sight(generation, subject_pk)).first() is not None

    def add_on_sight(self, gallery: Gallery, generation: int, subject_pk: int, vector: Float) -> bool:
        """Store the (d,) vector of an identified face for one template that has no crop; return whether it was stored.

        A face that is nearly identical to a stored one is skipped.
        """
        with self._database.change(gallery) as connection:
            template = connection.execute(templates_on_sight(generation, subject_pk)).first()
            if template is None or state_of(connection, gallery, generation) != "shadow":
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
            insert_vectors(connection, gallery, generation, [(template.pk, subject_pk, vector)])
            add_to_details(connection, gallery, generation, by_sight=1)
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
            if state_of(connection, gallery, generation) == "shadow":
                # Drop disagreements about subjects that were erased since the search.
                named = {pk for one in disagreements for pk in one.subject_pks if pk is not None}
                own = (subjects.c.gallery_pk == gallery.pk) & subjects.c.pk.in_(named)
                there: dict[int | None, str | None] = {None: None}
                there |= {
                    row.pk: row.lookup
                    for row in connection.execute(sa.select(subjects.c.pk, subjects.c.lookup).where(own))
                }
                kept = [
                    close_disagreement(gallery, one, there)
                    for one in disagreements
                    if there.keys() >= set(one.subject_pks)
                ]
                add_to_details(connection, gallery, generation, kept, **counts)
