"""``kith subject`` and ``kith erasures``: what is held about one person, erasing it, and what was erased."""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from service.connection import AsJson, Key, Url, connect
from service.files import replacing
from service.settings import load_settings
from service.terminal import print_table

subject_app = typer.Typer(help="One person.", no_args_is_help=True)
erasures_app = typer.Typer(help="What was erased.", no_args_is_help=True)

Gallery = Annotated[str, typer.Option("--gallery", "-g", help="Which gallery.")]
Subject = Annotated[str, typer.Argument(help="The subject's id.")]
Kept = Annotated[Path, typer.Argument(help="JSON.", dir_okay=False)]


@subject_app.command("export")
def export_subject(
    subject: Subject,
    gallery: Gallery,
    file: Annotated[Path | None, typer.Argument(help="Where to; default: the terminal.", dir_okay=False)] = None,
    url: Url = None,
    api_key: Key = None,
) -> None:
    """Everything that is held about one person, as JSON; a file is readable by its owner alone."""
    with connect(url, api_key) as kith:
        document = json.dumps(kith.export_subject(gallery, subject), indent=2)
    if file is None:
        print(document)
        return
    with replacing(file) as to:
        to.write(document.encode())
    print(f"wrote {file}")


@subject_app.command("erase")
def erase_subject(
    subject: Subject,
    gallery: Gallery,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    url: Url = None,
    api_key: Key = None,
) -> None:
    """Erase a person, and print the receipt."""
    if not yes:
        typer.confirm(f"Erase {subject!r} from gallery {gallery!r}?", abort=True)
    with connect(url, api_key) as kith:
        print(kith.delete_subject(gallery, subject).receipt.model_dump_json(indent=2))


@erasures_app.command("list")
def list_erasures(
    gallery: Gallery,
    subject: Annotated[str | None, typer.Option(help="Only this subject's.")] = None,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Receipts of a gallery, latest first."""
    with connect(url, api_key) as kith:
        found = list(kith.erasures(gallery, subject))
    if as_json:
        print(json.dumps([receipt.model_dump(mode="json") for receipt in found], indent=2))
        return
    table = Table(Column("Receipt", no_wrap=True), "When (UTC)", "What", "Removed")
    for receipt in found:
        removed = ", ".join(f"{count} {what}" for what, count in receipt.removed.items())
        table.add_row(receipt.id, f"{receipt.at:%Y-%m-%d %H:%M:%S}", receipt.kind, removed)
    print_table(table)


@erasures_app.command("verify")
def verify_receipt(
    receipt: Annotated[str, typer.Argument(help="Its id.")], url: Url = None, api_key: Key = None
) -> None:
    """Whether a receipt holds; exit 1 if it does not."""
    if re.fullmatch("[0-9a-f]{32}", receipt) is None:
        raise typer.BadParameter("it has 32 hexadecimal digits; 'kith erasures list' names them", param_hint="RECEIPT")
    with connect(url, api_key) as kith:
        verdict = kith.verify_receipt(receipt)
    print(verdict.model_dump_json(indent=2))
    if not verdict.holds:
        raise typer.Exit(1)


@erasures_app.command("save")
def save_erasures(file: Kept) -> None:
    """Write every receipt of the database to a file, to be kept elsewhere: no backup knows what was erased after it."""
    from service.engines import open_own_database
    from service.gallery.repeated_erasures import saved

    with closing(open_own_database(load_settings())) as database, database.read() as connection:
        documents = saved(connection)
    with replacing(file) as to:
        to.write(json.dumps(documents, indent=1).encode())
    print(f"wrote {len(documents)} receipts to {file}")


@erasures_app.command("repeat")
def repeat_erasures(file: Kept) -> None:
    """Erase anew, after a backup was restored, what the receipts of a file name."""
    from service.engines import open_own_database
    from service.gallery.repeated_erasures import repeat_saved

    documents: list[dict[str, Any]] = json.loads(file.read_text())
    with closing(open_own_database(load_settings())) as database:
        repeated = repeat_saved(database, documents)
    print(f"of {len(documents)} receipts, {len(repeated)} named what was there again; it is erased")
