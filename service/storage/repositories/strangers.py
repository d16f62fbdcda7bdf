"""Remembered strangers: recall and founding, reads, promotion, merging and erasure.

A process keeps the templates of the galleries that it recalls strangers of, and compares their version with the
database before each use. A change is decided again under the lock of the gallery's row, on templates as of then.
"""

from __future__ import annotations

import base64
import threading
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final

import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from kith.wire.fields import rfc3339
from models.runtime.network import Float
from service.core.errors import (
    GalleryMovedError,
    InvalidRequestError,
    StorageError,
    StrangerNotFoundError,
)
from service.domain.events import Event
from service.domain.gallery import Crop, Gallery, Item, NewTemplate
from service.domain.strangers import MAX_STRANGERS, MAX_TEMPLATES, Recalled, Remembered, Stranger
from service.storage.audit.log import Entry, append, note, pseudonym
from service.storage.db.engine import Database, deleted_meanwhile, new_version
from service.storage.db.row_sealing import EVENT, open_crop, seal_crop
from service.storage.db.tables import audit, events, galleries, stranger_templates, strangers
from service.storage.events.outbox import publish
from service.storage.repositories import erasures
from service.storage.repositories.erasures import Receipt, delete_strangers, record_erasure
from service.storage.repositories.gallery_rows import gallery_value, update_gallery
from service.storage.repositories.read_cache import ReadCache
from service.storage.repositories.subjects import MergeResult, name_subject, read_subject
from service.storage.repositories.templates import admit

MAX_CACHED: Final = 8
"""Galleries whose strangers a process keeps: at most 40 MB each."""
READ_AT_ONCE: Final = 500
FIRST_SEEN: Final = "stranger_first_seen"
SEEN_AGAIN: Final = "stranger_seen_again"
PROMOTED: Final = "stranger_promoted"
MERGED: Final = "stranger_merged"
REMEMBERED: Final = "stranger_remembered"
_CONFLICT: Final = StorageError("a constraint of the strangers was violated")


@dataclass(frozen=True, eq=False)
class Sighting:
    """Usable face that a search did not know: a (d,) unit vector, and what is stored with it.

    ``photo``: a stranger is met once in the faces of the same photo; None: the face stands alone.
    """

    vector: Float
    quality: dict[str, float]
    detection_score: float
    crop: Crop | None = None
    photo: int | None = None


Recall = Callable[[Float, Remembered], Recalled]


@dataclass
class _Memory:
    """Strangers of a gallery as this process last read them. ``lock``: of one thread at a time."""

    known: Remembered
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class _Changes:
    """Strangers as of now in one transaction, its events and its audit lines."""

    known: Remembered
    events: list[Event] = field(default_factory=list)
    lines: list[Entry] = field(default_factory=list)


