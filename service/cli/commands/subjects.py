"""``kith subject``, ``kith template`` and ``kith decoy``: a subject, its templates, and who is mistaken for it."""

from __future__ import annotations

import json
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.table import Table

from service.cli.calls import add_call
from service.cli.connection import connect
from service.cli.options import (
    CommandGroup,
    DetailOption,
    EnrollmentOptions,
    GalleryOption,
    Photos,
    ServerOptions,
    Subject,
)
from service.cli.terminal import EXIT_NO, list_table, make_table, print_line, print_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kith.wire.subjects import EnrollOut, SubjectOut, TemplateOut

app = CommandGroup(help="Manage subjects: enroll, rename, tag, export, erase.", no_args_is_help=True)
template_app = CommandGroup(help="Manage a subject's templates: list, move, delete.", no_args_is_help=True)
decoy_app = CommandGroup(help="Correct mistakes: photos of people who are not a subject.", no_args_is_help=True)


add_call(
    app,
    "list",
    "subjects",
    ("Subject=id", "name", "tags", "template_count", "created_at"),
    nothing="No subjects. Enroll some with 'kith subject enroll ID PHOTO -g {gallery}' or "
    "'kith enroll FOLDER -g {gallery}'.",
    tags=Annotated[list[str] | None, typer.Option("--tag", help="Only subjects with this tag; repeatable: all tags.")],
    metadata=Annotated[
        list[str] | None,
        typer.Option(
            "--where",
            metavar="KEY=VALUE",
            callback=lambda given: [_parse_metadata(each, "--where") for each in given or ()],
            help="Only subjects with this metadata, as in 'update --set'; repeatable.",
        ),
    ],
    q=Annotated[
        str | None,
        typer.Option("--find", metavar="TEXT", help="Only subjects with these words, or parts, in the id or name."),
    ],
)


@app.command("enroll")
def enroll_subject(
    subject: Subject,
    photos: Photos,
    gallery: GalleryOption,
    enrollment: EnrollmentOptions,
    server: ServerOptions,
    name: Annotated[str | None, typer.Option(help="Display name. Default: unchanged.")] = None,
) -> None:
    """Enroll a subject from photos.

    Running the command again enrolls the photos again. Exit status 1 if a photo is refused."""
    from kith import KithClientError

    enrolled: dict[str, EnrollOut] = {}
    refused: list[dict[str, Any]] = []
    unknown = None
    try:
        with connect(server) as kith:
            for photo in photos:  # one in a request, because the problem of a single photo has more detail
                content, unknown = photo.read_bytes(), str(photo)
                try:
                    enrolled[str(photo)] = kith.enroll(gallery, subject, content, **enrollment.fields())
                except KithClientError as error:
                    if error.status not in (409, 413, 422):
                        refused_at_once = HTTPStatus.BAD_REQUEST <= error.status < HTTPStatus.INTERNAL_SERVER_ERROR
                        unknown = None if refused_at_once else unknown
                        raise
                    refused.append({"photo": str(photo), **error.problem})
                unknown = None
            if name is not None and enrolled:
                kith.update_subject(gallery, subject, name=name)
    finally:  # print what a later photo, or Ctrl-C, ends, so that no photo is enrolled twice
        if enrolled or refused or unknown:
            document = {
                "subject": subject,
                "enrolled_count": len(enrolled),
                "photos": list(enrolled),
                "templates": [each.template for answer in enrolled.values() for each in answer.results],
                "refused": refused,
                "unknown": unknown,
            }
            server.answer(document, lambda: _print_enrolled(subject, len(photos), enrolled, refused, unknown))
    if refused:
        raise typer.Exit(EXIT_NO)


def _print_enrolled(
    subject: str, requested: int, enrolled: dict[str, EnrollOut], refused: list[dict[str, Any]], unknown: str | None
) -> None:
    """Print the result of each photo. ``unknown``: one whose request failed without saying whether it is enrolled."""
    print_line(f"{len(enrolled)} of {requested} photos enrolled as {subject}")
    if 0 < len(enrolled) < requested:
        for photo in enrolled:
            print_line(f"  {photo}: enrolled")
    for photo, answer in enrolled.items():
        if (count := answer.results[0].face_count or 1) > 1:
            print_line(f"  {photo}: the largest of {count} faces")
    for problem in refused:
        print_line(f"  {problem['photo']}: {problem['code']}: {problem['detail'].rstrip('.')}. {problem['remedy']}")
    if unknown is not None:
        print_line(f"  {unknown}: result unknown. Check with 'kith subject show'.")


