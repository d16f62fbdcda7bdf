"""``kith jobs``: long work, how far it is, and calling it off."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import MofNCompleteColumn, TextColumn
from rich.table import Column, Table

from service.commands.options import AsJson, JobId, Key, OneGallery, Url
from service.commands.remedies import remedies_of, remedy_of
from service.connection import connect
from service.terminal import SAID_NO, print_json, print_table, progress, say

if TYPE_CHECKING:
    from service.api.schemas import JobOut
    from service.client import Kith

app = typer.Typer(help="Long work: bulk enrolment and the like.", no_args_is_help=True)


class State(StrEnum):
    queued = "queued"
    running = "running"
    succeeded = "succeeded"
    failed = "failed"
    cancelled = "cancelled"


@app.command(name="list")
def list_jobs(
    gallery: OneGallery = None,
    state: Annotated[
        list[State] | None, typer.Option(help="Only those in this state; repeatable: in one of these.")
    ] = None,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """All jobs, the latest first; finished ones for two weeks."""
    with connect(url, api_key) as kith:
        found = list(kith.jobs(gallery, state or ()))
    if as_json:
        print_json(found)
        return
    if not found:
        say("no job: kith enroll FOLDER --gallery NAME begins one, and so does kith gallery migrate")
        return
    table = Table(Column("Job", no_wrap=True), "Kind", "Gallery", "State", "Done", "Failed", "Created (UTC)")
    for job in found:
        created = f"{job.created_at:%Y-%m-%d %H:%M:%S}"
        table.add_row(job.id, job.kind, job.gallery, _state(job), _done(job), str(job.failed), created)
    print_table(table)


@app.command()
def show(
    job: JobId,
    items: Annotated[bool, typer.Option("--items", help="Every item, not only those with a problem.")] = False,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """One job: how far it is, and which items were refused, with the reasons."""
    with connect(url, api_key) as kith:
        _show(kith, kith.job(job), items, as_json)


@app.command()
def watch(
    job: JobId,
    items: Annotated[
        bool, typer.Option("--items", help="At the end every item, not only those with a problem.")
    ] = False,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Wait until a job is finished, and show it.

    Exit 1 if it failed, was cancelled, or refused an item. Ctrl-C ends the watching, not the job."""
    rate = TextColumn("{task.fields[rate]}")
    with connect(url, api_key) as kith:
        with progress(MofNCompleteColumn(), rate) as shown:
            bar = shown.add_task("waiting", total=None, rate="")

            def seen(now: JobOut) -> None:
                speed = "" if now.rate is None else f"{now.rate:.1f}/s"
                shown.update(bar, description=now.kind, completed=now.done, total=now.total, rate=speed)

            found = kith.wait_for(job, seen=seen)
        _show(kith, found, items, as_json)
    if found.state != "succeeded" or found.failed:
        raise typer.Exit(SAID_NO)


@app.command()
def cancel(job: JobId, url: Url = None, api_key: Key = None, as_json: AsJson = False) -> None:
    """Call a job off; what it has done stays."""
    with connect(url, api_key) as kith:
        found = kith.cancel_job(job)
    print_json(found) if as_json else say(_state(found))


def _show(kith: Kith, found: JobOut, items: bool, as_json: bool) -> None:
    listed = list(kith.job_items(found.id, failed=not items))
    if as_json:
        print_json(found.model_dump(mode="json") | {"items": listed})
        return
    say(f"{found.kind} into {found.gallery}: {_state(found)}, {_done(found)} done")
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(found.counts.items()))
    if counts:
        say(counts)
    if found.problem is not None:
        say(f"{found.problem.code}: {found.problem.detail.rstrip('.')}. {remedy_of(found.problem.model_dump())}")
    if listed:
        table = Table("Item", "Code", "Detail")
        for item in listed:
            problem = ("", "") if item.problem is None else (item.problem.code, item.problem.detail)
            table.add_row(*(escape(cell) for cell in (item.item, *problem)))
        print_table(table)
        for line in remedies_of(item.problem.model_dump() for item in listed if item.problem is not None):
            say(line)


def _state(job: JobOut) -> str:
    return "cancelling" if job.cancelling else job.state


def _done(job: JobOut) -> str:
    return str(job.done) if job.total is None else f"{job.done} of {job.total}"
