"""``kith erasures``: erasure receipts, and repetition of erasures after a restore."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from service.cli.completion import complete_subjects
from service.cli.connection import connect, local_database, local_settings
from service.cli.options import AsJson, CommandGroup, GalleryOption, ServerOptions
from service.cli.terminal import EXIT_NO, print_json, print_line, print_table
from service.core.atomic_files import atomic_write

app = CommandGroup(help="List, verify, save and repeat erasures.", no_args_is_help=True)
ReceiptFile = Annotated[Path, typer.Argument(help="JSON file.", dir_okay=False)]


@app.command("list")
def list_erasures(
    gallery: GalleryOption,
    server: ServerOptions,
    subject: Annotated[str | None, typer.Option(help="Only this subject id.", autocompletion=complete_subjects)] = None,
) -> None:
    """List the erasure receipts of a gallery, newest first."""
    with connect(server) as kith:
        receipts = list(kith.erasures(gallery, subject))
    if server.as_json:
        print_json(receipts)
        return
    if not receipts:
        print_line(
            f"No erasures in gallery {gallery}. Erased subjects, templates and expired templates leave receipts."
        )
        return
    table = Table(Column("Receipt", no_wrap=True), "Time (UTC)", "Kind", "Removed")
    for receipt in receipts:
        removed = ", ".join(f"{count} {kind}" for kind, count in receipt.removed.items())
        table.add_row(receipt.id, f"{receipt.at:%Y-%m-%d %H:%M:%S}", receipt.kind, removed)
    print_table(table)


@app.command("verify")
def verify_receipt(receipt: Annotated[str, typer.Argument(help="Receipt id.")], server: ServerOptions) -> None:
    """Verify that the erased data is gone and the audit log records its erasure.

    Exit status 1 if the receipt does not hold."""
    if re.fullmatch("[0-9a-f]{32}", receipt) is None:
        raise typer.BadParameter("Expected 32 hexadecimal digits. See 'kith erasures list'.", param_hint="RECEIPT")
    with connect(server) as kith:
        verdict = kith.verify_receipt(receipt)
    if server.as_json:
        print_json(verdict)
    elif verdict.holds:
        print_line(f"The receipt holds: the data erased on {verdict.receipt.at:%Y-%m-%d %H:%M} UTC is gone")
    else:
        missing = "" if verdict.line_found else "; the audit log has no entry for it"
        present = "" if verdict.gone or verdict.enrolled_since else "; the data still exists"
        print_line(f"The receipt does not hold{missing}{present}")
    if not verdict.holds:
        raise typer.Exit(EXIT_NO)


@app.command("save")
def save_erasures(file: ReceiptFile, as_json: AsJson = False) -> None:
    """Write all receipts to a file to keep apart from backups, which lack later erasures."""
    from service.storage.privacy.repeated_erasures import saved

    with local_database(local_settings()) as database, database.read() as connection:
        documents = saved(connection)
    with atomic_write(file) as target:
        target.write(json.dumps(documents, indent=1).encode())
    if as_json:
        print_json({"file": str(file), "receipts": len(documents)})
    else:
        print_line(f"Wrote {len(documents)} receipts to {file}")


@app.command("repeat")
def repeat_erasures(file: ReceiptFile, as_json: AsJson = False) -> None:
    """Erase what saved receipts name again, after a backup was restored."""
    from service.storage.privacy.repeated_erasures import repeat_saved

    try:
        documents: list[dict[str, Any]] = json.loads(file.read_text())
        if not isinstance(documents, list):
            raise ValueError("expected a list")
    except ValueError as error:
        raise typer.BadParameter(
            f"{file} was not written by 'kith erasures save': {error}", param_hint="FILE"
        ) from error
    with local_database(local_settings()) as database:
        repeated = repeat_saved(database, documents)
    if as_json:
        print_json({"receipts": len(documents), "erased": [receipt.id for receipt in repeated]})
    else:
        print_line(f"Repeated {len(repeated)} of {len(documents)} erasures; the others needed no repetition")
