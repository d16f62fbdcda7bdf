"""``kith stranger``: list, name, merge and forget the strangers that a gallery remembers."""

from __future__ import annotations

from typing import Annotated

import typer

from service.cli.commands.erasures import describe_removed
from service.cli.connection import connect
from service.cli.options import CommandGroup, GalleryOption, JsonFile, ServerOptions, Yes
from service.cli.terminal import require_confirmation

app = CommandGroup(help="Manage remembered strangers: name, merge, forget.", no_args_is_help=True)
Stranger = Annotated[str, typer.Argument(help="Stranger id, from 'kith stranger list'.")]


@app.command("list")
def list_strangers(gallery: GalleryOption, server: ServerOptions) -> None:
    """List the strangers that a gallery remembers, the latest first."""
    with connect(server) as kith:
        strangers = list(kith.strangers(gallery))
    server.answer_list(
        strangers,
        ("Stranger", "Visits", "First seen (UTC)", "Last seen (UTC)", "Templates"),
        lambda one: (one.id, one.seen_count, one.first_seen, one.last_seen, one.template_count),
        f"No strangers. To remember them: 'kith gallery update {gallery} --remember-strangers-days 30'.",
    )


@app.command()
def promote(
    stranger: Stranger,
    subject: Annotated[str, typer.Argument(help="New or existing subject that it is.")],
    gallery: GalleryOption,
    server: ServerOptions,
    name: Annotated[str | None, typer.Option(help="Display name, if the subject has none.")] = None,
) -> None:
    """Make a stranger a subject: move its templates, and forget the stranger."""
    with connect(server) as kith:
        done = kith.promote_stranger(gallery, stranger, subject, name)
    server.answer(
        done,
        f"{subject} has {done.subject.template_count} templates, {done.template_count} of them of the stranger; "
        f"receipt {done.receipt.id}",
    )


@app.command()
def merge(
    stranger: Stranger,
    gallery: GalleryOption,
    into: Annotated[str, typer.Option(help="Stranger that remains.")],
    server: ServerOptions,
    yes: Yes = False,
) -> None:
    """Merge a stranger into another one that is the same person. A merge cannot be undone."""
    require_confirmation(f"Merge stranger {stranger} into {into}?", yes)
    with connect(server) as kith:
        merged = kith.merge_stranger(gallery, stranger, into)
    one = merged.stranger
    server.answer(merged, f"Merged {stranger} into {into}, seen {one.seen_count} times; receipt {merged.receipt.id}")


@app.command()
def forget(
    gallery: GalleryOption,
    server: ServerOptions,
    stranger: Annotated[str | None, typer.Argument(help="Stranger id, from 'kith stranger list'.")] = None,
    everyone: Annotated[bool, typer.Option("--all", help="Forget all strangers of the gallery.")] = False,
    yes: Yes = False,
) -> None:
    """Erase a stranger, or all, and print the erasure receipt."""
    if everyone == (stranger is not None):
        raise typer.BadParameter("Give a stranger, or --all.", param_hint="STRANGER, --all")
    whom = f"all strangers of {gallery!r}" if stranger is None else f"stranger {stranger}"
    require_confirmation(f"Forget {whom}?", yes)
    with connect(server) as kith:
        done = kith.forget_strangers(gallery) if stranger is None else kith.forget_stranger(gallery, stranger)
    server.answer(done.receipt, f"Forgot {whom}: {describe_removed(done.receipt)}; receipt {done.receipt.id}")


@app.command("export")
def export_stranger(
    stranger: Stranger,
    gallery: GalleryOption,
    server: ServerOptions,
    file: JsonFile = None,
) -> None:
    """Export all data stored about a stranger as JSON. Only the owner can read the file."""
    with connect(server) as kith:
        document = kith.export_stranger(gallery, stranger)
    server.write(document, file)
