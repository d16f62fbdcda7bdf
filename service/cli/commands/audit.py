"""``kith audit``: search, export and verification of the audit log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.table import Column

from service.cli.connection import connect, local_settings, read_settings
from service.cli.options import CommandGroup, GalleryFilter, OutputOptions, ServerOptions
from service.cli.terminal import EXIT_NO, count_of, make_table, print_line, print_note, print_table, to_the_second
from service.core.atomic_files import atomic_write
from service.core.errors import AuditFileError, MasterKeyError

if TYPE_CHECKING:
    from kith.wire.audit import AuditLineOut
    from service.storage.audit.chain import Anchor, Fault, Report
    from service.storage.audit.reader import Trail

app = CommandGroup(help="Search and verify the audit log.", no_args_is_help=True)
HASH_DIGITS: Final = 64
SQLITE_HEADER: Final = b"SQLite format 3\x00"
Source = Annotated[
    Path | None, typer.Argument(help="Export, or copy of a SQLite file. Default: the local database.", exists=True)
]


@app.command()
def verify(
    output: OutputOptions,
    source: Source = None,
    against: Annotated[
        Path | None, typer.Option(help="Anchors from 'audit head', stored where no writer of the audit log can write.")
    ] = None,
) -> None:
    """Verify every chain of the audit log, without the service.

    Prints the altered or missing lines. Exit status 1 if there are any."""
    from service.storage.audit.reader import read_anchors

    report = _verify(source, [] if against is None else read_anchors(against))
    output.answer(asdict(report), lambda: _print_report(report, against is not None), ok=not report.faults)


@app.command()
def head(output: OutputOptions, source: Source = None) -> None:
    """Print the end of each chain as anchors for 'audit verify --against'.

    Exit status 1 if a chain is not sound."""
    from service.storage.audit.reader import anchor_lines

    report = _verify(source, [])
    for fault in report.faults:
        print_note(_describe_fault(fault))
    if report.faults:
        raise typer.Exit(EXIT_NO)
    lines = anchor_lines(report.ends, datetime.now(UTC))
    output.answer([json.loads(line) for line in lines], "\n".join(lines))


@app.command()
def export(
    file: Annotated[Path, typer.Argument(help="FILE.ndjson, replaced when the new file is complete.")],
    output: OutputOptions,
) -> None:
    """Write a consistent snapshot of the audit log to a file that 'audit verify' can read."""
    from service.storage.audit.reader import write_trail

    with _open_trail(None) as trail, atomic_write(file) as target:
        count = write_trail(trail, target)
    size = file.stat().st_size
    text = f"Wrote {file}, {size:,} bytes: {count_of(count, 'line')}"
    output.answer({"file": str(file), "bytes": size, "line_count": count}, text)


@app.command("list")
def list_lines(
    server: ServerOptions,
    gallery: GalleryFilter = None,
    event: Annotated[str | None, typer.Option(help="Only this event of docs/audit.md.")] = None,
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


def _print_lines(lines: list[AuditLineOut]) -> None:
    if not lines:
        print_line("No matching entries. docs/audit.md lists the recorded events.")
        return
    headers = ("Time (UTC)", "Event", "Outcome", "Actor", "Gallery", "Subject")
    rows = []
    for line in lines:
        details = json.dumps(line.details, separators=(", ", ": "))[1:-1]
        at = to_the_second(line.at)
        rows.append((at, line.event, line.outcome, line.actor, line.gallery, line.subject, details))
    columns = (*(Column(header, no_wrap=True) for header in headers), Column("Details", min_width=20))
    print_table(make_table(*columns, rows=rows))


@contextmanager
def _open_trail(source: Path | None) -> Iterator[Trail]:
    """Open an export, a copy of a SQLite file, or the local database. Raises AuditFileError, StorageError."""
    from service.storage.audit.reader import trail_in, trail_of

    if source is None:
        with trail_of(local_settings().sql_url) as trail:
            yield trail
        return
    try:
        with source.open("rb") as file:
            is_database = file.read(len(SQLITE_HEADER)) == SQLITE_HEADER
    except OSError as error:
        raise AuditFileError(f"{source} cannot be read: {error.strerror}") from error
    with trail_of(f"sqlite:///{source.absolute()}") if is_database else trail_in(source) as trail:
        yield trail


def _verify(source: Path | None, anchors: list[Anchor]) -> Report:
    from service.storage.audit.chain import SERVICE, Fault, examine

    with _open_trail(source) as trail:
        secret, fault = _signing_secret(trail)
        report = examine(trail.lines, trail.heads, secret, trail.galleries, anchors)
    if fault is not None:
        report.faults.insert(0, Fault("mac", SERVICE, None, None, None, fault))
    return report


def _signing_secret(trail: Trail) -> tuple[bytes | None, str | None]:
    """Return the secret that signs chain heads, and a fault if the master key does not open it.

    A missing secret, or one that another key wraps, is a fault: an attacker who rewrites the log could have removed or
    replaced it. Without a master key, signatures are not checked.
    """
    from service.resources import existing_master_keys
    from service.storage.audit.log import PURPOSE

    keys, wrapped = existing_master_keys(read_settings()), trail.secret
    if keys is None:
        return None, None
    if wrapped is None:
        # An audit log without lines was never signed.
        return None, "the secret that signs chain heads is missing" if trail.heads else None
    try:
        return keys.unwrap(wrapped.key, PURPOSE, wrapped.master_key), None
    except MasterKeyError as error:
        return None, f"the master key does not open the secret that signs chain heads: {error}"


def _describe_fault(fault: Fault) -> str:
    from service.storage.audit.chain import SERVICE

    if fault.chain == SERVICE:
        chain = "the service's chain"
    else:
        # The hash that names a chain is unknown if no line of it is left.
        digits = f", chain {fault.chain[:16]}" if len(fault.chain) == HASH_DIGITS else ""
        chain = f"gallery {fault.gallery or 'unknown'}{digits}"
    lines = ""
    if fault.first is not None:
        lines = f", line {fault.first}" if fault.first == fault.last else f", lines {fault.first} to {fault.last}"
    return f"{chain}{lines}: {fault.kind}: {fault.what}"


def _print_report(report: Report, anchored: bool) -> None:
    for fault in report.faults:
        print_line(_describe_fault(fault))
    verdict = count_of(len(report.faults), "fault") if report.faults else "sound"
    print_line(f"{count_of(report.lines, 'line')} in {count_of(len(report.ends), 'chain')}: {verdict}")
    if not report.signed:
        print_line(
            "Signatures were not checked, because no master key is available. Anyone with write access to the database "
            "could have changed lines"
            + (" after the anchors." if anchored else ". Anchors from 'audit head' would show it.")
        )
