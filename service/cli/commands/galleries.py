"""``kith gallery``: creation, settings, statistics, export, import, deletion and migration of galleries."""

from __future__ import annotations

import gzip
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.progress import DownloadColumn, MofNCompleteColumn, TransferSpeedColumn
from rich.table import Column, Table

from kith.wire.common import LivenessSetting
from service.cli.calls import add_call
from service.cli.commands.jobs import show_until_done
from service.cli.commands.risk import TARGETS, format_risk, misses_text, print_risk
from service.cli.connection import connect
from service.cli.options import CommandGroup, GalleryArgument, RiskOptions, ServerOptions, Yes
from service.cli.terminal import (
    count_of,
    make_table,
    print_line,
    print_table,
    progress_bar,
    remedy_lines,
    require_confirmation,
)
from service.cli.words import format_ratio
from service.core.atomic_files import atomic_write

if TYPE_CHECKING:
    from kith import Kith
    from kith.wire.galleries import GalleryOut
    from kith.wire.hygiene import FindingOut, HygieneOut
    from kith.wire.migration import GenerationOut, MigrationOut

app = CommandGroup(help="Manage galleries: their subjects, risk and settings.", no_args_is_help=True)


@dataclass(frozen=True)
class SettingOptions:
    """Settings of a gallery other than its risk."""

    one_face_per_person: Annotated[
        bool | None, typer.Option(help="Identify a person in at most one face of a photo.")
    ] = None
    keep_crops: Annotated[
        bool | None, typer.Option(help="Store face crops, which migration to another recognizer needs.")
    ] = None
    retention_days: Annotated[
        int | None, typer.Option(min=0, max=36_500, help="Age at which templates are erased; 0: never.")
    ] = None
    remember_strangers_days: Annotated[
        int | None,
        typer.Option(min=0, max=3650, help="Remember unknown faces for so many days after they were seen; 0: never."),
    ] = None
    liveness: Annotated[
        LivenessSetting | None, typer.Option(help="'required' refuses faces that fail the liveness check.")
    ] = None

    def given(self, risk: RiskOptions) -> dict[str, Any]:
        """Return the settings that were given, with the risk, as the API takes them."""
        values = {"risk": risk.value(), **vars(self)}
        settings = {name: value for name, value in values.items() if value is not None}
        never = {name: None for name in ("retention_days", "remember_strangers_days") if settings.get(name) == 0}
        return settings | never


def _risk(gallery: GalleryOut) -> str:
    return format_risk(gallery.risk)


def _print_stats(gallery: GalleryOut) -> None:
    drift, days = gallery.drift, gallery.remember_strangers_days
    rows = (
        ("Gallery", gallery.name),
        ("Enrolled", f"{count_of(gallery.subject_count, 'subject')}, {count_of(gallery.template_count, 'template')}"),
        ("Risk", format_risk(gallery.risk)),
        ("One face per person", "yes" if gallery.one_face_per_person else "no"),
        ("Retention", "unlimited" if gallery.retention_days is None else f"{gallery.retention_days} days"),
        ("Strangers", "not remembered" if days is None else f"kept for {days} days"),
        ("Face crops", "stored" if gallery.keep_crops else "not stored"),
        ("Liveness", gallery.liveness),
        ("Recognizer", f"{gallery.recognizer[:12]}, {gallery.dimension} dimensions"),
        *([] if drift is None else [("Drift", f"{drift.state.replace('_', ' ')}: {drift.detail}")]),
        ("Index", gallery.index),
    )
    print_table(make_table(rows=rows))


add_call(
    app,
    "list",
    "galleries",
    ("Gallery=name", "subject_count", "template_count", _risk),
    nothing="No galleries. Create one with 'kith gallery create NAME' or 'kith enroll FOLDER --gallery NAME'.",
)
add_call(app, "stats", "gallery", _print_stats, name=GalleryArgument)
add_call(
    app,
    "delete",
    "delete_gallery",
    "Deleted. Subjects: {0.subject_count}, templates: {0.template_count}, receipt: {0.receipt.id}",
    confirm="Delete gallery {name!r} and all its subjects?",
    name=GalleryArgument,
)