class StrangerStore:
    """Remembered strangers in SQL, of the gallery's current recognizer. Every method blocks."""

    def __init__(self, database: Database, cache: ReadCache) -> None:
        self._database = database
        self._cache = cache
        self._memories: OrderedDict[tuple[int, int], _Memory] = OrderedDict()
        self._lock = threading.Lock()

    def remember(
        self, gallery: Gallery, sightings: Sequence[Sighting], recall: Recall, now: datetime
    ) -> tuple[list[Stranger | None], bool]:
        """Return the stranger of each sighting, found or founded; None: neither. The second value: events were stored.

        No stranger is founded if anything was erased since ``gallery`` was read.

        Raises GalleryNotFoundError, GalleryMovedError, MasterKeyError, StorageError; as ``recall``.
        """
        gallery.seal.unlock()
        memory = self._memory(gallery)
        with memory.lock:
            with self._database.read() as connection:
                memory.known = self._current(connection, gallery, memory.known)
            if (settled := _settled(sightings, recall, memory.known, now)) is not None:
                return settled, False
            with self._database.write(_CONFLICT) as connection:
                is_erased = _lock(connection, gallery)
                made, seen = _Changes(self._current(connection, gallery, memory.known)), list[Stranger | None]()
                for sighting in sightings:
                    taken_for = recall(sighting.vector, made.known.hiding(_met_in_photo(sightings, seen)))
                    if taken_for.stranger_pk is not None:
                        one = _see_again(connection, gallery, taken_for, sighting, now, made)
                    elif taken_for.is_new and not is_erased:
                        one = _found(connection, gallery, sighting, now, made)
                    else:
                        one = None
                    if one is not None:
                        made.known = made.known.with_stranger(one)
                    seen.append(one)
                publish(self._database.vault, connection, gallery, made.events)
                if made.lines:
                    append(self._database.vault, connection, made.lines)
            memory.known = made.known.without(made.known.hidden)
            return seen, bool(made.events)

    def list_page(self, gallery: Gallery, before: int | None, limit: int) -> list[Stranger]:
        """Return strangers, the latest founded first: at most ``limit`` before the row key ``before``."""
        query = _stranger_rows(gallery).order_by(strangers.c.pk.desc()).limit(limit)
        if before is not None:
            query = query.where(strangers.c.pk < before)
        with self._database.read() as connection:
            return [_stranger_of(row) for row in connection.execute(query)]

    def get(self, gallery: Gallery, stranger_id: str) -> Stranger:
        """Raises StrangerNotFoundError."""
        with self._database.read() as connection:
            return _read(connection, gallery, stranger_id)

    def export(self, gallery: Gallery, stranger_id: str) -> dict[str, Any]:
        """Return everything stored about a stranger as JSON: times, templates with vectors, events, audit lines.

        Raises StrangerNotFoundError.
        """
        with self._database.change(gallery) as connection:
            stranger = _read(connection, gallery, stranger_id)
            note(self._database.vault, connection, "stranger_exported", gallery, stranger=stranger_id)
            return _document(connection, gallery, stranger)

    def promote(
        self, gallery: Gallery, stranger_id: str, subject_id: str, name: str | None, now: datetime
    ) -> MergeResult:
        """Move the templates of a stranger to a subject, which is created if missing, and forget the stranger.

        ``name``: of a subject without one.

        Raises:
            StrangerNotFoundError: with the receipt, if it was promoted, merged or forgotten.
            SubjectErasedError: the subject was erased since ``gallery`` was read.
        """
        vault = self._database.vault
        with self._database.change(gallery) as connection:
            stranger = _read(connection, gallery, stranger_id)
            new = [Item(subject_id, _as_template(gallery, row)) for row in _template_rows(connection, stranger.pk)]
            admit(vault, connection, gallery, new).require_all()
            subject = read_subject(connection, gallery, subject_id)
            if name is not None and subject.name is None:
                name_subject(connection, gallery, subject, name)
            # An erasure of the subject must delete them.
            own = events.update().where(events.c.stranger_pk == stranger.pk)
            connection.execute(own.values(stranger_pk=None, subject_pk=subject.pk))
            removed = delete_strangers(connection, gallery, strangers.c.pk == stranger.pk)
            to = pseudonym(gallery, subject_id)
            receipt = record_erasure(
                vault,
                connection,
                gallery,
                erasures.MOVED,
                removed,
                object_id=stranger_id,
                event=PROMOTED,
                moved_to=to,
                into=to,
                templates=len(new),
            )
            subject = read_subject(connection, gallery, subject_id)
        self._cache.evict(gallery.name)
        self._evict(gallery)
        return MergeResult(subject, len(new), erasures.with_log_emptied(self._database, receipt))

    def merge(self, gallery: Gallery, stranger_id: str, into: str) -> tuple[Stranger, Receipt]:
        """Merge a stranger into another one, which keeps the MAX_TEMPLATES templates of the best quality.

        Raises InvalidRequestError: both are the same. StrangerNotFoundError as :meth:`promote`.
        """
        if stranger_id == into:
            raise InvalidRequestError("into: must be another stranger")
        with self._database.change(gallery) as connection:
            source, target = (_read(connection, gallery, each) for each in (stranger_id, into))
            rows = [*_template_rows(connection, target.pk), *_template_rows(connection, source.pk)]
            kept = sorted(rows, key=lambda row: -row.quality.get("score", 0.0))[:MAX_TEMPLATES]
            moving = stranger_templates.update().where(stranger_templates.c.pk.in_([row.pk for row in kept]))
            connection.execute(moving.values(stranger_pk=target.pk))
            left = (stranger_templates.c.stranger_pk == target.pk) & stranger_templates.c.pk.not_in(
                [row.pk for row in kept]
            )
            connection.execute(stranger_templates.delete().where(left))
            own = events.update().where(events.c.stranger_pk == source.pk)
            connection.execute(own.values(stranger_pk=target.pk))
            both = {
                "first_seen": min(source.first_seen, target.first_seen),
                "last_seen": max(source.last_seen, target.last_seen),
                "seen_count": source.seen_count + target.seen_count,
            }
            connection.execute(strangers.update().where(strangers.c.pk == target.pk).values(**both))
            removed = delete_strangers(connection, gallery, strangers.c.pk == source.pk)
            receipt = record_erasure(
                self._database.vault,
                connection,
                gallery,
                erasures.MOVED,
                removed,
                object_id=stranger_id,
                event=MERGED,
                moved_to=into,
                into=into,
            )
            merged = _read(connection, gallery, into)
        return merged, erasures.with_log_emptied(self._database, receipt)

    def forget(self, gallery: Gallery, stranger_id: str) -> Receipt:
        """Erase a stranger. A repeated erasure returns the first receipt. Raises as :meth:`promote`."""
        with self._database.change(gallery) as connection:
            removed = delete_strangers(connection, gallery, strangers.c.id == stranger_id)
            if removed["strangers"]:
                vault = self._database.vault
                receipt = record_erasure(vault, connection, gallery, "stranger", removed, object_id=stranger_id)
            else:
                earlier = erasures.last_receipt(connection, gallery, "stranger", stranger_id)
                if earlier is None or earlier.kind == erasures.MOVED:
                    raise _not_found(gallery, stranger_id, earlier)
                receipt = earlier
        self._evict(gallery)
        return erasures.with_log_emptied(self._database, receipt)

    def forget_all(self, gallery: Gallery) -> Receipt:
        """Erase all strangers of a gallery, of any recognizer."""
        with self._database.change(gallery) as connection:
            removed = delete_strangers(connection, gallery, sa.true())
            receipt = record_erasure(self._database.vault, connection, gallery, "strangers", removed)
        self._evict(gallery)
        return erasures.with_log_emptied(self._database, receipt)

    def _evict(self, gallery: Gallery) -> None:
        """Release what this process holds of a gallery's strangers."""
        with self._lock:
            for key in [key for key in self._memories if key[0] == gallery.pk]:
                del self._memories[key]

    def _memory(self, gallery: Gallery) -> _Memory:
        key = (gallery.pk, gallery.generation)
        with self._lock:
            memory = self._memories.setdefault(key, _Memory(Remembered.none(gallery.dimension)))
            self._memories.move_to_end(key)
            if len(self._memories) > MAX_CACHED:
                self._memories.popitem(last=False)
        return memory

    def _current(self, connection: Connection, gallery: Gallery, known: Remembered) -> Remembered:
        """Return the strangers as of the transaction. Vectors that are known are not read again.

        Keys are given under the lock of the gallery's row and never again: as long as none of the known strangers was
        deleted, only templates with higher keys are new.
        """
        version = gallery_value(connection, gallery.pk, galleries.c.strangers)
        if version is None:
            raise deleted_meanwhile(gallery)
        if version == known.version:
            return known
        former = sa.select(sa.func.count()).select_from(strangers).where(*_own(gallery))
        former = former.where(strangers.c.pk <= max(known.strangers, default=0))
        are_all_left = connection.execute(former).scalar_one() == len(known.strangers)
        base = known if are_all_left else Remembered.none(gallery.dimension)
        newer = stranger_templates.c.pk > int(base.template_pks.max(initial=0))
        founded = _stranger_rows(gallery).where(
            strangers.c.pk.in_(sa.select(stranger_templates.c.stranger_pk).where(newer))
        )
        people = {row.pk: _stranger_of(row) for row in connection.execute(founded)}
        columns = stranger_templates.c.pk, stranger_templates.c.stranger_pk, stranger_templates.c.quality
        owned = sa.select(*columns).join(strangers, strangers.c.pk == stranger_templates.c.stranger_pk)
        rows = connection.execute(owned.where(*_own(gallery), newer).order_by(columns[0])).all()
        keys = np.array([row.pk for row in rows], np.int64)
        vectors = np.empty((len(rows), gallery.dimension), np.float32)
        places = {} if are_all_left else {pk: place for place, pk in enumerate(known.template_pks.tolist())}
        old = np.array([places.get(pk, -1) for pk in keys.tolist()], np.int64)
        vectors[old >= 0] = known.vectors[old[old >= 0]]
        missing = np.flatnonzero(old < 0)
        for start in range(0, len(missing), READ_AT_ONCE):
            part = missing[start : start + READ_AT_ONCE]
            chosen = stranger_templates.c.pk.in_(keys[part].tolist())
            sealed = dict(connection.execute(sa.select(columns[0], stranger_templates.c.vector).where(chosen)).all())
            opened = [sealed[pk] for pk in keys[part].tolist()]
            vectors[part] = gallery.seal.open_vectors(opened, gallery.generation, gallery.dimension)
        owners = np.concatenate([base.stranger_pks, np.array([row.stranger_pk for row in rows], np.int64)])
        order = np.argsort(owners, kind="stable")
        return Remembered(
            version,
            {**base.strangers, **people},
            np.concatenate([base.template_pks, keys])[order],
            owners[order],
            np.concatenate([base.vectors, vectors])[order],
            np.concatenate([base.qualities, np.array([_score(row.quality) for row in rows], np.float32)])[order],
        )


