"""``kith convert``: conversion of other services' databases to files that Kith imports (docs/moving-here.md)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from service.cli.connection import read_settings
from service.cli.options import CommandGroup, OutputOptions
from service.cli.terminal import print_first, print_line
from service.core.atomic_files import atomic_write

Source = TypeVar("Source")


def _require_folder(path: Path) -> Path:
    if not path.parent.is_dir():
        raise typer.BadParameter(f"The folder {path.parent} does not exist.")
    return path


app = CommandGroup(help="Convert data of other services (docs/moving-here.md).", no_args_is_help=True)
Archive = Annotated[
    Path, typer.Argument(help="Zip file to write, for 'kith enroll'.", dir_okay=False, callback=_require_folder)
]
CollectionName = Annotated[str | None, typer.Option(help="Collection; required if there are several.")]


@app.command("compreface")
def convert_compreface(
    dump: Annotated[Path, typer.Argument(help="SQL dump by pg_dump.", exists=True, dir_okay=False)],
    archive: Archive,
    output: OutputOptions,
    collection: CollectionName = None,
) -> None:
    """Extract the photos of a CompreFace collection from a database dump."""
    from service.cli.converters import compreface
    from service.cli.converters.output import SubjectIds, write_archive

    found = compreface.read_collections(dump)
    chosen = _choose(found, [(each.title, each.api_key) for each in found], collection)
    ids = SubjectIds()
    people, photos = write_archive(compreface.read_photos(dump, chosen, ids), archive)
    left = [f"{chosen.without_photo} embeddings without a photo"] if chosen.without_photo else []
    if without_photo := len(chosen.people) - len(set(chosen.photos.values())):
        left.append(f"{without_photo} people without a photo")
    _answer(output, archive, people, photos, left, ids.changed)


@app.command("deepface")
def convert_deepface(
    pickle: Annotated[
        Path, typer.Argument(help="ds_model_....pkl, in the folder of the photos.", exists=True, dir_okay=False)
    ],
    archive: Archive,
    output: OutputOptions,
) -> None:
    """Collect the photos of a DeepFace database. Subjects are named after folders, or else files."""
    from service.cli.converters import deepface
    from service.cli.converters.output import SubjectIds, write_archive

    ids = SubjectIds()
    found, missing = deepface.find_photos(deepface.read_paths(pickle), pickle.parent)
    people, photos = write_archive(deepface.read_photos(found, pickle.parent, ids), archive)
    left = [f"{path} is not in {pickle.parent}" for path in missing]
    _answer(output, archive, people, photos, left, ids.changed)


@app.command("insightface-server")
def convert_insightface_server(
    database: Annotated[Path, typer.Argument(help="SQLite database.", exists=True, dir_okay=False)],
    file: Annotated[
        Path,
        typer.Argument(
            help=".ndjson file to write, for 'kith gallery import'.", dir_okay=False, callback=_require_folder
        ),
    ],
    output: OutputOptions,
    collection: CollectionName = None,
    pack: Annotated[
        str | None,
        typer.Option(
            help="Pack that computed the vectors, by name or directory. Default: KITH_PACK.",
        ),
    ] = None,
) -> None:
    """Convert the people and vectors of an InsightFace Server collection that used one of Kith's packs."""
    from models.pack.loading import find_pack, load_pack
    from service.cli.converters import insightface_server
    from service.cli.converters.output import SubjectIds

    settings = read_settings()
    served = load_pack(settings.pack_path if pack is None else find_pack(Path(pack), settings.models_path))
    found = insightface_server.read_collections(database)
    chosen = _choose(found, [(each.name,) for each in found], collection)
    insightface_server.check_recognizer(chosen, served)
    ids = SubjectIds()
    with atomic_write(file) as target:
        target.writelines(insightface_server.lines(database, chosen, served.recognition.fingerprint(), ids))
    _answer(output, file, chosen.people, chosen.faces, [], ids.changed)


def _choose(found: Sequence[Source], names: Sequence[tuple[str, ...]], wanted: str | None) -> Source:
    """Return the collection with the wanted name, or the only one. Raises typer.BadParameter with the names."""
    matching = [each for each, own in zip(found, names, strict=True) if wanted is None or wanted in own]
    if len(matching) != 1:
        choices = ", ".join(own[0] for own in names) or "none"
        raise typer.BadParameter(f"Choose a collection: {choices}", param_hint="--collection")
    return matching[0]


def _answer(
    output: OutputOptions, file: Path, people: int, photos: int, left: list[str], renamed: dict[str, str]
) -> None:
    """Print the result. ``left`` lists skipped data with reasons; ``renamed`` maps names to subject ids."""

    def print_text() -> None:
        print_line(f"Wrote {file}: {people} people, {photos} photos or vectors.")
        print_line("The file holds unencrypted faces. Delete it after the import.")
        print_first("  skipped", left, " (use --json to list all)")
        changes = [f"{name!r} to {subject!r}" for name, subject in renamed.items()]
        print_first("  renamed", changes, " (use --json to list all)")

    document = {"file": str(file), "people_count": people, "photo_count": photos, "left": left, "renamed": renamed}
    output.answer(document, print_text)
