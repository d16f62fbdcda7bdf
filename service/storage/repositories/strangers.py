"""Remembered strangers: subjects of a hidden companion gallery, which has the recognizer of its parent.

The keyed hash of a stranger's id in the database is the public id. A face is compared before the transaction that
stores it, and again if strangers were added or removed in between. Writers hold the lock of the parent's row.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from kith.wire.subjects import MergedOut
from models.runtime.network import Float
from service.core.errors import GalleryMovedError, InvalidRequestError, NotFoundError, StorageError
from service.domain.events import Event
from service.domain.gallery import Gallery, GallerySettings, Hit, Item, NewTemplate, Person
from service.domain.strangers import MAX_STRANGERS, MAX_TEMPLATES, Nearest, Recalled, Stranger
from service.storage.audit.log import append, note, pseudonym
from service.storage.db.engine import deleted_meanwhile
from service.storage.db.tables import galleries, last_change, subjects, templates
from service.storage.events.outbox import publish
from service.storage.repositories import erasures
from service.storage.repositories.change_log import read_snapshot
from service.storage.repositories.erasures import ErasingStore, Receipt, delete_rows, entry_of
from service.storage.repositories.gallery_rows import gallery_value, is_embedded, read_companion, strangers_of
from service.storage.repositories.subjects import (
    insert_subjects,
    move_belongings,
    name_subject,
    read_subject,
)
from service.storage.repositories.templates import admit, insert_templates

Search = Callable[[Gallery, Float, int], tuple[list[list[Hit]], int]]
"""Search of a gallery for (q, d) vectors: the k nearest subjects of each, and the number of subjects compared."""
Recall = Callable[[Float, Nearest | None], Recalled]


@dataclass(frozen=True, eq=False)
class Sighting(NewTemplate):
    """Usable face that a search did not know.

    ``photo``: a stranger is met once in the faces of the same photo; None: the face stands alone.
    """

    photo: int | None = None


class StrangerStore(ErasingStore):
    """Remembered strangers in SQL, of the gallery's current recognizer. Every method blocks."""

    def remember(
        self, gallery: Gallery, sightings: Sequence[Sighting], search: Search, recall: Recall, now: datetime
    ) -> tuple[list[Stranger | None], bool]:
        """Return the stranger of each sighting, found or founded; None: neither. The second value: events were stored.

        None is founded if anything was erased since ``gallery`` was read. Raises as :meth:`Database.change`.
        """
        seen: list[tuple[Stranger | None, bool]] = []
        for sighting in sightings:
            pairs = zip(seen, sightings, strict=False)
            met = {one.pk for (one, _), other in pairs if one is not None and other.photo == sighting.photo is not None}
            while (found := self._see(gallery, sighting, met, search, recall, now)) is None:
                pass  # another writer was faster
            seen.append(found)
        return [stranger for stranger, _ in seen], any(is_reported for _, is_reported in seen)

    def _see(
        self,
        gallery: Gallery,
        sighting: Sighting,
        met: set[int],
        search: Search,
        recall: Recall,
        now: datetime,
    ) -> tuple[Stranger | None, bool] | None:
        """Compare a face, and store what changes; return None if the strangers changed meanwhile.

        ``met``: strangers of other faces in its photo.
        """
        with self._database.read() as connection:
            companion = read_companion(connection, gallery)
        nearest = None if companion is None else self._nearest(companion, sighting.vector, met, search)
        found = recall(sighting.vector, nearest)
        if found == "unclear":
            return None, False
        key = None if nearest is None or found == "new" else nearest.key
        if found == "met":
            row = self._database.first(STRANGER, {"pk": key})
            known = None if row is None else _stranger_of(row)
            if known is not None and known.seen(now) is known:
                return known, False
        return self._write(gallery, companion, key, None if found == "met" else sighting, now)

    def _nearest(self, companion: Gallery, vector: Float, met: set[int], search: Search) -> Nearest | None:
        """Return the stranger most similar to a face, without those who were ``met`` in its photo."""
        (hits,), compared = search(companion, vector[None], len(met) + 1)
        best = next((hit for hit in hits if hit.subject_pk not in met), None)
        if best is None:
            return None
        mean = companion.templates / max(1, companion.subjects)
        own = partial(self._vectors, companion, best.subject_pk)
        return Nearest(best.subject_pk, best.similarity, compared - len(met), mean, own)

    def _vectors(self, companion: Gallery, key: int) -> Float:
        with self._database.read() as connection:
            return read_snapshot(connection, companion, 0, templates.c.subject_pk == key).vectors

    def _write(
        self, gallery: Gallery, companion: Gallery | None, key: int | None, added: Sighting | None, now: datetime
    ) -> tuple[Stranger | None, bool] | None:
        """Store a sighting of a known stranger, or of a new one without ``key``, as :meth:`_see`."""
        vault = self._database.vault
        with self._database.write(StorageError("a constraint of the strangers was violated")) as connection:
            _lock(connection, gallery)
            compared = None if companion is None else companion.last_change
            if connection.execute(LAST_CHANGE, {"gallery": gallery.pk}).scalar() != compared:
                return None
            if is_new := key is None:
                if erasures.erased_since(connection, gallery.pk, gallery.erased):
                    return None, False
                companion = companion or _create(connection, gallery, now)
                (key,) = insert_subjects(
                    connection, companion, {uuid.uuid4().hex: Person(None, None, None, now, now)}
                ).values()
            assert companion is not None  # noqa: S101 - it has the known stranger
            if added is not None:
                insert_templates(connection, companion, [(key, replace(added, created_at=now))])
            before = _stranger_of(connection.execute(STRANGER, {"pk": key}).one())
            stranger = before.seen(now)
            if stranger is not before:
                changing = subjects.update().where(subjects.c.pk == key)
                connection.execute(changing.values(updated_at=now, seen_count=stranger.seen_count))
            about: dict[str, Any] = {"data": stranger.sighting(), "stranger_pk": key, "at": now}
            if is_new:
                removed = _make_room(connection, companion, key)
                reported = [Event("stranger_first_seen", **about)]
                about = {"stranger": stranger.id, **removed}
                note(vault, connection, "stranger_remembered", gallery, published=reported, **about)
            else:
                reported = [Event("stranger_seen_again", **about)] if stranger.seen_count > before.seen_count else []
                publish(vault, connection, gallery, reported)
        return stranger, bool(reported)

    def list_page(self, gallery: Gallery, before: int | None, limit: int) -> list[Stranger]:
        """Return strangers, the latest founded first: at most ``limit`` before the row key ``before``."""
        query = _rows(gallery).order_by(subjects.c.pk.desc()).limit(limit)
        if before is not None:
            query = query.where(subjects.c.pk < before)
        with self._database.read() as connection:
            return [_stranger_of(row) for row in connection.execute(query)]

    def get(self, gallery: Gallery, stranger_id: str) -> Stranger:
        """Raises stranger_not_found."""
        with self._database.read() as connection:
            return read_stranger(connection, gallery, stranger_id)

    def promote(
        self, gallery: Gallery, stranger_id: str, subject_id: str, name: str | None, now: datetime
    ) -> MergedOut:
        """Move the templates of a stranger to a subject, which is created if missing, and forget the stranger.

        ``name``: of a subject without one. Raises stranger_not_found, with the receipt if it was promoted, merged or
        forgotten; SubjectErasedError: since ``gallery`` was read.
        """
        with self._database.change(gallery) as connection:
            stranger = read_stranger(connection, gallery, stranger_id)
            vault = self._database.vault
            admit(vault, connection, gallery, [Item(subject_id)]).require_all()
            subject = read_subject(connection, gallery, subject_id)
            if name is not None and subject.name is None:
                name_subject(connection, gallery, subject, name)
            owned = templates.update().where(templates.c.subject_pk == stranger.pk)
            connection.execute(owned.values(gallery_pk=gallery.pk, subject_pk=subject.pk, created_at=now))
            move_belongings(connection, stranger.pk, subject.pk)
            into, count = pseudonym(gallery, subject_id), stranger.template_count
            receipt = erasures.bury_moved(connection, gallery, stranger.id, into, count)
            enrolled = Event("enrollment", {"subject": subject_id, "template_count": count}, subject_id)
            note(vault, connection, "templates_enrolled", gallery, subject_id, published=[enrolled], templates=count)
            line = entry_of(receipt, "stranger_promoted", stranger=stranger.id, into=into, templates=count)
            append(vault, connection, [line])
            subject = read_subject(connection, gallery, subject_id)
        self._cache.evict(gallery.name)
        receipt = erasures.with_log_emptied(self._database, receipt)
        return MergedOut(subject=subject, template_count=count, receipt=receipt)

    def merge(self, gallery: Gallery, stranger_id: str, into: str) -> tuple[Stranger, Receipt]:
        """Merge a stranger into another one, which keeps the MAX_TEMPLATES templates of the best quality.

        Raises InvalidRequestError: both are the same. stranger_not_found as :meth:`promote`.
        """
        if stranger_id == into:
            raise InvalidRequestError("into: must be another stranger")
        with self._database.change(gallery) as connection:
            source, target = (read_stranger(connection, gallery, each) for each in (stranger_id, into))
            move_belongings(connection, source.pk, target.pk)
            photos = sa.select(templates.c.pk, templates.c.quality).where(templates.c.subject_pk == target.pk)
            both = connection.execute(photos.order_by(templates.c.pk)).all()
            ranked = [row.pk for row in sorted(both, key=lambda row: -row.quality.get("score", 0.0))]
            connection.execute(templates.delete().where(templates.c.pk.in_(ranked[MAX_TEMPLATES:])))
            visits = {
                "created_at": min(source.first_seen, target.first_seen),
                "updated_at": max(source.last_seen, target.last_seen),
                "seen_count": source.seen_count + target.seen_count,
            }
            connection.execute(subjects.update().where(subjects.c.pk == target.pk).values(**visits))
            receipt = erasures.bury_moved(connection, gallery, source.id, into, source.template_count)
            line = entry_of(receipt, "stranger_merged", stranger=source.id, into=into)
            append(self._database.vault, connection, [line])
            merged = read_stranger(connection, gallery, into)
        return merged, erasures.with_log_emptied(self._database, receipt)

    def forget(self, gallery: Gallery, stranger_id: str) -> Receipt:
        """Erase a stranger. A repeated erasure returns the first receipt. Raises as :meth:`promote`."""
        return self._erase(
            "stranger_forgotten",
            gallery,
            "subject",
            stranger_id,
            missing=lambda _, moved: _not_found(gallery, stranger_id, moved),
            among=strangers_of(gallery.pk),
            stranger=stranger_id,
        )

    def forget_all(self, gallery: Gallery) -> Receipt:
        """Erase all strangers of a gallery, of any recognizer."""
        with self._database.change(gallery) as connection:
            receipt = erasures.erase(connection, gallery, "subject", None)
            assert receipt is not None  # noqa: S101 - also without strangers
            append(self._database.vault, connection, [entry_of(receipt, "strangers_forgotten")])
        return erasures.with_log_emptied(self._database, receipt)