def _settled(
    sightings: Sequence[Sighting], recall: Recall, known: Remembered, now: datetime
) -> list[Stranger | None] | None:
    """Return the strangers if nothing is to be written; else None."""
    seen: list[Stranger | None] = []
    for sighting in sightings:
        found = recall(sighting.vector, known.hiding(_met_in_photo(sightings, seen)))
        stranger = None if found.stranger_pk is None else known.strangers[found.stranger_pk]
        if found.is_new or found.is_diverse or (stranger is not None and stranger.seen(now) is not stranger):
            return None
        seen.append(stranger)
    return seen


def _met_in_photo(sightings: Sequence[Sighting], seen: Sequence[Stranger | None]) -> set[int]:
    """Return the keys of the strangers that were ``seen`` in the photo of the next sighting."""
    photo = sightings[len(seen)].photo
    pairs = zip(sightings, seen, strict=False)
    return {one.pk for sighting, one in pairs if one is not None and photo is not None and sighting.photo == photo}


def _lock(connection: Connection, gallery: Gallery) -> bool:
    """Lock the gallery's row, and return whether anything was erased since ``gallery`` was read.

    Its version stays: indexes and caches of subjects have nothing to follow.
    """
    query = sa.select(galleries.c.current_generation).where(galleries.c.pk == gallery.pk)
    row = connection.execute(query.with_for_update(key_share=True)).first()
    if row is None:
        raise deleted_meanwhile(gallery)
    if row.current_generation != gallery.generation:
        raise GalleryMovedError(f"gallery {gallery.name!r} moved to another recognizer meanwhile")
    return erasures.is_any_since(connection, gallery)


