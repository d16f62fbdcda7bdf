"""A gallery's vectors by recogniser, in SQL: a second generation beside the first, the change between them, and back.

Each transition is one transaction, is written to the audit, and does nothing when it is repeated. A generation's number
is never used again, so that a vector made for one cannot come to stand in another.
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

from models.network import Float
from service.decision import RiskTarget
from service.errors import InvalidRequestError, MigrationIncompleteError, MigrationStateError
from service.gallery.audit_log import Entry, append, record
from service.gallery.database import Database
from service.gallery.job_store import ItemOutcome, Job, create_in, record_in
from service.gallery.sealed_rows import close_disagreement, open_disagreement
from service.gallery.subjects import Gallery, Generation
from service.gallery.tables import (
    changes,
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

FILL: Final = "migrate"
"""The kind of job that embeds kept crops."""
DROP: Final = "drop_vectors"
"""The kind of job that deletes a finished migration's vectors."""
KEPT_DISAGREEMENTS: Final = 20
NEAR_COPY: Final = 0.99
"""A face seen so like one that the subject has already adds nothing: the next frame of a video, or the same photo."""


@dataclass(frozen=True)
class Coverage:
    """How much of a gallery a generation has seen: ``embedded`` of ``templates``; of the others some have a crop to be
    embedded from, and the rest wait for their subject to be seen."""

    templates: int
    embedded: int
    with_crop: int

    @property
    def without_crop(self) -> int:
        return self.templates - self.embedded - self.with_crop


@dataclass(frozen=True)
class Waiting:
    """A template that a generation has not seen; ``id``: as it is known outside; ``sealed``: its crop, to be opened by
    whoever can do without it (service.gallery.sealed_rows.open_crop)."""

    pk: int
    id: str
    sealed: bytes


@dataclass(frozen=True)
class Disagreement:
    """One search that two recognisers answered differently; subjects by key, None: nobody near. It is stored sealed,
    beside its subjects' keyed hashes, by which it goes with them."""

    outcomes: tuple[str, str]
    subject_pks: tuple[int | None, int | None]
    similarities: tuple[float | None, float | None]