def _lock(connection: Connection, gallery: Gallery) -> None:
    """Lock the gallery's row. Its version stays: indexes and caches of its subjects have nothing to follow."""
    query = sa.select(galleries.c.current_generation).where(galleries.c.pk == gallery.pk)
    row = connection.execute(query.with_for_update(key_share=True)).first()
    if row is None:
        raise deleted_meanwhile(gallery)
    if row.current_generation != gallery.generation:
        raise GalleryMovedError(f"gallery {gallery.name!r} moved to another recognizer meanwhile")


def _create(connection: Connection, gallery: Gallery, now: datetime) -> Gallery:
    """Create the companion of a gallery, under a name that no user can give."""
    same = {"fingerprint": gallery.fingerprint, "dimension": gallery.dimension, "settings": asdict(GallerySettings())}
    row = {"name": f"{gallery.name}/strangers", "companion_of": gallery.pk, "created_at": now}
    connection.execute(galleries.insert().values(**row, **same))
    companion = read_companion(connection, gallery)
    assert companion is not None  # noqa: S101 - just inserted
    return companion


def _make_room(connection: Connection, companion: Gallery, new: int) -> dict[str, Any]:
    """Delete the strangers last seen the longest ago, if there are too many; return their number for an audit line.

    The ``new`` one stays, also if the clock went back.
    """
    excess = gallery_value(connection, companion.pk, galleries.c.subject_count) - MAX_STRANGERS
    if excess <= 0:
        return {}
    oldest = sa.select(subjects.c.pk).where(subjects.c.gallery_pk == companion.pk, subjects.c.pk != new)
    oldest = oldest.order_by(subjects.c.updated_at, subjects.c.pk).limit(excess)
    pks = connection.execute(oldest).scalars().all()
    return {"removed": {"subjects": delete_rows(connection, "subject", subjects.c.pk.in_(pks))}}


