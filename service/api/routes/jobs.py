"""Jobs: progress, results per item, cancellation."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import Query

from kith.wire.common import JobState
from kith.wire.fields import GalleryName, ObjectId, Page, Problem
from kith.wire.jobs import JobItemOut, JobOut
from service.api.http.access import ENROLL, READ, BackendDep, CallerDep, Need, router
from service.api.http.parameters import PageDep
from service.security.api_keys import Caller, mark_hidden
from service.storage.repositories.jobs import Job, missing
from service.usecases import albums, bulk_enrollment
from service.usecases.backend import Backend

routes = router("/v1/jobs", "jobs")


@routes.get("", dependencies=[READ])
async def list_jobs(
    backend: BackendDep,
    caller: CallerDep,
    page: PageDep,
    gallery: Annotated[GalleryName | None, Query(description="Only jobs of this gallery.")] = None,
    state: Annotated[list[JobState], Query(max_length=8, description="Only jobs in one of these states.")] = [],  # noqa: B006
) -> Page[JobOut]:
    """List the jobs of all galleries that the key is for, newest first.

    Finished jobs are kept for KITH_RETENTION_JOBS_DAYS.
    """
    if gallery is not None:
        caller.check_gallery(gallery)
    chosen = None if gallery is None else await backend.find_gallery(gallery)
    seal = (await backend.threads.run(backend.store.keys.ring)).seal
    listed = partial(backend.store.jobs.list_jobs, chosen, state, among=caller.rights.galleries)
    return await page.read(Page[JobOut], backend.threads, seal, listed, to_job_out)


@routes.get("/{job}", dependencies=[READ])
async def get_job(job: ObjectId, backend: BackendDep, caller: CallerDep) -> JobOut:
    """Return a job and its progress."""
    return to_job_out(await _find_job(backend, caller, job))


@routes.get("/{job}/items", dependencies=[READ])
async def list_job_items(
    job: ObjectId,
    backend: BackendDep,
    caller: CallerDep,
    page: PageDep,
    failed: Annotated[bool, Query(description="Only items that failed.")] = False,
) -> Page[JobItemOut]:
    """List the processed items in order of completion, each with its problem if it was rejected."""
    found = await _find_job(backend, caller, job)
    listed = partial(backend.store.jobs.items, found, failed_only=failed)
    return await page.read(Page[JobItemOut], backend.threads, found.seal, listed)


@routes.post("/{job}/cancel", dependencies=[ENROLL])
async def cancel_job(job: ObjectId, backend: BackendDep, caller: CallerDep) -> JobOut:
    """Cancel a job: at once if it is queued, after the current item if it runs. Finished items stay.

    A job other than an enrollment or an album needs the scope `admin`, as starting it does.
    """
    found = await _find_job(backend, caller, job)
    if found.kind not in (bulk_enrollment.KIND, albums.KIND):
        Need("admin").check(caller)
    return to_job_out(await backend.threads.run(backend.jobs.cancel, job))


async def _find_job(backend: Backend, caller: Caller, job_id: str) -> Job:
    """Raises job_not_found, also if the job is of a gallery that the caller's key is not for."""
    found = await backend.threads.run(backend.store.jobs.job, job_id)
    if not caller.rights.sees(found.gallery):
        raise mark_hidden(missing(job_id))
    return found


def to_job_out(job: Job) -> JobOut:
    """Convert a job, with its rate and the estimated time left."""
    progress, active = job.progress, job.state in ("queued", "running")
    rate = progress.done / progress.seconds if progress.done and progress.seconds else None
    left = None if rate is None or progress.total is None or not active else (progress.total - progress.done) / rate
    return JobOut(
        id=job.id,
        kind=job.kind,
        gallery=job.gallery,
        state=job.state,
        canceling=job.cancel and job.state == "running",
        total_count=progress.total,
        done_count=progress.done,
        failed_count=progress.failed,
        counts=progress.counts,
        rate=None if rate is None else round(rate, 2),
        remaining_s=None if left is None else round(left, 1),
        details=progress.details,
        problem=None if job.problem is None else Problem(**job.problem),
        created_at=job.created_at,
        updated_at=job.updated_at,
    )
