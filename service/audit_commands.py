"""``kith audit``: what was done, by whom; and whether the record of it is what was written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from service.audit_files import anchor_lines, read_anchors, trail_in, write_trail
from service.connection import AsJson, Key, Url, connect
from service.engines import master_keys_at_hand
from service.errors import AuditFileError, MasterKeyError
from service.files import replacing
from service.gallery.audit_log import PURPOSE
from service.gallery.audit_reading import Trail, trail_of
from service.security.trail import SERVICE, Anchor, Fault, Report, examine
from service.settings import load_settings
from service.terminal import print_table

app = typer.Typer(help="Who did what; and whether the record of it is whole.", no_args_is_help=True)
HASH_DIGITS: Final = 64
SQLITE: Final = b"SQLite format 3\x00"
Source = Annotated[
    Path | None,
    typer.Argument(help="An export, or a copy of SQLite's file; default: the database of the settings.", exists=True),
]

Event = Annotated[str | None, typer.Option(help="Only this event, as docs/audit.md names it.")]
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
    """Examine every chain, without the service; exit 1 if it is not what was written, and say where."""
    anchors = [] if against is None else read_anchors(against)
    report = _examine(source, anchors)
    if as_json:
        print(json.dumps(asdict(report), indent=2))
    else:
        console = Console(soft_wrap=True)
        for fault in report.faults:
            console.print(_told(fault), markup=False, highlight=False)
        _print_summary(console, report, against is not None)
    if report.faults:
        raise typer.Exit(1)


@app.command()
def head(source: Source = None) -> None:
    """Print the end of each chain, to be noted elsewhere and given to 'verify --against'; exit 1 if it is unsound."""
    report = _examine(source, [])
    for fault in report.faults:
        Console(stderr=True, soft_wrap=True).print(_told(fault), markup=False, highlight=False)
    if report.faults:
        raise typer.Exit(1)
    print("\n".join(anchor_lines(report.ends, datetime.now(UTC))))


@app.command()
def export(file: Annotated[Path, typer.Argument(help="FILE.ndjson; replaced when the new one is complete.")]) -> None:
    """Write the whole audit, as it is at this moment, to a file that 'verify' examines anywhere."""
    with _trail(None) as trail, replacing(file) as to:
        count = write_trail(trail, to)
    print(f"wrote {file}, {file.stat().st_size:,} bytes: {_counted(count, 'line')}")


@app.command("list")
def list_lines(
    gallery: Annotated[str | None, typer.Option("--gallery", "-g", help="Only this gallery's.")] = None,
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
        print(json.dumps([line.model_dump(mode="json") for line in lines], indent=2))
        return
    whole = (Column(header, no_wrap=True) for header in ("When (UTC)", "What", "Outcome", "By whom", "Gallery", "Who"))
    table = Table(*whole, Column("Details", min_width=20))
    for line in lines:
        details = json.dumps(line.details, separators=(", ", ": "))[1:-1]
        told = (line.event, line.outcome, line.actor, line.gallery or "", line.subject or "", details)
        table.add_row(f"{line.at:%Y-%m-%d %H:%M:%S}", *(escape(cell) for cell in told))
    print_table(table)


def of_gallery(
    name: str,
    event: Event = None,
    subject: Subject = None,
    limit: Limit = None,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """What was done with a gallery and the people in it, latest first."""
    list_lines(name, event, None, subject, None, None, limit, url, api_key, as_json)


@contextmanager
def _trail(source: Path | None) -> Iterator[Trail]:
    if source is None:
        with trail_of(load_settings().sql_url) as trail:
            yield trail
        return
    try:
        with source.open("rb") as file:
            is_database = file.read(len(SQLITE)) == SQLITE
    except OSError as error:
        raise AuditFileError(f"{source} cannot be read: {error.strerror}") from error
    with trail_of(f"sqlite:///{source.absolute()}") if is_database else trail_in(source) as trail:
        yield trail


def _examine(source: Path | None, anchors: list[Anchor]) -> Report:
    with _trail(source) as trail:
        secret, fault = _secret(trail)
        report = examine(trail.lines, trail.heads, secret, trail.galleries, anchors)
    if fault is not None:
        report.faults.insert(0, Fault("mac", SERVICE, None, None, None, fault))
    return report


def _secret(trail: Trail) -> tuple[bytes | None, str | None]:
    """Of the heads' MACs, if a master key is at hand; and what is wrong if one is, and does not lead to it: whoever
    wrote the lines anew would have left the secret out, or another one in its place."""
    keys, wrapped = master_keys_at_hand(load_settings()), trail.secret
    if keys is None:
        return None, None
    if wrapped is None:
        # Nothing was ever signed where nothing was ever written.
        return None, "the secret that heads are signed with is missing" if trail.heads else None
    try:
        return keys.unwrap(wrapped.key, PURPOSE, wrapped.master_key), None
    except MasterKeyError as error:
        return None, f"the master key at hand does not open the secret that heads are signed with: {error}"


def _told(fault: Fault) -> str:
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


def _print_summary(console: Console, report: Report, anchored: bool) -> None:
    verdict = _counted(len(report.faults), "fault") if report.faults else "sound"
    told = f"{_counted(report.lines, 'line')} in {_counted(len(report.ends), 'chain')}: {verdict}"
    console.print(told, highlight=False)
    if not report.signed:
        console.print(
            "The heads' signatures were not checked, for no master key that opens their secret is at hand: lines "
            "written anew by whoever can write to the database would not show"
            + (", but for those before the anchors." if anchored else "; anchors noted earlier would show them."),
            highlight=False,
        )


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
