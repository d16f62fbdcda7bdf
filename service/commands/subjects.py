"""``kith subject``: one person: enrolling, changing, telling what is held, erasing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Column, Table

from service.commands.completion import complete_subjects
from service.commands.options import (
    AllowDuplicate,
    AllowInconsistent,
    AllowLowQuality,
    AllowNotLive,
    AsJson,
    Gallery,
    Key,
    LargestFace,
    Subject,
    Url,
    Yes,
)
from service.commands.questions import insist
from service.connection import connect
from service.files import replacing
from service.terminal import print_json, print_table, say

if TYPE_CHECKING:
    from service.api.schemas import EnrolOut, SubjectOut

app = typer.Typer(help="One person: enrol, rename, tag, export, erase.", no_args_is_help=True)

Tags = Annotated[list[str] | None, typer.Option("--tag", help="A tag; repeatable.")]
Metadata = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Metadata; VALUE is JSON or text; repeatable.")
]


@app.command("list")
def list_subjects(
    gallery: Gallery,
    tag: Annotated[
        list[str] | None, typer.Option(help="Only those that bear this tag; repeatable: all of them.")
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Only those with this metadata; VALUE as of update --set; repeatable."),
    ] = None,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Who is in a gallery, the oldest first."""
    metadata = dict(_entry(each, "--where") for each in where or ())
    with connect(url, api_key) as kith:
        found = list(kith.subjects(gallery, tag or (), metadata))
    if as_json:
        print_json([subject.model_dump(mode="json") for subject in found])
        return
    if not found:
        say(f"nobody: kith subject enroll ID PHOTO -g {gallery}, or kith enroll FOLDER -g {gallery}")
        return
    table = Table(Column("Subject", no_wrap=True), "Name", "Tags", "Templates", "Since (UTC)")
    for subject in found:
        since = f"{subject.created_at:%Y-%m-%d %H:%M}"
        named = (subject.id, subject.name or "", ", ".join(subject.tags))
        table.add_row(*map(escape, named), str(subject.templates), since)
    print_table(table)


@app.command()
def show(subject: Subject, gallery: Gallery, url: Url = None, api_key: Key = None, as_json: AsJson = False) -> None:
    """One person's name, tags, metadata and templates."""
    with connect(url, api_key) as kith:
        found = kith.subject(gallery, subject)
        templates = list(kith.templates(gallery, subject))
    if as_json:
        listed = [template.model_dump(mode="json") for template in templates]
        print_json(found.model_dump(mode="json") | {"templates": listed})
        return
    _print(found)
    table = Table(Column("Template", no_wrap=True), "Kind", "Quality", "Since (UTC)")
    for template in templates:
        score = "" if template.quality is None else f"{template.quality.get('score', 0):.2f}"
        table.add_row(template.id, template.kind, score, f"{template.created_at:%Y-%m-%d %H:%M}")
    print_table(table)


