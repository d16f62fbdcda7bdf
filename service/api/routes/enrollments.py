"""Bulk enrollment of an archive by a job."""

from __future__ import annotations

import uuid
from typing import Annotated, Any

from fastapi import Query, Request

from kith.wire.common import Detail
from kith.wire.fields import DETAIL
from kith.wire.jobs import JobOut
from service.api.http.access import ENROLL, BackendDep, GalleryDep, router
from service.api.http.bodies import set_body_limit
from service.api.http.openapi import BINARY
from service.api.routes.jobs import to_job_out
from service.domain.gallery import Gallery
from service.inference.archives import SIGNATURE_BYTES, archive_kind
from service.security.sealed_files import SealedWriter
from service.storage.repositories.jobs import Beginning
from service.usecases.backend import Backend
from service.usecases.bulk_enrollment import KIND, BulkOptions

routes = router("/v1/galleries/{gallery}/enrollments", "subjects")
ARCHIVES = ("application/zip", "application/x-tar", "application/gzip", "application/zstd", "application/octet-stream")
ARCHIVE_BODY = {"requestBody": {"required": True, "content": dict.fromkeys(ARCHIVES, BINARY)}}
DetailOption = Annotated[Detail | None, Query(description=f"{DETAIL} Default: KITH_DETAIL, at least medium.")]


@routes.post("", dependencies=[ENROLL], status_code=202, openapi_extra=ARCHIVE_BODY)
async def enroll_archive(
    gallery: GalleryDep,
    request: Request,
    backend: BackendDep,
    options: Annotated[BulkOptions, Query()],
) -> JobOut:
    """Start a job that enrolls the photos of an archive: zip, or tar with gzip, zstd or no compression.

    Paths in the archive are SUBJECT/PHOTO, unless a manifest.csv (file, subject) assigns them. The
    archive is on disk when the response is sent.
    """
    backend.recognizers.for_gallery(gallery)  # raises here rather than in the job
    return await queue_archive(request, backend, gallery, KIND, options.model_dump())


async def queue_archive(
    request: Request,
    backend: Backend,
    gallery: Gallery,
    kind: str,
    parameters: dict[str, Any],
    beginning: Beginning | None = None,
) -> JobOut:
    """Write the body to the spool as it arrives, and queue a job that reads it. ``beginning``: as of JobStore.create.

    Raises ArchiveInvalidError, unsupported_encoding, StorageFullError; as JobStore.create.
    """
    # An archive is recognized by content: a coding is the compression of its tar.
    set_body_limit(request, backend.settings.max_upload_bytes, streamed=True, codings=("gzip", "zstd"))
    job_id = uuid.uuid4().hex
    announced = int(request.headers.get("content-length", 0))
    with backend.spool.receiving(job_id, gallery.seal, announced) as file:
        await _receive(request, backend, file)
        await backend.threads.run(backend.spool.sync, file)
        job = await backend.threads.run(backend.store.jobs.create, gallery, kind, parameters, job_id, beginning)
    backend.jobs.wake()
    return to_job_out(job)


async def _receive(request: Request, backend: Backend, file: SealedWriter) -> None:
    """Write the body to ``file`` as it arrives. Raises ArchiveInvalidError if its first bytes are no archive's."""
    head = b""
    async for block in request.stream():
        head += block[: SIGNATURE_BYTES - len(head)]
        await backend.threads.run(backend.spool.write, file, block)
    archive_kind(head)