def _found(connection: Connection, gallery: Gallery, sighting: Sighting, now: datetime, made: _Changes) -> Stranger:
    """Found a stranger, in place of the one last seen the longest ago if the gallery is full."""
    own = strangers.c.gallery_pk == gallery.pk
    count = connection.execute(sa.select(sa.func.count()).select_from(strangers).where(own)).scalar_one()
    removed = Counter[str]()
    if count >= MAX_STRANGERS:
        by_age = sa.select(strangers.c.pk).where(own).order_by(strangers.c.last_seen, strangers.c.pk)
        oldest = connection.execute(by_age.limit(count - MAX_STRANGERS + 1)).scalars().all()
        removed = delete_strangers(connection, gallery, strangers.c.pk.in_(oldest))
        made.known = made.known.hiding(oldest)  # they are left out after the transaction: that copies all vectors
    stranger_id = uuid.uuid4().hex
    seen = {"first_seen": now, "last_seen": now, "seen_count": 1}
    row = {"id": stranger_id, "gallery_pk": gallery.pk, "generation": gallery.generation}
    pk = connection.execute(strangers.insert().values(**row, **seen).returning(strangers.c.pk)).scalar_one()
    _add_template(connection, gallery, pk, sighting, now, made)
    stranger = Stranger(pk, stranger_id, now, now, 1, 1)
    details: dict[str, Any] = {"stranger": stranger_id}
    if removed:
        details["removed"] = {kind: number for kind, number in sorted(removed.items()) if number}
    made.lines.append(Entry.about(gallery, REMEMBERED, **details))
    made.events.append(Event(FIRST_SEEN, stranger.sighting(), stranger=stranger_id, at=now))
    return stranger


def _see_again(
    connection: Connection, gallery: Gallery, taken_for: Recalled, sighting: Sighting, now: datetime, made: _Changes
) -> Stranger:
    row = connection.execute(_stranger_rows(gallery).where(strangers.c.pk == taken_for.stranger_pk)).one()
    before = _stranger_of(row)
    after = before.seen(now)
    if after is not before:
        values = {"last_seen": after.last_seen, "seen_count": after.seen_count}
        connection.execute(strangers.update().where(strangers.c.pk == before.pk).values(**values))
    if after.seen_count > before.seen_count:
        made.events.append(Event(SEEN_AGAIN, after.sighting(), stranger=after.id, at=now))
    if taken_for.is_diverse:
        _add_template(connection, gallery, before.pk, sighting, now, made)
        after = replace(after, template_count=before.template_count + 1)
    return after


