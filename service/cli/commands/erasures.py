"""``kith erasures``: erasure receipts, and repetition of erasures after a restore."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.connection import connect, local_database
from service.cli.options import CommandGroup, GalleryOption, OutputOptions, ServerOptions
from service.cli.terminal import to_the_second
from service.core.atomic_files import atomic_write

if TYPE_CHECKING:
    from kith.wire.erasures import ReceiptOut

app = CommandGroup(help="List, verify, save and repeat erasures.", no_args_is_help=True)
ReceiptFile = Annotated[Path, typer.Argument(help="JSON file.", dir_okay=False)]


@app.command("list")
def list_erasures(
    gallery: GalleryOption,
    server: ServerOptions,
    subject: Annotated[str | None, typer.Option(help="Only this subject id.")] = None,
) -> None:
    """List the erasure receipts of a gallery, newest first."""
    with connect(server) as kith:
        receipts = list(kith.erasures(gallery, subject))
    server.answer_list(
        receipts,
        ("Receipt", "Time (UTC)", "Kind", "Removed"),
        lambda receipt: (receipt.id, to_the_second(receipt.at), receipt.kind, describe_removed(receipt)),
        f"No erasures in gallery {gallery}. Erased subjects, templates and expired templates leave receipts.",
    )


@app.command("verify")
def verify_receipt(receipt: Annotated[str, typer.Argument(help="Receipt id.")], server: ServerOptions) -> None:
    """Verify that the erased data is gone and the audit log records its erasure.

    Exit status 1 if the receipt does not hold."""
    if re.fullmatch("[0-9a-f]{32}", receipt) is None:
        raise typer.BadParameter("Expected 32 hexadecimal digits. See 'kith erasures list'.", param_hint="RECEIPT")
    with connect(server) as kith:
        verdict = kith.verify_receipt(receipt)
    if verdict.holds:
        text = f"The receipt holds: the data erased on {verdict.receipt.at:%Y-%m-%d %H:%M} UTC is gone"
    else:
        missing = "" if verdict.line_found else "; the audit log has no entry for it"
        present = "" if verdict.gone or verdict.enrolled_since else "; the data still exists"
        text = f"The receipt does not hold{missing}{present}"
    server.answer(verdict, text, ok=verdict.holds)


@app.command("save")
def save_erasures(file: ReceiptFile, output: OutputOptions) -> None:
    """Write all receipts to a file to keep apart from backups, which lack later erasures."""
    from service.storage.privacy.repeated_erasures import saved

    with local_database() as database, database.read() as connection:
        documents = saved(connection)
    with atomic_write(file) as target:
        target.write(json.dumps(documents, indent=1).encode())
    output.answer({"file": str(file), "receipt_count": len(documents)}, f"Wrote {len(documents)} receipts to {file}")


@app.command("repeat")
def repeat_erasures(file: ReceiptFile, output: OutputOptions) -> None:
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
    with local_database() as database:
        repeated = repeat_saved(database, documents)
    text = f"Repeated {len(repeated)} of {len(documents)} erasures; the others needed no repetition"
    output.answer({"receipt_count": len(documents), "erased": [receipt.id for receipt in repeated]}, text)


def describe_removed(receipt: ReceiptOut) -> str:
    """Return what was erased: '1 subject, 2 templates'."""
    return ", ".join(f"{count} {kind}" for kind, count in receipt.removed.items())
