"""Albums: a job that groups the faces of an archive's photos into people, and the enrollment of groups."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Final

import numpy as np

from kith.wire.albums import AlbumEnrolledOut, AlbumEnrollIn, RefusedFaceOut
from kith.wire.fields import Problem
from kith.wire.subjects import ChecksIn
from models.vision.liveness import LivenessResult
from models.vision.quality import Quality
from service.core.actor import gather_or_cancel
from service.core.errors import (
    GalleryChangedError,
    KithError,
    LimitReachedError,
    RefusedError,
)
from service.domain.albums import MAX_PHOTOS, Album, FaceRecord, NewAlbumFace
from service.domain.gallery import Gallery, NewTemplate
from service.inference.archives import ArchivedFile, ArchiveLimits, iterate_members, read_contents
from service.inference.photo_pipeline import Face, Photo
from service.jobs.runner import JobContext, JobKind, is_fault
from service.risk.albums import group_faces_of_album, singles
from service.security.api_keys import Caller
from service.storage.repositories.albums import COPY, FOUND, NO_FACE
from service.storage.repositories.jobs import ItemOutcome, Job
from service.usecases.backend import Backend
from service.usecases.bulk_enrollment import record_other_files, refusal, template_id
from service.usecases.enroll import report_refused
from service.usecases.enrollment_checks import needs_identity_check, refuse_identities, template_from_face

KIND: Final = "album"
PHOTOS_AT_ONCE: Final = 16
"""Photos that are embedded, and then stored, together: two full detector batches."""
Embed = Callable[[bytes], Coroutine[Any, Any, Photo]]
MAX_ENROLLED: Final = 500
"""Faces of a group that one request enrolls."""


@dataclass(frozen=True)
class AlbumJobs:
    """Jobs that make albums, and their dependencies."""

    backend: Backend
    limits: ArchiveLimits

    def kind(self) -> JobKind:
        """Return the functions of this kind of job."""
        return JobKind(self.run, self.backend.spool.has, self._discard)

    async def run(self, context: JobContext) -> None:
        """Embed the photos that have no recorded outcome yet, then group the faces of all."""
        store, options = self.backend.store, context.job.parameters
        gallery = await context.run(store.galleries.get, context.job.gallery)
        album = await context.run(store.albums.get, gallery, context.job.id)
        if album.generation != gallery.generation:
            raise RefusedError("album_outdated", f"gallery {gallery.name!r} moved to another recognizer meanwhile")
        served = self.backend.recognizers.for_gallery(gallery)
        calibration = self.backend.risks.require_calibration(gallery)
        if album.state == "grouping":
            kept: dict[str, Any] = {"detail": options["detail"], "keep": "all", "background": True}
            embed = partial(self.backend.photos.embed, recognizer=served, **kept)
            await self._embed_all(context, gallery, album, embed)
            context.check()
            faces, vectors = await context.run(store.albums.faces_to_group, album, gallery)
            is_usable = np.array([not face.reasons for _, face in faces], bool)
            pks, poor = (np.array([pk for pk, _ in faces], np.int64)[rows] for rows in (is_usable, ~is_usable))
            _, photos = np.unique([face.hash for _, face in faces if not face.reasons], return_inverse=True)
            work = partial(group_faces_of_album, vectors[is_usable], photos, calibration, options["risk"])
            found, threshold = await self.backend.heavy.run(work)
            context.check()
            groups = [[(int(pks[row]), certainty) for row, certainty in members] for members in found]
            await context.run(store.albums.set_groups, context.job, album, groups + singles(poor.tolist()), threshold)

    async def _embed_all(self, context: JobContext, gallery: Gallery, album: Album, embed: Embed) -> None:
        archive = self.backend.spool.archive(context.job.id, gallery.seal)
        contents = await context.run(partial(read_contents, labeled=False), archive, self.limits, None, context.check)
        if len(contents.subjects) > MAX_PHOTOS:
            raise LimitReachedError("album_too_large", f"the archive has more than {MAX_PHOTOS:,} photos")
        done = await context.run(context.done)
        await context.run(record_other_files, context, contents, done)
        members = iterate_members(archive, self.limits)
        waiting = (each for each in members if each.name in contents.subjects and each.name not in done)
        while block := await context.run(_read, waiting):
            context.check()
            await self._embed(context, gallery, album, embed, block)

    async def _embed(
        self, context: JobContext, gallery: Gallery, album: Album, embed: Embed, block: Sequence[_Item]
    ) -> None:
        """Embed a block of photos, and store their faces and outcomes in one transaction."""
        albums, hashes = self.backend.store.albums, [item.hash for item in block if item.hash]
        known = await context.run(albums.known_photos, album, gallery.seal, hashes)
        first = {item.hash: item.name for item in reversed(block)}

        async def seen_in(item: _Item) -> Photo | KithError | None:
            if isinstance(item.payload, KithError):
                return item.payload
            if item.hash in known or first[item.hash] != item.name:
                return None
            try:
                return await embed(item.payload)
            except KithError as error:
                if is_fault(error):
                    raise
                return error

        photos = await gather_or_cancel([seen_in(item) for item in block])
        outcomes, faces = list[ItemOutcome](), list[NewAlbumFace]()
        for item, photo in zip(block, photos, strict=True):
            if isinstance(photo, KithError):
                outcomes.append(refusal(item.name, photo))
            else:
                seen = COPY if photo is None else FOUND if photo.faces else NO_FACE
                outcomes.append(ItemOutcome(item.name, seen, face_count=None if photo is None else photo.face_count))
                faces += [] if photo is None else _new_faces(item, photo, gallery)
        canceled = await context.run(albums.add, context.job, album, outcomes, faces, context.seconds)
        context.note_cancellation(canceled)

    def _discard(self, job: Job) -> None:
        self.backend.spool.discard(job.id)
        self.backend.store.albums.delete_ungrouped()


@dataclass(frozen=True)
class _Item:
    """Photo of the archive. ``hash``: SHA-256; empty if the photo cannot be read."""

    name: str
    payload: bytes | KithError
    hash: str


def _read(waiting: Iterator[ArchivedFile]) -> list[_Item]:
    items = []
    for member in islice(waiting, PHOTOS_AT_ONCE):
        try:
            payload = member.read()
        except KithError as error:
            items.append(_Item(member.name, error, ""))
        else:
            items.append(_Item(member.name, payload, hashlib.sha256(payload).hexdigest()))
    return items


def _new_faces(item: _Item, photo: Photo, gallery: Gallery) -> Iterator[NewAlbumFace]:
    for number, face in enumerate(photo.faces, start=1):
        assert face.vector is not None and face.kept is not None  # noqa: S101 - embed was asked for both
        liveness = None if face.liveness is None else [face.liveness.score, face.liveness.threshold]
        yield NewAlbumFace(
            FaceRecord(
                photo=item.name,
                hash=item.hash,
                number=number,
                box=[round(float(side), 1) for side in face.box_xyxy],
                score=face.score,
                quality=dict(vars(face.quality)),
                reasons=gallery.settings.quality_gate.reasons(face.quality),
                liveness=liveness,
            ),
            face.vector,
            face.kept,
        )


async def enroll_group(
    backend: Backend, snapshot: Gallery, caller: Caller, album: str, number: int, body: AlbumEnrollIn
) -> AlbumEnrolledOut:
    """Enroll the most certain faces of a group as one subject, like photos, at most MAX_ENROLLED. They leave the album.

    Faces that a check refuses stay, and those after them are checked.

    Raises album_outdated, album_group_not_found, album_not_found, album_not_ready; SubjectErasedError:
    since the request began; liveness_unavailable.
    """
    store, enrolled, refused, subject = backend.store, 0, dict[str, KithError](), body.subject
    remaining = 1  # or there is no such group
    async with backend.enrolling.of(snapshot.pk):
        while enrolled < MAX_ENROLLED and remaining > len(refused):
            gallery = await backend.reload_gallery(snapshot)
            backend.recognizers.for_gallery(gallery)
            chosen = album, number, MAX_ENROLLED - enrolled, refused
            remaining, faces = await backend.threads.run(store.albums.to_enroll, gallery, *chosen)
            admitted, others = _admit(gallery, subject, faces, body)
            checked = needs_identity_check(gallery, backend.risks, body)
            if checked and admitted:
                others |= await refuse_identities(admitted, gallery, subject, backend, body, backend.threads.run)
            if admitted:
                enroll = partial(store.albums.enroll, gallery, album, number, subject, body.name, admitted, checked)
                try:
                    remaining = await backend.threads.run(enroll)
                except GalleryChangedError:
                    continue
                enrolled += len(admitted)
                backend.metrics.count_enrollment("enrolled", len(admitted))
                backend.risks.derive_later(await backend.reload_gallery(gallery))
            refused |= others
    shown = await report_refused(backend, snapshot, caller, subject, list(refused.values()))
    problems = (Problem(**error.document()) for error in shown)
    left = [RefusedFaceOut(face=face, problem=problem) for face, problem in zip(refused, problems, strict=True)]
    return AlbumEnrolledOut(subject=subject, enrolled_count=enrolled, refused=left, remaining_count=remaining)


def _admit(
    gallery: Gallery, subject: str, faces: Mapping[str, NewAlbumFace], overrides: ChecksIn
) -> tuple[dict[str, NewTemplate], dict[str, KithError]]:
    """Return templates and errors by id of the face. Identities are not checked yet."""
    admitted, refused = dict[str, NewTemplate](), dict[str, KithError]()
    for face_id, one in faces.items():
        about, liveness = one.record, None
        if about.liveness is not None:
            score, threshold = about.liveness
            assert threshold is not None  # noqa: S101 - the pack has one
            liveness = LivenessResult(score, threshold)
        face = Face(
            np.array(about.box, np.float32),
            np.array(one.crop.landmarks_xy, np.float32),
            about.score,
            Quality(**about.quality),
            one.vector,
            kept=one.crop if gallery.settings.keep_crops else None,
            liveness=liveness,
        )
        # The same face of the same photo is enrolled once, from whichever album.
        template = template_id(gallery.seal, subject, f"{about.hash} {about.number}".encode())
        try:
            admitted[face_id] = template_from_face(face, gallery, overrides, template)
        except KithError as error:
            if is_fault(error) or error.status == 409:
                raise  # not an error of the face
            refused[face_id] = error
    return admitted, refused
