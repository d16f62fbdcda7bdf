"""``kith gallery``: making, looking at, changing and deleting galleries; ``calibrate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Column, Table

from service.commands import audit, gallery_check, gallery_files, migration
from service.commands.options import (
    LEAST_RISK,
    MOST_RISK,
    AsJson,
    Fmr,
    Fpir,
    Gallery,
    GalleryName,
    Key,
    Preset,
    Threshold,
    Url,
    Yes,
    risk_of,
)
from service.commands.questions import insist
from service.connection import connect
from service.terminal import print_json, print_table, say, stdout
from service.words import odds

if TYPE_CHECKING:
    from service.api.schemas import GalleryOut, GalleryRiskOut, GalleryStatsOut

app = typer.Typer(help="Galleries: who is known, at which risk.", no_args_is_help=True)

Fusions = Annotated[
    Literal["max", "mean_top_k", "centroid", "quality_weighted"] | None,
    typer.Option(help="How a person's templates make one similarity."),
]
KeepCrops = Annotated[bool | None, typer.Option(help="Keep the faces enrolled, for another recogniser.")]
RetentionDays = Annotated[
    int | None, typer.Option(min=0, max=36_500, help="Age at which templates are erased; 0: never.")
]
Liveness = Annotated[
    Literal["required", "off"] | None,
    typer.Option(help="required: faces that are not taken for people are refused."),
]


PAGE = 1000
"""Findings of one answer, at most."""


@app.command("list")
def list_galleries(url: Url = None, api_key: Key = None, as_json: AsJson = False) -> None:
    """All galleries."""
    with connect(url, api_key) as kith:
        found = list(kith.galleries())
    if as_json:
        print_json(found)
        return
    if not found:
        say("no gallery yet: kith gallery create NAME, or kith enroll FOLDER --gallery NAME, which makes one")
        return
    table = Table(Column("Gallery", no_wrap=True), "Subjects", "Templates", "Risk")
    for gallery in found:
        table.add_row(gallery.name, str(gallery.subjects), str(gallery.templates), _risk(gallery.risk))
    print_table(table)


@app.command()
def create(
    name: Annotated[str, typer.Argument(metavar="GALLERY", help="Its name: letters, digits, and . _ - among them.")],
    fpir: Fpir = None,
    fmr: Fmr = None,
    threshold: Threshold = None,
    preset: Preset = None,
    fusion: Fusions = None,
    keep_crops: KeepCrops = None,
    retention_days: RetentionDays = None,
    liveness: Liveness = None,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Create a gallery."""
    settings = _settings(risk_of(fpir, fmr, threshold, preset), fusion, keep_crops, retention_days, liveness)
    with connect(url, api_key) as kith:
        created = kith.create_gallery(name, **settings)
    print_json(created) if as_json else say(f"created {created.name}")


