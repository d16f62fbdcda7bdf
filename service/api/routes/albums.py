"""Albums: upload photos, see who is in them, merge, split and enroll groups."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial
from operator import attrgetter, itemgetter
from typing import Annotated

from fastapi import Query, Request

from kith.wire.albums import (
    AlbumEnrolledOut,
    AlbumEnrollIn,
    AlbumFaceOut,
    AlbumGroupOut,
    AlbumMergeIn,
    AlbumOut,
    AlbumSplitIn,
    GroupId,
)
from kith.wire.erasures import DeletedOut
from kith.wire.fields import ObjectId, Page
from kith.wire.jobs import JobOut
from service.api.http.access import ENROLL, READ, BackendDep, CallerDep, GalleryDep, router
from service.api.http.bodies import JsonBody
from service.api.http.openapi import example
from service.api.http.parameters import GalleryPath, PageDep
from service.api.routes.enrollments import ARCHIVE_BODY, DetailOption, queue_archive
from service.api.routes.erasures import to_deleted_out
from service.usecases.albums import KIND, enroll_group

routes = router("/v1/galleries/{gallery}/albums", "albums")
AlbumRisk = Annotated[
    float,
    Query(gt=0, lt=1, description="Accepted share of pairs of faces in one group that are two people."),
]


@routes.post("", dependencies=[ENROLL], status_code=202, openapi_extra=ARCHIVE_BODY)
async def create_album(
    gallery: GalleryDep,
    request: Request,
    backend: BackendDep,
    risk: AlbumRisk = 0.01,
    detail: DetailOption = None,
) -> JobOut:
    """Start a job that groups the faces of an archive's photos into people. The album has the id of the job.

    Folders and manifests in the archive are ignored. No face is enrolled before its group is.
    """
    backend.recognizers.for_gallery(gallery)  # these raise here rather than in the job
    backend.risks.require_calibration(gallery)
    options = {"risk": risk, "detail": detail or backend.settings.expected_face_detail}
    expires_at = datetime.now(UTC) + timedelta(days=backend.settings.retention_albums_days)
    begin = backend.store.albums.beginning(gallery, risk, expires_at)
    return await queue_archive(request, backend, gallery, KIND, options, begin)


@routes.get("", dependencies=[READ])
async def list_albums(gallery: GalleryDep, backend: BackendDep) -> Page[AlbumOut]:
    """List the albums of a gallery, the latest first. There are at most 20."""
    return Page[AlbumOut](data=[*await backend.threads.run(backend.store.albums.list_all, gallery)])


@routes.get("/{album}", dependencies=[READ])
async def get_album(gallery: GalleryPath, album: ObjectId, backend: BackendDep) -> AlbumOut:
    """Return an album."""
    return await backend.threads.run(backend.store.albums.get, await backend.find_gallery(gallery), album)


@routes.delete("/{album}", dependencies=[ENROLL])
async def delete_album(gallery: GalleryPath, album: ObjectId, backend: BackendDep) -> DeletedOut:
    """Erase an album and its job, which stops if it runs. The response is a receipt.

    Enrolled faces stay with their subjects.
    """
    receipt = await backend.run_on_gallery(gallery, backend.store.albums.delete, album)
    await backend.threads.run(backend.spool.discard, album)
    return to_deleted_out(receipt)


@routes.get("/{album}/groups", dependencies=[READ])
async def list_album_groups(
    gallery: GalleryDep,
    album: ObjectId,
    backend: BackendDep,
    page: PageDep,
    single: Annotated[bool | None, Query(description="Only groups of one face, or only the others.")] = None,
) -> Page[AlbumGroupOut]:
    """List the groups with some of their faces, the largest first, then single faces, then those split off."""
    listed, number_of = partial(backend.store.albums.groups, gallery, album, single), attrgetter("number")
    return await page.read(Page[AlbumGroupOut], backend.threads, gallery.seal, listed, number_of=number_of)


@routes.get("/{album}/groups/{group}/faces", dependencies=[READ])
async def list_album_faces(
    gallery: GalleryDep, album: ObjectId, group: GroupId, backend: BackendDep, page: PageDep
) -> Page[AlbumFaceOut]:
    """List the faces of a group, the most certain first."""
    listed = partial(backend.store.albums.faces, gallery, album, _number(group))
    return await page.read(Page[AlbumFaceOut], backend.threads, gallery.seal, listed, itemgetter(1), itemgetter(0))


@routes.post("/{album}/groups/{group}/merge", dependencies=[ENROLL], openapi_extra=example({"into": "g1"}))
async def merge_album_group(
    gallery: GalleryDep, album: ObjectId, group: GroupId, body: JsonBody[AlbumMergeIn], backend: BackendDep
) -> AlbumGroupOut:
    """Merge a group into another one that is the same person. Return the remaining group."""
    merge = backend.store.albums.merge
    return await backend.run_on_gallery(gallery, merge, album, _number(group), _number(body.into))


@routes.post(
    "/{album}/groups/{group}/split",
    dependencies=[ENROLL],
    openapi_extra=example({"faces": ["9f86d081884c4d659a2feaa0c55ad015"]}),
)
async def split_album_group(
    gallery: GalleryDep, album: ObjectId, group: GroupId, body: JsonBody[AlbumSplitIn], backend: BackendDep
) -> AlbumGroupOut:
    """Move faces that are another person to a new group. Return it."""
    split = backend.store.albums.split
    return await backend.run_on_gallery(gallery, split, album, _number(group), body.faces)


@routes.post(
    "/{album}/groups/{group}/enroll",
    dependencies=[ENROLL],
    openapi_extra=example({"subject": "ada", "name": "Ada Lovelace"}),
)
async def enroll_album_group(
    gallery: GalleryDep,
    album: ObjectId,
    group: GroupId,
    body: JsonBody[AlbumEnrollIn],
    backend: BackendDep,
    caller: CallerDep,
) -> AlbumEnrolledOut:
    """Enroll the faces of a group as templates of a subject, which is created if missing.

    The checks of enrollment apply to each face. Enrolled faces leave the album, refused ones stay. A repeated request
    enrolls the rest.
    """
    return await enroll_group(backend, gallery, caller, album, _number(group), body)


def _number(group: str) -> int:
    return int(group.removeprefix("g"))
