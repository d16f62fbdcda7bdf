"""``kith models``: packs by name, from the catalogue."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.markup import escape
from rich.progress import DownloadColumn, TaskID, TransferSpeedColumn
from rich.table import Column, Table

from service.commands.completion import complete_packs
from service.commands.options import AsJson, PackName
from service.commands.questions import confirmed
from service.terminal import SAID_NO, print_json, print_table, progress, remark, say, stdout

if TYPE_CHECKING:
    from models.catalog import Entry
    from models.download import Progress
    from service.settings import Settings

KINDS: Final = {"bundled": "bundled", "files": "ONNX files", "zip": "archive", "dlib": "converted"}
UNKNOWN: Final = "unknown"

app = typer.Typer(help="Model packs by name: what there is, whose terms, pull and verify.", no_args_is_help=True)


@app.command(name="list")
def list_command(as_json: AsJson = False) -> None:
    """All packs of the catalogue, and which are here."""
    from service.settings import load_settings

    settings = load_settings()
    rows = [_row(entry, settings) for entry in _catalog(settings).values()]
    if as_json:
        print_json(rows)
        return
    table = Table("Pack", "Kind", "Licence", "Download", "Here", "Served")
    for row in rows:
        size = "" if row["kind"] == "bundled" else _megabytes(row["size"])
        marks = ("yes" if row[key] else "" for key in ("here", "served"))
        table.add_row(row["name"], KINDS[row["kind"]], row["licence"], size, *marks)
    print_table(table)


@app.command()
def show(name: PackName, as_json: AsJson = False) -> None:
    """Everything about one pack: terms, sources, checksums, figures."""
    from models.pack import load_pack
    from models.pull import directory_of, read_record
    from service.settings import load_settings

    settings = load_settings()
    entry = _named(name, settings)
    figures = _figures(entry)
    if as_json:
        record = read_record(entry, settings.models_path) if _is_pulled(entry, settings) else None
        document = asdict(entry) | _row(entry, settings) | {"licence": asdict(entry.licence)}
        print_json(document | {"figures": dict(figures), "pulled": record})
        return
    table = Table("What", Column("Detail", overflow="fold"), show_header=False)
    table.add_row("Pack", f"{entry.name}: {entry.about}")
    table.add_row("Licence", f"{entry.licence.name}, {entry.licence.url}")
    table.add_row("Allows", entry.licence.allows)
    if entry.licence.acceptance:
        table.add_row("Acceptance", "asked for before anything is fetched (--accept-licence)")
    for file in entry.downloads:
        source = file.url or f"{file.file}, of the project {file.project} in pip's package index"
        table.add_row("Source", f"{source}\nsha256 {file.sha256 or UNKNOWN}, {_megabytes(file.size)}")
        for member in file.members:
            table.add_row("Taken", f"{member.file}\nsha256 {member.sha256 or UNKNOWN}, {_megabytes(member.size)}")
    row = _row(entry, settings)
    if row["here"]:
        table.add_row("Here", f"{row['directory']}{', served' if row['served'] else ''}")
        calibrated = load_pack(directory_of(entry, settings.models_path)).calibration is not None
        table.add_row("Answers at a risk", "yes, it is calibrated" if calibrated else "no: at explicit thresholds only")
    else:
        table.add_row("Here", f"no: kith models pull {entry.name}")
    for what, value in figures:
        table.add_row(what, value)
    stdout().print(table)


@app.command(name="pull")
def pull_command(
    name: PackName,
    accept_licence: Annotated[
        bool, typer.Option("--accept-licence", help="You have read the pack's licence and accept it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Fetch a pack, check it, and try its networks. Run again to resume."""
    from models.pull import is_present, pull, read_record
    from service.settings import load_settings

    settings = load_settings()
    entry = _named(name, settings)
    present = is_present(entry, settings.models_path)
    accepted = accept_licence or (entry.licence.acceptance and not present and _ask(entry))
    with _bars() as advance:
        directory = pull(entry, settings.models_path, accepted or present, advance)
    record = {} if entry.kind == "bundled" else read_record(entry, settings.models_path)
    if as_json:
        print_json({"name": entry.name, "directory": str(directory), "pulled": record or None})
        return
    say(f"{entry.name} lies in {directory}; serve it with KITH_PACK={entry.name}")
    for file in _unchecked(entry, record):
        remark(
            f"nobody states a checksum of {file['file']}: it has sha256 {file['sha256']}, which `verify` will expect"
        )