@app.command()
def update(
    subject: Subject,
    gallery: GalleryOption,
    server: ServerOptions,
    name: Annotated[str | None, typer.Option(help="New name; an empty one removes the name.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Add a tag; repeatable.")] = None,
    untag: Annotated[list[str] | None, typer.Option(help="Remove a tag; repeatable.")] = None,
    put: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set metadata; VALUE is JSON or text; repeatable."),
    ] = None,
    unset: Annotated[list[str] | None, typer.Option(metavar="KEY", help="Remove metadata; repeatable.")] = None,
) -> None:
    """Change a subject's name, tags or metadata. Everything else stays as it is."""
    if (name, tag, untag, put, unset) == (None,) * 5:
        raise typer.BadParameter("Give a change.", param_hint="--name, --tag, --untag, --set, --unset")
    entries = dict(_parse_metadata(each, "--set") for each in put or ())
    with connect(server) as kith:
        current = kith.subject(gallery, subject)
        changes: dict[str, Any] = {} if name is None else {"name": name or None}
        if tag or untag:
            tags = dict.fromkeys([*current.tags, *(tag or ())])
            changes["tags"] = [each for each in tags if each not in (untag or ())]
        if put or unset:
            kept = {key: value for key, value in current.metadata.items() if key not in (unset or ())}
            changes["metadata"] = kept | entries
        updated = kith.update_subject(gallery, subject, **changes)
    server.answer(updated, _subject_table(updated))


def _parse_metadata(text: str, option: str) -> tuple[str, Any]:
    """Parse KEY=VALUE, where VALUE is JSON or else text. Raises typer.BadParameter."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise typer.BadParameter(f"Expected KEY=VALUE, got {text}", param_hint=option)
    try:
        parsed = json.loads(value)
    except ValueError:
        return key, value
    try:  # Python reads NaN, infinities and lone surrogates, which are not JSON
        json.dumps(parsed, allow_nan=False, ensure_ascii=False).encode()
    except ValueError:
        raise typer.BadParameter(
            f'{text} is not valid JSON. Quote the value to set it as text: {key}="..."', param_hint=option
        ) from None
    return key, parsed


def _subject_table(subject: SubjectOut) -> Table:
    rows = (
        ("Subject", subject.id),
        ("Name", subject.name),
        ("Tags", subject.tags),
        ("Metadata", json.dumps(subject.metadata, ensure_ascii=False) if subject.metadata else None),
        ("Templates", subject.template_count),
    )
    return make_table(rows=rows)


def _quality(template: TemplateOut) -> str | None:
    return None if template.quality is None else f"{template.quality.get('score', 0):.2f}"


def _detection(template: TemplateOut) -> str | None:
    return None if template.detection_score is None else f"{template.detection_score:.2f}"


TEMPLATE_COLUMNS: Final = ("Template=id", "kind", _quality, _detection, "created_at")


def _print_subject(subject: SubjectOut, templates: Sequence[TemplateOut]) -> None:
    print_table(_subject_table(subject))
    print_table(list_table(templates, TEMPLATE_COLUMNS))


add_call(app, "show", "subject", _print_subject, note="Also its templates.", also=("templates", "templates"))
add_call(app, "export", "export_subject", None, note="Only the owner can read the file.")
add_call(
    app,
    "merge",
    "merge_subject",
    "Merged {subject} into {into}. Templates: {0.subject.template_count}, moved: {0.template_count}; "
    "receipt {0.receipt.id}",
    note="Metadata of --into wins. A merge cannot be undone.",
    confirm="Move all data of {subject!r} to {into!r}, and erase {subject!r} from {gallery!r}?",
)
add_call(
    app,
    "erase",
    "delete_subject",
    "Erased {subject}: {removed}; receipt {0.id}",
    confirm="Erase {subject!r} from gallery {gallery!r}?",
    part="receipt",
)
add_call(template_app, "list", "templates", TEMPLATE_COLUMNS, part="templates")
add_call(
    template_app,
    "move",
    "move_template",
    "Moved template {template} to {to}",
    to=Annotated[str, typer.Option(help="Subject to move it to.")],
)
add_call(
    template_app,
    "delete",
    "delete_template",
    "Erased template {template} of {subject}; receipt {0.id}",
    confirm="Erase template {template} of {subject!r}?",
    part="receipt",
)
add_call(
    decoy_app,
    "add",
    "add_decoy",
    "Noted: {photo} is not {subject}. Undo: kith decoy delete {subject} {0.id} -g {gallery}",
    note="Faces more similar to it than to the subject are not identified as the subject any more.",
    photo=Annotated[Path, typer.Argument(help="Photo of the other person.", exists=True, dir_okay=False)],
    face=Annotated[
        bool,
        typer.Option(
            "--largest-face",
            callback=lambda largest: "largest" if largest else "only",
            help="Take the largest face if the photo shows several.",
        ),
    ],
    allow_low_quality=Annotated[
        bool, typer.Option("--allow-low-quality", help="Accept a photo below the gallery's quality gate.")
    ],
    detail=DetailOption,
)
add_call(decoy_app, "list", "decoys", ("Decoy=id", "kind", "in_use", "created_at"), part="decoys")
add_call(
    decoy_app,
    "delete",
    "delete_decoy",
    "Erased decoy {decoy} of {subject}; receipt {0.id}",
    part="receipt",
    decoy=Annotated[str, typer.Argument(help="Decoy id, from 'kith decoy list'.")],
)
