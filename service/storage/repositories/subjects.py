"""Subjects: sealed names, tags and metadata, filters, merging and erasure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray
from sqlalchemy.engine import Connection

from kith.wire.fields import MAX_DECOYS, MAX_LABELS
from kith.wire.subjects import MergedOut
from service.core.errors import InvalidRequestError, KithError, SubjectExistsError, SubjectNotFoundError
from service.domain.gallery import Described, Gallery, Person, Subject, SubjectFilter, SubjectLabel, SubjectRecord
from service.domain.person_search import matches
from service.security.sealing import Seal
from service.storage.audit.log import append, note, pseudonym
from service.storage.db import bulk_rows
from service.storage.db.row_sealing import labels_of, open_subject, seal_subject, subject_lookup
from service.storage.db.tables import IS_PERSON, album_faces, events, labels, subjects, templates
from service.storage.repositories import erasures
from service.storage.repositories.erasures import ErasingStore, Receipt, entry_of

MERGED_EVENT: Final = "subject_merged"
DELETED_EVENT: Final = "subject_deleted"
MAX_OPENED: Final = 10_000
"""Subjects that one search for names opens: names are sealed, so the database cannot compare them."""
OPENED_AT_ONCE: Final = 500
LABEL_COLUMNS: Final = ("gallery_pk", "label", "subject_pk")
# Built once: SQLAlchemy takes longer to build a statement than SQLite to run it.
SEALED_NAMES: Final = sa.select(subjects.c.pk, subjects.c.sealed).where(IS_PERSON)


class SubjectStore(ErasingStore):
    """Subjects in SQL. Every method is one transaction and blocks."""

    def put(
        self,
        gallery: Gallery,
        subject_id: str,
        name: str | None,
        metadata: dict[str, Any],
        tags: list[str],
        only_new: bool = False,
    ) -> tuple[Subject, bool]:
        """Create or replace a subject; return it and whether it was created.

        Raises SubjectErasedError: it was erased since ``gallery`` was read. SubjectExistsError: it exists, and
        ``only_new``.
        """
        about = SubjectRecord(subject_id, name, metadata, tags)
        with self._database.change(gallery) as connection:
            erasures.refuse_erased(connection, gallery, subject_id)
            if only_new:
                refuse_existing(connection, gallery, subject_id)
            subject_pk = find_subject_pk(connection, gallery, subject_id)
            created = subject_pk is None
            if subject_pk is None:
                insert_subjects(connection, gallery, {subject_id: Person(name, metadata, tags)})
            else:
                _update(connection, gallery, subject_pk, about)
            note(self._database.vault, connection, "subject_put", gallery, subject_id, created=created)
            return read_subject(connection, gallery, subject_id), created

    def patch(self, gallery: Gallery, subject_id: str, given: dict[str, Any]) -> Subject:
        """Change the given fields (name, metadata, tags). Raises SubjectNotFoundError, SubjectErasedError."""
        with self._database.change(gallery) as connection:
            subject = read_subject(connection, gallery, subject_id)
            erasures.refuse_erased(connection, gallery, subject_id)
            _update(connection, gallery, subject.pk, subject.model_copy(update=given))
            note(self._database.vault, connection, "subject_changed", gallery, subject_id, changed=sorted(given))
            return read_subject(connection, gallery, subject_id)

    def get(self, gallery: Gallery, subject_id: str) -> Subject:
        """Raises SubjectNotFoundError."""
        with self._database.read() as connection:
            return read_subject(connection, gallery, subject_id)

    def list_page(self, gallery: Gallery, after: int | None, limit: int, chosen: SubjectFilter) -> list[Subject]:
        """Return subjects that pass the filter, oldest first: at most ``limit`` after the row key ``after``."""
        query = _page_of(_subject_rows(gallery), gallery, after, limit, chosen)
        with self._database.read() as connection:
            return [_subject_of(gallery.seal, row) for row in connection.execute(query)]

    def find_page(
        self, gallery: Gallery, after: int | None, limit: int, chosen: SubjectFilter, words: tuple[str, ...]
    ) -> tuple[list[Subject], int | None]:
        """Return subjects that pass the filter and whose name or id has all words, oldest first.

        At most MAX_OPENED subjects after the row key ``after`` are opened, so that a page may have fewer than ``limit``
        subjects, or none, although more match. The second value is the row key to continue after; None at the end.
        """
        sealed = _page_of(
            SEALED_NAMES.where(subjects.c.gallery_pk == gallery.pk), gallery, after, MAX_OPENED + 1, chosen
        )
        with self._database.read() as connection:
            with connection.execution_options(yield_per=OPENED_AT_ONCE).execute(sealed) as rows:
                found, rest = _find(rows, gallery.seal, after, limit, words)
            query = _subject_rows(gallery).where(subjects.c.pk.in_(found)).order_by(subjects.c.pk)
            return [_subject_of(gallery.seal, row) for row in connection.execute(query)], rest

    def names(self, gallery: Gallery, pks: Collection[int]) -> dict[int, SubjectLabel]:
        """Return ids and names by row key, as of ``gallery``'s version or later, without deleted subjects."""
        cached = self._cache.names.get(gallery, pks)
        if len(cached) == len(pks):
            return cached
        query = SEALED_NAMES.where(subjects.c.pk.in_([pk for pk in pks if pk not in cached]))
        with self._database.read() as connection:
            opened = ((row.pk, open_subject(gallery.seal, row.sealed)) for row in connection.execute(query))
            read = {pk: SubjectLabel(about.id, about.name) for pk, about in opened}
        self._cache.names.put(gallery, read)
        return cached | read

    def matching_pks(self, gallery: Gallery, chosen: SubjectFilter) -> NDArray[np.int64]:
        """Return the (n,) ascending row keys of the subjects that pass the filter."""
        wanted = _filter_labels(gallery, chosen)
        every = sa.select(subjects.c.pk).where(subjects.c.gallery_pk == gallery.pk, IS_PERSON)
        passing = (_subjects_with_labels(gallery, wanted) if wanted else every).subquery()
        (key,) = passing.c
        # One text instead of a row for each key, which would take most of a search's time.
        query = sa.select(sa.func.aggregate_strings(sa.cast(key, sa.Text), ",")).select_from(passing)
        with self._database.read() as connection:
            text = connection.execute(query).scalar()
        keys = np.fromstring(text, np.int64, sep=",") if text else np.empty(0, np.int64)
        keys.sort()
        return keys

    def delete(self, gallery: Gallery, subject_id: str) -> Receipt:
        """Erase a subject. A repeated erasure returns the first receipt.

        Raises SubjectNotFoundError, of a merged one with that receipt.
        """
        name = pseudonym(gallery, subject_id)
        return self._erase(
            DELETED_EVENT,
            gallery,
            "subject",
            name,
            missing=lambda _, moved: _not_found(gallery, subject_id, moved),
            about=name,
        )

    def delete_many(self, gallery: Gallery, subject_ids: Sequence[str]) -> int:
        """Erase subjects, all or nothing, each with its receipt; return how many existed."""
        names = [pseudonym(gallery, each) for each in subject_ids]
        with self._database.change(gallery) as connection:
            gone = [one for name in names if (one := erasures.erase(connection, gallery, "subject", name)) is not None]
            append(self._database.vault, connection, [entry_of(one, DELETED_EVENT, one.subject) for one in gone])
        self._cache.evict(gallery.name)
        self._database.truncate_wal()
        return len(gone)

    def refuse_existing(self, gallery: Gallery, subject_id: str) -> None:
        """Raises SubjectExistsError."""
        with self._database.read() as connection:
            refuse_existing(connection, gallery, subject_id)

    def merge(self, gallery: Gallery, subject_id: str, into: str) -> MergedOut:
        """Move a subject's templates and decoys to another, add missing name, tags and metadata, and delete the first.

        A repeated merge returns the first result. Raises SubjectNotFoundError, with the receipt of an earlier erasure;
        SubjectErasedError: since ``gallery`` was read; InvalidRequestError: the ids are equal, or the result is too
        large.
        """
        if subject_id == into:
            raise InvalidRequestError("into: must be another subject")
        with self._database.change(gallery) as connection:
            if find_subject_pk(connection, gallery, subject_id) is None:
                return _earlier_merge(connection, gallery, subject_id, into)
            source = read_subject(connection, gallery, subject_id)
            target = read_subject(connection, gallery, into)
            for each in (subject_id, into):
                erasures.refuse_erased(connection, gallery, each)
            about = merged_record(target, source)
            count = move_belongings(connection, source.pk, target.pk)
            _refuse_many_decoys(connection, target.pk)
            changed = sorted(name for name, value in about.items() if value != getattr(target, name))
            if changed:
                _update(connection, gallery, target.pk, target.model_copy(update=about))
            vault, by, to = self._database.vault, pseudonym(gallery, subject_id), pseudonym(gallery, into)
            receipt = erasures.bury_moved(connection, gallery, by, to, count)
            note(vault, connection, "subject_changed", gallery, into, changed=changed, merged=by, templates=count)
            append(vault, connection, [entry_of(receipt, MERGED_EVENT, by, into=to, templates=count)])
            now = read_subject(connection, gallery, into)
        self._cache.evict(gallery.name)
        receipt = erasures.with_log_emptied(self._database, receipt)
        return MergedOut(subject=now, template_count=count, receipt=receipt)