def _add_template(
    connection: Connection, gallery: Gallery, stranger_pk: int, sighting: Sighting, now: datetime, made: _Changes
) -> None:
    (vector,) = gallery.seal.close_vectors(sighting.vector[None], gallery.generation)
    inserted = stranger_templates.insert().values(
        stranger_pk=stranger_pk,
        vector=vector,
        crop=None if sighting.crop is None else seal_crop(gallery.seal, sighting.crop),
        quality=sighting.quality,
        detection_score=sighting.detection_score,
        created_at=now,
    )
    pk = connection.execute(inserted.returning(stranger_templates.c.pk)).scalar_one()
    version, quality = new_version(), _score(sighting.quality)
    update_gallery(connection, gallery.pk, strangers=version)
    # This transaction holds the lock, so nothing else changed: it need not read what it wrote.
    made.known = made.known.with_template(version, stranger_pk, pk, sighting.vector, quality)


def _score(quality: Mapping[str, float]) -> float:
    return quality.get("score", np.nan)


def _own(gallery: Gallery) -> tuple[sa.ColumnElement[bool], sa.ColumnElement[bool]]:
    return strangers.c.gallery_pk == gallery.pk, strangers.c.generation == gallery.generation


def _stranger_rows(gallery: Gallery) -> sa.Select[Any]:
    owned = sa.select(sa.func.count()).where(stranger_templates.c.stranger_pk == strangers.c.pk)
    return sa.select(strangers, owned.scalar_subquery().label("template_count")).where(*_own(gallery))


def _stranger_of(row: sa.Row[Any]) -> Stranger:
    return Stranger(row.pk, row.id, row.first_seen, row.last_seen, row.seen_count, row.template_count)


def _read(connection: Connection, gallery: Gallery, stranger_id: str) -> Stranger:
    row = connection.execute(_stranger_rows(gallery).where(strangers.c.id == stranger_id)).first()
    if row is None:
        raise _not_found(gallery, stranger_id, erasures.last_receipt(connection, gallery, "stranger", stranger_id))
    return _stranger_of(row)


def _not_found(gallery: Gallery, stranger_id: str, erased: Receipt | None) -> StrangerNotFoundError:
    details: dict[str, Any] = {} if erased is None else {"receipt": erased.document()}
    return StrangerNotFoundError(f"gallery {gallery.name!r} remembers no stranger {stranger_id!r}", **details)


def _template_rows(connection: Connection, stranger_pk: int) -> Sequence[sa.Row[Any]]:
    own = stranger_templates.c.stranger_pk == stranger_pk
    return connection.execute(sa.select(stranger_templates).where(own).order_by(stranger_templates.c.pk)).all()


def _as_template(gallery: Gallery, row: sa.Row[Any]) -> NewTemplate:
    crop = None if row.crop is None else open_crop(gallery.seal, row.crop)
    (vector,) = gallery.seal.open_vectors([row.vector], gallery.generation, gallery.dimension)
    return NewTemplate(uuid.uuid4().hex, vector, "photo", row.quality, row.detection_score, crop=crop)


def _document(connection: Connection, gallery: Gallery, stranger: Stranger) -> dict[str, Any]:
    templates = []
    for row in _template_rows(connection, stranger.pk):
        new = _as_template(gallery, row)
        crop = new.crop and {
            "image": base64.b64encode(new.crop.image).decode(),
            "landmarks": new.crop.landmarks_xy,
        }
        about = {"quality": row.quality, "detection_score": row.detection_score}
        templates.append(
            {**about, "created_at": rfc3339(row.created_at), "embedding": new.vector.tolist(), "crop": crop}
        )
    own = events.c.stranger_pk == stranger.pk
    sealed = connection.execute(sa.select(events.c.sealed).where(own).order_by(events.c.pk)).scalars()
    named = (audit.c.gallery_pk == gallery.pk) & sa.cast(audit.c.details, sa.Text).contains(stranger.id)
    lines = connection.execute(sa.select(audit).where(named).order_by(audit.c.number))
    return {
        "kind": "kith-stranger",
        "gallery": gallery.name,
        **stranger.sighting(),
        "templates": templates,
        "events": [gallery.seal.open_json(each, EVENT) for each in sealed],
        "audit": [
            {"number": line.number, "at": rfc3339(line.at), "event": line.event, "actor": line.actor} for line in lines
        ],
    }
