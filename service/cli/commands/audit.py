"""``kith audit`` and ``kith erasures``: the audit log, and the receipts of erasures."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.table import Column

from service.cli.calls import add_call, removed
from service.cli.connection import connect, local_database
from service.cli.options import CommandGroup, GalleryFilter, OutputOptions, ServerOptions
from service.cli.terminal import count_of, make_table, print_line, print_table, to_the_second

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


@app.command("list")
def list_lines(
    server: ServerOptions,
    gallery: GalleryFilter = None,
    event: Annotated[str | None, typer.Option(help="Only this event of docs/keys.md.")] = None,
    actor: Annotated[str | None, typer.Option(help="Only this actor: key:ID, operator, anonymous or service.")] = None,
    subject: Annotated[str | None, typer.Option(help="Only this subject id; needs --gallery.")] = None,
    since: Annotated[str | None, typer.Option(help="From this time: 2026-01-31 or 2026-01-31T12:00:00Z.")] = None,
    until: Annotated[str | None, typer.Option(help="Before this time.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of lines. Default: all.")] = None,
) -> None:
    """List the audit log, newest first."""
    if subject is not None and gallery is None:
        raise typer.BadParameter("Subject ids belong to a gallery. Give --gallery too.", param_hint="--subject")
    filters = {"event": event, "actor": actor, "since": since, "until": until}
    with connect(server) as kith:
        found = kith.audit(gallery, **filters, **({} if subject is None else {"subject": subject}))
        lines = list(islice(found, limit))
    server.answer(lines, lambda: _print_lines(lines))


add_call(
    erasures_app,
    "list",
    "erasures",
    ("Receipt=id", "Time (UTC)=at", "kind", removed),
    nothing="No erasures in gallery {gallery}. Erased subjects, templates and expired templates leave receipts.",
    subject=Annotated[str | None, typer.Option(help="Only this subject id.")],
)


def _print_lines(lines: list[AuditLineOut]) -> None:
    if not lines:
        print_line("No matching entries. docs/keys.md lists the recorded events.")
        return
    headers = ("Time (UTC)", "Event", "Outcome", "Actor", "Gallery", "Subject")
    rows = []
    for line in lines:
        details = json.dumps(line.details, separators=(", ", ": "))[1:-1]
        at = to_the_second(line.at)
        rows.append((at, line.event, line.outcome, line.actor, line.gallery, line.subject, details))
    columns = (*(Column(header, no_wrap=True) for header in headers), Column("Details", min_width=20))
    print_table(make_table(*columns, rows=rows))


def _print_report(report: Report) -> None:
    for fault in report.faults:
        lines = f"line {fault.first}" if fault.first == fault.last else f"lines {fault.first} to {fault.last}"
        print_line(f"{lines}: {fault.kind}: {MEANINGS[fault.kind]}")
    verdict = count_of(len(report.faults), "fault") if report.faults else "sound"
    pruned = f", after {count_of(report.pruned, 'line')} deleted by age" if report.pruned else ""
    print_line(f"{count_of(report.lines, 'line')}{pruned}: {verdict}")