# Rows, within a transaction of the caller


def find_subject_pk(connection: Connection, gallery: Gallery, subject_id: str) -> int | None:
    """Return the row key of a subject, if it exists."""
    own = (subjects.c.gallery_pk == gallery.pk) & _has_id(gallery, subject_id)
    return connection.execute(sa.select(subjects.c.pk).where(own)).scalar()


def read_subject(connection: Connection, gallery: Gallery, subject_id: str) -> Subject:
    """Raises SubjectNotFoundError."""
    row = connection.execute(_subject_rows(gallery).where(_has_id(gallery, subject_id))).first()
    if row is None:
        raise _not_found(gallery, subject_id)
    return _subject_of(gallery.seal, row)


def name_subject(connection: Connection, gallery: Gallery, subject: Subject, name: str) -> None:
    """Set the name of a subject."""
    _update(connection, gallery, subject.pk, subject.model_copy(update={"name": name}))


def refuse_existing(connection: Connection, gallery: Gallery, subject_id: str) -> None:
    """Raises SubjectExistsError."""
    if find_subject_pk(connection, gallery, subject_id) is not None:
        raise SubjectExistsError(f"there is a subject {subject_id!r} in gallery {gallery.name!r}")


def insert_subjects(
    connection: Connection, gallery: Gallery, people: Mapping[str, Person], owner_pk: int | None = None
) -> dict[str, int]:
    """Insert subjects by id, outsiders if there is an owner, and return their row keys by id."""
    keys, now, seal = bulk_rows.reserve_keys(connection, subjects, len(people)), datetime.now(UTC), gallery.seal
    rows, own_labels = list[Any](), list[Any]()
    for key, (subject_id, person) in zip(keys, people.items(), strict=True):
        about = SubjectRecord(subject_id, person.name, person.metadata or {}, person.tags or [])
        times = (bulk_rows.as_time(connection, at, now) for at in (person.created_at, person.updated_at))
        lookup = subject_lookup(seal, subject_id)
        rows.append((key, gallery.pk, owner_pk, lookup, seal_subject(seal, about), *times))
        own_labels += _labels(gallery, key, about)
    columns = ("pk", "gallery_pk", "owner_pk", "lookup", "sealed", "created_at", "updated_at")
    bulk_rows.insert(connection, subjects, columns, rows)
    bulk_rows.insert(connection, labels, LABEL_COLUMNS, own_labels)
    return dict(zip(people, keys, strict=True))