@app.command()
def create(
    name: Annotated[str, typer.Argument(metavar="GALLERY", help="Name: letters, digits and . _ - only.")],
    risk: RiskOptions,
    settings: SettingOptions,
    server: ServerOptions,
) -> None:
    """Create a gallery."""
    given = settings.given(risk)
    with connect(server, "create") as kith:
        created = kith.create_gallery(name, **given)
        misses = "" if server.as_json else misses_text(kith, created.risk)
    server.answer(created, f"Created gallery {created.name}.{misses}")


@app.command()
def update(
    name: GalleryArgument, risk: RiskOptions, settings: SettingOptions, server: ServerOptions, yes: Yes = False
) -> None:
    """Change the settings of a gallery that are given as options."""
    from kith import KithClientError

    given = settings.given(risk)
    if not given:
        raise typer.BadParameter("Give a setting to change.", param_hint="--fpir, --retention-days, ...")
    with connect(server) as kith:
        try:
            updated = kith.update_gallery(name, **given)
        except KithClientError as error:
            if error.code != "retention_unconfirmed":
                raise
            require_confirmation(f"{error.problem['detail']}. Erase them for good?", yes)
            updated = kith.update_gallery(name, confirm=error.problem["confirm"], **given)
    server.answer(updated, f"Updated gallery {updated.name}: {', '.join(given)}")


def _print_hygiene(report: HygieneOut) -> None:
    if report.data:
        print_table(_findings_table(report.data))
    for kind, action in {(finding.kind, finding.action): None for finding in report.data}:
        print_line(f"{kind.replace('_', ' ')}: {action}")
    counts = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in report.counts.items() if count)
    print_line(f"Showing {len(report.data)} findings of {counts}" if counts else "No findings")
    if report.expected_recall is not None:
        print_line(
            f"This recognizer is expected to find {report.expected_recall:.0%} of the duplicates in this gallery "
            f"(95 % interval: {report.expected_recall_low:.0%} to {report.expected_recall_high:.0%})."
        )
    if report.nearest:
        print_line("Nearest other pairs, however unlikely. Compare their photos.")
        print_table(_findings_table(report.nearest, "nearest pair"))


def _findings_table(findings: list[FindingOut], kind: str | None = None) -> Table:
    rows = (
        (
            kind or finding.kind.replace("_", " "),
            "\n".join(s.subject if s.name is None else f"{s.subject} ({s.name})" for s in finding.subjects),
            "\n".join(t.template for t in finding.templates),
            finding.similarity,
            None if finding.odds is None else format_ratio(finding.odds),
        )
        for finding in findings
    )
    headers = ("Finding", "Subjects", Column("Templates", no_wrap=True), "Similarity", "Odds")
    return make_table(*headers, rows=rows, leading=1)


add_call(
    app,
    "hygiene",
    "hygiene",
    _print_hygiene,
    note="Each has a remedy.",
    name=GalleryArgument,
    limit=Annotated[int, typer.Option(min=1, max=1000, help="Number of findings to show.")],
)


@app.command("export")
def export_gallery(
    name: GalleryArgument,
    file: Annotated[Path, typer.Argument(help="FILE.ndjson or FILE.ndjson.gz.")],
    server: ServerOptions,
    embeddings: Annotated[bool, typer.Option(help="Include embeddings.")] = True,
    crops: Annotated[bool, typer.Option("--crops", help="Include stored face crops.")] = False,
) -> None:
    """Write a consistent snapshot of a gallery to a file, which appears when it is complete."""
    _check_suffix(file)
    with connect(server) as kith:
        gallery = kith.gallery(name)
        with (
            atomic_write(file) as plain,
            progress_bar(DownloadColumn(), TransferSpeedColumn(), transient=True) as progress,
        ):
            packed = gzip.GzipFile(fileobj=plain, mode="wb", compresslevel=1) if file.suffix == ".gz" else None
            task = progress.add_task("receiving", total=None)
            with packed or nullcontext(plain) as target:
                for chunk in kith.export_gallery(name, embeddings=embeddings, crops=crops):
                    target.write(chunk)
                    progress.advance(task, len(chunk))
    size = file.stat().st_size
    document = {
        "file": str(file),
        "bytes": size,
        "subject_count": gallery.subject_count,
        "template_count": gallery.template_count,
    }
    server.answer(document, f"Wrote {file}, {size:,} bytes")


