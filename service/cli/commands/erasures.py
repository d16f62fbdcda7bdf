"""``kith erasures``: erasure receipts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.connection import connect
from service.cli.options import CommandGroup, GalleryOption, ServerOptions
from service.cli.terminal import to_the_second

if TYPE_CHECKING:
    from kith.wire.erasures import ReceiptOut

app = CommandGroup(help="List erasures.", no_args_is_help=True)


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


def describe_removed(receipt: ReceiptOut) -> str:
    """Return what was erased: '1 subject, 2 templates'."""
    return ", ".join(f"{count} {kind}" for kind, count in receipt.removed.items())
