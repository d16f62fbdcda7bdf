"""Remembered strangers: list, name, merge, forget."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import Any

from kith.wire.erasures import DeletedOut
from kith.wire.fields import ObjectId, Page
from kith.wire.strangers import PromoteIn, StrangerMergedOut, StrangerMergeIn, StrangerOut
from kith.wire.subjects import MergedOut
from service.api.http.access import ADMIN, ENROLL, READ, BackendDep, GalleryDep, router
from service.api.http.bodies import JsonBody
from service.api.http.openapi import example
from service.api.http.parameters import GalleryPath, PageDep
from service.api.routes.erasures import to_deleted_out
from service.storage.privacy.subject_access import everything_about_stranger

routes = router("/v1/galleries/{gallery}/strangers", "strangers")


@routes.get("", dependencies=[READ])
async def list_strangers(gallery: GalleryDep, backend: BackendDep, page: PageDep) -> Page[StrangerOut]:
    """List the remembered strangers, the latest first."""
    listed = partial(backend.store.strangers.list_page, gallery)
    return await page.read(Page[StrangerOut], backend.threads, gallery.seal, listed)


@routes.delete("", dependencies=[ADMIN])
async def forget_strangers(gallery: GalleryPath, backend: BackendDep) -> DeletedOut:
    """Erase all remembered strangers of the gallery. The response is a receipt."""
    return to_deleted_out(await backend.run_on_gallery(gallery, backend.store.strangers.forget_all))


@routes.get("/{stranger}", dependencies=[READ])
async def get_stranger(gallery: GalleryDep, stranger: ObjectId, backend: BackendDep) -> StrangerOut:
    """Return a stranger."""
    return await backend.threads.run(backend.store.strangers.get, gallery, stranger)


@routes.delete("/{stranger}", dependencies=[ENROLL])
async def forget_stranger(gallery: GalleryPath, stranger: ObjectId, backend: BackendDep) -> DeletedOut:
    """Erase a stranger. The response is a receipt. A repeated request gets the same receipt."""
    return to_deleted_out(await backend.run_on_gallery(gallery, backend.store.strangers.forget, stranger))


@routes.post(
    "/{stranger}/promote", dependencies=[ENROLL], openapi_extra=example({"subject": "ada", "name": "Ada Lovelace"})
)
async def promote_stranger(
    gallery: GalleryDep, stranger: ObjectId, body: JsonBody[PromoteIn], backend: BackendDep
) -> MergedOut:
    """Make a stranger a subject: move the templates to a new or existing subject, and forget the stranger.

    It is an enrollment without identity checks: the caller says who it is.
    """
    promote = backend.store.strangers.promote
    return await backend.change_templates(gallery, promote, stranger, body.subject, body.name, datetime.now(UTC))


@routes.post(
    "/{stranger}/merge", dependencies=[ENROLL], openapi_extra=example({"into": "9f86d081884c4d659a2feaa0c55ad015"})
)
async def merge_stranger(
    gallery: GalleryDep, stranger: ObjectId, body: JsonBody[StrangerMergeIn], backend: BackendDep
) -> StrangerMergedOut:
    """Merge a stranger into another one that is the same person. Visits add up. A merge cannot be undone."""
    merge = backend.store.strangers.merge
    merged, receipt = await backend.run_on_gallery(gallery, merge, stranger, body.into)
    return StrangerMergedOut(stranger=merged, receipt=receipt)


@routes.get("/{stranger}/export", dependencies=[ADMIN], response_model=dict[str, Any])
async def export_stranger(gallery: GalleryDep, stranger: ObjectId, backend: BackendDep) -> dict[str, Any]:
    """Export all data about a stranger: stored data with embeddings and crops, events, and audit entries."""
    return await backend.threads.run(everything_about_stranger, backend.store.database, gallery, stranger)
