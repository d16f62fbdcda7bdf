"""Erasure receipts, and export of all data about a subject."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query

from kith.wire.erasures import DeletedOut, ReceiptOut, ReceiptsOut
from kith.wire.fields import SubjectId
from service.api.http.parameters import Cursor, GalleryPath, PageLimit, SubjectPath, open_cursor, paginate
from service.api.http.routing import ADMIN, BackendDep, Routes
from service.core.errors import AuditWriteError
from service.storage.privacy.subject_access import everything_about
from service.storage.repositories.erasures import Receipt

routes = Routes("/v1", "erasures")


@routes.add("GET", "/galleries/{gallery}/erasures", ADMIN)
async def list_erasures(
    gallery: GalleryPath,
    backend: BackendDep,
    subject: Annotated[SubjectId | None, Query(description="Only receipts of this subject id.")] = None,
    cursor: Cursor = None,
    limit: PageLimit = 100,
) -> ReceiptsOut:
    """List the erasure receipts of a gallery, newest first."""
    found = await backend.find_gallery(gallery)
    before = open_cursor(found.seal, cursor)
    listed = await backend.run(backend.galleries.erasures.list_page, found, subject, before, limit + 1)
    page, more = paginate(listed, limit, found.seal, lambda row: row[0])
    return ReceiptsOut(data=[to_receipt_out(receipt) for _, receipt in page], next=more)


@routes.add(
    "GET",
    "/galleries/{gallery}/subjects/{subject}/export",
    ADMIN,
    response_model=dict[str, Any],
    errors=(AuditWriteError,),
)
async def export_subject(gallery: GalleryPath, subject: SubjectPath, backend: BackendDep) -> dict[str, Any]:
    """Export all data about a subject: stored data with embeddings and crops, and audit entries.

    For an erased subject the export has the receipts and the audit entries.
    """
    found = await backend.find_gallery(gallery)
    return await backend.run(everything_about, backend.galleries.store.database, found, subject)


def to_receipt_out(receipt: Receipt) -> ReceiptOut:
    """Convert a receipt."""
    return ReceiptOut(**receipt.document())


def to_deleted_out(receipt: Receipt) -> DeletedOut:
    """Convert the receipt of a deletion."""
    return DeletedOut(
        subject_count=receipt.removed.get("subjects", 0),
        template_count=receipt.removed.get("templates", 0),
        stranger_count=receipt.removed.get("strangers", 0),
        receipt=to_receipt_out(receipt),
    )
