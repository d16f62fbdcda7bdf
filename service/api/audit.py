"""What was done, by whom: of a gallery, or of everything."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import AfterValidator

from service.api.context import Context, Kith
from service.api.galleries import GalleryPath, Limit, PlaceCursor, place_in
from service.api.openapi import PROBLEMS
from service.api.permissions import Permitted
from service.api.schemas import WITHOUT_NUL, AuditLineOut, AuditOut, GalleryName, SubjectId, in_utc
from service.gallery.audit_log import pseudonym
from service.gallery.audit_reading import Chosen, Listed
from service.gallery.sealed_rows import close_place
from service.security.sealing import Seal

router = APIRouter(route_class=Permitted, tags=["audit"], responses=PROBLEMS)


def _aware(at: datetime) -> datetime:
    return in_utc(at if at.tzinfo else at.replace(tzinfo=UTC))


Time = Annotated[datetime, AfterValidator(_aware)]
Word = Annotated[str | None, Query(max_length=64, pattern=WITHOUT_NUL)]
Since = Annotated[Time | None, Query(description="Only lines of this time or later; UTC where it names no zone.")]
Until = Annotated[Time | None, Query(description="Only lines before this time.")]


@router.get("/v1/audit")
async def list_all(
    kith: Kith,
    event: Word = None,
    actor: Word = None,
    gallery: Annotated[GalleryName | None, Query(description="Also of one that was deleted.")] = None,
    since: Since = None,
    until: Until = None,
    cursor: PlaceCursor = None,
    limit: Limit = 100,
) -> AuditOut:
    """Everything that was done, latest first."""
    chosen = Chosen(gallery=gallery, event=event, actor=actor, since=since, until=until)
    return await _page(kith, chosen, (await kith.run(kith.keys.ring)).seal, cursor, limit)


@router.get("/v1/galleries/{gallery}/audit")
async def list_audit(
    gallery: GalleryPath,
    kith: Kith,
    event: Word = None,
    actor: Word = None,
    subject: Annotated[SubjectId | None, Query(description="Only lines that concern this person.")] = None,
    since: Since = None,
    until: Until = None,
    cursor: PlaceCursor = None,
    limit: Limit = 100,
) -> AuditOut:
    """What was done with a gallery and the people in it, latest first: changes, searches, exports, and what the service
    changed by itself."""
    found = await kith.gallery(gallery)
    known = None if subject is None else pseudonym(found, subject)
    chosen = Chosen(found.pk, None, event, actor, since, until, known)
    return await _page(kith, chosen, found.seal, cursor, limit)


async def _page(kith: Context, chosen: Chosen, seal: Seal, cursor: str | None, limit: int) -> AuditOut:
    before = place_in(seal, cursor)
    await kith.audit.written()
    lines = await kith.run(kith.audit.reader.lines, chosen, before, limit + 1)
    more = close_place(seal, lines[limit - 1].pk) if len(lines) > limit else None
    return AuditOut(lines=[_out(listed) for listed in lines[:limit]], next=more)


def _out(listed: Listed) -> AuditLineOut:
    return AuditLineOut(**vars(listed.line), chain="gallery" if listed.of_gallery else "service", hash=listed.hash)
