"""``kith gallery migrate``: a gallery moves to another recogniser."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import MofNCompleteColumn, Progress
from rich.table import Table

from service.commands.completion import complete_served
from service.commands.options import AsJson, Fmr, Fpir, GalleryName, Key, Preset, Threshold, Url, risk_of
from service.connection import connect
from service.terminal import print_json, print_table, progress, say

if TYPE_CHECKING:
    from service.api.migration_schemas import GenerationOut, MigrationOut
    from service.api.schemas import JobOut
    from service.client import Kith


def migrate(
    name: GalleryName,
    to: Annotated[
        str | None, typer.Option(help="Start: a served pack (KITH_PACK, KITH_ALSO).", autocompletion=complete_served)
    ] = None,
    status: Annotated[bool, typer.Option("--status", help="How far it is (the default).")] = False,
    cut_over: Annotated[bool, typer.Option("--cut-over", help="Let the new recogniser answer.")] = False,
    roll_back: Annotated[bool, typer.Option("--roll-back", help="Let the one before answer again.")] = False,
    finish: Annotated[bool, typer.Option("--finish", help="Drop the other one's vectors.")] = False,
    on_sight: Annotated[bool, typer.Option(help="With --to: who has no crop is embedded when seen.")] = False,
    force: Annotated[bool, typer.Option(help="With --cut-over, --finish: although some are left out.")] = False,
    fpir: Fpir = None,
    fmr: Fmr = None,
    threshold: Threshold = None,
    preset: Preset = None,
    wait: Annotated[bool, typer.Option(help="With --to, --roll-back, --finish: until its job is done.")] = True,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Move a gallery to another recogniser.

    Start with --to, look with --status, then --cut-over (which may set the risk), and --finish or --roll-back."""
    if (to is not None) + status + cut_over + roll_back + finish > 1:
        raise typer.BadParameter("give one of --to, --status, --cut-over, --roll-back, --finish")
    risk = risk_of(fpir, fmr, threshold, preset)
    if risk is not None and not cut_over:
        raise typer.BadParameter("a risk goes with --cut-over", param_hint=f"--{next(iter(risk))}")
    with connect(url, api_key) as kith:
        if to is not None:
            told = kith.migrate(name, to, on_sight)
        elif cut_over:
            told = kith.cut_over(name, force=force, **({} if risk is None else {"risk": risk}))
        elif roll_back:
            told = kith.roll_back(name)
        elif finish:
            told = kith.finish_migration(name, force)
        else:
            told, wait = kith.migration(name), False
        if wait:
            told = _waited(kith, told)
    print_json(told) if as_json else _print(told)


def _waited(kith: Kith, told: MigrationOut) -> MigrationOut:
    """The migration after its jobs. Interrupted, they go on where a server runs, or with the next command."""
    with progress(MofNCompleteColumn(), transient=True) as shown:
        for job in told.jobs:
            _shown_until_done(kith, job, shown)
    return kith.migration(told.gallery)


def _shown_until_done(kith: Kith, job: str, shown: Progress) -> None:
    bar = shown.add_task("job", total=None)

    def seen(found: JobOut) -> None:
        shown.update(bar, description=found.kind, completed=found.done, total=found.total)

    kith.wait_for(job, seen=seen)


def _print(told: MigrationOut) -> None:
    say(f"{told.gallery}: {told.state.replace('_', ' ')}")
    table = Table("", "Recogniser", "Embedded", "Waiting with crop", "Without", "Threshold")
    for what, generation in (("answers", told.current), ("kept" if told.state != "shadow" else "shadow", told.other)):
        if generation is not None:
            table.add_row(what, *_row(generation))
    print_table(table)
    if (shadow := told.shadow) is not None:
        skipped = "".join(f", {count} skipped ({reason})" for reason, count in shadow.skipped.items())
        differing = shadow.compared - shadow.agreed
        say(
            f"{shadow.compared} faces compared, {shadow.agreed} agree, {differing} do not ({shadow.absent} of them as "
            f"the shadow does not know the subject yet){skipped}"
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
