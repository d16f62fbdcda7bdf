"""``kith gallery migrate``: a gallery moves to another recogniser."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from service.api.migration_schemas import GenerationOut, MigrationOut
from service.client import Kith
from service.connection import AsJson, Key, Url, connect


def migrate(
    name: str,
    to: Annotated[str | None, typer.Option(help="Start: a served pack (KITH_PACK, KITH_ALSO).")] = None,
    status: Annotated[bool, typer.Option("--status", help="How far it is (the default).")] = False,
    cut_over: Annotated[bool, typer.Option("--cut-over", help="Let the new recogniser answer.")] = False,
    roll_back: Annotated[bool, typer.Option("--roll-back", help="Let the one before answer again.")] = False,
    finish: Annotated[bool, typer.Option("--finish", help="Drop the other one's vectors.")] = False,
    on_sight: Annotated[bool, typer.Option(help="With --to: who has no crop is embedded when seen.")] = False,
    force: Annotated[bool, typer.Option(help="With --cut-over, --finish: although some are left out.")] = False,
    fpir: Annotated[float | None, typer.Option(help="With --cut-over: the risk from now on.")] = None,
    wait: Annotated[bool, typer.Option(help="With --to, --roll-back, --finish: until its job is done.")] = True,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Move a gallery to another recogniser: start with --to, look with --status, then --cut-over, and --finish or
    --roll-back."""
    if (to is not None) + status + cut_over + roll_back + finish > 1:
        raise typer.BadParameter("give one of --to, --status, --cut-over, --roll-back, --finish")
    with connect(url, api_key) as kith:
        if to is not None:
            told = kith.migrate(name, to, on_sight)
        elif cut_over:
            told = kith.cut_over(name, force=force, **({} if fpir is None else {"risk": {"fpir": fpir}}))
        elif roll_back:
            told = kith.roll_back(name)
        elif finish:
            told = kith.finish_migration(name, force)
        else:
            told, wait = kith.migration(name), False
        if wait:
            told = _waited(kith, told)
    print(told.model_dump_json(indent=2)) if as_json else _print(told)


def _waited(kith: Kith, told: MigrationOut) -> MigrationOut:
    """The migration after its jobs. Interrupted, they go on where a server runs, or with the next command."""
    with Console(stderr=True).status("") as shown:
        for job in told.jobs:
            kith.wait_for(job, seen=lambda found: shown.update(f"{found.kind}: {found.done} of {found.total}"))
    return kith.migration(told.gallery)


def _print(told: MigrationOut) -> None:
    console = Console()
    console.print(f"{told.gallery}: {told.state.replace('_', ' ')}", highlight=False)
    table = Table("", "Recogniser", "Embedded", "Waiting with crop", "Without", "Threshold")
    for what, generation in (("answers", told.current), ("kept" if told.state != "shadow" else "shadow", told.other)):
        if generation is not None:
            table.add_row(what, *_row(generation))
    console.print(table)
    if (shadow := told.shadow) is not None:
        skipped = "".join(f", {count} skipped ({reason})" for reason, count in shadow.skipped.items())
        differing = shadow.compared - shadow.agreed
        console.print(
            f"{shadow.compared} faces compared, {shadow.agreed} agree, {differing} do not ({shadow.absent} of them as "
            f"the shadow does not know the subject yet){skipped}",
            highlight=False,
        )


def _row(generation: GenerationOut) -> tuple[str, ...]:
    known = generation.threshold
    return (
        escape(generation.model or generation.recogniser[:12]) + ("" if generation.served else " (not served)"),
        f"{generation.embedded} of {generation.templates}",
        str(generation.waiting_with_crop),
        str(generation.waiting_without_crop),
        "unknown" if known is None else f"{known.threshold:.4f}",
    )