@app.command()
def update(
    name: GalleryName,
    fpir: Fpir = None,
    fmr: Fmr = None,
    threshold: Threshold = None,
    preset: Preset = None,
    fusion: Fusions = None,
    keep_crops: KeepCrops = None,
    retention_days: RetentionDays = None,
    liveness: Liveness = None,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Change a gallery's settings: those that are named."""
    settings = _settings(risk_of(fpir, fmr, threshold, preset), fusion, keep_crops, retention_days, liveness)
    if not settings:
        raise typer.BadParameter("nothing to change: name a setting", param_hint="--fpir, --retention-days, ...")
    with connect(url, api_key) as kith:
        updated = kith.update_gallery(name, **settings)
    print_json(updated) if as_json else say(f"updated {updated.name}: {', '.join(settings)}")


@app.command()
def stats(name: GalleryName, url: Url = None, api_key: Key = None, as_json: AsJson = False) -> None:
    """One gallery's settings and counts, whether its decisions drift, and the index that serves its searches."""
    with connect(url, api_key) as kith:
        gallery, served = kith.gallery(name), kith.stats(name)
    if as_json:
        answer, index = gallery.model_dump(mode="json"), served.index.model_dump(mode="json")
        print_json(answer | {"index": {"setting": answer["index"], **index}})
    else:
        _print_stats(gallery, served)


@app.command()
def retention(
    name: GalleryName,
    erase: Annotated[
        bool, typer.Option("--erase", help="Erase what is past its age now, although it is a large share.")
    ] = False,
    yes: Yes = False,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """What is past a gallery's age, and whether its erasure waits for a confirmation; with --erase, confirm it once."""
    with connect(url, api_key) as kith:
        found = kith.retention(name)
        told = (
            f"{found.due_templates} of {found.templates} templates and {found.due_subjects} of {found.subjects} "
            f"subjects of {name} are past their age; the server's clock says {found.now:%Y-%m-%d %H:%M} UTC"
        )
        if not erase:
            waits = "they are kept until confirmed: --erase" if found.held else "no confirmation is needed"
            print_json(found) if as_json else say(f"{told}; {waits}")
            return
        if not yes:
            insist(f"{told}. Erase them for good?")
        done = kith.apply_retention(name, found.due_templates, found.due_subjects)
    print_json(done) if as_json else say(f"erased {done.templates} templates and {done.subjects} subjects")


@app.command()
def risk(
    name: GalleryName,
    fpir: Annotated[
        list[float] | None,
        typer.Option(min=LEAST_RISK, max=MOST_RISK, help="A target; repeatable. Default: 0.1 to 0.0001."),
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Draw FPIR by threshold here.")] = None,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Which threshold keeps which risk, today and at ten times the size, and what that rests on."""
    if png is not None and (png.suffix.lower() != ".png" or not png.parent.is_dir()):
        raise typer.BadParameter(f"{png} must be a .png file in a folder that exists", param_hint="--png")
    with connect(url, api_key) as kith:
        report = kith.risk(name, *(fpir or ()))
    print_json(report) if as_json else _print_risk(report)
    if png is not None:
        from service.risk_plot import risk_png

        png.write_bytes(risk_png(report))


def calibrate(gallery: Gallery, url: Url = None, api_key: Key = None, as_json: AsJson = False) -> None:
    """Derive a gallery's risk anew from everybody enrolled in it, and show it."""
    with connect(url, api_key) as kith:
        report = kith.calibrate(gallery)
    print_json(report) if as_json else _print_risk(report)


@app.command("calibrate", hidden=True)
def calibrate_named(name: GalleryName, url: Url = None, api_key: Key = None, as_json: AsJson = False) -> None:
    """As 'kith calibrate', where one may look for it."""
    calibrate(name, url, api_key, as_json)


@app.command()
def hygiene(
    name: GalleryName,
    limit: Annotated[int, typer.Option(min=1, help="Show so many findings.")] = 50,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Who seems enrolled twice, filed wrongly, or easily taken for another; what to do about each."""
    with connect(url, api_key) as kith:
        report = page = kith.hygiene(name, min(limit, PAGE))
        while page.next is not None and len(report.findings) < limit:
            page = kith.hygiene(name, min(limit - len(report.findings), PAGE), page.next)
            report.findings += page.findings
        report.next = page.next
    if as_json:
        print_json(report)
        return
    table = Table("Finding", "Subjects", Column("Templates", no_wrap=True), "Similarity", "Chance", show_lines=True)
    for found in report.findings:
        table.add_row(
            found.kind.replace("_", " "),
            escape("\n".join(s.subject if s.name is None else f"{s.subject} ({s.name})" for s in found.subjects)),
            "\n".join(t.template for t in found.templates),
            "" if found.similarity is None else f"{found.similarity:.3f}",
            "" if found.chance is None else odds(found.chance),
        )
    if report.findings:
        print_table(table)
    for kind, action in {(found.kind, found.action): None for found in report.findings}:
        say(f"{kind.replace('_', ' ')}: {action}")
    counts = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in report.total.items() if count)
    say(f"{len(report.findings)} shown of {counts}" if counts else "nothing found")


app.command("audit")(audit.of_gallery)
app.command("migrate")(migration.migrate)
app.command("check")(gallery_check.check)
app.command("export")(gallery_files.export)
app.command("import")(gallery_files.take)


@app.command()
def delete(name: GalleryName, yes: Yes = False, url: Url = None, api_key: Key = None, as_json: AsJson = False) -> None:
    """Delete a gallery with everyone in it, and tell the receipt."""
    if not yes:
        insist(f"Delete gallery {name!r} and everyone in it?")
    with connect(url, api_key) as kith:
        deleted = kith.delete_gallery(name)
    if as_json:
        print_json(deleted)
    else:
        say(f"deleted {deleted.subjects} subjects, {deleted.templates} templates; receipt {deleted.receipt.id}")


def _settings(
    risk: dict[str, float | str] | None,
    fusion: str | None,
    keep_crops: bool | None,
    retention_days: int | None,
    liveness: str | None,
) -> dict[str, Any]:
    """Those that were named."""
    given = {"risk": risk, "fusion": fusion, "keep_crops": keep_crops, "liveness": liveness}
    settings: dict[str, Any] = {setting: value for setting, value in given.items() if value is not None}
    if retention_days is not None:
        settings["retention_days"] = retention_days or None
    return settings


def _risk(named: dict[str, float]) -> str:
    return ", ".join(f"{kind} {value:g}" for kind, value in named.items())


def _print_stats(gallery: GalleryOut, served: GalleryStatsOut) -> None:
    index = served.index
    table = Table(show_header=False)
    table.add_row("Gallery", gallery.name)
    table.add_row("Enrolled", f"{gallery.subjects:,} subjects, {gallery.templates:,} templates")
    table.add_row("Risk", _risk(gallery.risk))
    table.add_row("Fusion", gallery.fusion)
    kept = "never erased" if gallery.retention_days is None else f"erased after {gallery.retention_days} days"
    table.add_row("Kept", f"{kept}; {'with' if gallery.keep_crops else 'without'} the faces' crops")
    table.add_row("Liveness", gallery.liveness)
    table.add_row("Recogniser", f"{gallery.recogniser[:12]}, {gallery.dimension} dimensions")
    if gallery.drift is not None:
        table.add_row("Drift", f"{gallery.drift.state.replace('_', ' ')}: {gallery.drift.detail}")
    table.add_row("Index", f"{index.engine} {index.kind}: {index.reason}")
    memory = f"{index.vectors:,} vectors, {index.memory_bytes / 1e6:.1f} MB"
    table.add_row("", memory if index.recall is None else f"{memory}, the best found in {index.recall.at_1:.2%}")
    if index.problem is not None:
        table.add_row("Problem", index.problem)
    print_table(table)


def _print_risk(report: GalleryRiskOut) -> None:
    from service.risk_plot import risk_text
    from service.risk_report import GROWTH

    evidence = report.evidence
    say(
        f"{report.subjects} subjects, fusion {report.fusion}; {_risk(report.risk)}: threshold "
        f"{_reachable(report.threshold)}"
    )
    later = f"At {report.subjects * GROWTH:,} subjects"
    table = Table("FPIR", "Threshold", "95 % interval", "Own probes missed", later)
    for target in report.targets:
        now, then = target.today, target.grown
        mark = " (extrapolated)" if now.extrapolated and now.threshold <= 1 else ""
        missed = "" if now.fnmr is None else f"{now.fnmr:.1%}"
        interval = f"{_reachable(now.low)} to {_reachable(now.high)}"
        table.add_row(
            f"{target.fpir:g}", f"{_reachable(now.threshold)}{mark}", interval, missed, _reachable(then.threshold)
        )
    print_table(table)
    say(
        f"from {evidence.source}: {evidence.pairs:,} pairs of this gallery ({evidence.gallery_share:.0%}), "
        f"{evidence.pack_pairs:,} of the pack; {evidence.duplicate_pairs:g} taken for duplicates and left out"
    )
    if (check := report.check) is not None:
        say(
            f"left out and searched for, {check.observed} of {check.probes} subjects reach the threshold of FPIR "
            f"{check.fpir:.0%}; {check.expected:.1f} should"
        )
    say(risk_text(report, stdout().width))


def _reachable(similarity: float) -> str:
    return f"{similarity:.4f}" if similarity <= 1 else "out of reach"
