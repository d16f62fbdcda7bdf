"""``kith gallery migrate``: migration of a gallery to another recognizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import MofNCompleteColumn, Progress

from service.cli.completion import complete_served
from service.cli.connection import connect
from service.cli.options import GalleryArgument, RiskOptions, ServerOptions
from service.cli.terminal import make_table, print_line, print_table, progress_bar

if TYPE_CHECKING:
    from kith import Kith
    from kith.wire.jobs import JobOut
    from kith.wire.migration import GenerationOut, MigrationOut


@dataclass(frozen=True)
class MigrationStep:
    """Step of a migration: at most one of these options."""

    to: Annotated[
        str | None,
        typer.Option(
            help="Start: migrate to this served pack (KITH_PACK, KITH_EXTRA_PACKS).", autocompletion=complete_served
        ),
    ] = None
    status: Annotated[bool, typer.Option("--status", help="Show the progress (the default).")] = False
    cut_over: Annotated[bool, typer.Option("--cut-over", help="Answer with the new recognizer.")] = False
    roll_back: Annotated[bool, typer.Option("--roll-back", help="Answer with the previous recognizer again.")] = False
    finish: Annotated[
        bool, typer.Option("--finish", help="Delete the vectors of the recognizer that does not answer.")
    ] = False


def migrate(
    name: GalleryArgument,
    step: MigrationStep,
    risk: RiskOptions,
    server: ServerOptions,
    on_sight: Annotated[
        bool, typer.Option(help="With --to: embed subjects without a crop when they are next seen.")
    ] = False,
    force: Annotated[
        bool, typer.Option(help="With --cut-over or --finish: continue although templates are missing.")
    ] = False,
    wait: Annotated[bool, typer.Option(help="With --to, --roll-back or --finish: wait for the job.")] = True,
) -> None:
    """Migrate a gallery to another recognizer.

    Start with --to, check with --status, then --cut-over (which may set the risk), and --finish or --roll-back."""
    if (step.to is not None) + step.status + step.cut_over + step.roll_back + step.finish > 1:
        raise typer.BadParameter("Give only one of --to, --status, --cut-over, --roll-back and --finish.")
    accepted = risk.value()
    if accepted is not None and not step.cut_over:
        raise typer.BadParameter("A risk needs --cut-over.", param_hint=f"--{next(iter(accepted))}")
    with connect(server) as kith:
        if step.to is not None:
            migration = kith.migrate(name, step.to, on_sight)
        elif step.cut_over:
            migration = kith.cut_over(name, force=force, risk=accepted)
        elif step.roll_back:
            migration = kith.roll_back(name)
        elif step.finish:
            migration = kith.finish_migration(name, force)
        else:
            migration, wait = kith.migration(name), False
        if wait:
            migration = _wait_for_jobs(kith, migration)
    server.answer(migration, lambda: _print_migration(migration))


def _wait_for_jobs(kith: Kith, migration: MigrationOut) -> MigrationOut:
    """Wait for the migration's jobs. After Ctrl-C they continue on the server, or with the next local command."""
    with progress_bar(MofNCompleteColumn(), transient=True) as progress:
        for job in migration.jobs:
            _show_until_done(kith, job, progress)
    return kith.migration(migration.gallery)


def _show_until_done(kith: Kith, job: str, progress: Progress) -> None:
    task = progress.add_task("job", total=None)

    def update(state: JobOut) -> None:
        progress.update(task, description=state.kind, completed=state.done, total=state.total)

    kith.wait_for(job, on_update=update)


def _print_migration(migration: MigrationOut) -> None:
    print_line(f"{migration.gallery}: {migration.state.replace('_', ' ')}")
    rows = [_generation_cells("answers", migration.current)]
    if migration.other is not None:
        rows.append(_generation_cells("shadow" if migration.state == "shadow" else "kept", migration.other))
    headers = ("", "Recognizer", "Embedded", "Waiting with crop", "Waiting without crop", "Threshold")
    print_table(make_table(*headers, rows=rows))
    if (shadow := migration.shadow) is not None:
        skipped = "".join(f", {count} skipped ({reason})" for reason, count in shadow.skipped.items())
        print_line(
            f"Shadow searches: {shadow.compared} faces compared, {shadow.agreed} agree, "
            f"{shadow.compared - shadow.agreed} differ ({shadow.absent} because the subject is not migrated yet)"
            f"{skipped}"
        )


def _generation_cells(role: str, generation: GenerationOut) -> tuple[object, ...]:
    known = generation.threshold
    return (
        role,
        (generation.model or generation.recognizer[:12]) + ("" if generation.served else " (not served)"),
        f"{generation.embedded} of {generation.templates}",
        generation.waiting_with_crop,
        generation.waiting_without_crop,
        "unknown" if known is None else f"{known.threshold:.4f}",
    )