@app.command("import")
def import_gallery(
    name: GalleryArgument,
    file: Annotated[Path, typer.Argument(help="FILE.ndjson or FILE.ndjson.gz.", exists=True, dir_okay=False)],
    server: ServerOptions,
    create: Annotated[bool, typer.Option("--create", help="Create the gallery if it does not exist.")] = False,
    recognizer: Annotated[
        str | None, typer.Option(help="Recognizer of the vectors, if the file does not name it.")
    ] = None,
) -> None:
    """Import subjects from a file into a gallery.

    Run the command again to resume: templates are imported once. Exit status 1 if an item is refused."""
    _check_suffix(file)
    missing: Literal["create", "refuse"] = "create" if create else "refuse"
    bar = progress_bar(DownloadColumn(), TransferSpeedColumn(), transient=True)
    with connect(server, missing) as kith, bar as progress:
        task = progress.add_task("sending", total=file.stat().st_size)
        advance = partial(progress.advance, task)
        report = kith.import_gallery(name, file, create=create, recognizer=recognizer, progress=advance)
    lines = [
        f"Imported {count_of(report.template_count, 'template')} of {count_of(report.subject_count, 'new subject')}; "
        f"{report.present_count} already present, {report.refused_count} refused",
        *(f"  item {refusal.item}: {refusal.error.code}: {refusal.error.detail}" for refusal in report.refusals),
        *remedy_lines(refusal.error.model_dump() for refusal in report.refusals),
    ]
    server.answer(report, "\n".join(lines), ok=not report.refused_count)


def _check_suffix(file: Path) -> None:
    if not file.name.endswith((".ndjson", ".ndjson.gz", ".jsonl", ".jsonl.gz")):
        raise typer.BadParameter(f"{file.name} must end in .ndjson or .ndjson.gz.", param_hint="FILE")


add_call(app, "risk", "risk", print_risk, gallery=GalleryArgument, fpir=TARGETS)


@app.command()
def migrate(
    name: GalleryArgument,
    server: ServerOptions,
    to: Annotated[str | None, typer.Option(help="Migrate to this served pack (KITH_PACK, KITH_EXTRA_PACKS).")] = None,
    status: Annotated[bool, typer.Option("--status", help="Show the progress (the default).")] = False,
    roll_back: Annotated[bool, typer.Option("--roll-back", help="Answer with the previous recognizer again.")] = False,
    finish: Annotated[
        bool, typer.Option("--finish", help="Delete the vectors of the recognizer that does not answer.")
    ] = False,
    force: Annotated[
        bool, typer.Option(help="With --to or --finish: leave out templates that cannot be embedded.")
    ] = False,
    wait: Annotated[bool, typer.Option(help="With --to, --roll-back or --finish: wait for the job.")] = True,
) -> None:
    """Migrate a gallery to another recognizer.

    Check with --status, start with --to, then --finish or --roll-back."""
    if (to is not None) + status + roll_back + finish > 1:
        raise typer.BadParameter("Give only one of --to, --status, --roll-back and --finish.")
    with connect(server) as kith:
        if to is not None:
            migration = kith.migrate(name, to, force)
        elif roll_back:
            migration = kith.roll_back(name)
        elif finish:
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
            show_until_done(kith, job, progress)
    return kith.migration(migration.gallery)


def _print_migration(migration: MigrationOut) -> None:
    print_line(f"{migration.gallery}: {migration.state}")
    rows = [_generation_cells("answers", migration.current)]
    if migration.other is not None:
        rows.append(_generation_cells("previous" if migration.state == "switched" else "next", migration.other))
    headers = ("", "Recognizer", "Embedded", "Threshold")
    print_table(make_table(*headers, rows=rows))
    if migration.without_crop:
        print_line(f"{migration.without_crop_count} templates that a new recognizer cannot embed. Enroll them again:")
        print_table(
            make_table("Subject", "Template", rows=[(one.subject, one.template) for one in migration.without_crop])
        )


def _generation_cells(role: str, generation: GenerationOut) -> tuple[object, ...]:
    known = generation.threshold
    return (
        role,
        (generation.model or generation.recognizer[:12]) + ("" if generation.served else " (not served)"),
        f"{generation.embedded_count} of {generation.template_count}",
        "unknown" if known is None else f"{known.threshold:.4f}",
    )
