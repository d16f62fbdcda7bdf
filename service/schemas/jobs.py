"""Conversion of jobs to responses."""

from __future__ import annotations

from kith.wire.common import Problem
from kith.wire.jobs import JobItemOut, JobOut
from service.storage.repositories.job_records import Job
from service.storage.repositories.jobs import JobItem


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
        cancelling=job.cancel and job.state == "running",
        total=progress.total,
        done=progress.done,
        failed=progress.failed,
        counts=progress.counts,
        rate=None if rate is None else round(rate, 2),
        remaining_s=None if left is None else round(left, 1),
        details=progress.details,
        problem=None if job.problem is None else Problem(**job.problem),
        created_at=job.created_at,
        updated_at=job.updated_at,
    )


def to_job_item_out(item: JobItem) -> JobItemOut:
    """Convert one item of a job."""
    problem = None if item.problem is None else Problem(**item.problem)
    return JobItemOut(item=item.item, outcome=item.outcome, subject=item.subject, problem=problem, at=item.at)
