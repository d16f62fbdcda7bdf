"""Albums: faces of uploaded photos and the numbers of their groups, which people merge, split and enroll.

Whatever is enrolled leaves the album, in the same transaction: each face is stored once. The rest of its group belongs
to the subject from then on, and is erased with it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from kith.wire.albums import AlbumFaceOut
from models.runtime.network import Float
from service.core.errors import (
    InvalidRequestError,
    LimitReachedError,
    NotFoundError,
    RefusedError,
    StorageError,
)
from service.domain.albums import (
    EXAMPLES,
    MAX_ALBUMS,
    MAX_FACES,
    Album,
    AlbumGroup,
    FaceRecord,
    NewAlbumFace,
)
from service.domain.gallery import Gallery, Item, NewTemplate
from service.security.sealing import Seal
from service.storage.audit.log import Entry, append, note
from service.storage.db.row_sealing import ALBUM_FACE, ALBUM_PHOTO, open_crop, open_subject, seal_crop
from service.storage.db.tables import album_faces, albums, galleries, jobs, subjects
from service.storage.repositories.erasures import ErasingStore, Receipt, delete_rows
from service.storage.repositories.jobs import FINISHED, Beginning, ItemOutcome, Job, own_row, record_in
from service.storage.repositories.subjects import name_subject, read_subject
from service.storage.repositories.templates import admit

FOUND: Final = "faces_found"
NO_FACE: Final = "no_face"
COPY: Final = "copy"
ORDER: Final = (
    sa.func.coalesce(album_faces.c.certainty, -1.0).desc(),
    album_faces.c.pk,
)
"""The most certain faces first, then those that a person put into the group."""
SHOWN: Final = tuple(album_faces.c[name] for name in ("pk", "id", "group_number", "certainty", "sealed"))
"""Columns of an AlbumFace: without its vector and crop."""
CONTENT: Final = (album_faces.c.vector, album_faces.c.crop)
READ_AT_ONCE: Final = 500
_CONFLICT: Final = StorageError("a constraint of the albums was violated")


class AlbumStore(ErasingStore):
    """Albums in SQL. Every method is one transaction and blocks."""

    # For the job that makes an album

    def beginning(self, gallery: Gallery, risk: float, expires_at: datetime) -> Beginning:
        """Return a function that adds an empty album in the transaction that queues its job.

        It raises too_many_albums.
        """

        def begin(connection: Connection, job_id: str) -> None:
            # As Database.change: writers of a gallery wait for each other, so that none counts too few.
            own = sa.select(galleries.c.pk).where(galleries.c.pk == gallery.pk)
            connection.execute(own.with_for_update(key_share=True))
            count = sa.select(sa.func.count()).select_from(albums).where(current_albums(gallery))
            if connection.execute(count).scalar_one() >= MAX_ALBUMS:
                problem = f"gallery {gallery.name!r} has {MAX_ALBUMS} albums, the most allowed"
                raise LimitReachedError("too_many_albums", problem)
            row = {"id": job_id, "gallery_pk": gallery.pk, "generation": gallery.generation, "risk": risk}
            times = {"created_at": datetime.now(UTC), "expires_at": expires_at}
            connection.execute(albums.insert().values(**row, **times))

        return begin

    def known_photos(self, album: Album, seal: Seal, hashes: Sequence[str]) -> set[str]:
        """Return which photos, by SHA-256, have faces in the album."""
        lookups = {seal.pseudonym(ALBUM_PHOTO, each): each for each in hashes}
        own = (album_faces.c.album_pk == album.pk) & album_faces.c.photo.in_(list(lookups))
        with self._database.read() as connection:
            return {lookups[each] for each in connection.execute(sa.select(album_faces.c.photo).where(own)).scalars()}

    def add(
        self, job: Job, album: Album, outcomes: Sequence[ItemOutcome], faces: Sequence[NewAlbumFace], seconds: float
    ) -> bool:
        """Store the faces of photos with the outcomes of the photos. Return whether cancellation was requested.

        Raises LeaseLostError, also if the album was deleted. album_too_large: it would have more than MAX_FACES.
        """
        rows = [_row_of(job.seal, album, face) for face in faces]
        read = sum(outcome.outcome in (FOUND, NO_FACE) for outcome in outcomes)
        with self._database.write(_CONFLICT) as connection:
            canceled = record_in(connection, job, outcomes, seconds)
            own = sa.select(sa.func.count()).where(album_faces.c.album_pk == album.pk)
            if connection.execute(own).scalar_one() + len(rows) > MAX_FACES:
                raise LimitReachedError("album_too_large", f"the photos show more than {MAX_FACES:,} faces")
            counted = albums.update().where(albums.c.pk == album.pk)
            connection.execute(counted.values(photo_count=albums.c.photo_count + read))
            if rows:
                connection.execute(album_faces.insert(), rows)
        return canceled

    def faces_to_group(self, album: Album, gallery: Gallery) -> tuple[list[tuple[int, FaceRecord]], Float]:
        """Return all row keys and faces, and (n, d) vectors, by the photos' content and the faces' numbers."""
        query: sa.Select[Any] = sa.select(*SHOWN, album_faces.c.vector).where(album_faces.c.album_pk == album.pk)
        seal, faces = gallery.seal, list[tuple[int, FaceRecord]]()
        blocks = [np.zeros((0, gallery.dimension), np.float32)]
        with self._database.read() as connection:
            for rows in connection.execution_options(yield_per=READ_AT_ONCE).execute(query).partitions():
                faces += [(row.pk, _record_of(seal, row)) for row in rows]
                blocks.append(seal.open_vectors([row.vector for row in rows], album.generation, gallery.dimension))
        order = sorted(range(len(faces)), key=lambda row: (faces[row][1].hash, faces[row][1].number))
        return [faces[row] for row in order], np.concatenate(blocks)[order]

    def set_groups(
        self, job: Job, album: Album, groups: Sequence[Sequence[tuple[int, float | None]]], threshold: float | None
    ) -> None:
        """Store the groups, each of row keys of faces and certainties. Raises LeaseLostError."""
        with self._database.write(_CONFLICT) as connection:
            gallery = own_row(connection, job).gallery_pk
            placed = [
                {"face": face, "into": number, "how": certainty}
                for number, members in enumerate(groups, start=1)
                for face, certainty in members
            ]
            if placed:
                place = album_faces.update().where(album_faces.c.pk == sa.bindparam("face"))
                values: dict[str, Any] = {"group_number": sa.bindparam("into"), "certainty": sa.bindparam("how")}
                connection.execute(place.values(values), placed)
            done = {"threshold": threshold, "next_group": len(groups) + 1, "grouped_at": datetime.now(UTC)}
            connection.execute(albums.update().where(albums.c.pk == album.pk).values(**done))
            counts = {"faces": len(placed), "groups": sum(len(members) > 1 for members in groups)}
            entry = Entry("album_grouped", (gallery, job.gallery), details={"album": album.id, **counts})
            append(self._database.vault, connection, [entry])

    # Reads

    def list_all(self, gallery: Gallery) -> list[Album]:
        """Return the albums of a gallery, the latest first: at most MAX_ALBUMS."""
        query = _albums(current_albums(gallery)).order_by(albums.c.pk.desc())
        with self._database.read() as connection:
            return [_album_of(row) for row in connection.execute(query)]

    def get(self, gallery: Gallery, album_id: str) -> Album:
        """Raises album_not_found."""
        with self._database.read() as connection:
            return _read(connection, gallery, album_id)

    def groups(
        self, gallery: Gallery, album_id: str, single: bool | None, after: int | None, limit: int
    ) -> list[AlbumGroup]:
        """Return groups with examples, the largest of the job first: at most ``limit`` after the number ``after``.

        ``single``: only groups of one face, or only the others. Raises album_not_found, album_not_ready.
        """
        with self._database.read() as connection:
            album = _read_ready(connection, gallery, album_id)
            own = _of(album, album_faces.c.group_number > (after or 0))
            size = sa.true() if single is None else (sa.func.count() == 1) == single
            return _groups(connection, gallery, own, size, limit)

    def faces(
        self, gallery: Gallery, album_id: str, number: int, after: int | None, limit: int
    ) -> list[tuple[int, AlbumFaceOut]]:
        """Return faces of a group, the most certain first, each with its place: ``limit`` after the first ``after``.

        Raises album_group_not_found; as :meth:`groups`.
        """
        start = after or 0
        with self._database.read() as connection:
            album = _read_ready(connection, gallery, album_id)
            _read_group(connection, gallery, album, number)
            rows = connection.execute(_members(album, number, *SHOWN).offset(start).limit(limit)).all()
        return [(start + place, _face_of(gallery.seal, row)) for place, row in enumerate(rows, start=1)]

    # What people decide

    def merge(self, gallery: Gallery, album_id: str, number: int, into: int) -> AlbumGroup:
        """Move the faces of a group to another one, which gets its subject if it has none. Raises as :meth:`faces`."""
        if number == into:
            raise InvalidRequestError("into: must be another group")
        with self._database.change(gallery) as connection:
            album = _read_ready(connection, gallery, album_id)
            source, target = (_read_group(connection, gallery, album, each) for each in (number, into))
            place = {"group_number": into, "subject_pk": target.subject_pk or source.subject_pk}
            certainty = sa.case((album_faces.c.group_number == into, album_faces.c.certainty))
            both = _of(album, album_faces.c.group_number.in_([number, into]))
            connection.execute(album_faces.update().where(both).values(certainty=certainty, **place))
            about: dict[str, Any] = {"album": album_id, "group": source.id, "into": target.id}
            note(self._database.vault, connection, "album_merged", gallery, **about)
            return _read_group(connection, gallery, album, into)

    def split(self, gallery: Gallery, album_id: str, number: int, face_ids: Sequence[str]) -> AlbumGroup:
        """Move some faces of a group to a new group, which has no subject. Return it.

        Raises InvalidRequestError: no face would be left. As :meth:`faces`.
        """
        with self._database.change(gallery) as connection:
            album = _read_ready(connection, gallery, album_id)
            group = _read_group(connection, gallery, album, number)
            following = albums.update().where(albums.c.pk == album.pk).values(next_group=albums.c.next_group + 1)
            new = connection.execute(following.returning(albums.c.next_group)).scalar_one() - 1
            place: dict[str, Any] = {"group_number": new, "subject_pk": None, "certainty": None}
            split = album_faces.update().where(_chosen(album, number, face_ids)).values(**place)
            moved = set(connection.execute(split.returning(album_faces.c.id)).scalars())
            if missing := sorted(set(face_ids) - moved):
                raise NotFoundError("album_group", f"group {group.id!r} has no face {missing[0]!r}")
            if len(moved) == group.face_count:
                raise InvalidRequestError("faces: leave at least one face in the group")
            about: dict[str, Any] = {"album": album_id, "group": group.id, "into": f"g{new}", "faces": len(moved)}
            note(self._database.vault, connection, "album_split", gallery, **about)
            return _read_group(connection, gallery, album, new)

    def to_enroll(
        self, gallery: Gallery, album_id: str, number: int, limit: int, without: Collection[str] = ()
    ) -> tuple[int, dict[str, NewAlbumFace]]:
        """Return the size of a group and its ``limit`` most certain faces by id, ``without`` those with these ids.

        Raises album_outdated; as :meth:`faces`.
        """
        with self._database.read() as connection:
            album = _read_ready(connection, gallery, album_id)
            if album.generation != gallery.generation:
                raise RefusedError("album_outdated", f"album {album_id!r} has embeddings of another recognizer")
            group = _read_group(connection, gallery, album, number)
            query = _members(album, number, *SHOWN, *CONTENT).where(album_faces.c.id.not_in(list(without)))
            rows = connection.execute(query.limit(limit)).all()
        seal = gallery.seal
        vectors = seal.open_vectors([row.vector for row in rows], album.generation, gallery.dimension)
        return group.face_count, {
            row.id: NewAlbumFace(_record_of(seal, row), vector, open_crop(seal, row.crop))
            for row, vector in zip(rows, vectors, strict=True)
        }

    def enroll(
        self,
        gallery: Gallery,
        album: str,
        number: int,
        subject: str,
        name: str | None,
        admitted: Mapping[str, NewTemplate],
        as_read: bool,
    ) -> int:
        """Store templates by id of their face, and delete these faces from the album. Return the faces that remain.

        A face whose template exists is only deleted, also if it was moved to another subject. ``name``: of a subject
        without one.

        Raises album_group_not_found: the group changed. GalleryChangedError, SubjectErasedError, GalleryMovedError: as
        TemplateStore.enroll.
        """
        with self._database.change(gallery, as_read=as_read) as connection:
            found = _read_ready(connection, gallery, album)
            group = _read_group(connection, gallery, found, number)
            taken = album_faces.delete().where(_chosen(found, number, admitted))
            if connection.execute(taken).rowcount != len(admitted):
                raise NotFoundError("album_group", f"group {group.id!r} changed during the request")
            items = [Item(subject), *(Item(subject, template) for template in admitted.values())]
            done = admit(self._database.vault, connection, gallery, items, album=album)
            for error in done.refused.values():
                if error.code != "template_conflict":
                    raise error
            person = read_subject(connection, gallery, subject)
            if done.enrolled and name is not None and person.name is None:
                name_subject(connection, gallery, person, name)
            rest = album_faces.update().where(_of(found, album_faces.c.group_number == number))
            connection.execute(rest.values(subject_pk=person.pk))
        self._cache.evict(gallery.name)
        return group.face_count - len(admitted)

    # Deletion

    def delete(self, gallery: Gallery, album_id: str) -> Receipt:
        """Erase an album and its job. A repeated erasure returns the first receipt. Raises album_not_found."""
        missing = _missing(gallery, album_id)
        return self._erase("album_deleted", gallery, "album", album_id, missing=lambda *_: missing, album=album_id)

    def delete_ungrouped(self) -> int:
        """Delete the albums whose job ended without groups, and count them."""
        ended = sa.select(jobs.c.id).where(jobs.c.state.in_(FINISHED))
        return self._delete_due(albums.c.grouped_at.is_(None) & albums.c.id.in_(ended), with_jobs=False)

    def delete_expired(self, now: datetime) -> int:
        """Delete albums past their time with their jobs, and those whose job ended without groups; count them."""
        return self._delete_due(albums.c.expires_at < now, with_jobs=True) + self.delete_ungrouped()

    def _delete_due(self, due: sa.ColumnElement[bool], with_jobs: bool) -> int:
        query = sa.select(albums.c.id, galleries.c.pk, galleries.c.name).join(galleries).where(due)
        with self._database.read() as connection:
            found = connection.execute(query.order_by(albums.c.pk)).all()
        deleted = 0
        for row in found:
            with self._database.write(_CONFLICT) as connection:
                chosen = (albums.c.id == row.id) & due
                one = albums.delete().where(chosen)
                if not (delete_rows(connection, "album", chosen) if with_jobs else connection.execute(one).rowcount):
                    continue
                entry = Entry("album_expired", (row.pk, row.name), details={"album": row.id})
                append(self._database.vault, connection, [entry])
            deleted += 1
        if deleted:
            self._database.truncate_wal()
        return deleted


def _missing(gallery: Gallery, album_id: str) -> NotFoundError:
    return NotFoundError("album", f"gallery {gallery.name!r} has no album {album_id!r}")


def _row_of(seal: Seal, album: Album, face: NewAlbumFace) -> dict[str, Any]:
    about = face.record
    (vector,) = seal.close_vectors(face.vector[None], album.generation)
    return {
        "id": seal.pseudonym(ALBUM_FACE, f"{album.id}\0{about.hash}\0{about.number}"),
        "album_pk": album.pk,
        "photo": seal.pseudonym(ALBUM_PHOTO, about.hash),
        "sealed": seal.close_json(asdict(about), ALBUM_FACE),
        "vector": vector,
        "crop": seal_crop(seal, face.crop),
    }


def _record_of(seal: Seal, row: sa.Row[Any]) -> FaceRecord:
    return FaceRecord(**seal.open_json(row.sealed, ALBUM_FACE))


def _face_of(seal: Seal, row: sa.Row[Any]) -> AlbumFaceOut:
    about, certainty = _record_of(seal, row), None if row.certainty is None else round(row.certainty, 4)
    return AlbumFaceOut.model_validate(vars(about) | {"id": row.id, "certainty": certainty})


def current_albums(gallery: Gallery) -> sa.ColumnElement[bool]:
    """Choose the albums that a gallery shows. Those past their time wait for deletion."""
    return (albums.c.gallery_pk == gallery.pk) & (albums.c.expires_at > datetime.now(UTC))


def _albums(own: sa.ColumnElement[bool]) -> sa.Select[Any]:
    """Select these albums with the counts of their faces and groups."""
    among = album_faces.c.album_pk.in_(sa.select(albums.c.pk).where(own))
    sizes = sa.select(album_faces.c.album_pk, album_faces.c.group_number, sa.func.count().label("size")).where(among)
    sized = sizes.group_by(album_faces.c.album_pk, album_faces.c.group_number).subquery()
    grouped = sa.func.count(sized.c.group_number)
    counts = (
        sa.func.coalesce(sa.func.sum(sized.c.size), 0).label("face_count"),
        grouped.filter(sized.c.size > 1).label("group_count"),
        grouped.filter(sized.c.size == 1).label("single_count"),
    )
    joined = albums.outerjoin(sized, sized.c.album_pk == albums.c.pk)
    return sa.select(albums, *counts).select_from(joined).where(own).group_by(albums.c.pk)


def _album_of(row: sa.Row[Any]) -> Album:
    threshold = None if row.threshold is None else round(row.threshold, 4)
    state = "grouping" if row.grouped_at is None else "ready"
    return Album.model_validate({**row._mapping, "threshold": threshold, "state": state})


def _read(connection: Connection, gallery: Gallery, album_id: str) -> Album:
    """Raises album_not_found."""
    row = connection.execute(_albums(current_albums(gallery) & (albums.c.id == album_id))).first()
    if row is None:
        raise _missing(gallery, album_id)
    return _album_of(row)


def _read_ready(connection: Connection, gallery: Gallery, album_id: str) -> Album:
    """Return a grouped album. Raises album_not_found, album_not_ready."""
    album = _read(connection, gallery, album_id)
    if album.state == "grouping":
        raise RefusedError("album_not_ready", f"the job of album {album_id!r} has not finished")
    return album


def _of(album: Album, among: sa.ColumnElement[bool]) -> sa.ColumnElement[bool]:
    return sa.and_(album_faces.c.album_pk == album.pk, among)


def _chosen(album: Album, number: int, face_ids: Collection[str]) -> sa.ColumnElement[bool]:
    return _of(album, (album_faces.c.group_number == number) & album_faces.c.id.in_(list(face_ids)))


def _members(album: Album, number: int, *columns: sa.Column[Any]) -> sa.Select[Any]:
    return sa.select(*columns).where(_of(album, album_faces.c.group_number == number)).order_by(*ORDER)


def _read_group(connection: Connection, gallery: Gallery, album: Album, number: int) -> AlbumGroup:
    """Raises album_group_not_found."""
    found = _groups(connection, gallery, _of(album, album_faces.c.group_number == number), sa.true(), limit=1)
    if not found:
        raise NotFoundError("album_group", f"album {album.id!r} has no group 'g{number}'")
    return found[0]


def _groups(
    connection: Connection,
    gallery: Gallery,
    own: sa.ColumnElement[bool],
    size: sa.ColumnElement[bool],
    limit: int,
) -> list[AlbumGroup]:
    """Return the first ``limit`` groups of these faces and of a size, each with its first EXAMPLES faces."""
    number, person = album_faces.c.group_number, sa.func.max(album_faces.c.subject_pk).label("subject_pk")
    counted = sa.select(number, person, sa.func.count().label("face_count")).where(own).group_by(number)
    some = counted.having(size).order_by(number).limit(limit).subquery()
    named = sa.select(some, subjects.c.sealed).outerjoin(subjects, subjects.c.pk == some.c.subject_pk)
    rows = connection.execute(named.order_by(some.c.group_number)).all()
    place = sa.func.row_number().over(partition_by=number, order_by=ORDER).label("place")
    shown = own & number.in_([row.group_number for row in rows])
    ranked = sa.select(album_faces.c.pk, place).where(shown).subquery()
    first = sa.select(*SHOWN).join(ranked, ranked.c.pk == album_faces.c.pk).where(ranked.c.place <= EXAMPLES)
    faces: dict[int, list[AlbumFaceOut]] = {}
    for row in connection.execute(first.order_by(ranked.c.place)):
        faces.setdefault(row.group_number, []).append(_face_of(gallery.seal, row))
    groups = []
    for row in rows:
        known = None if row.sealed is None else open_subject(gallery.seal, row.sealed)
        shown_as = {"subject": None, "name": None} if known is None else {"subject": known.id, "name": known.name}
        about = shown_as | {name: row._mapping[name] for name in ("face_count", "subject_pk")}
        number = row.group_number
        groups.append(AlbumGroup(id=f"g{number}", number=number, faces=faces[number], **about))
    return groups
