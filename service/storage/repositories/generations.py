"""Generations: a gallery's vectors by recognizer, and the change from one recognizer to another.

A job embeds the stored crops as the next generation; its last transaction embeds the rest and switches. The former
generation stays until ``finish``, so that a roll-back is a switch. Numbers are never reused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from models.runtime.network import Float
from service.core.errors import RefusedError, StorageError
from service.domain.gallery import Gallery, Generation, GenerationState
from service.storage.audit.log import note
from service.storage.db.engine import Database
from service.storage.db.row_sealing import open_subject
from service.storage.db.tables import (
    IS_PERSON,
    OF_PERSON,
    albums,
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
from service.storage.repositories.erasures import delete_rows
from service.storage.repositories.gallery_rows import gallery_value, is_embedded, strangers_of, update_gallery
from service.storage.repositories.jobs import ItemOutcome, Job, create_in, record_in

FILL: Final = "migrate"
"""Kind of job that embeds stored crops, and switches to their generation."""
DROP: Final = "drop_vectors"
"""Kind of job that deletes the vectors of a dropped generation."""
MAX_REST: Final = 16
"""Crops that are embedded while the gallery's lock keeps its other writers waiting, at most."""
DROP_BATCH: Final = 5000
SealedCrops = Sequence[sa.Row[int, str, bytes]]
"""Keys and ids of templates, and their crops (service.storage.db.row_sealing.open_crop): ``pk``, ``id``, ``sealed``."""
Embed = Callable[[SealedCrops], tuple[Mapping[int, Float], Sequence[ItemOutcome]]]
"""Returns (d,) vectors by template key, without damaged crops, and the outcomes."""


