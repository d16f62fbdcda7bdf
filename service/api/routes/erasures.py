"""Erasure receipts, and export of all data about a subject."""

from __future__ import annotations

from functools import partial
from operator import itemgetter
from typing import Annotated, Any

from fastapi import Query

from kith.wire.erasures import DeletedOut, ReceiptOut
from kith.wire.fields import Page, SubjectId
from service.api.http.access import ADMIN, BackendDep, GalleryDep, router
from service.api.http.parameters import PageDep, SubjectPath
from service.storage.privacy.subject_access import everything_about
from service.storage.repositories.erasures import Receipt

routes = router("/v1", "erasures")


@routes.get("/galleries/{gallery}/erasures", dependencies=[ADMIN])
async def list_erasures(
    gallery: GalleryDep,
    backend: BackendDep,
    page: PageDep,
    subject: Annotated[SubjectId | None, Query(description="Only receipts of this subject id.")] = None,
) -> Page[ReceiptOut]:
    """List the erasure receipts of a gallery, newest first."""
    listed = partial(backend.store.erasures.list_page, gallery, subject)
    return await page.read(Page[ReceiptOut], backend.threads, gallery.seal, listed, itemgetter(1), itemgetter(0))


@routes.get("/galleries/{gallery}/subjects/{subject}/export", dependencies=[ADMIN], response_model=dict[str, Any])
async def export_subject(gallery: GalleryDep, subject: SubjectPath, backend: BackendDep) -> dict[str, Any]:
    """Export all data about a subject: stored data with embeddings and crops, and audit entries.

    For an erased subject the export has the receipts and the audit entries.
    """
    return await backend.threads.run(everything_about, backend.store.database, gallery, subject)


def to_deleted_out(receipt: Receipt) -> DeletedOut:
    """Convert the receipt of a deletion."""
    return DeletedOut(
        subject_count=receipt.removed.get("subjects", 0),
        template_count=receipt.removed.get("templates", 0),
        receipt=receipt,
    )