@app.command()
def verify(
    name: Annotated[
        str | None, typer.Argument(help="One pack; default: all that are here.", autocompletion=complete_packs)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare files with their checksums and run both networks once.

    Exit 1 if anything is amiss."""
    from models.pull import check, is_present
    from service.settings import load_settings

    settings = load_settings()
    if name is not None:
        entries = [_named(name, settings)]
    else:
        entries = [entry for entry in _catalog(settings).values() if is_present(entry, settings.models_path)]
    found = {entry.name: check(entry, settings.models_path, settings.provider) for entry in entries}
    if as_json:
        print_json({pack: [asdict(finding) for finding in findings] for pack, findings in found.items()})
    else:
        table = Table("Pack", "What", "", "Detail")
        for pack, findings in found.items():
            for finding in findings:
                mark = "[green]ok[/]" if finding.ok else "[red]error[/]"
                table.add_row(pack, finding.what, mark, escape(finding.detail))
        print_table(table)
    if not all(finding.ok for findings in found.values() for finding in findings):
        raise typer.Exit(SAID_NO)


def _catalog(settings: Settings) -> dict[str, Entry]:
    from models import catalog

    return catalog.read_catalog(settings.catalog or catalog.CATALOG)


def _named(name: str, settings: Settings) -> Entry:
    from models import catalog

    return catalog.find(_catalog(settings), name)


def _row(entry: Entry, settings: Settings) -> dict[str, Any]:
    from models.pull import directory_of, is_present

    directory = directory_of(entry, settings.models_path)
    here = is_present(entry, settings.models_path)
    return {
        "name": entry.name,
        "kind": entry.kind,
        "licence": entry.licence.name,
        "size": entry.size,
        "here": here,
        "served": here and settings.pack_path.expanduser().resolve() == directory.resolve(),
        "directory": str(directory) if here else None,
    }


def _is_pulled(entry: Entry, settings: Settings) -> bool:
    from models.pull import is_present

    return entry.kind != "bundled" and is_present(entry, settings.models_path)


def _figures(entry: Entry) -> list[tuple[str, str]]:
    """What was measured of packs that were measured."""
    if entry.kind not in ("bundled", "dlib"):
        return []
    from models.dlib_pack import figures, read_evidence
    from models.pack import BUNDLED, load_pack

    return figures(load_pack(BUNDLED).metrics if entry.kind == "bundled" else read_evidence()["metrics"])


def _ask(entry: Entry) -> bool:
    """A person at a terminal may accept here; a program must say so in its command."""
    if not sys.stdin.isatty():
        return False
    remark(f"{entry.name} is under {entry.licence.name}: {entry.licence.url}\n{entry.licence.allows}")
    return confirmed("Do you accept this licence?", "--accept-licence")


@contextmanager
def _bars() -> Iterator[Progress]:
    """A bar for each file."""
    with progress(DownloadColumn(), TransferSpeedColumn()) as bars:
        tasks: dict[str, TaskID] = {}

        def advance(name: str, done: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(escape(name), total=total)
            bars.update(tasks[name], completed=done, total=total)

        yield advance


def _unchecked(entry: Entry, record: Mapping[str, Any]) -> list[dict[str, Any]]:
    unknown = {file.file for file in entry.downloads if file.sha256 is None}
    return [file for file in record.get("downloads", ()) if file["file"] in unknown]


def _megabytes(size: int | None) -> str:
    return UNKNOWN if size is None else f"{size / 1e6:.1f} MB"
