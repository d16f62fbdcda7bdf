"""``kith group``: unlabeled photos grouped into people."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.progress import MofNCompleteColumn
from rich.table import Column

from models.vision.photo_files import list_photos, printable_path
from service.cli.connection import read_settings
from service.cli.options import DetailOption, OutputOptions, check_shares
from service.cli.terminal import count_of, make_table, print_first, print_line, print_table, progress_bar

DEFAULT_RISK: Final = 0.01
PAGE: Final = "groups.html"
LISTED_GROUPS: Final = 10


def group(
    photos: Annotated[
        Path, typer.Argument(help="Folder of photos without names, at any depth.", exists=True, file_okay=False)
    ],
    album: Annotated[
        Path, typer.Argument(help="Folder for the result, created if missing. Only its owner may read it.")
    ],
    output: OutputOptions,
    risk: Annotated[
        float,
        typer.Option(callback=check_shares, help="Accepted share of pairs of faces in one group that are two people."),
    ] = DEFAULT_RISK,
    page: Annotated[bool, typer.Option("--page", help=f"Write {PAGE}, with faces of each group.")] = False,
    detail: DetailOption = None,
) -> None:
    """Group the faces of photos without names into people.

    Writes groups.json. Run the command again to resume, or after photos were added: each photo is embedded once, and
    groups keep their ids. Then write names in names.txt, and enroll them with 'kith enroll ALBUM'. Exit status 1 if a
    photo is refused."""
    from service.cli.tools.album_names import AlbumError, begin_names
    from service.cli.tools.albums import group_album

    settings = read_settings()
    listed = list_photos(photos)
    if not listed.photos and not listed.unreadable:
        raise typer.BadParameter(f"{photos} has no photos.", param_hint="PHOTOS")
    if album.is_file():
        raise typer.BadParameter(f"{album} is a file, not a folder.", param_hint="ALBUM")
    try:
        with _progress("embedding") as advance:
            document = group_album(listed, photos, album, settings, risk, detail or settings.detail, advance)
    except AlbumError as error:
        raise typer.BadParameter(f"{error}.", param_hint="PHOTOS") from error
    begin_names(album)
    if page:
        from service.cli.tools.album_pictures import write_page

        with _progress("drawing") as advance:
            write_page(document, album / PAGE, settings, advance)
    summary = _summary(document, album)
    output.answer(summary, lambda: _print(document, summary, page), ok=not document["refused"])


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    with progress_bar(MofNCompleteColumn()) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _summary(document: Mapping[str, Any], album: Path) -> dict[str, Any]:
    groups = document["groups"]
    return {
        "album": str(album),
        "photo_count": document["photo_count"],
        "new_photo_count": document["new_photos"],
        "refused": document["refused"],
        "face_count": sum(len(group["faces"]) for group in groups) + len(document["loners"]),
        "group_count": len(groups),
        "loner_count": len(document["loners"]),
        "low_quality_count": sum("reasons" in face for face in document["loners"]),
        "risk": document["risk"],
        "threshold": document["threshold"],
        "known_different_pair_count": document["known_different_pairs"],
        "largest": [{"id": group["id"], "face_count": len(group["faces"])} for group in groups[:LISTED_GROUPS]],
    }


def _print(document: Mapping[str, Any], summary: Mapping[str, Any], page: bool) -> None:
    rows = (
        (
            group["id"],
            len(group["faces"]),
            f"{group['faces'][-1]['certainty']:.1%}",
            printable_path(group["faces"][0]["photo"]),
        )
        for group in document["groups"][:LISTED_GROUPS]
    )
    if document["groups"]:
        headers = (Column("Group", no_wrap=True), "Faces", "Least certain face", "Clearest face in")
        print_table(make_table(*headers, rows=rows))
    refused = [f"{printable_path(each['photo'])}: {each['code']}: {each['detail']}" for each in document["refused"]]
    print_first("Refused", refused, f". All are in {summary['album']}/groups.json.")
    photos = f"{count_of(summary['photo_count'], 'photo')} ({summary['new_photo_count']:,} new)"
    groups = f"{count_of(summary['group_count'], 'group')}, {count_of(summary['loner_count'], 'loner')}"
    faces = f"{count_of(summary['face_count'], 'face')}, {summary['low_quality_count']:,} of low quality"
    print_line(f"{photos}, {faces}: {groups}")
    print_line(
        f"Risk: about {document['risk']:.2%} of the pairs of faces in one group may be two people "
        f"(similarity {document['threshold']:.3f})"
    )
    album = summary["album"]
    see = f"open {album}/{PAGE}" if page else "see the faces with --page"
    print_line(f"Next: {see}, write 'g1 = ada' in {album}/names.txt, then: kith enroll {album} -g GALLERY")