class Generations:
    """Every method is one transaction; all block. ``gallery`` is as read before: whoever comes too late meets
    GalleryMovedError, and reads it anew."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def kept(self, gallery: Gallery) -> list[Generation]:
        """All but those dropped, the current one first."""
        with self._database.read() as connection:
            return _kept(connection, gallery)

    def disagreements(self, gallery: Gallery, generation: Generation) -> list[Disagreement]:
        """The latest.

        Raises:
            StorageError: they cannot be read.
            MasterKeyError: or not be opened.
        """
        noted = generation.details.get("disagreements", [])
        named = {lookup for one in noted for lookup in one["subjects"] if lookup is not None}
        keys: dict[str | None, int | None] = {None: None}
        own = (subjects.c.gallery_pk == gallery.pk) & subjects.c.lookup.in_(named)
        with self._database.read() as connection:
            if named:
                keys |= {row.lookup: row.pk for row in connection.execute(sa.select(subjects).where(own))}
            return [_opened(gallery, one, keys) for one in noted]

    def coverage(self, gallery: Gallery, generation: int) -> Coverage:
        with self._database.read() as connection:
            return _coverage(connection, gallery, generation)

    # Transitions

    def start(self, gallery: Gallery, fingerprint: str, dimension: int, model: str, on_sight: bool) -> None:
        """Begin a shadow generation, or go on with the one that is there or was set aside.

        Raises:
            MigrationStateError: the recogniser is the gallery's already, or another migration is not finished.
        """
        now = datetime.now(UTC)
        with self._database.change(gallery) as connection:
            current, *rest = _kept(connection, gallery)
            if fingerprint == current.fingerprint:
                raise MigrationStateError(f"gallery {gallery.name!r} has this recogniser already")
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
                said: dict[str, Any] = {"recogniser": fingerprint, "model": model, "on_sight": on_sight}
                record(self._database.vault, connection, "migration_started", gallery, **said)
            _queue(connection, gallery, FILL, number, fingerprint, unless_running=repeated)

    def cut_over(self, gallery: Gallery, min_share: float, risk: RiskTarget | None) -> None:
        """Let the shadow generation answer. ``risk``: the gallery's from now on; the one before comes back with a roll
        back.

        Raises:
            MigrationStateError: there is no shadow.
            MigrationIncompleteError: less than ``min_share`` of the templates have its vectors.
            InvalidRequestError: the gallery answers by a bare similarity, which means nothing to another recogniser.
        """
        with self._database.change(gallery) as connection:
            current, *rest = _kept(connection, gallery)
            if rest and rest[0].state == "previous":
                return
            if not rest or rest[0].state != "shadow":
                raise MigrationStateError(f"gallery {gallery.name!r} has no shadow to cut over to")
            covered = _coverage(connection, gallery, rest[0].number)
            if covered.embedded < min_share * covered.templates:
                raise MigrationIncompleteError(
                    f"{covered.embedded} of {covered.templates} templates have vectors of the new recogniser",
                    embedded=covered.embedded,
                    templates=covered.templates,
                )
            settings = connection.execute(
                sa.select(galleries.c.settings).where(galleries.c.pk == gallery.pk)
            ).scalar_one()
            if risk is None and settings["risk"]["kind"] == "threshold":
                raise InvalidRequestError(
                    "risk: the gallery answers by a bare similarity, which means nothing to another recogniser: give "
                    "the risk, or the similarity, by which it is to answer from now on"
                )
            details = {key: value for key, value in current.details.items() if key != "risk"}
            if risk is not None:
                details["risk"] = settings["risk"]
            _switch(connection, gallery, current, rest[0], "previous", details, asdict(risk) if risk else None)
            _queue(connection, gallery, FILL, rest[0].number, rest[0].fingerprint)  # what was enrolled as it ended
            counts = {"templates": covered.templates, "embedded": covered.embedded}
            said = _between(current, rest[0]) | counts
            record(self._database.vault, connection, "migration_cut_over", gallery, **said)

    def roll_back(self, gallery: Gallery) -> None:
        """Let the generation before answer again, or end the shadow. Nothing is deleted.

        Raises:
            MigrationStateError: there is nothing to roll back to.
        """
        with self._database.change(gallery) as connection:
            current, *rest = _kept(connection, gallery)
            if not rest:
                raise MigrationStateError(f"gallery {gallery.name!r} keeps no vectors but those that answer")
            if rest[0].state == "set_aside":
                return
            if rest[0].state == "shadow":
                changed = {"state": "set_aside", "updated_at": datetime.now(UTC)}
                connection.execute(generations.update().where(_is(gallery, rest[0].number)).values(**changed))
                back = current
            else:
                back = rest[0]
                _switch(connection, gallery, current, back, "set_aside", current.details, back.details.get("risk"))
            # What was enrolled meanwhile may lack its vectors.
            _queue(connection, gallery, FILL, back.number, back.fingerprint)
            covered = _coverage(connection, gallery, back.number)
            away = rest[0] if back is current else current
            counts = {"templates": covered.templates, "embedded": covered.embedded}
            said = _between(away, back) | counts
            record(self._database.vault, connection, "migration_rolled_back", gallery, **said)

    def finish(self, gallery: Gallery, force: bool) -> None:
        """Keep only the vectors that answer.

        Raises:
            MigrationStateError: there was no migration, or it is still in shadow.
            MigrationIncompleteError: a template would be left without a vector, and ``force`` does not say that it may.
        """
        with self._database.change(gallery) as connection:
            current, *rest = _kept(connection, gallery)
            ended = sa.exists().where(generations.c.gallery_pk == gallery.pk, generations.c.state == "dropped")
            if not rest and connection.execute(sa.select(ended)).scalar():
                return
            if not rest or rest[0].state == "shadow":
                raise MigrationStateError(f"gallery {gallery.name!r} has no migration that was cut over or rolled back")
            away = rest[0]
            only_there = sa.select(sa.func.count()).select_from(templates)
            only_there = only_there.where(
                templates.c.gallery_pk == gallery.pk, ~_has(current.number), _has(away.number)
            )
            lost = connection.execute(only_there).scalar_one()
            if lost and not force:
                covered = _coverage(connection, gallery, current.number)
                raise MigrationIncompleteError(
                    f"{lost} templates have no vector but those that would go",
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
            said = _between(away, current) | {"left_out": lost}
            record(self._database.vault, connection, "migration_finished", gallery, **said)

    def drop(self, gallery: Gallery, generation: int, keys: Sequence[int]) -> None:
        """Delete the vectors of these templates by a dropped generation; those of another one stay."""
        gone = vectors.c.template_pk.in_(list(keys)) & (vectors.c.generation == generation)
        with self._database.change(gallery) as connection:
            if _state(connection, gallery, generation) == "dropped":
                connection.execute(vectors.delete().where(gone))

    # Filling a generation

    def waiting_keys(self, gallery: Gallery, generation: int) -> list[int]:
        """Of the templates with a crop that a generation has not seen. All at once: page by page, each page would look
        at all templates again."""
        query = (
            sa.select(templates.c.pk)
            .join(crops, crops.c.template_pk == templates.c.pk)
            .where(templates.c.gallery_pk == gallery.pk, ~_has(generation))
        )
        with self._database.read() as connection:
            return sorted(connection.execute(query).scalars())

    def embedded_keys(self, gallery: Gallery, generation: int) -> list[int]:
        """Of the templates that have a generation's vector."""
        query = sa.select(templates.c.pk).where(templates.c.gallery_pk == gallery.pk, _has(generation))
        with self._database.read() as connection:
            return sorted(connection.execute(query).scalars())

    def waiting(self, gallery: Gallery, keys: Sequence[int]) -> list[Waiting]:
        """These templates with their crops; without those deleted since."""
        query = (
            sa.select(templates.c.pk, templates.c.id, crops.c.sealed)
            .join(crops, crops.c.template_pk == templates.c.pk)
            .where(templates.c.gallery_pk == gallery.pk, templates.c.pk.in_(list(keys)))
        )
        with self._database.read() as connection:
            rows = connection.execute(query)
            return [Waiting(row.pk, row.id, row.sealed) for row in rows]

    def add(
        self,
        gallery: Gallery,
        generation: int,
        made: Mapping[int, Float],
        job: Job,
        outcomes: Sequence[ItemOutcome],
        seconds: float,
    ) -> bool:
        """Store (d,) vectors by template, where it still exists and has none of this generation yet, with what the job
        records of them; tells whether somebody asked to cancel the job. Raises LeaseLostError."""
        with self._database.change(gallery) as connection:
            lacking = sa.select(templates.c.pk, templates.c.subject_pk).where(
                templates.c.gallery_pk == gallery.pk, templates.c.pk.in_(list(made)), ~_has(generation)
            )
            rows = connection.execute(lacking).all()
            if rows and _state(connection, gallery, generation) != "dropped":
                _add(connection, gallery, generation, [(row.pk, row.subject_pk, made[row.pk]) for row in rows])
                _tally(connection, gallery, generation, by_crop=len(rows))
            return record_in(connection, job, outcomes, seconds)

    def knows(self, generation: int, subject_pk: int) -> bool:
        """Whether a subject has a template with this generation's vector."""
        query = sa.select(templates.c.pk).where(templates.c.subject_pk == subject_pk, _has(generation)).limit(1)
        with self._database.read() as connection:
            return connection.execute(query).first() is not None

    def unseen(self, gallery: Gallery, generation: int, subject_pk: int) -> bool:
        """Whether a subject has a template that only a sight of it can give this generation's vector."""
        with self._database.read() as connection:
            return connection.execute(_unseen(generation, subject_pk)).first() is not None

    def see(self, gallery: Gallery, generation: int, subject_pk: int, vector: Float) -> bool:
        """Give one template without crop the vector (d,) of a face that was identified as its subject; tells whether it
        was. Not if it hardly differs from a vector that the subject has."""
        with self._database.change(gallery) as connection:
            template = connection.execute(_unseen(generation, subject_pk)).first()
            if template is None or _state(connection, gallery, generation) != "shadow":
                return False
            known = connection.execute(
                sa.select(vectors.c.vector)
                .join(templates, templates.c.pk == vectors.c.template_pk)
                .where(templates.c.subject_pk == subject_pk, vectors.c.generation == generation)
            ).scalars()
            if (gallery.seal.open_vectors(known.all(), generation, len(vector)) @ vector).max(initial=-1) > NEAR_COPY:
                return False
            _add(connection, gallery, generation, [(template.pk, subject_pk, vector)])
            _tally(connection, gallery, generation, by_sight=1)
            whose = sa.select(subjects.c.lookup).where(subjects.c.pk == subject_pk)
            subject, whom = connection.execute(whose).scalar_one(), (gallery.pk, gallery.name)
            seen = Entry("template_on_sight", whom, subject, details={"template": template.id})
            append(self._database.vault, connection, gallery.pk, [seen])
            return True

    def note(
        self, gallery: Gallery, generation: int, counts: Mapping[str, int], disagreements: Sequence[Disagreement]
    ) -> None:
        """Add to what is known of how a shadow answers."""
        with self._database.change(gallery) as connection:
            if _state(connection, gallery, generation) == "shadow":
                # Of those who are there: who was erased since the search is in no tally any more.
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
        "sealed": close_disagreement(gallery.seal, one.outcomes, one.similarities),
    }


