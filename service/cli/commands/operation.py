"""``kith serve``, ``demo``, ``doctor``, ``backup`` and ``restore``: operation of the service."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.text import Text

from service.cli.connection import local_database, local_settings, read_settings, temporary_settings
from service.cli.options import OutputOptions
from service.cli.terminal import EXIT_NO, make_table, print_note, stdout_console
from service.core.errors import StorageError

VERDICT_COLORS: Final = {"ok": "green", "warning": "yellow", "error": "red"}


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on. Overrides KITH_HOST.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Overrides KITH_PORT.")] = None,
) -> None:
    """Serve until interrupted."""
    gc.disable()  # nearly all objects of the start stay; the started server enables it again
    from service import server
    from service.observability.logs import configure

    settings = read_settings(**{k: v for k, v in {"host": host, "port": port}.items() if v is not None})
    configure(settings.log_level, settings.log_format)
    server.serve(settings)


def demo(
    output: Annotated[Path, typer.Option(help="Folder for the photos and the annotated group photo.")] = Path(
        "demo-output"
    ),
) -> None:
    """Enroll, verify and identify real photos on a temporary server, and explain each step.

    Exit status 1 if a decision is wrong."""
    from kith import Kith
    from service.cli.tools.demo import run_demo
    from service.server import embedded

    terminal = stdout_console()
    console = terminal if terminal.is_terminal else stdout_console(width=150)
    with (
        tempfile.TemporaryDirectory() as folder,
        embedded(temporary_settings(Path(folder), api_key=None)) as url,
        Kith(url) as kith,
    ):
        correct = run_demo(kith, output, console)
    if not correct:
        raise typer.Exit(EXIT_NO)


def doctor(output: OutputOptions) -> None:
    """Check the installation and the database, and show where each network runs. Servers may keep running.

    Exit status 1 if a check fails."""
    from service.cli.tools.doctor import diagnose

    checks = diagnose(read_settings())
    sound = all(check.verdict != "error" for check in checks)
    rows = ((check.what, Text(check.verdict, VERDICT_COLORS[check.verdict]), check.detail) for check in checks)
    output.answer([vars(check) for check in checks], make_table("Check", "", "Detail", rows=rows), ok=sound)


def backup(
    file: Annotated[Path, typer.Argument(help="Backup file, replaced when the new one is complete.")],
    output: OutputOptions,
) -> None:
    """Write a consistent snapshot of the database to one file. Servers keep running."""
    from service.storage.audit.log import Entry, record_entries
    from service.storage.privacy.backup import back_up

    with local_database() as database:
        manifest = back_up(database, file)
        try:
            record_entries(database, [Entry("database_backed_up", details=manifest.rows)])
        except StorageError as error:  # a damaged database must still be backed up
            print_note(f"The backup is not recorded in the audit log: {error}")
    text = f"Wrote {file}, {file.stat().st_size:,} bytes: {_describe_rows(manifest.rows)}"
    output.answer(manifest.model_dump(), text)


def restore(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Backup file.")],
    output: OutputOptions,
    replace: Annotated[bool, typer.Option("--replace", help="Delete all data in the database first.")] = False,
) -> None:
    """Restore a backup into the configured database, completely or not at all."""
    from service.resources import master_keys
    from service.storage.privacy import backup as backups

    settings = local_settings(must_exist=False)
    manifest = backups.read_manifest(file, master_keys(settings))  # before a database and a master key are created
    with local_database(settings) as database:
        backups.restore(database, file, replace, report=print_note)
    restored = f"Restored {_describe_rows(manifest.rows)}, as of {manifest.created_at}"
    required = (
        f"Requires recognizer {needed['fingerprint'][:12]} with {needed['dimension']} dimensions"
        for needed in manifest.recognizers
    )
    output.answer(manifest.model_dump(), "\n".join((restored, *required)))


def _describe_rows(rows: dict[str, int]) -> str:
    return f"{rows['templates']:,} templates of {rows['subjects']:,} people"