@app.command("enroll")
def enroll_subject(
    subject: Subject,
    photos: Annotated[list[Path], typer.Argument(help="Of this person alone.", exists=True, dir_okay=False)],
    gallery: Gallery,
    name: Annotated[str | None, typer.Option(help="For people; default: stays.")] = None,
    largest_face: LargestFace = False,
    allow_duplicate: AllowDuplicate = False,
    allow_inconsistent: AllowInconsistent = False,
    allow_low_quality: AllowLowQuality = False,
    allow_not_live: AllowNotLive = False,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Enrol one person from photos.

    Exit 1 if one of them was refused."""
    from service.client import KithClientError

    options: dict[str, Any] = {
        "face": "largest" if largest_face else "only",
        "allow_duplicate": allow_duplicate,
        "allow_inconsistent": allow_inconsistent,
        "allow_low_quality": allow_low_quality,
        "allow_not_live": allow_not_live,
    }
    refused: list[dict[str, Any]] = []
    taken: list[EnrolOut] = []
    with connect(url, api_key) as kith:
        for photo in photos:  # each by itself: a lone refusal says more than one among many
            try:
                taken.append(kith.enrol(gallery, subject, photo, **options))
            except KithClientError as error:
                if error.status not in (409, 413, 422):
                    raise
                refused.append({"photo": str(photo), **error.problem})
        if name is not None and taken:
            kith.update_subject(gallery, subject, name=name)
    if as_json:
        templates = [result.template for answer in taken for result in answer.results]
        print_json({"subject": subject, "enrolled": len(taken), "templates": templates, "refused": refused})
    else:
        say(f"{len(taken)} of {len(photos)} photos enrolled as {subject}")
        for problem in refused:
            say(f"  {problem['photo']}: {problem['code']}: {problem['detail']}. {problem.get('remedy', '')}")
    if refused:
        raise typer.Exit(1)


@app.command()
def update(
    subject: Subject,
    gallery: Gallery,
    name: Annotated[str | None, typer.Option(help="Another name; an empty one: none.")] = None,
    tag: Tags = None,
    untag: Annotated[list[str] | None, typer.Option(help="Take a tag away; repeatable.")] = None,
    put: Metadata = None,
    unset: Annotated[list[str] | None, typer.Option(metavar="KEY", help="Take metadata away; repeatable.")] = None,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Rename, tag and untag a person, and change metadata: what is named; the rest stays."""
    if (name, tag, untag, put, unset) == (None,) * 5:
        raise typer.BadParameter(
            "nothing to change: name something", param_hint="--name, --tag, --untag, --set, --unset"
        )
    entries = dict(_entry(each, "--set") for each in put or ())
    with connect(url, api_key) as kith:
        now = kith.subject(gallery, subject)
        changes: dict[str, Any] = {} if name is None else {"name": name or None}
        if tag or untag:
            changes["tags"] = [each for each in dict.fromkeys([*now.tags, *(tag or ())]) if each not in (untag or ())]
        if put or unset:
            kept = {key: value for key, value in now.metadata.items() if key not in (unset or ())}
            changes["metadata"] = kept | entries
        found = kith.update_subject(gallery, subject, **changes)
    print_json(found.model_dump(mode="json")) if as_json else _print(found)


@app.command("export")
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
        say(document)
        return
    with replacing(file) as to:
        to.write(document.encode())
    say(f"wrote {file}")


@app.command()
def merge(
    subject: Subject,
    gallery: Gallery,
    into: Annotated[str, typer.Option(help="Who stays.", autocompletion=complete_subjects)],
    yes: Yes = False,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """File everything of a person under another id, where both are one person, and erase the first.

    What both say of one key of metadata stays as --into has it. Nothing takes it back."""
    if not yes:
        insist(f"File everything of {subject!r} under {into!r}, and erase {subject!r} from gallery {gallery!r}?")
    with connect(url, api_key) as kith:
        done = kith.merge_subject(gallery, subject, into)
    if as_json:
        print_json(done.model_dump(mode="json", exclude_none=True))
    else:
        say(f"{into} has {done.templates} more, {done.subject.templates} in all; receipt {done.receipt.id}")


@app.command("erase")
def erase_subject(
    subject: Subject,
    gallery: Gallery,
    yes: Yes = False,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Erase a person, and tell the receipt."""
    if not yes:
        insist(f"Erase {subject!r} from gallery {gallery!r}?")
    with connect(url, api_key) as kith:
        receipt = kith.delete_subject(gallery, subject).receipt
    if as_json:
        print_json(receipt.model_dump(mode="json", exclude_none=True))
        return
    removed = ", ".join(f"{count} {what}" for what, count in receipt.removed.items())
    say(f"erased {subject}: {removed}; receipt {receipt.id}")


def _entry(given: str, option: str) -> tuple[str, Any]:
    key, equals, value = given.partition("=")
    if not key or not equals:
        raise typer.BadParameter(f"{given} is no KEY=VALUE", param_hint=option)
    try:
        read = json.loads(value)
    except ValueError:
        return key, value
    try:
        json.dumps(read, allow_nan=False, ensure_ascii=False).encode()
    except ValueError:
        raise typer.BadParameter(
            f'{given} holds what JSON has not; as text it is {key}="..." with its quotes', param_hint="--set"
        ) from None
    return key, read


def _print(subject: SubjectOut) -> None:
    table = Table(show_header=False)
    table.add_row("Subject", escape(subject.id))
    table.add_row("Name", escape(subject.name or ""))
    table.add_row("Tags", escape(", ".join(subject.tags)))
    table.add_row("Metadata", escape(json.dumps(subject.metadata, ensure_ascii=False) if subject.metadata else ""))
    table.add_row("Templates", str(subject.templates))
    print_table(table)
