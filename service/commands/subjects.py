"""``kith subject``: one person: enrolling, changing, telling what is held, erasing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
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
from service.commands.remedies import remedy_of
from service.connection import connect
from service.files import replacing
from service.terminal import SAID_NO, print_json, print_table, say

if TYPE_CHECKING:
    from service.api.schemas import EnrolOut, SubjectOut
    from service.client import Kith

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
        print_json(found)
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
        print_json(found.model_dump(mode="json") | {"templates": templates})
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

    Run again, it enrols what it is given again. Exit 1 if one of them was refused."""
    options: dict[str, Any] = {
        "face": "largest" if largest_face else "only",
        "allow_duplicate": allow_duplicate,
        "allow_inconsistent": allow_inconsistent,
        "allow_low_quality": allow_low_quality,
        "allow_not_live": allow_not_live,
    }
    done = _Enrolled(subject, len(photos))
    with _told_in_the_end(done, as_json), connect(url, api_key) as kith:
        for photo in photos:
            _enrol_photo(kith, gallery, photo, options, done)
        if name is not None and done.taken:
            kith.update_subject(gallery, subject, name=name)
    if done.refused:
        raise typer.Exit(SAID_NO)


@dataclass
class _Enrolled:
    """What became of the photos. ``unknown``: one that was under way when something else ended the command."""

    subject: str
    asked: int
    taken: dict[str, EnrolOut] = field(default_factory=dict)
    refused: list[dict[str, Any]] = field(default_factory=list)
    unknown: str | None = None


def _enrol_photo(kith: Kith, gallery: str, photo: Path, options: dict[str, Any], done: _Enrolled) -> None:
    """By itself: a lone refusal says more than one among many."""
    from service.client import KithClientError

    payload = photo.read_bytes()
    done.unknown = str(photo)
    try:
        done.taken[str(photo)] = kith.enrol(gallery, done.subject, payload, **options)
    except KithClientError as error:
        if error.status not in (409, 413, 422):
            if HTTPStatus.BAD_REQUEST <= error.status < HTTPStatus.INTERNAL_SERVER_ERROR:
                done.unknown = None
            raise
        done.refused.append({"photo": str(photo), **error.problem, "remedy": remedy_of(error.problem)})
    done.unknown = None


@contextmanager
def _told_in_the_end(done: _Enrolled, as_json: bool) -> Iterator[None]:
    """Whatever ends the block: what was enrolled is not to be enrolled again."""
    try:
        yield
    finally:
        if done.taken or done.refused or done.unknown:
            _print_enrolled(done, as_json)


def _print_enrolled(done: _Enrolled, as_json: bool) -> None:
    if as_json:
        templates = [result.template for answer in done.taken.values() for result in answer.results]
        counts = {"subject": done.subject, "enrolled": len(done.taken), "photos": list(done.taken)}
        print_json(counts | {"templates": templates, "refused": done.refused, "unknown": done.unknown})
        return
    say(f"{len(done.taken)} of {done.asked} photos enrolled as {done.subject}")
    if 0 < len(done.taken) < done.asked:
        for photo in done.taken:
            say(f"  {photo}: enrolled")
    for problem in done.refused:
        say(f"  {problem['photo']}: {problem['code']}: {problem['detail'].rstrip('.')}. {problem['remedy']}")
    if done.unknown is not None:
        say(f"  {done.unknown}: it may be enrolled: 'kith subject show' tells")


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
    print_json(found) if as_json else _print(found)


@app.command("export")
def export_subject(
    subject: Subject,
    gallery: Gallery,
    file: Annotated[Path | None, typer.Argument(help="Where to; default: the terminal.", dir_okay=False)] = None,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Everything that is held about one person, as JSON; a file is readable by its owner alone."""
    with connect(url, api_key) as kith:
        document = kith.export_subject(gallery, subject)
    if file is None:
        print_json(document)
        return
    with replacing(file) as to:
        to.write(json.dumps(document, indent=2).encode())
    size = file.stat().st_size
    print_json({"file": str(file), "bytes": size}) if as_json else say(f"wrote {file}, {size:,} bytes")


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
        print_json(done)
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
        print_json(receipt)
        return
    removed = ", ".join(f"{count} {what}" for what, count in receipt.removed.items())
    say(f"erased {subject}: {removed}; receipt {receipt.id}")


app.command("delete", hidden=True)(erase_subject)


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
            f'{given} holds what JSON has not; as text it is {key}="..." with its quotes', param_hint=option
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
