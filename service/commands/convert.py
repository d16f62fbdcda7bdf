"""``kith convert``: what another service holds of people, as a file that Kith takes (docs/moving-here.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer
from rich.progress import MofNCompleteColumn

from service.commands.completion import complete_packs
from service.commands.options import AsJson
from service.files import replacing
from service.terminal import print_json, progress, say

if TYPE_CHECKING:
    from service.foreign.people_archive import PersonPhoto

Some = TypeVar("Some")

MOST_LISTED: Final = 10
CLEAR: Final = "It holds people's faces in clear: delete it once they are enrolled."


def _in_a_folder(path: Path) -> Path:
    if not path.parent.is_dir():
        raise typer.BadParameter(f"the folder {path.parent} does not exist")
    return path


app = typer.Typer(help="Move here from another service: docs/moving-here.md.", no_args_is_help=True)
Archive = Annotated[
    Path, typer.Argument(help="The zip to write; kith enroll takes it.", dir_okay=False, callback=_in_a_folder)
]
Collection = Annotated[str | None, typer.Option(help="Which one; needed where there are several.")]


@dataclass(frozen=True)
class Converted:
    """``left``: what was not taken, and why; ``renamed``: subject by the name it had."""

    file: str
    people: int
    photos: int
    left: list[str] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)


@app.command("compreface")
def convert_compreface(
    dump: Annotated[Path, typer.Argument(help="What pg_dump wrote, as SQL.", exists=True, dir_okay=False)],
    archive: Archive,
    collection: Collection = None,
    as_json: AsJson = False,
) -> None:
    """The photos that CompreFace kept, out of a dump of its database, with whose they are."""
    from service.foreign import compreface
    from service.foreign.people_archive import write_archive
    from service.foreign.subject_ids import SubjectIds

    found = compreface.read_collections(dump)
    chosen = _chosen(found, [(each.title, each.api_key) for each in found], collection)
    ids = SubjectIds()
    with _bar("photos", len(chosen.photos)) as shown:
        people, photos = write_archive(shown(compreface.read_photos(dump, chosen, ids)), archive)
    left = [f"{chosen.without_photo} embeddings without a photo"] if chosen.without_photo else []
    if lonely := len(chosen.people) - len(set(chosen.photos.values())):
        left.append(f"{lonely} people without a photo")
    _tell(Converted(str(archive), people, photos, left, ids.changed), as_json)


@app.command("deepface")
def convert_deepface(
    pickle: Annotated[
        Path, typer.Argument(help="ds_model_....pkl, in the folder of the photos.", exists=True, dir_okay=False)
    ],
    archive: Archive,
    as_json: AsJson = False,
) -> None:
    """The photos of a DeepFace database, with whose they are: by their folder, or else by their name."""
    from service.foreign import deepface
    from service.foreign.people_archive import write_archive
    from service.foreign.subject_ids import SubjectIds

    ids = SubjectIds()
    found, missing = deepface.find_photos(deepface.read_paths(pickle), pickle.parent)
    with _bar("photos", len(found)) as shown:
        people, photos = write_archive(shown(deepface.read_photos(found, pickle.parent, ids)), archive)
    left = [f"{path} is not in {pickle.parent}" for path in missing]
    _tell(Converted(str(archive), people, photos, left, ids.changed), as_json)


@app.command("insightface-server")
def convert_insightface_server(
    database: Annotated[Path, typer.Argument(help="Its SQLite database.", exists=True, dir_okay=False)],
    file: Annotated[
        Path,
        typer.Argument(
            help="The .ndjson to write; kith gallery import takes it.", dir_okay=False, callback=_in_a_folder
        ),
    ],
    collection: Collection = None,
    pack: Annotated[
        str | None,
        typer.Option(
            help="The pack whose vectors they are, by name or directory; default: KITH_PACK.",
            autocompletion=complete_packs,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """A collection's people and their vectors, where they are of a pack that Kith serves."""
    from models.pack import find_pack, load_pack
    from service.foreign import insightface_server
    from service.foreign.subject_ids import SubjectIds
    from service.settings import load_settings

    settings = load_settings()
    served = load_pack(settings.pack_path if pack is None else find_pack(Path(pack), settings.models_path))
    found = insightface_server.read_collections(database)
    chosen = _chosen(found, [(each.name,) for each in found], collection)
    insightface_server.check_same(chosen, served)
    ids = SubjectIds()
    with replacing(file) as to:
        to.writelines(insightface_server.lines(database, chosen, served.recognition.fingerprint(), ids))
    _tell(Converted(str(file), chosen.people, chosen.faces, [], ids.changed), as_json)


def _chosen(found: Sequence[Some], names: Sequence[tuple[str, ...]], wanted: str | None) -> Some:
    """The one that is called so, or the only one. Raises typer.BadParameter: which ones there are."""
    matching = [each for each, own in zip(found, names, strict=True) if wanted is None or wanted in own]
    if len(matching) != 1:
        there = ", ".join(own[0] for own in names) or "none"
        raise typer.BadParameter(f"name one of: {there}", param_hint="--collection")
    return matching[0]


@contextmanager
def _bar(what: str, total: int) -> Iterator[Callable[[Iterable[PersonPhoto]], Iterator[PersonPhoto]]]:
    """How many of the items that go through what it gives are done, and how long the rest will take."""
    with progress(MofNCompleteColumn(), transient=True) as bars:
        task = bars.add_task(what, total=total)

        def shown(items: Iterable[PersonPhoto]) -> Iterator[PersonPhoto]:
            for item in items:
                yield item
                bars.advance(task)

        yield shown


def _tell(done: Converted, as_json: bool) -> None:
    if as_json:
        print_json(asdict(done))
        return
    say(f"wrote {done.file}: {done.people} people, {done.photos} photos or vectors. {CLEAR}")
    _list("not taken", done.left)
    _list("called otherwise", [f"{name!r} is {subject!r}" for name, subject in done.renamed.items()])


def _list(title: str, lines: Sequence[Any]) -> None:
    for line in lines[:MOST_LISTED]:
        say(f"  {title}: {line}")
    if len(lines) > MOST_LISTED:
        say(f"  {title}: and {len(lines) - MOST_LISTED} more (--json has all)")
