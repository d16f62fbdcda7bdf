"""Running it: ``serve``, ``demo``, ``doctor``, ``backup``, ``restore``."""

from __future__ import annotations

import tempfile
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from service.commands.options import AsJson
from service.commands.own_database import own_settings
from service.errors import StorageError
from service.terminal import SAID_NO, print_json, print_table, remark, say, stdout

if TYPE_CHECKING:
    from service.rates import Rates


def serve(
    host: Annotated[str | None, typer.Option(help="Overrides KITH_HOST.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Overrides KITH_PORT.")] = None,
) -> None:
    """Serve until interrupted."""
    from service import server
    from service.logs import configure
    from service.settings import load_settings

    settings = load_settings(**{k: v for k, v in {"host": host, "port": port}.items() if v is not None})
    configure(settings.log_level, settings.log_format)
    server.serve(settings)


def demo(
    output: Annotated[Path, typer.Option(help="The folder for the picture.")] = Path("demo-output"),
) -> None:
    """Enrol, verify and identify real photos through a real server, and tell what is done and why.

    Exit 1 if a decision is wrong."""
    from service.client import Kith
    from service.demo import run_demo
    from service.server import embedded
    from service.settings import load_settings

    terminal = stdout()
    console = terminal if terminal.is_terminal else stdout(width=150)
    models_dir = load_settings().models_path  # before the data directory becomes another
    with (
        tempfile.TemporaryDirectory() as folder,
        embedded(load_settings(data_dir=Path(folder), models_dir=models_dir, database_url=None, api_key=None)) as url,
        Kith(url) as kith,
    ):
        right = run_demo(kith, output, console)
    if not right:
        raise typer.Exit(SAID_NO)


def doctor(
    bench: Annotated[
        bool, typer.Option("--bench", help="Measure every engine that is installed, and say which to use.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """What is installed, and what really ran each network where.

    Exit 1 on an error."""
    from models.pack import load_pack
    from service.doctor import diagnose
    from service.rates import measure
    from service.settings import load_settings

    settings = load_settings()
    findings = diagnose(settings)
    sound = all(finding.verdict != "error" for finding in findings)
    rates = measure(load_pack(settings.pack_path), settings) if bench and sound else None
    if as_json:
        listed = [vars(finding) for finding in findings]
        print_json({"findings": listed, **asdict(rates)} if rates is not None else listed)
    else:
        table = Table("What", "", "Detail")
        colours = {"ok": "green", "warning": "yellow", "error": "red"}
        for finding in findings:
            table.add_row(finding.what, f"[{colours[finding.verdict]}]{finding.verdict}[/]", finding.detail)
        print_table(table)
        if rates is not None:
            _print_rates(rates)
    if not sound:
        raise typer.Exit(SAID_NO)


def backup(
    file: Annotated[Path, typer.Argument(help="Where to; replaced when the new one is complete.")],
    as_json: AsJson = False,
) -> None:
    """Write everything in the database, as it is at this moment, to one file; servers go on meanwhile."""
    from service.gallery.audit_log import Entry, record_entries
    from service.gallery.backup import back_up
    from service.opening import open_own_database
    from service.security.acting import Actor, acting_as

    with acting_as(Actor("operator")), closing(open_own_database(own_settings())) as database:
        manifest = back_up(database, file)
        try:
            record_entries(database, [Entry("database_backed_up", details=manifest.rows)])
        except StorageError as error:  # of which a backup may be the remedy
            remark(f"not in the audit: {error}")
    if as_json:
        print_json(manifest.document())
        return
    say(f"wrote {file}, {file.stat().st_size:,} bytes: {_backed_up(manifest.rows)}")


def restore(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="As backup wrote it.")],
    replace: Annotated[bool, typer.Option("--replace", help="Delete all that the database holds.")] = False,
    as_json: AsJson = False,
) -> None:
    """Put a backup into the database, of whatever kind, that the settings name: wholly, or not at all."""
    from service.gallery import backup as backups
    from service.opening import master_keys, open_own_database
    from service.security.acting import Actor, acting_as

    settings, manifest = own_settings(existing=False), backups.read_manifest(file)
    backups.check_keys(file, master_keys(settings))  # before a database is made, and a key for it
    with acting_as(Actor("operator")), closing(open_own_database(settings)) as database:
        backups.restore(database, file, replace, said=remark)
    if as_json:
        print_json(manifest.document())
        return
    say(f"restored {_backed_up(manifest.rows)}, as of {manifest.created_at}")
    for needed in manifest.recognisers:
        say(f"needs recogniser {needed['fingerprint'][:12]} of {needed['dimension']} dimensions")


def _backed_up(rows: dict[str, int]) -> str:
    return ", ".join(f"{rows[table]:,} {table}" for table in ("galleries", "subjects", "templates"))


def _print_rates(rates: Rates) -> None:
    from service.rates import BATCHES

    table = Table("Network", "Engine", "Numbers", *(f"ms each, batch {n}" for n in BATCHES), "Points lost", "At start")
    for rate in rates.rates:
        lost = "not measured" if rate.points_lost is None else f"{rate.points_lost:g}"
        taken = (f"{ms:.2f}" for ms in rate.milliseconds)
        table.add_row(rate.network, rate.engine, rate.precision, *taken, lost, "chosen" if rate.chosen else "")
    print_table(table)
    say(rates.advice)
