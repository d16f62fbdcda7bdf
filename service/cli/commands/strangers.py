"""``kith stranger``: list, name, merge and forget the strangers that a gallery remembers."""

from __future__ import annotations

from typing import Annotated

import typer

from service.cli.calls import add_call, removed
from service.cli.connection import connect
from service.cli.options import CommandGroup, GalleryOption, ServerOptions, Yes
from service.cli.terminal import require_confirmation

app = CommandGroup(help="Manage remembered strangers: name, merge, forget.", no_args_is_help=True)

add_call(
    app,
    "list",
    "strangers",
    ("Stranger=id", "Visits=seen_count", "First seen (UTC)=first_seen", "Last seen (UTC)=last_seen", "template_count"),
    nothing="No strangers. To remember them: 'kith gallery update {gallery} --remember-strangers-days 30'.",
)
add_call(
    app,
    "promote",
    "promote_stranger",
    "Templates of {subject}: {0.subject.template_count}, of them the stranger's: {0.template_count}; "
    "receipt {0.receipt.id}",
    subject=Annotated[str, typer.Argument(help="New or existing subject that it is.")],
    name=Annotated[str | None, typer.Option(help="Display name, if the subject has none.")],
)
add_call(
    app,
    "merge",
    "merge_stranger",
    "Merged {stranger} into {into}, seen {0.stranger.seen_count} times; receipt {0.receipt.id}",
    note="A merge cannot be undone.",
    confirm="Merge stranger {stranger} into {into}?",
)
add_call(app, "export", "export_stranger", None, note="Only the owner can read the file.")


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
    forgotten = f"all strangers of {gallery!r}" if stranger is None else f"stranger {stranger}"
    require_confirmation(f"Forget {forgotten}?", yes)
    with connect(server) as kith:
        done = kith.forget_strangers(gallery) if stranger is None else kith.forget_stranger(gallery, stranger)
    server.answer(done.receipt, f"Forgot {forgotten}: {removed(done)}; receipt {done.receipt.id}")
