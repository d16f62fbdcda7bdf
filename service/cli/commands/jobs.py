"""``kith jobs``: progress and cancellation of background jobs."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, get_args

import typer
from rich.progress import MofNCompleteColumn, Progress, TextColumn

from kith.wire.common import JobState
from service.cli.calls import add_call
from service.cli.connection import connect
from service.cli.options import CommandGroup, GalleryFilter, JobId, ServerOptions
from service.cli.terminal import (
    make_table,
    print_line,
    print_table,
    progress_bar,
    remedy_lines,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kith import Kith
    from kith.wire.jobs import JobItemOut, JobOut

app = CommandGroup(help="Manage background jobs, such as bulk enrollment.", no_args_is_help=True)
State = StrEnum("State", get_args(JobState))  # type: ignore[misc]  # Typer takes no list of literals
Failed = Annotated[
    bool, typer.Option("--items", callback=lambda shown: not shown, help="Show every item, not only refused ones.")
]


def _state(job: JobOut) -> str:
    return "canceling" if job.canceling else job.state


def _done(job: JobOut) -> str:
    return str(job.done_count) if job.total_count is None else f"{job.done_count} of {job.total_count}"


add_call(
    app,
    "list",
    "jobs",
    ("Job=id", "kind", "gallery", _state, _done, "Failed=failed_count", "created_at"),
    note="Finished jobs are kept for 14 days, or KITH_RETENTION_JOBS_DAYS of the server.",
    nothing="No jobs. 'kith enroll FOLDER --gallery NAME' and 'kith gallery migrate' start one.",
    gallery=GalleryFilter,
    states=Annotated[
        list[State] | None, typer.Option("--state", help="Only jobs in this state; repeatable: any of them.")
    ],
)
add_call(app, "cancel", "cancel_job", lambda job: print_line(_state(job)))


@app.command()
def watch(job: JobId, server: ServerOptions, failed: Failed = False) -> None:
    """Wait until a job is finished, and show it.

    Exit status 1 if the job failed, was canceled, or refused an item. Ctrl-C stops waiting, not the job."""
    with connect(server) as kith:
        with progress_bar(MofNCompleteColumn(), TextColumn("{task.fields[rate]}")) as progress:
            finished = show_until_done(kith, job, progress)
        items = list(kith.job_items(job, failed))
    ok = finished.state == "succeeded" and not finished.failed_count
    server.answer(finished.model_dump(mode="json") | {"items": items}, lambda: _print_job(finished, items), ok)


def show_until_done(kith: Kith, job: str, progress: Progress) -> JobOut:
    """Show the progress of a job, and return the job when it is finished."""
    task = progress.add_task("waiting", total=None, rate="")

    def update(state: JobOut) -> None:
        rate = "" if state.rate is None else f"{state.rate:.1f}/s"
        progress.update(task, description=state.kind, completed=state.done_count, total=state.total_count, rate=rate)

    return kith.wait_for(job, on_update=update)


def _print_job(job: JobOut, items: Sequence[JobItemOut]) -> None:
    print_line(f"{job.kind} into {job.gallery}: {_state(job)}, {_done(job)} done")
    if counts := ", ".join(f"{count} {outcome}" for outcome, count in sorted(job.counts.items())):
        print_line(counts)
    if job.problem is not None:
        print_line(f"{job.problem.code}: {job.problem.detail.rstrip('.')}. {job.problem.remedy}")
    if items:
        rows = ((item.item, item.outcome, None if item.problem is None else item.problem.detail) for item in items)
        print_table(make_table("Item", "Outcome", "Detail", rows=rows))
        for line in remedy_lines(item.problem.model_dump() for item in items if item.problem is not None):
            print_line(line)


add_call(
    app,
    "show",
    "job",
    _print_job,
    note="Also its refused items.",
    also=("items", "job_items"),
    failed=Failed,
)
