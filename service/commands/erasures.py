"""``kith erasures``: what was erased, and proving it."""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from service.commands.completion import complete_subjects
from service.commands.options import AsJson, Gallery, Key, Url
from service.commands.own_database import own_settings
from service.connection import connect
from service.files import replacing
from service.terminal import SAID_NO, print_json, print_table, say

app = typer.Typer(help="What was erased.", no_args_is_help=True)

Kept = Annotated[Path, typer.Argument(help="JSON.", dir_okay=False)]


@app.command("list")
def list_erasures(
    gallery: Gallery,
    subject: Annotated[str | None, typer.Option(help="Only this subject's.", autocompletion=complete_subjects)] = None,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Receipts of a gallery, latest first."""
    with connect(url, api_key) as kith:
        found = list(kith.erasures(gallery, subject))
    if as_json:
        print_json(found)
        return
    if not found:
        say(f"no erasure in {gallery}: 'kith subject erase' and 'kith template delete' leave receipts, and so does age")
        return
    table = Table(Column("Receipt", no_wrap=True), "When (UTC)", "What", "Removed")
    for receipt in found:
        removed = ", ".join(f"{count} {what}" for what, count in receipt.removed.items())
        table.add_row(receipt.id, f"{receipt.at:%Y-%m-%d %H:%M:%S}", receipt.kind, removed)
    print_table(table)


@app.command("verify")
def verify_receipt(
    receipt: Annotated[str, typer.Argument(help="Its id.")],
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Whether a receipt holds; exit 1 if it does not."""
    if re.fullmatch("[0-9a-f]{32}", receipt) is None:
        raise typer.BadParameter("it has 32 hexadecimal digits; 'kith erasures list' names them", param_hint="RECEIPT")
    with connect(url, api_key) as kith:
        verdict = kith.verify_receipt(receipt)
    if as_json:
        print_json(verdict)
    elif verdict.holds:
        say(f"the receipt holds: what was erased on {verdict.receipt.at:%Y-%m-%d %H:%M} UTC is gone")
    else:
        line = "" if verdict.line_found else ": the audit has no such line"
        there = "" if verdict.gone or verdict.enrolled_since else ": what it names is there"
        say(f"the receipt does not hold{line}{there}")
    if not verdict.holds:
        raise typer.Exit(SAID_NO)


@app.command("save")
def save_erasures(file: Kept, as_json: AsJson = False) -> None:
    """Write every receipt of the database to a file, to be kept elsewhere: no backup knows what was erased after it."""
    from service.gallery.repeated_erasures import saved
    from service.opening import open_own_database

    with closing(open_own_database(own_settings())) as database, database.read() as connection:
        documents = saved(connection)
    with replacing(file) as to:
        to.write(json.dumps(documents, indent=1).encode())
    if as_json:
        print_json({"file": str(file), "receipts": len(documents)})
    else:
        say(f"wrote {len(documents)} receipts to {file}")


@app.command("repeat")
def repeat_erasures(file: Kept, as_json: AsJson = False) -> None:
    """Erase anew, after a backup was restored, what the receipts of a file name."""
    from service.gallery.repeated_erasures import repeat_saved
    from service.opening import open_own_database

    try:
        documents: list[dict[str, Any]] = json.loads(file.read_text())
        if not isinstance(documents, list):
            raise ValueError("it is no list")
    except ValueError as error:
        raise typer.BadParameter(
            f"{file} is not what 'kith erasures save' writes: {error}", param_hint="FILE"
        ) from error
    with closing(open_own_database(own_settings())) as database:
        repeated = repeat_saved(database, documents)
    if as_json:
        print_json({"receipts": len(documents), "erased": [receipt.id for receipt in repeated]})
    else:
        say(f"of {len(documents)} receipts, {len(repeated)} named what was there again; it is erased")