class GenerationStore:
    """Generations in SQL. Every method but ``drop`` is one transaction; all block.

    Methods that write raise GalleryMovedError: read the gallery again. ``view``: a gallery at_generation.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def list_live(self, gallery: Gallery) -> list[Generation]:
        """Return all generations except dropped ones, the current one first."""
        with self._database.read() as connection:
            return [one for one in _live(connection, gallery) if one is not None]

    def embedded_count(self, view: Gallery) -> int:
        """Return the number of templates that have a vector of the generation, so that its searches find them."""
        with self._database.read() as connection:
            return _count(connection, view, _embedded(view.generation))

    def without_crop(self, gallery: Gallery, limit: int) -> tuple[int, list[tuple[str, str]]]:
        """Count the templates that another recognizer, or that of the migration, cannot embed; return ids of some."""
        other = gallery.other
        new = None if other is None else other.number if other.state == "next" else gallery.generation
        query = sa.select(subjects.c.sealed, templates.c.id).join(subjects, subjects.c.pk == templates.c.subject_pk)
        query = (
            query.where(templates.c.gallery_pk == gallery.pk, IS_PERSON, _cropless(new))
            .order_by(templates.c.pk)
            .limit(limit)
        )
        with self._database.read() as connection:
            found = [(open_subject(gallery.seal, row.sealed).id, row.id) for row in connection.execute(query)]
            return _count(connection, gallery, _cropless(new)), found

    # Steps

    def start(self, gallery: Gallery, fingerprint: str, dimension: int, model: str, force: bool = False) -> None:
        """Queue the job that fills the next generation and switches to it, in place of an unfinished one.

        ``force``: switch although searches will not find some templates.

        Raises migration_state: the gallery uses this recognizer or a similarity threshold, or another migration is
        not finished. migration_incomplete: templates have no crop, and ``force`` is false.
        """
        with self._database.change(gallery) as connection:
            current, other = _live(connection, gallery)
            if fingerprint == current.fingerprint:
                raise RefusedError("migration_state", f"gallery {gallery.name!r} already uses this recognizer")
            if other is not None and (other.fingerprint != fingerprint or other.state == "previous"):
                raise RefusedError(
                    "migration_state",
                    f"gallery {gallery.name!r} still keeps the vectors of {other.model or other.fingerprint[:12]}",
                )
            _require_risk(connection, gallery)
            if not force:
                cropless = _count(connection, gallery, _cropless(None if other is None else other.number))
                _require_none(connection, gallery, cropless, "have no stored crop")
            if other is None:
                last = sa.select(sa.func.max(generations.c.generation)).where(generations.c.gallery_pk == gallery.pk)
                number, now = connection.execute(last).scalar_one() + 1, datetime.now(UTC)
                other = Generation(number, fingerprint, dimension, model, "next")
                about = {"fingerprint": fingerprint, "dimension": dimension, "model": model, "created_at": now}
                row = {"gallery_pk": gallery.pk, "generation": number, "state": "next"}
                connection.execute(generations.insert().values(**row, **about))
            repeated = _cancel_fills(connection, gallery, other)
            _queue_fill(connection, gallery, other, force)
            if not repeated:
                details: dict[str, Any] = {"recognizer": fingerprint, "model": model}
                note(self._database.vault, connection, "migration_started", gallery, **details)

    def switch(self, view: Gallery, job: Job, embed: Embed, damaged: Collection[int], seconds: float) -> bool:
        """Embed the rest of the templates, and make the next generation current. No enrollment comes between.

        Return whether nothing is left to do. False: more than MAX_REST crops wait, or the job was canceled.

        ``damaged``: keys of templates whose crop cannot be embedded.

        Raises migration_incomplete: templates have no vector, and the job was started without ``force``.
        migration_state: the gallery uses a similarity threshold. LeaseLostError.
        """
        with self._database.change(view) as connection:
            lacking = connection.execute(
                _lacking(view).outerjoin(crops, crops.c.template_pk == templates.c.pk).add_columns(crops.c.template_pk)
            ).all()
            rest = [row.pk for row in lacking if row.template_pk is not None and row.pk not in damaged]
            if len(rest) > MAX_REST:
                return False
            made, outcomes = embed(_crops(connection, view, rest))
            if _add(connection, view, made, job, outcomes, seconds):
                return False
            current, other = _live(connection, view)
            if other is None or (other.number, other.state) != (view.generation, "next"):
                return True
            left_out = _count(connection, view, ~_embedded(view.generation))
            if not job.parameters["force"]:
                _require_none(connection, view, left_out, "have no vector of the new recognizer")
            _make_current(connection, view, current, "previous", other)
            details = _fingerprints(current, other) | {"left_out": left_out}
            note(self._database.vault, connection, "migration_cut_over", view, **details)
            return True

    def roll_back(self, gallery: Gallery) -> None:
        """Make the previous generation current again, or stop the migration; delete nothing.

        Raises migration_state: nothing to roll back, or the gallery uses a similarity threshold.
        """
        with self._database.change(gallery) as connection:
            current, other = _live(connection, gallery)
            if other is None:
                raise RefusedError(
                    "migration_state", f"gallery {gallery.name!r} has no other generation to roll back to"
                )
            left, entered = (current, other) if other.state == "previous" else (other, current)
            stopped = _cancel_fills(connection, gallery, left)  # also one that switched, and was killed before its end
            if entered is other:
                _make_current(connection, gallery, current, "next", other)
                _queue_fill(connection, gallery, other, force=True)  # templates enrolled since the switch
            elif not stopped:
                return
            details = _fingerprints(left, entered)
            note(self._database.vault, connection, "migration_rolled_back", gallery, **details)

    def finish(self, gallery: Gallery, force: bool) -> None:
        """Drop the generation that is not current, if there is one.

        Raises migration_state: the job is not finished. migration_incomplete: a template would lose its only
        vector, and ``force`` is false.
        """
        with self._database.change(gallery) as connection:
            current, away = _live(connection, gallery)
            if away is None:
                return
            if away.state == "next" and connection.execute(sa.select(jobs.c.pk).where(_is_fill(gallery, away))).first():
                raise RefusedError(
                    "migration_state", f"gallery {gallery.name!r} still migrates: wait for the job, or roll back"
                )
            lost = _count(connection, gallery, ~_embedded(current.number) & _embedded(away.number))
            if not force:
                _require_none(connection, gallery, lost, "have vectors of the dropped recognizer only")
            _set_state(connection, gallery, away.number, "dropped")
            for table in (evidence, index_states):
                own = (table.c.gallery_pk == gallery.pk) & (table.c.generation == away.number)
                connection.execute(table.delete().where(own))
            create_in(connection, gallery, DROP, {"generation": away.number})
            useless = sa.select(templates.c.subject_pk).where(~OF_PERSON, ~_embedded(current.number))
            outsiders = (subjects.c.gallery_pk == gallery.pk) & subjects.c.pk.in_(useless)
            forgotten = delete_rows(connection, "subject", outsiders)
            strangers = strangers_of(gallery.pk) & ~is_embedded(current.number)
            unreadable = delete_rows(connection, "subject", strangers)
            outdated = (albums.c.gallery_pk == gallery.pk) & (albums.c.generation == away.number)
            unusable = delete_rows(connection, "album", outdated)
            details = _fingerprints(away, current) | {"left_out": lost, "decoys": forgotten}
            details |= {"strangers": unreadable, "albums": unusable}
            note(self._database.vault, connection, "migration_finished", gallery, **details)

    def drop(self, gallery: Gallery, generation: int, check: Callable[[], None]) -> None:
        """Delete the vectors of a dropped generation in batches: other writers wait for each. ``check`` may raise."""
        own = sa.select(templates.c.pk).where(templates.c.gallery_pk == gallery.pk, _embedded(generation))
        with self._database.read() as connection:
            keys = connection.execute(own).scalars().all()
        for start in range(0, len(keys), DROP_BATCH):
            check()
            batch = vectors.c.template_pk.in_(keys[start : start + DROP_BATCH]) & (vectors.c.generation == generation)
            with self._database.write(StorageError("vectors are in use")) as connection:
                connection.execute(vectors.delete().where(batch))

    # Fill of a generation

    def missing_keys(self, view: Gallery) -> list[int]:
        """Return the keys of templates with a crop that a generation has not embedded: a page would scan all again."""
        with self._database.read() as connection:
            cropped = _lacking(view).join(crops, crops.c.template_pk == templates.c.pk)
            return sorted(connection.execute(cropped).scalars())

    def crops(self, gallery: Gallery, keys: Sequence[int]) -> SealedCrops:
        """Return the crops of these templates, without deleted ones."""
        with self._database.read() as connection:
            return _crops(connection, gallery, keys)

    def add(
        self, view: Gallery, made: Mapping[int, Float], job: Job, outcomes: Sequence[ItemOutcome], seconds: float
    ) -> bool:
        """Store (d,) vectors of existing templates that lack one, and record the outcomes in the job.

        Returns whether a cancellation of the job was requested. Raises LeaseLostError.
        """
        with self._database.change(view) as connection:
            return _add(connection, view, made, job, outcomes, seconds)


# Rows, within a transaction of the caller


def _live(connection: Connection, gallery: Gallery) -> tuple[Generation, Generation | None]:
    """Return the current generation, and the other one that is not dropped."""
    query = sa.select(generations).where(generations.c.gallery_pk == gallery.pk, generations.c.state != "dropped")
    found = [
        Generation(row.generation, row.fingerprint, row.dimension, row.model, row.state)
        for row in connection.execute(query)
    ]
    current, *rest = sorted(found, key=lambda one: one.state != "current")
    return current, rest[0] if rest else None


def _set_state(connection: Connection, gallery: Gallery, generation: int, state: GenerationState) -> None:
    own = (generations.c.gallery_pk == gallery.pk) & (generations.c.generation == generation)
    connection.execute(generations.update().where(own).values(state=state))


def _make_current(
    connection: Connection, gallery: Gallery, left: Generation, state: GenerationState, entered: Generation
) -> None:
    """Switch from the generation ``left``, which gets the ``state``, to another one."""
    _require_risk(connection, gallery)
    _set_state(connection, gallery, left.number, state)
    _set_state(connection, gallery, entered.number, "current")
    about = {"fingerprint": entered.fingerprint, "dimension": entered.dimension}
    update_gallery(connection, gallery.pk, current_generation=entered.number, **about)


def _embedded(generation: int) -> sa.ColumnElement[bool]:
    own = (vectors.c.template_pk == templates.c.pk) & (vectors.c.generation == generation)
    return sa.exists().where(own).correlate(templates)


def _lacking(view: Gallery) -> sa.Select[Any]:
    """Select the keys of templates without a vector of a generation."""
    return sa.select(templates.c.pk).where(templates.c.gallery_pk == view.pk, ~_embedded(view.generation))


def _cropless(generation: int | None) -> sa.ColumnElement[bool]:
    """Return the condition that a template has neither a crop nor a vector of the generation, if given."""
    stored = sa.exists().where(crops.c.template_pk == templates.c.pk).correlate(templates)
    return ~stored if generation is None else ~stored & ~_embedded(generation)


def _count(connection: Connection, gallery: Gallery, condition: sa.ColumnElement[bool]) -> int:
    """Count templates of the gallery's people."""
    query = sa.select(sa.func.count()).where(templates.c.gallery_pk == gallery.pk, OF_PERSON, condition)
    return int(connection.execute(query.select_from(templates)).scalar_one())