def _opened(gallery: Gallery, stored: Mapping[str, Any], keys: Mapping[str | None, int | None]) -> Disagreement:
    first, second = stored["subjects"]
    outcomes, similarities = open_disagreement(gallery.seal, stored["sealed"])
    pks = keys.get(first), keys.get(second)
    return Disagreement((outcomes[0], outcomes[1]), pks, (similarities[0], similarities[1]))


def _kept(connection: Connection, gallery: Gallery) -> list[Generation]:
    query = sa.select(generations).where(generations.c.gallery_pk == gallery.pk, generations.c.state != "dropped")
    found = [
        Generation(row.generation, row.fingerprint, row.dimension, row.model, row.state, row.details)
        for row in connection.execute(query)
    ]
    return sorted(found, key=lambda one: one.state != "current")


def _is(gallery: Gallery, generation: int) -> sa.ColumnElement[bool]:
    return (generations.c.gallery_pk == gallery.pk) & (generations.c.generation == generation)


def _has(generation: int) -> sa.ColumnElement[bool]:
    """Of a row of templates: whether it has this generation's vector."""
    own = (vectors.c.template_pk == templates.c.pk) & (vectors.c.generation == generation)
    return sa.exists().where(own).correlate(templates)


def _unseen(generation: int, subject_pk: int) -> sa.Select[Any]:
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
    left_as: str,
    details: Mapping[str, Any],
    risk: Mapping[str, Any] | None,
) -> None:
    """Let ``chosen`` answer instead of ``current``, by another ``risk`` if one is given."""
    now = datetime.now(UTC)
    for number, values in (
        (current.number, {"state": left_as, "details": dict(details)}),
        (chosen.number, {"state": "current"}),
    ):
        connection.execute(generations.update().where(_is(gallery, number)).values(**values, updated_at=now))
    pointed: dict[str, Any] = {
        "current_generation": chosen.number,
        "fingerprint": chosen.fingerprint,
        "dimension": chosen.dimension,
    }
    own = galleries.c.pk == gallery.pk
    if risk is not None:
        settings = connection.execute(sa.select(galleries.c.settings).where(own)).scalar_one()
        pointed["settings"] = {**settings, "risk": dict(risk)}
    connection.execute(galleries.update().where(own).values(**pointed))