def merged_record(target: Described, source: Described) -> dict[str, Any]:
    """Add the name, tags and metadata that ``target`` lacks. Raises InvalidRequestError above MAX_LABELS. Pure."""
    metadata = {**source.metadata, **target.metadata}
    tags = list(dict.fromkeys([*target.tags, *source.tags]))
    for kind, count in (("tags", len(tags)), ("entries of metadata", len(metadata))):
        if count > MAX_LABELS:
            raise InvalidRequestError(
                f"into: the merged subject would have {count} {kind}. Remove some: at most {MAX_LABELS} are allowed."
            )
    return {"name": target.name if target.name is not None else source.name, "metadata": metadata, "tags": tags}


def move_belongings(connection: Connection, source_pk: int, target_pk: int) -> int:
    """Move all that hangs on a subject to another one; return the number of its templates."""
    for owner in (subjects.c.owner_pk, album_faces.c.subject_pk, events.c.subject_pk):
        connection.execute(owner.table.update().where(owner == source_pk).values({owner: target_pk}))
    moving = templates.update().where(templates.c.subject_pk == source_pk)
    return connection.execute(moving.values(subject_pk=target_pk, moved=True)).rowcount


def _refuse_many_decoys(connection: Connection, target_pk: int) -> None:
    """Raises InvalidRequestError if a merged subject would have more than MAX_DECOYS."""
    owned = sa.select(sa.func.count()).where(subjects.c.owner_pk == target_pk)
    if (count := connection.execute(owned).scalar_one()) > MAX_DECOYS:
        raise InvalidRequestError(
            f"into: the merged subject would have {count} decoys. Remove some: at most {MAX_DECOYS} are allowed."
        )


