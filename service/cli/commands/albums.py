"""``kith album``: unlabeled photos whose faces the server groups into people."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.progress import MofNCompleteColumn, TextColumn

from models.vision.photo_files import list_photos, printable_path
from service.cli.calls import add_call
from service.cli.commands.enroll import ProgressStream, create_if_missing
from service.cli.commands.jobs import show_until_done
from service.cli.connection import connect
from service.cli.options import CheckOptions, CommandGroup, DetailOption, GalleryOption, ServerOptions
from service.cli.terminal import (
    EXIT_INTERRUPTED,
    UNREADABLE,
    count_of,
    make_table,
    print_line,
    print_note,
    print_refused,
    print_table,
    progress_bar,
    remedy_lines,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kith.wire.albums import AlbumGroupOut, AlbumOut

app = CommandGroup(help="Group photos without names into people, and enroll them.", no_args_is_help=True)
LISTED_GROUPS: Final = 10
SHOWN_PHOTOS: Final = 3
AlbumId = Annotated[str, typer.Argument(metavar="ALBUM", help="Album id, from 'kith album list'.")]


@app.command()
def create(
    photos: Annotated[
        Path, typer.Argument(help="Folder of photos without names, at any depth.", exists=True, file_okay=False)
    ],
    gallery: Annotated[str, typer.Option("--gallery", "-g", help="Gallery, created if missing.")],
    server: ServerOptions,
    risk: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Accepted share of pairs of faces in one group that are two people. Default: 0.01.",
        ),
    ] = None,
    detail: DetailOption = None,
) -> None:
    """Group the faces of photos without names into people.

    Ctrl-C stops waiting, not the job: 'kith jobs watch ALBUM' resumes it. Exit status 1 if a photo is refused."""
    from kith import KithClientError
    from service.cli.tools.photo_folders import TarStream, photos_of

    listed = list_photos(photos)
    if not listed.photos:
        raise typer.BadParameter(f"{photos} has no photos.", param_hint="PHOTOS")
    archive = TarStream(photos_of(photos, listed))
    with connect(server, "create") as kith:
        created = create_if_missing(kith, gallery)
        with progress_bar(MofNCompleteColumn(), TextColumn("{task.fields[rate]}")) as progress:
            stream = ProgressStream(archive, progress)
            job = kith.create_album(gallery, stream, risk, detail=detail)
            progress.remove_task(stream.task)
            try:
                job = show_until_done(kith, job.id, progress)
            except KeyboardInterrupt:
                print_note(f"The job goes on. Wait for it with 'kith jobs watch {job.id}'.")
                raise typer.Exit(EXIT_INTERRUPTED) from None
        if job.problem is not None:
            raise KithClientError(job.problem.status, job.problem.model_dump(exclude_none=True))
        unreadable = {printable_path(path): reason for path, reason in listed.unreadable.items()} | archive.unreadable
        refused = [{"photo": name, "detail": reason, **UNREADABLE} for name, reason in unreadable.items()]
        refused += [
            {"photo": item.item, **item.problem.model_dump()}
            for item in kith.job_items(job.id, failed=True)
            if item.problem is not None and item.item not in unreadable
        ]
        album, groups = kith.album(gallery, job.id), list(kith.album_groups(gallery, job.id, single=False))

    def print_text() -> None:
        print_refused(refused)
        _print_album(album, groups[:LISTED_GROUPS])
        if created:
            print_line(created)
        print_line(f"Next: see the faces in the console, or 'kith album show {album.id} -g {gallery}'; then")
        print_line(f"  kith album enroll {album.id} g1=ada -g {gallery}")

    problems = {each["photo"]: f"{each['code']}: {each['detail']}" for each in refused}
    server.answer(album.model_dump(mode="json") | {"refused": problems | unreadable}, print_text, ok=not refused)


add_call(
    app,
    "list",
    "albums",
    ("Album=id", "state", "photo_count", "face_count", "group_count", "Single faces=single_count", "expires_at"),
    note="Each is deleted at the time shown (KITH_RETENTION_ALBUMS_DAYS).",
    nothing="No albums. 'kith album create FOLDER --gallery NAME' makes one.",
)
add_call(
    app,
    "delete",
    "delete_album",
    "Erased album {album}; receipt {0.receipt.id}",
    confirm="Erase album {album}?",
    album=AlbumId,
)
GROUP: Final = Annotated[str, typer.Argument(metavar="GROUP", help="Group, such as g1, from 'kith album show'.")]
MOVED: Final = "Group {0.id} has {0.face_count} faces"
add_call(app, "merge", "merge_album_group", MOVED, album=AlbumId, group=GROUP)
add_call(
    app,
    "split",
    "split_album_group",
    MOVED,
    album=AlbumId,
    group=GROUP,
    faces=Annotated[list[str], typer.Argument(metavar="FACE", help="Face ids, from 'kith album show --json'.")],
)


@app.command()
def enroll(
    album: AlbumId,
    people: Annotated[
        list[str], typer.Argument(metavar="GROUP=PERSON", help="Who the groups are, such as g1=ada g4=ada g2=bob.")
    ],
    gallery: GalleryOption,
    checks: CheckOptions,
    server: ServerOptions,
) -> None:
    """Enroll the faces of groups as the persons that you name. They leave the album.

    Exit status 1 if a face is refused: it stays in its group."""
    named = [[part.strip() for part in each.partition("=")[::2]] for each in people]
    if not all(group and person for group, person in named):
        raise typer.BadParameter("Expected GROUP=PERSON, such as g1=ada.", param_hint="GROUP=PERSON")
    results = []
    with connect(server) as kith:
        for group, person in named:
            enrolled, going_on = 0, True
            while going_on:  # one request takes 500 faces
                done = kith.enroll_album_group(gallery, album, group, person, None, **checks.allowed())
                enrolled += done.enrolled_count
                going_on = bool(done.enrolled_count) and done.remaining_count > len(done.refused)
            done.enrolled_count = enrolled
            results.append({"group": group} | done.model_dump(mode="json"))
    refused = [face["problem"] for result in results for face in result["refused"]]

    def print_text() -> None:
        for result in results:
            count = count_of(result["enrolled_count"], "face")
            print_line(f"{result['group']}: {count} enrolled as {result['subject']}, {len(result['refused'])} refused")
        for line in remedy_lines(refused):
            print_line(line)

    server.answer(results, print_text, ok=not refused)


def _print_album(album: AlbumOut, groups: Sequence[AlbumGroupOut]) -> None:
    rows = (
        (group.id, group.face_count, group.subject, ", ".join(face.photo for face in group.faces[:SHOWN_PHOTOS]))
        for group in groups
    )
    if groups:
        print_table(make_table("Group", "Faces", "Person", "Clearest faces in", rows=rows))
    groups_found = f"{count_of(album.group_count, 'group')}, {count_of(album.single_count, 'single face')}"
    photos = f"{count_of(album.photo_count, 'photo')}, {count_of(album.face_count, 'face')}"
    print_line(f"{photos}: {groups_found}")
    if album.threshold is not None:
        print_line(
            f"Risk: about {album.risk:.2%} of the pairs of faces in one group may be two people "
            f"(similarity {album.threshold:.3f})"
        )


def _print_groups(album: AlbumOut, groups: Sequence[AlbumGroupOut]) -> None:
    _print_album(album, [group for group in groups if group.face_count > 1])


add_call(
    app,
    "show",
    "album",
    _print_groups,
    note="Also its groups, the largest first; with --json also single faces.",
    also=("groups", "album_groups"),
    album=AlbumId,
)