def _rows(gallery: Gallery) -> sa.Select[Any]:
    return STRANGERS.where(strangers_of(gallery.pk), is_embedded(gallery.generation))


def _stranger_of(row: sa.Row[Any]) -> Stranger:
    about = {"id": row.lookup, "first_seen": row.created_at, "last_seen": row.updated_at}
    return Stranger.model_validate({**row._mapping, **about})


def read_stranger(connection: Connection, gallery: Gallery, stranger_id: str) -> Stranger:
    """Raises stranger_not_found."""
    row = connection.execute(_rows(gallery).where(subjects.c.lookup == stranger_id)).first()
    if row is None:
        raise _not_found(gallery, stranger_id, erasures.last_receipt(connection, gallery, "subject", stranger_id))
    return _stranger_of(row)


def _not_found(gallery: Gallery, stranger_id: str, erased: Receipt | None) -> NotFoundError:
    details: dict[str, Any] = {} if erased is None else {"receipt": erased.model_dump(mode="json")}
    return NotFoundError("stranger", f"gallery {gallery.name!r} remembers no stranger {stranger_id!r}", **details)


# Built once: SQLAlchemy takes longer to build a statement than SQLite to run it.
LAST_CHANGE: Final = sa.select(last_change()).where(galleries.c.companion_of == sa.bindparam("gallery"))
OWNED: Final = sa.select(sa.func.count()).where(templates.c.subject_pk == subjects.c.pk).scalar_subquery()
STRANGERS: Final = sa.select(subjects, OWNED.label("template_count"))
STRANGER: Final = STRANGERS.where(subjects.c.pk == sa.bindparam("pk"))
