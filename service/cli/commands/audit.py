"""``kith audit`` and ``kith erasures``: the audit log, and the receipts of erasures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from service.cli.calls import add_call, removed
from service.cli.connection import local_database
from service.cli.options import CommandGroup, GalleryFilter, OutputOptions
from service.cli.terminal import count_of, print_line

if TYPE_CHECKING:
    from kith.wire.audit import AuditLineOut
    from service.storage.db.audit_chain import Report

app = CommandGroup(help="Search and verify the audit log.", no_args_is_help=True)
erasures_app = CommandGroup(help="List erasures.", no_args_is_help=True)
MEANINGS: Final = {
    "altered": "the content differs from what was written",
    "missing": "removed",
    "inserted": "not written by the service",
    "head": "the end of the log was cut off, added, or signed by someone else",
}


@app.command()
def verify(output: OutputOptions) -> None:
    """Verify the audit log of the local database. Servers may keep running.

    Prints the altered, missing and inserted lines. Exit status 1 if there are any."""
    from service.storage.db.audit_chain import walk

    with local_database() as database, database.read() as connection:
        report = walk(database.vault, connection)
    document = {**asdict(report), "faults": [fault._asdict() for fault in report.faults]}
    output.answer(document, lambda: _print_report(report), ok=not report.faults)


def _check_subject(given: Mapping[str, Any]) -> None:
    if given["subject"] is not None and given["name"] is None:
        raise typer.BadParameter("Subject ids belong to a gallery. Give --gallery too.", param_hint="--subject")


def _details(line: AuditLineOut) -> str:
    return json.dumps(line.details, separators=(", ", ": "))[1:-1]


add_call(
    app,
    "list",
    "audit",
    ("Time (UTC)=at", "event", "outcome", "actor", "gallery", "subject", _details),
    check=_check_subject,
    nothing="No entries.",
    name=GalleryFilter,
    event=Annotated[str | None, typer.Option(help="Only this event of docs/keys.md.")],
    actor=Annotated[str | None, typer.Option(help="Only this actor: key:ID, operator, anonymous or service.")],
    subject=Annotated[str | None, typer.Option(help="Only this subject id; needs --gallery.")],
    since=Annotated[str | None, typer.Option(help="From this time: 2026-01-31 or 2026-01-31T12:00:00Z.")],
    until=Annotated[str | None, typer.Option(help="Before this time.")],
    limit=Annotated[int | None, typer.Option(min=1, help="Maximum number of lines. Default: all.")],
)
add_call(
    erasures_app,
    "list",
    "erasures",
    ("Receipt=id", "Time (UTC)=at", "kind", removed),
    nothing="No erasures in {gallery}. Erased subjects, templates and albums leave receipts; expired ones do not.",
    subject=Annotated[str | None, typer.Option(help="Only this subject id.")],
)


def _print_report(report: Report) -> None:
    for fault in report.faults:
        lines = f"line {fault.first}" if fault.first == fault.last else f"lines {fault.first} to {fault.last}"
        print_line(f"{lines}: {fault.kind}: {MEANINGS[fault.kind]}")
    verdict = count_of(len(report.faults), "fault") if report.faults else "sound"
    pruned = f", after {count_of(report.pruned, 'line')} deleted by age" if report.pruned else ""
    print_line(f"{count_of(report.lines, 'line')}{pruned}: {verdict}")
