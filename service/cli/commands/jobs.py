"""``kith jobs``: progress and cancellation of background jobs."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import MofNCompleteColumn, TextColumn
from rich.table import Column, Table

from service.cli.connection import connect
from service.cli.options import CommandGroup, GalleryFilter, JobId, ServerOptions
from service.cli.remedies import remedy_for, remedy_lines
from service.cli.terminal import EXIT_NO, print_json, print_line, print_table, progress_bar

if TYPE_CHECKING:
    from kith import Kith
    from kith.wire.jobs import JobOut

app = CommandGroup(help="Manage background jobs, such as bulk enrollment.", no_args_is_help=True)
Items = Annotated[bool, typer.Option("--items", help="Show every item, not only refused ones.")]


class State(StrEnum):
    queued = "queued"
    running = "running"
    succeeded = "succeeded"
    failed = "failed"
    cancelled = "cancelled"


@app.command("list")
def list_jobs(
    server: ServerOptions,
    gallery: GalleryFilter = None,
    state: Annotated[list[State] | None, typer.Option(help="Only jobs in this state; repeatable: any of them.")] = None,
) -> None:
    """List jobs, newest first. Finished jobs are kept for two weeks."""
    with connect(server) as kith:
        found = list(kith.jobs(gallery, [one.value for one in state or ()]))
    if server.as_json:
        print_json(found)
        return
    if not found:
        print_line("No jobs. 'kith enroll FOLDER --gallery NAME' and 'kith gallery migrate' start one.")
        return
    table = Table(Column("Job", no_wrap=True), "Kind", "Gallery", "State", "Done", "Failed", "Created (UTC)")
    for job in found:
        created = f"{job.created_at:%Y-%m-%d %H:%M:%S}"
        table.add_row(job.id, job.kind, job.gallery, _state(job), _progress(job), str(job.failed), created)
    print_table(table)


@app.command()
def show(job: JobId, server: ServerOptions, items: Items = False) -> None:
    """Show a job's progress and its refused items."""
    with connect(server) as kith:
        _print_job(kith, kith.job(job), items, server.as_json)


@app.command()
def watch(job: JobId, server: ServerOptions, items: Items = False) -> None:
    """Wait until a job is finished, and show it.

    Exit status 1 if the job failed, was cancelled, or refused an item. Ctrl-C stops waiting, not the job."""
    with connect(server) as kith:
        with progress_bar(MofNCompleteColumn(), TextColumn("{task.fields[rate]}")) as progress:
            task = progress.add_task("waiting", total=None, rate="")

            def update(state: JobOut) -> None:
                rate = "" if state.rate is None else f"{state.rate:.1f}/s"
                progress.update(task, description=state.kind, completed=state.done, total=state.total, rate=rate)

            finished = kith.wait_for(job, on_update=update)
        _print_job(kith, finished, items, server.as_json)
    if finished.state != "succeeded" or finished.failed:
        raise typer.Exit(EXIT_NO)


@app.command()
def cancel(job: JobId, server: ServerOptions) -> None:
    """Cancel a job. Completed items are kept."""
    with connect(server) as kith:
        cancelled = kith.cancel_job(job)
    print_json(cancelled) if server.as_json else print_line(_state(cancelled))


def _print_job(kith: Kith, job: JobOut, all_items: bool, as_json: bool) -> None:
    items = list(kith.job_items(job.id, failed=not all_items))
    if as_json:
        print_json(job.model_dump(mode="json") | {"items": items})
        return
    print_line(f"{job.kind} into {job.gallery}: {_state(job)}, {_progress(job)} done")
    if counts := ", ".join(f"{count} {outcome}" for outcome, count in sorted(job.counts.items())):
        print_line(counts)
    if job.problem is not None:
        print_line(f"{job.problem.code}: {job.problem.detail.rstrip('.')}. {remedy_for(job.problem.model_dump())}")
    if items:
        table = Table("Item", "Outcome", "Detail")
        for item in items:
            detail = "" if item.problem is None else item.problem.detail
            table.add_row(*(escape(cell) for cell in (item.item, item.outcome, detail)))
        print_table(table)
        for line in remedy_lines(item.problem.model_dump() for item in items if item.problem is not None):
            print_line(line)


def _state(job: JobOut) -> str:
    return "cancelling" if job.cancelling else job.state


def _progress(job: JobOut) -> str:
    return str(job.done) if job.total is None else f"{job.done} of {job.total}"
