"""Rows of generations: reads and changes within a transaction of the caller."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from models.runtime.network import Float
from service.domain.gallery import Gallery, Generation
from service.storage.db.row_sealing import open_disagreement, seal_disagreement
from service.storage.db.tables import (
    crops,
    galleries,
    generations,
    jobs,
    templates,
    vectors,
)
from service.storage.repositories.change_log import append_changes
from service.storage.repositories.job_records import create_in

MAX_DISAGREEMENTS: Final = 20


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
class Disagreement:
    """One search with different answers of two recognizers. A subject key is None if no subject was near.

    Stored sealed, with keyed hashes of its subjects, so that their erasure deletes it.
    """

    outcomes: tuple[str, str]
    subject_pks: tuple[int | None, int | None]
    similarities: tuple[float | None, float | None]


def close_disagreement(gallery: Gallery, one: Disagreement, lookups: Mapping[int | None, str | None]) -> dict[str, Any]:
    return {
        "subjects": [lookups[pk] for pk in one.subject_pks],
        "sealed": seal_disagreement(gallery.seal, one.outcomes, one.similarities),
    }


def read_disagreement(
    gallery: Gallery, stored: Mapping[str, Any], keys: Mapping[str | None, int | None]
) -> Disagreement:
    first, second = stored["subjects"]
    outcomes, similarities = open_disagreement(gallery.seal, stored["sealed"])
    pks = keys.get(first), keys.get(second)
    return Disagreement((outcomes[0], outcomes[1]), pks, (similarities[0], similarities[1]))


def live_generations(connection: Connection, gallery: Gallery) -> list[Generation]:
    query = sa.select(generations).where(generations.c.gallery_pk == gallery.pk, generations.c.state != "dropped")
    found = [
        Generation(row.generation, row.fingerprint, row.dimension, row.model, row.state, row.details)
        for row in connection.execute(query)
    ]
    return sorted(found, key=lambda one: one.state != "current")


def is_generation(gallery: Gallery, generation: int) -> sa.ColumnElement[bool]:
    return (generations.c.gallery_pk == gallery.pk) & (generations.c.generation == generation)


def has_vector(generation: int) -> sa.ColumnElement[bool]:
    """Return a condition: the template has a vector of this generation."""
    own = (vectors.c.template_pk == templates.c.pk) & (vectors.c.generation == generation)
    return sa.exists().where(own).correlate(templates)


def templates_on_sight(generation: int, subject_pk: int) -> sa.Select[Any]:
    cropped = sa.exists().where(crops.c.template_pk == templates.c.pk).correlate(templates)
    waiting = (templates.c.subject_pk == subject_pk) & ~has_vector(generation) & ~cropped
    return sa.select(templates.c.pk, templates.c.id).where(waiting).order_by(templates.c.pk).limit(1)


def coverage_of(connection: Connection, gallery: Gallery, generation: int) -> Coverage:
    own = sa.select(sa.func.count()).select_from(templates).where(templates.c.gallery_pk == gallery.pk)
    cropped = own.join(crops, crops.c.template_pk == templates.c.pk)
    counted = (own, own.where(has_vector(generation)), cropped.where(~has_vector(generation)))
    return Coverage(*(int(connection.execute(query).scalar_one()) for query in counted))


def state_of(connection: Connection, gallery: Gallery, generation: int) -> str:
    return str(
        connection.execute(sa.select(generations.c.state).where(is_generation(gallery, generation))).scalar_one()
    )


def switch_current(
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
        connection.execute(generations.update().where(is_generation(gallery, number)).values(**changed, updated_at=now))
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


def insert_vectors(
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


def add_to_details(
    connection: Connection,
    gallery: Gallery,
    generation: int,
    disagreements: Sequence[Mapping[str, Any]] = (),
    **counts: int,
) -> None:
    """Add counts and stored disagreements to a generation's details."""
    details = connection.execute(
        sa.select(generations.c.details).where(is_generation(gallery, generation))
    ).scalar_one()
    latest = [*details.get("disagreements", []), *disagreements][-MAX_DISAGREEMENTS:]
    summed = dict(Counter(details.get("counts", {})) + Counter(counts))
    changed = {"details": {**details, "counts": summed, "disagreements": latest}, "updated_at": datetime.now(UTC)}
    connection.execute(generations.update().where(is_generation(gallery, generation)).values(**changed))


def queue_job(
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


def fingerprints(left: Generation, entered: Generation) -> dict[str, Any]:
    return {"from": left.fingerprint, "to": entered.fingerprint}
