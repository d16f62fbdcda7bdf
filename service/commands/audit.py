"""``kith audit``: what was done, by whom; and whether the record of it is what was written."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.markup import escape
from rich.table import Column, Table

from service.commands.completion import complete_events
from service.commands.options import AsJson, GalleryName, Key, OneGallery, Url
from service.commands.own_database import own_settings
from service.connection import connect
from service.files import replacing
from service.terminal import SAID_NO, print_json, print_table, remark, say

if TYPE_CHECKING:
    from service.security.trail import Fault, Report

app = typer.Typer(help="Who did what; and whether the record of it is whole.", no_args_is_help=True)
HASH_DIGITS: Final = 64
Source = Annotated[
    Path | None,
    typer.Argument(help="An export, or a copy of SQLite's file; default: the database of the settings.", exists=True),
]

Event = Annotated[
    str | None, typer.Option(help="Only this event, as docs/audit.md names it.", autocompletion=complete_events)
]
Actor = Annotated[str | None, typer.Option(help="Only what this key did: key:ID, operator, anonymous or service.")]
Subject = Annotated[str | None, typer.Option(help="Only what concerns this person: the id.")]
Since = Annotated[str | None, typer.Option(help="Only from this time on, like 2026-01-31 or 2026-01-31T12:00:00Z.")]
Limit = Annotated[int | None, typer.Option(min=1, help="So many lines at most; default: all.")]
Until = Annotated[str | None, typer.Option(help="Only before this time.")]


@app.command()
def verify(
    source: Source = None,
    against: Annotated[
        Path | None, typer.Option(help="Anchors that 'head' printed, noted where the audit's writers cannot write.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Examine every chain, without the service.

    Exit 1 if it is not what was written, and say where."""
    from service.audit_examination import examined
    from service.audit_files import read_anchors

    if source is None:
        own_settings()
    report = examined(source, [] if against is None else read_anchors(against))
    if as_json:
        print_json(asdict(report))
    else:
        for fault in report.faults:
            say(_told(fault))
        _print_summary(report, against is not None)
    if report.faults:
        raise typer.Exit(SAID_NO)


@app.command()
def head(source: Source = None, as_json: AsJson = False) -> None:
    """Print the end of each chain, to be noted elsewhere and given to 'verify --against'.

    Exit 1 if it is unsound."""
    from service.audit_examination import examined
    from service.audit_files import anchor_lines

    if source is None:
        own_settings()
    report = examined(source, [])
    for fault in report.faults:
        remark(_told(fault))
    if report.faults:
        raise typer.Exit(SAID_NO)
    lines = anchor_lines(report.ends, datetime.now(UTC))
    if as_json:
        print_json([json.loads(line) for line in lines])
    else:
        print("\n".join(lines))


@app.command()
def export(
    file: Annotated[Path, typer.Argument(help="FILE.ndjson; replaced when the new one is complete.")],
    as_json: AsJson = False,
) -> None:
    """Write the whole audit, as it is at this moment, to a file that 'verify' examines anywhere."""
    from service.audit_examination import opened_trail
    from service.audit_files import write_trail

    own_settings()
    with opened_trail(None) as trail, replacing(file) as to:
        count = write_trail(trail, to)
    size = file.stat().st_size
    if as_json:
        print_json({"file": str(file), "bytes": size, "lines": count})
    else:
        say(f"wrote {file}, {size:,} bytes: {_counted(count, 'line')}")


@app.command("list")
def list_lines(
    gallery: OneGallery = None,
    event: Event = None,
    actor: Actor = None,
    subject: Subject = None,
    since: Since = None,
    until: Until = None,
    limit: Limit = None,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """What was done, latest first."""
    if subject is not None and gallery is None:
        raise typer.BadParameter("people are known by their gallery: name it, too", param_hint="--subject")
    chosen = {"event": event, "actor": actor, "since": since, "until": until}
    with connect(url, api_key) as kith:
        lines = list(islice(kith.audit(gallery, **chosen, **({} if subject is None else {"subject": subject})), limit))
    if as_json:
        print_json(lines)
        return
    if not lines:
        say("no line of this kind: 'kith audit list' without options tells all, docs/audit.md what is recorded")
        return
    whole = (Column(header, no_wrap=True) for header in ("When (UTC)", "What", "Outcome", "By whom", "Gallery", "Who"))
    table = Table(*whole, Column("Details", min_width=20))
    for line in lines:
        details = json.dumps(line.details, separators=(", ", ": "))[1:-1]
        told = (line.event, line.outcome, line.actor, line.gallery or "", line.subject or "", details)
        table.add_row(f"{line.at:%Y-%m-%d %H:%M:%S}", *(escape(cell) for cell in told))
    print_table(table)


def of_gallery(
    name: GalleryName,
    event: Event = None,
    subject: Subject = None,
    limit: Limit = None,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """What was done with a gallery and the people in it, latest first."""
    list_lines(name, event, None, subject, None, None, limit, url, api_key, as_json)


def _told(fault: Fault) -> str:
    from service.security.trail import SERVICE

    if fault.chain == SERVICE:
        chain = "the service's chain"
    else:
        # Where nothing is left of a chain, the hash is not known that would name it.
        named = f", chain {fault.chain[:16]}" if len(fault.chain) == HASH_DIGITS else ""
        chain = f"gallery {fault.gallery or 'unknown'}{named}"
    lines = ""
    if fault.first is not None:
        lines = f", line {fault.first}" if fault.first == fault.last else f", lines {fault.first} to {fault.last}"
    return f"{chain}{lines}: {fault.kind}: {fault.what}"


def _print_summary(report: Report, anchored: bool) -> None:
    verdict = _counted(len(report.faults), "fault") if report.faults else "sound"
    say(f"{_counted(report.lines, 'line')} in {_counted(len(report.ends), 'chain')}: {verdict}")
    if not report.signed:
        say(
            "The heads' signatures were not checked, for no master key that opens their secret is at hand: lines "
            "written anew by whoever can write to the database would not show"
            + (", but for those before the anchors." if anchored else "; anchors noted earlier would show them.")
        )


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
