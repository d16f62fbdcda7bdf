"""``kith convert``: conversion of other services' databases to files that Kith enrolls (docs/moving-here.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from service.cli.options import CommandGroup, OutputOptions
from service.cli.terminal import print_first, print_line

app = CommandGroup(help="Convert data of other services (docs/moving-here.md).", no_args_is_help=True)


@app.command("compreface")
def convert_compreface(
    dump: Annotated[Path, typer.Argument(help="SQL dump by pg_dump.", exists=True, dir_okay=False)],
    archive: Annotated[Path, typer.Argument(help="Zip file to write, for 'kith enroll'.", dir_okay=False)],
    output: OutputOptions,
    collection: Annotated[str | None, typer.Option(help="Collection; required if there are several.")] = None,
) -> None:
    """Extract the photos of a CompreFace collection from a database dump."""
    from service.cli.converters import compreface
    from service.cli.converters.output import SubjectIds, write_archive

    found = compreface.read_collections(dump)
    matching = [each for each in found if collection is None or collection in (each.title, each.api_key)]
    if len(matching) != 1:
        choices = ", ".join(each.title for each in found) or "none"
        raise typer.BadParameter(f"Choose a collection: {choices}", param_hint="--collection")
    (chosen,) = matching
    ids = SubjectIds()
    people, photos = write_archive(compreface.read_photos(dump, chosen, ids), archive)
    left = [f"{chosen.without_photo} embeddings without a photo"] if chosen.without_photo else []
    if without_photo := len(chosen.people) - len(set(chosen.photos.values())):
        left.append(f"{without_photo} people without a photo")

    def print_text() -> None:
        print_line(f"Wrote {archive}: {people} people, {photos} photos.")
        print_line("The file holds unencrypted faces. Delete it after the import.")
        print_first("  skipped", left, " (use --json to list all)")
        changes = [f"{name!r} to {subject!r}" for name, subject in ids.changed.items()]
        print_first("  renamed", changes, " (use --json to list all)")

    document = {
        "file": str(archive),
        "people_count": people,
        "photo_count": photos,
        "left": left,
        "renamed": ids.changed,
    }
    output.answer(document, print_text)