def _add(connection: Connection, gallery: Gallery, generation: int, made: Sequence[tuple[int, int, Float]]) -> None:
    """Write vectors, and lines of the change log for them: (template, subject, (d,) vector)."""
    sealed = gallery.seal.close_vectors(np.stack([vector for *_, vector in made]), generation)
    connection.execute(
        vectors.insert(),
        [
            {"template_pk": pk, "generation": generation, "vector": value}
            for (pk, *_), value in zip(made, sealed, strict=True)
        ],
    )
    connection.execute(
        changes.insert(),
        [{"gallery_pk": gallery.pk, "template_pk": pk, "subject_pk": subject_pk} for pk, subject_pk, _ in made],
    )


def _tally(
    connection: Connection,
    gallery: Gallery,
    generation: int,
    disagreements: Sequence[Mapping[str, Any]] = (),
    **counts: int,
) -> None:
    """``disagreements``: as they are stored."""
    details = connection.execute(sa.select(generations.c.details).where(_is(gallery, generation))).scalar_one()
    latest = [*details.get("disagreements", []), *disagreements][-KEPT_DISAGREEMENTS:]
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
    """Queue a job, unless one like it waits. One that runs may have seen all that it will ever see: it does not count,
    except for who asks for nothing new (``unless_running``); nor does one that is called off."""
    wanted = {"generation": generation, "fingerprint": fingerprint}
    unfinished = sa.select(jobs.c.parameters).where(
        jobs.c.gallery_pk == gallery.pk,
        jobs.c.kind == kind,
        jobs.c.state.in_(["queued", "running"] if unless_running else ["queued"]),
        ~jobs.c.cancel,
    )
    if wanted not in connection.execute(unfinished).scalars().all():
        create_in(connection, gallery, kind, wanted)


def _between(left: Generation, entered: Generation) -> dict[str, Any]:
    return {"from": left.fingerprint, "to": entered.fingerprint}