def _earlier_merge(connection: Connection, gallery: Gallery, subject_id: str, into: str) -> MergedOut:
    receipt = erasures.last_receipt(connection, gallery, "subject", pseudonym(gallery, subject_id))
    if receipt is None or receipt.kind != erasures.MOVED or receipt.moved_to != pseudonym(gallery, into):
        raise _not_found(gallery, subject_id, receipt)
    now, count = read_subject(connection, gallery, into), receipt.removed.get("templates", 0)
    return MergedOut(subject=now, template_count=count, receipt=receipt)


def _has_id(gallery: Gallery, subject_id: str) -> sa.ColumnElement[bool]:
    return subjects.c.lookup == subject_lookup(gallery.seal, subject_id)


def _not_found(gallery: Gallery, subject_id: str, erased: Receipt | None = None) -> KithError:
    details: dict[str, Any] = {} if erased is None else {"receipt": erased.model_dump(mode="json")}
    return SubjectNotFoundError(f"there is no subject {subject_id!r} in gallery {gallery.name!r}", **details)


def _subject_rows(gallery: Gallery) -> sa.Select[Any]:
    owned = sa.select(sa.func.count()).select_from(templates).where(templates.c.subject_pk == subjects.c.pk)
    every = sa.select(subjects, owned.scalar_subquery().label("template_count"))
    return every.where(subjects.c.gallery_pk == gallery.pk, IS_PERSON)


def _page_of(
    query: sa.Select[Any], gallery: Gallery, after: int | None, limit: int, chosen: SubjectFilter
) -> sa.Select[Any]:
    """Restrict a query of subjects to at most ``limit`` that pass the filter, after the row key ``after``."""
    query = query.order_by(subjects.c.pk).limit(limit)
    if after is not None:
        query = query.where(subjects.c.pk > after)
    if wanted := _filter_labels(gallery, chosen):
        query = query.where(subjects.c.pk.in_(_subjects_with_labels(gallery, wanted)))
    return query


def _find(
    rows: Iterable[sa.Row[Any]], seal: Seal, after: int | None, limit: int, words: tuple[str, ...]
) -> tuple[list[int], int | None]:
    """Return the row keys of the first ``limit`` matches, and the row key to continue after; None at the end."""
    found: list[int] = []
    for number, row in enumerate(rows):
        if number == MAX_OPENED:
            return found, after
        about = open_subject(seal, row.sealed)
        if matches(words, about.id, about.name):
            if len(found) == limit:
                return found, after
            found.append(row.pk)
        after = row.pk
    return found, None


def _subject_of(seal: Seal, row: sa.Row[Any]) -> Subject:
    return Subject.model_validate({**row._mapping, **vars(open_subject(seal, row.sealed))})


def _update(connection: Connection, gallery: Gallery, subject_pk: int, about: Described) -> None:
    values = {"sealed": seal_subject(gallery.seal, about), "updated_at": datetime.now(UTC)}
    connection.execute(subjects.update().where(subjects.c.pk == subject_pk).values(**values))
    connection.execute(labels.delete().where(labels.c.subject_pk == subject_pk))
    bulk_rows.insert(connection, labels, LABEL_COLUMNS, _labels(gallery, subject_pk, about))


def _labels(gallery: Gallery, subject_pk: int, about: Described) -> list[tuple[int, str, int]]:
    found = labels_of(gallery.seal, about.tags, about.metadata)
    return [(gallery.pk, label, subject_pk) for label in sorted(found)]


def _filter_labels(gallery: Gallery, chosen: SubjectFilter) -> list[str]:
    return sorted(labels_of(gallery.seal, chosen.tags, dict(chosen.metadata)))


def _subjects_with_labels(gallery: Gallery, wanted: list[str]) -> sa.Select[int]:
    """Select the keys of subjects that have all these labels."""
    labeled = sa.select(labels.c.subject_pk).where(labels.c.gallery_pk == gallery.pk)
    if len(wanted) == 1:
        return labeled.where(labels.c.label == wanted[0])
    with_any = labeled.where(labels.c.label.in_(wanted)).group_by(labels.c.subject_pk)
    return with_any.having(sa.func.count() == len(wanted))