def _crops(connection: Connection, gallery: Gallery, keys: Sequence[int]) -> SealedCrops:
    chosen = (templates.c.gallery_pk == gallery.pk) & templates.c.pk.in_(list(keys))
    query = sa.select(templates.c.pk, templates.c.id, crops.c.sealed).join(crops).where(chosen)
    return connection.execute(query).all()


def _add(
    connection: Connection,
    view: Gallery,
    made: Mapping[int, Float],
    job: Job,
    outcomes: Sequence[ItemOutcome],
    seconds: float,
) -> bool:
    keys = connection.execute(_lacking(view).where(templates.c.pk.in_(list(made)))).scalars().all()
    if keys and view.generation in [one.number for one in _live(connection, view) if one is not None]:
        sealed = view.seal.close_vectors(np.stack([made[key] for key in keys]), view.generation)
        rows = zip(keys, sealed, strict=True)
        new = [{"template_pk": key, "generation": view.generation, "vector": vector} for key, vector in rows]
        connection.execute(vectors.insert(), new)
    return record_in(connection, job, outcomes, seconds)


def _require_none(connection: Connection, gallery: Gallery, missing: int, reason: str) -> None:
    """Raise migration_incomplete if templates are missing."""
    if missing:
        total = gallery_value(connection, gallery.pk, galleries.c.template_count)
        raise RefusedError(
            "migration_incomplete", f"{missing} of {total} templates {reason}", missing=missing, templates=total
        )


