"""Receipts of what was erased, and everything that is held about one person."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query

from service.api.context import Kith
from service.api.galleries import GalleryPath, Limit, PlaceCursor, place_in
from service.api.openapi import PROBLEMS
from service.api.permissions import Permitted
from service.api.schemas import ReceiptOut, ReceiptsOut, SubjectId, VerdictOut
from service.api.subjects import SubjectPath
from service.gallery.sealed_rows import close_place

router = APIRouter(route_class=Permitted, prefix="/v1", tags=["erasures"], responses=PROBLEMS)
ReceiptPath = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]


@router.get("/galleries/{gallery}/erasures")
async def list_erasures(
    gallery: GalleryPath,
    kith: Kith,
    subject: Annotated[SubjectId | None, Query(description="Only this subject's, by its id.")] = None,
    cursor: PlaceCursor = None,
    limit: Limit = 100,
) -> ReceiptsOut:
    """What was erased from the gallery, latest first."""
    found = await kith.run(kith.store.gallery, gallery)
    before = place_in(found.seal, cursor)
    listed = await kith.run(kith.erasures.listed, found, subject, before, limit + 1)
    page = listed[:limit]
    receipts = [ReceiptOut.of(receipt) for _, receipt in page]
    more = close_place(found.seal, page[-1][0]) if len(listed) > limit else None
    return ReceiptsOut(receipts=receipts, next=more)


@router.get("/erasures/{receipt}")
async def verify_receipt(receipt: ReceiptPath, kith: Kith) -> VerdictOut:
    """Whether a receipt holds: the audit has its line, and what it names is not there, or was enrolled anew since."""
    return VerdictOut.of(await kith.run(kith.erasures.verdict, receipt))


@router.get("/galleries/{gallery}/subjects/{subject}/export", response_model=dict[str, Any])
async def export_subject(gallery: GalleryPath, subject: SubjectPath, kith: Kith) -> dict[str, Any]:
    """Everything that is held about one person: what is stored, with embeddings and crops, and what was written down;
    of somebody who was erased, the receipts and the audit's lines."""
    found = await kith.run(kith.store.gallery, gallery)
    return await kith.run(kith.subject_access.everything_about, found, subject)
