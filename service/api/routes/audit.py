"""Audit entries of one gallery, or of the whole service."""

from __future__ import annotations

from datetime import datetime
from functools import partial
from operator import attrgetter
from typing import Annotated

from fastapi import Query
from pydantic import AfterValidator, BaseModel

from kith.wire.audit import AuditLineOut, AuditOut
from kith.wire.fields import GalleryName, SubjectId, to_utc
from service.api.http.access import ADMIN, ADMIN_ALL, BackendDep, GalleryDep, router
from service.api.http.parameters import WITHOUT_NUL, PageDep, PageQuery
from service.security.sealing import Seal
from service.storage.audit.log import AuditFilter, listed_lines, pseudonym
from service.usecases.backend import Backend

routes = router("", "audit")


UtcTime = Annotated[datetime, AfterValidator(to_utc)]
ShortText = Annotated[str | None, Query(max_length=64, pattern=WITHOUT_NUL)]
Since = Annotated[UtcTime | None, Query(description="Only entries from this time on; UTC if it has no time zone.")]
Until = Annotated[UtcTime | None, Query(description="Only entries before this time.")]


class _Query(BaseModel):
    event: ShortText = None
    actor: ShortText = None
    since: Since = None
    until: Until = None


QueryDep = Annotated[_Query, Query()]


@routes.get("/v1/audit", dependencies=[ADMIN_ALL])
async def list_audit(
    backend: BackendDep,
    query: QueryDep,
    page: PageDep,
    gallery: Annotated[GalleryName | None, Query(description="Also finds a deleted gallery.")] = None,
) -> AuditOut:
    """List the audit entries of the whole service, newest first."""
    chosen = AuditFilter(None, gallery, query.event, query.actor, query.since, query.until)
    return await _list(backend, chosen, (await backend.threads.run(backend.store.keys.ring)).seal, page)


@routes.get("/v1/galleries/{gallery}/audit", dependencies=[ADMIN])
async def list_gallery_audit(
    gallery: GalleryDep,
    backend: BackendDep,
    query: QueryDep,
    page: PageDep,
    subject: Annotated[SubjectId | None, Query(description="Only entries about this subject.")] = None,
) -> AuditOut:
    """List the audit entries of a gallery, newest first: changes, searches, exports and automatic changes."""
    subject_pseudonym = None if subject is None else pseudonym(gallery, subject)
    chosen = AuditFilter(gallery.pk, None, query.event, query.actor, query.since, query.until, subject_pseudonym)
    return await _list(backend, chosen, gallery.seal, page)


async def _list(backend: Backend, chosen: AuditFilter, seal: Seal, page: PageQuery) -> AuditOut:
    await backend.audit.written()
    listed = partial(listed_lines, backend.store.database, chosen)
    to_line = partial(AuditLineOut.model_validate, from_attributes=True)
    return await page.read(AuditOut, backend.threads, seal, listed, to_line, attrgetter("number"))
