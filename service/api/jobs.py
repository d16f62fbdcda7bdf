"""Long work: how far it is, what became of its items, and calling it off."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query

from service.api.context import Context, Kith
from service.api.galleries import Limit, PlaceCursor, place_in
from service.api.openapi import PROBLEMS
from service.api.permissions import ADMIN, Asking, Caller, Permitted, hidden
from service.api.schemas import GalleryName, JobItemOut, JobItemsOut, JobOut, JobsOut
from service.bulk import KIND
from service.gallery.job_store import Job, missing
from service.gallery.sealed_rows import close_place
from service.gallery.subjects import JobState

router = APIRouter(route_class=Permitted, prefix="/v1/jobs", tags=["jobs"], responses=PROBLEMS)
JobPath = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]


@router.get("")
async def list_jobs(
    kith: Kith,
    caller: Asking,
    gallery: Annotated[GalleryName | None, Query(description="Only this gallery's.")] = None,
    state: Annotated[list[JobState], Query(max_length=8, description="Only those in one of these states.")] = [],  # noqa: B006
    cursor: PlaceCursor = None,
    limit: Limit = 100,
) -> JobsOut:
    """The jobs of all galleries that the key is for, the latest first; finished ones for two weeks."""
    if gallery is not None:
        caller.check_gallery(gallery)
    chosen = None if gallery is None else await kith.run(kith.store.gallery, gallery)
    seal = (await kith.run(kith.keys.ring)).seal
    before, among = place_in(seal, cursor), caller.rights.galleries
    found = await kith.run(kith.jobs.store.list_jobs, chosen, state, before, limit + 1, among)
    page = found[:limit]
    more = close_place(seal, page[-1].pk) if len(found) > limit else None
    return JobsOut(jobs=[JobOut.of(job) for job in page], next=more)


@router.get("/{job}")
async def get_job(job: JobPath, kith: Kith, caller: Asking) -> JobOut:
    return JobOut.of(await _job(kith, caller, job))


@router.get("/{job}/items")
async def job_items(
    job: JobPath,
    kith: Kith,
    caller: Asking,
    failed: Annotated[bool, Query(description="Only those with a problem.")] = False,
    cursor: PlaceCursor = None,
    limit: Limit = 100,
) -> JobItemsOut:
    """The items that are done, in this order, each with the reason if it was refused."""
    found = await _job(kith, caller, job)
    items = await kith.run(kith.jobs.store.items, found, place_in(found.seal, cursor), limit + 1, failed)
    page = items[:limit]
    more = close_place(found.seal, page[-1].pk) if len(items) > limit else None
    return JobItemsOut(items=[JobItemOut.of(item) for item in page], next=more)


@router.delete("/{job}")
async def cancel_job(job: JobPath, kith: Kith, caller: Asking) -> JobOut:
    """Call a job off: at once if it waits, between two items if it runs. What it has done stays. For one that does not
    enrol the scope `admin` is needed, as it was to begin it."""
    found = await _job(kith, caller, job)
    if found.kind != KIND:
        caller.check(ADMIN)
    return JobOut.of(await kith.run(kith.jobs.cancel, job))


async def _job(kith: Context, caller: Caller, job_id: str) -> Job:
    """Raises JobNotFoundError, also where it is of a gallery that the caller's key is not for."""
    found = await kith.run(kith.jobs.store.job, job_id)
    if not caller.rights.sees(found.gallery):
        raise hidden(missing(job_id))
    return found