def _require_risk(connection: Connection, gallery: Gallery) -> None:
    """Raise migration_state if the gallery uses a similarity threshold, which another recognizer does not share."""
    if gallery_value(connection, gallery.pk, galleries.c.settings)["risk"]["kind"] == "threshold":
        raise RefusedError(
            "migration_state",
            f"gallery {gallery.name!r} uses a similarity threshold, which another recognizer does not share: set its "
            "risk to a rate first, such as fpir",
        )


def _is_fill(gallery: Gallery, of: Generation) -> sa.ColumnElement[bool]:
    """Return the condition of fills that did not end, and were not canceled."""
    fills = jobs.c.parameters["generation"].as_integer() == of.number
    return sa.and_(
        jobs.c.gallery_pk == gallery.pk,
        jobs.c.kind == FILL,
        jobs.c.state.in_(["queued", "running"]),
        ~jobs.c.cancel,
        fills,
    )


def _cancel_fills(connection: Connection, gallery: Gallery, of: Generation) -> bool:
    """Let fills end without a switch; return whether there were any."""
    return bool(connection.execute(jobs.update().where(_is_fill(gallery, of)).values(cancel=True)).rowcount)


def _queue_fill(connection: Connection, gallery: Gallery, to: Generation, force: bool) -> None:
    create_in(connection, gallery, FILL, {"generation": to.number, "fingerprint": to.fingerprint, "force": force})


def _fingerprints(left: Generation, entered: Generation) -> dict[str, Any]:
    return {"from": left.fingerprint, "to": entered.fingerprint}
