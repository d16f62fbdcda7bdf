"""Bulk enrolment: an archive in, a job out."""

from __future__ import annotations

import uuid
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.requests import ClientDisconnect

from service.api.context import Context, Kith
from service.api.galleries import GalleryPath
from service.api.openapi import PROBLEMS
from service.api.permissions import Permitted
from service.api.schemas import JobOut
from service.archives import SNIFFED_BYTES, archive_kind
from service.bulk import KIND, BulkOptions
from service.decision import FaceChoice
from service.errors import InvalidRequestError
from service.security.sealed_files import SealedWriter

router = APIRouter(
    route_class=Permitted, prefix="/v1/galleries/{gallery}/enrolments", tags=["subjects"], responses=PROBLEMS
)
BINARY = {"schema": {"type": "string", "format": "binary"}}
ARCHIVES = ("application/zip", "application/x-tar", "application/gzip", "application/zstd", "application/octet-stream")
Strip = Annotated[
    int | None, Query(ge=0, le=64, description="Folders above the people's; default: as the archive suggests.")
]


@router.post(
    "",
    status_code=202,
    openapi_extra={"requestBody": {"required": True, "content": dict.fromkeys(ARCHIVES, BINARY)}},
)
async def enrol_archive(
    gallery: GalleryPath,
    request: Request,
    kith: Kith,
    face: FaceChoice = "only",
    allow_duplicate: bool = False,
    allow_inconsistent: bool = False,
    allow_low_quality: bool = False,
    allow_not_live: bool = False,
    strip: Strip = None,
) -> JobOut:
    """Enrol the photos of a zip, tar, tar.gz or tar.zst: PERSON/PHOTO, or as its manifest.csv or manifest.ndjson says
    (file, subject). The answer is a job; what is answered with 202 is on disk."""
    found = await kith.gallery(gallery)
    kith.recognisers.of(found)  # refused now, not by the job
    options = BulkOptions(face, allow_duplicate, allow_inconsistent, allow_low_quality, strip, allow_not_live)
    job_id = uuid.uuid4().hex
    declared = request.headers.get("content-length", "0")
    await kith.run(kith.spool.check_room, int(declared) if declared.isdigit() else 0)
    with kith.spool.receiving(job_id, found.seal) as file:
        await _receive(request, kith, file)
        await kith.run(kith.spool.sync, file)
        job = await kith.run(kith.jobs.submit, found, KIND, options.parameters(), job_id)
    kith.jobs.wake()
    return JobOut.of(job)


async def _receive(request: Request, kith: Context, file: SealedWriter) -> None:
    """Write the body as it comes. Raises ArchiveInvalidError as soon as it is seen to be no archive."""
    beginning = b""
    try:
        async for block in request.stream():
            if len(beginning) < SNIFFED_BYTES:
                beginning += block
                if len(beginning) >= SNIFFED_BYTES:
                    archive_kind(beginning)
            await kith.run(kith.spool.write, file, block)
        archive_kind(beginning)
    except ClientDisconnect as error:
        raise InvalidRequestError("the archive broke off before its end") from error
