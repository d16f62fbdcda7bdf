"""``kith template``: one face of a person, as it is enrolled."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Column, Table

from service.commands.completion import complete_subjects, complete_templates
from service.commands.options import AsJson, Gallery, Key, Subject, Url, Yes
from service.commands.questions import insist
from service.connection import connect
from service.terminal import print_json, print_table, say

app = typer.Typer(help="What is enrolled of a person: list, move, delete.", no_args_is_help=True)

Template = Annotated[
    str, typer.Argument(help="Its id, as 'kith template list' names it.", autocompletion=complete_templates)
]


@app.command("list")
def list_templates(
    subject: Subject, gallery: Gallery, url: Url = None, api_key: Key = None, as_json: AsJson = False
) -> None:
    """A person's templates."""
    with connect(url, api_key) as kith:
        found = list(kith.templates(gallery, subject))
    if as_json:
        print_json({"subject": subject, "templates": found})
        return
    table = Table(Column("Template", no_wrap=True), "Kind", "Quality", "Detection", "Since (UTC)")
    for template in found:
        score = "" if template.quality is None else f"{template.quality.get('score', 0):.2f}"
        detection = "" if template.detection_score is None else f"{template.detection_score:.2f}"
        table.add_row(template.id, template.kind, score, detection, f"{template.created_at:%Y-%m-%d %H:%M}")
    print_table(table)


@app.command()
def move(
    subject: Subject,
    template: Template,
    gallery: Gallery,
    to: Annotated[str, typer.Option(help="The subject to file it under.", autocompletion=complete_subjects)],
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """File a template under another person, where it was filed wrongly."""
    with connect(url, api_key) as kith:
        moved = kith.move_template(gallery, subject, template, to)
        count = len(moved.templates) if moved.next is None else kith.subject(gallery, to).templates
    print_json(moved) if as_json else say(f"{template} is {to}'s, who has {count}")


@app.command()
def delete(
    subject: Subject,
    template: Template,
    gallery: Gallery,
    yes: Yes = False,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Erase one template, and tell the receipt."""
    if not yes:
        insist(f"Erase template {template} of {subject!r}?")
    with connect(url, api_key) as kith:
        receipt = kith.delete_template(gallery, subject, template).receipt
    if as_json:
        print_json(receipt)
    else:
        say(f"erased template {template} of {subject}; receipt {receipt.id}")
