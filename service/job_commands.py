"""``kith jobs``: long work, how far it is, and calling it off."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from service.api.schemas import JobOut
from service.connection import AsJson, Key, Url, connect

app = typer.Typer(help="Long work: bulk enrolment and the like.", no_args_is_help=True)

JobId = Annotated[str, typer.Argument(help="As 'kith jobs list' names it.")]


@app.command(name="list")
def list_jobs(
    gallery: Annotated[str | None, typer.Option("--gallery", "-g", help="Only this gallery's.")] = None,
    state: Annotated[
        list[str] | None, typer.Option(help="queued, running, succeeded, failed or cancelled; repeatable.")
    ] = None,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """All jobs, the latest first; finished ones for two weeks."""
    with connect(url, api_key) as kith:
        found = list(kith.jobs(gallery, state or ()))
    if as_json:
        print(json.dumps([job.model_dump(mode="json") for job in found], indent=2))
        return
    table = Table("Job", "Kind", "Gallery", "State", "Done", "Failed", "Created (UTC)")
    for job in found:
        created = f"{job.created_at:%Y-%m-%d %H:%M:%S}"
        table.add_row(job.id, job.kind, job.gallery, _state(job), _done(job), str(job.failed), created)
    Console().print(table)


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
        found = kith.job(job)
        listed = list(kith.job_items(job, failed=not items))
    if as_json:
        documents = [item.model_dump(mode="json", exclude_none=True) for item in listed]
        print(json.dumps(found.model_dump(mode="json") | {"items": documents}, indent=2))
        return
    console = Console()
    console.print(f"{found.kind} into {found.gallery}: {_state(found)}, {_done(found)} done", highlight=False)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(found.counts.items()))
    if counts:
        console.print(counts, highlight=False)
    if found.problem is not None:
        console.print(escape(f"{found.problem.code}: {found.problem.detail}. {found.problem.remedy}"), highlight=False)
    if listed:
        table = Table("Item", "Code", "Detail")
        for item in listed:
            problem = ("", "") if item.problem is None else (item.problem.code, item.problem.detail)
            table.add_row(*(escape(cell) for cell in (item.item, *problem)))
        console.print(table)


@app.command()
def cancel(job: JobId, url: Url = None, api_key: Key = None) -> None:
    """Call a job off; what it has done stays."""
    with connect(url, api_key) as kith:
        print(_state(kith.cancel_job(job)))


def _state(job: JobOut) -> str:
    return "cancelling" if job.cancelling else job.state


def _done(job: JobOut) -> str:
    return str(job.done) if job.total is None else f"{job.done} of {job.total}"
