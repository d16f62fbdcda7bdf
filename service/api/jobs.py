"""Long work: how far it is, what became of its items, and calling it off."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query

from service.api.context import Kith
from service.api.galleries import Limit, PlaceCursor, place_in
from service.api.openapi import PROBLEMS
from service.api.schemas import GalleryName, JobItemOut, JobItemsOut, JobOut, JobsOut
from service.gallery.job_store import JobState
from service.gallery.sealed_rows import close_place

router = APIRouter(prefix="/v1/jobs", tags=["jobs"], responses=PROBLEMS)
JobPath = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]


@router.get("")
async def list_jobs(
    kith: Kith,
    gallery: Annotated[GalleryName | None, Query(description="Only this gallery's.")] = None,
    state: Annotated[list[JobState], Query(description="Only those in one of these states.")] = [],  # noqa: B006
    cursor: Annotated[int | None, Query(description="'next' of the page before.")] = None,
    limit: Limit = 100,
) -> JobsOut:
    """All jobs, the latest first; finished ones for two weeks."""
    chosen = None if gallery is None else await kith.run(kith.store.gallery, gallery)
    found = await kith.run(kith.jobs.store.list_jobs, chosen, state, cursor, limit + 1)
    page = found[:limit]
    return JobsOut(jobs=[JobOut.of(job) for job in page], next=page[-1].pk if len(found) > limit else None)


@router.get("/{job}")
async def get_job(job: JobPath, kith: Kith) -> JobOut:
    return JobOut.of(await kith.run(kith.jobs.store.job, job))


@router.get("/{job}/items")
async def job_items(
    job: JobPath,
    kith: Kith,
    failed: Annotated[bool, Query(description="Only those with a problem.")] = False,
    cursor: PlaceCursor = None,
    limit: Limit = 100,
) -> JobItemsOut:
    """The items that are done, in this order, each with the reason if it was refused."""
    found = await kith.run(kith.jobs.store.job, job)
    items = await kith.run(kith.jobs.store.items, found, place_in(found.seal, cursor), limit + 1, failed)
    page = items[:limit]
    more = close_place(found.seal, page[-1].pk) if len(items) > limit else None
    return JobItemsOut(items=[JobItemOut.of(item) for item in page], next=more)


@router.delete("/{job}")
async def cancel_job(job: JobPath, kith: Kith) -> JobOut:
    """Call a job off: at once if it waits, between two items if it runs. What it has done stays."""
    return JobOut.of(await kith.run(kith.jobs.cancel, job))
