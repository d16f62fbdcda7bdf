"""``kith``: serve, or use the service from a terminal, a remote one by ``--url`` or an embedded one."""

from __future__ import annotations

import gzip
import json
import tempfile
from contextlib import closing, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from models.errors import ModelError
from models.pack import load_pack
from service import (
    audit_commands,
    job_commands,
    key_commands,
    master_commands,
    migration_commands,
    model_commands,
    subject_commands,
)
from service.api.schemas import GalleryRiskOut
from service.client import Kith, KithClientError
from service.connection import AsJson, Key, Url, connect
from service.demo import run_demo
from service.doctor import diagnose
from service.drawing import draw_decisions, label
from service.enroll_command import enroll
from service.errors import KithError, SettingsError, StorageError
from service.files import replacing
from service.foreign import commands as foreign_commands
from service.logs import configure
from service.rates import BATCHES, Rates, measure
from service.risk_report import GROWTH
from service.security.acting import Actor, acting_as
from service.settings import load_settings

app = typer.Typer(help="Face recognition that says how sure it may be.", no_args_is_help=True)
gallery_app = typer.Typer(help="Galleries.", no_args_is_help=True)
app.add_typer(gallery_app, name="gallery")
app.command()(enroll)
app.add_typer(audit_commands.app, name="audit")
app.add_typer(foreign_commands.app, name="convert")
app.add_typer(job_commands.app, name="jobs")
app.add_typer(master_commands.app, name="master")
app.add_typer(key_commands.app, name="keys")
app.add_typer(model_commands.app, name="models")
app.add_typer(subject_commands.subject_app, name="subject")
app.add_typer(subject_commands.erasures_app, name="erasures")

Gallery = Annotated[str, typer.Option("--gallery", "-g", help="Which gallery.")]
Fpir = Annotated[float | None, typer.Option(help="Accepted false positive identification rate.")]


@app.command(name="serve")
def serve_command(
    host: Annotated[str | None, typer.Option(help="Overrides KITH_HOST.")] = None,
    port: Annotated[int | None, typer.Option(help="Overrides KITH_PORT.")] = None,
) -> None:
    """Serve until interrupted."""
    settings = load_settings(**{k: v for k, v in {"host": host, "port": port}.items() if v is not None})
    configure(settings.log_level, settings.log_format)
    from service.server import serve

    serve(settings)


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("demo-output"),
) -> None:
    """Enrol, verify and identify real photos through a real server; exit 1 if a decision is wrong."""
    from service.server import embedded

    console = Console(width=None if Console().is_terminal else 150)
    models_dir = load_settings().models_path  # before the data directory becomes another
    with (
        tempfile.TemporaryDirectory() as folder,
        embedded(load_settings(data_dir=Path(folder), models_dir=models_dir, database_url=None, api_key=None)) as url,
        Kith(url) as kith,
    ):
        console.print(f"server on {url}")
        right = run_demo(kith, output, console)
    console.print("server stopped")
    if not right:
        raise typer.Exit(1)


@app.command()
def doctor(
    bench: Annotated[
        bool, typer.Option("--bench", help="Measure every engine that is installed, and say which to use.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """What is installed, and what really ran each network where; exit 1 on an error."""
    settings = load_settings()
    findings = diagnose(settings)
    sound = all(finding.verdict != "error" for finding in findings)
    rates = measure(load_pack(settings.pack_path), settings) if bench and sound else None
    if as_json:
        listed = [vars(finding) for finding in findings]
        print(json.dumps({"findings": listed, **asdict(rates)} if rates is not None else listed, indent=2))
    else:
        table = Table("What", "", "Detail")
        colours = {"ok": "green", "warning": "yellow", "error": "red"}
        for finding in findings:
            table.add_row(finding.what, f"[{colours[finding.verdict]}]{finding.verdict}[/]", finding.detail)
        Console().print(table)
        if rates is not None:
            _print_rates(rates)
    if not sound:
        raise typer.Exit(1)


@app.command()
def backup(
    file: Annotated[Path, typer.Argument(help="Where to; replaced when the new one is complete.")],
    as_json: AsJson = False,
) -> None:
    """Write everything in the database, as it is at this moment, to one file; servers go on meanwhile."""
    from service.engines import open_own_database
    from service.gallery.audit_log import Entry, record_entries
    from service.gallery.backup import back_up

    with acting_as(Actor("operator")), closing(open_own_database(load_settings())) as database:
        manifest = back_up(database, file)
        try:
            record_entries(database, [Entry("database_backed_up", details=manifest.rows)])
        except StorageError as error:  # of which a backup may be the remedy
            Console(stderr=True).print(f"not in the audit: {error}", highlight=False, markup=False)
    if as_json:
        print(json.dumps(manifest.document(), indent=2))
        return
    print(f"wrote {file}, {file.stat().st_size:,} bytes: {_backed_up(manifest.rows)}")


@app.command()
def restore(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False)],
    replace: Annotated[bool, typer.Option("--replace", help="Delete all that the database holds.")] = False,
) -> None:
    """Put a backup into the database, of whatever kind, that the settings name: wholly, or not at all."""
    from service.engines import master_keys, open_own_database
    from service.gallery import backup as backups

    settings, manifest = load_settings(), backups.read_manifest(file)
    backups.check_keys(file, master_keys(settings))  # before a database is made, and a key for it
    with acting_as(Actor("operator")), closing(open_own_database(settings)) as database:
        backups.restore(database, file, replace, said=lambda line: Console(stderr=True).print(line, highlight=False))
    print(f"restored {_backed_up(manifest.rows)}, as of {manifest.created_at}")
    for needed in manifest.recognisers:
        print(f"needs recogniser {needed['fingerprint'][:12]} of {needed['dimension']} dimensions")


def _backed_up(rows: dict[str, int]) -> str:
    return ", ".join(f"{rows[table]:,} {table}" for table in ("galleries", "subjects", "templates"))


@app.command()
def identify(
    photos: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False)],
    gallery: Gallery,
    fpir: Fpir = None,
    draw: Annotated[Path | None, typer.Option(help="Write the first photo with its decisions here.")] = None,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Say who is in the photos, or that they are unknown."""
    _check_picture(draw, "--draw", (".png", ".jpg", ".jpeg"))
    options: dict[str, Any] = {} if fpir is None else {"risk": {"fpir": fpir}}
    table = Table("Photo", "Face", "Decision", "Similarity", "Threshold", "Chance of a stranger")
    answers: dict[str, Any] = {}
    with connect(url, api_key) as kith:
        for photo in photos:
            try:
                answer = kith.identify(gallery, photo, **options)
            except KithClientError as error:
                if not error.code.startswith("image_"):
                    raise
                answers[str(photo)] = {"error": error.problem}
                table.add_row(escape(photo.name), "", error.code, "", "", "")
                continue
            answers[str(photo)] = answer.model_dump(mode="json", exclude_none=True)
            for number, result in enumerate(answer.results, start=1):
                chance = result.false_alarm_probability
                table.add_row(
                    escape(photo.name),
                    str(number) if result.face else "",
                    escape(label(result)),
                    "" if result.similarity is None else f"{result.similarity:.3f}",
                    "" if result.threshold is None else f"{result.threshold:.3f}",
                    "" if chance is None else f"{chance:.2g}",
                )
            if draw is not None and photo == photos[0]:
                draw_decisions(photo.read_bytes(), answer.results, draw)
    if as_json:
        print(json.dumps(answers, indent=2))
    else:
        Console().print(table)


@app.command()
def verify(
    a: Annotated[Path, typer.Argument(exists=True, dir_okay=False)],
    b: Annotated[Path, typer.Argument(exists=True, dir_okay=False)],
    fmr: Annotated[float, typer.Option(help="Accepted false match rate.")] = 0.001,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Are two photos of the same person?"""
    with connect(url, api_key) as kith:
        answer = kith.verify(a, b, fmr=fmr)
    if as_json:
        _print_json(answer)
    elif answer.similarity is None:
        names = {"a": str(a), "b": str(b)}
        seen = (f"{names[side]}: {what}" for side, _, what in (reason.partition(": ") for reason in answer.reasons))
        print(f"{answer.outcome}: {', '.join(seen)}")
    else:
        print(f"{answer.outcome}: similarity {answer.similarity:.3f}, threshold {answer.threshold:.3f} at FMR {fmr:g}")


@gallery_app.command("list")
def gallery_list(url: Url = None, api_key: Key = None, as_json: AsJson = False) -> None:
    """All galleries."""
    with connect(url, api_key) as kith:
        found = list(kith.galleries())
    if as_json:
        print(json.dumps([g.model_dump(mode="json") for g in found], indent=2))
        return
    table = Table("Gallery", "Subjects", "Templates", "Risk")
    for g in found:
        table.add_row(g.name, str(g.subjects), str(g.templates), ", ".join(f"{k} {v:g}" for k, v in g.risk.items()))
    Console().print(table)


@gallery_app.command("create")
def gallery_create(
    name: str,
    fpir: Fpir = None,
    keep_crops: Annotated[bool, typer.Option(help="Keep the faces enrolled, for another recogniser.")] = False,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Create a gallery."""
    settings: dict[str, Any] = {"keep_crops": keep_crops} | ({} if fpir is None else {"risk": {"fpir": fpir}})
    with connect(url, api_key) as kith:
        created = kith.create_gallery(name, **settings)
    _print_json(created) if as_json else print(f"created {created.name}")


@gallery_app.command("update")
def gallery_update(
    name: str,
    fpir: Fpir = None,
    keep_crops: Annotated[bool | None, typer.Option(help="Keep the faces enrolled, for another recogniser.")] = None,
    retention_days: Annotated[
        int | None, typer.Option(min=0, max=36_500, help="Age at which templates are erased; 0: never.")
    ] = None,
    liveness: Annotated[
        str | None, typer.Option(help="required: faces that are not taken for people are refused; or off.")
    ] = None,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Change a gallery's settings: those that are named."""
    settings: dict[str, Any] = {"keep_crops": keep_crops, "liveness": liveness}
    settings = {setting: value for setting, value in settings.items() if value is not None}
    if fpir is not None:
        settings["risk"] = {"fpir": fpir}
    if retention_days is not None:
        settings["retention_days"] = retention_days or None
    if not settings:
        raise typer.BadParameter("nothing to change: name a setting", param_hint="--fpir, --retention-days, ...")
    with connect(url, api_key) as kith:
        updated = kith.update_gallery(name, **settings)
    _print_json(updated) if as_json else print(f"updated {updated.name}: {', '.join(settings)}")


@gallery_app.command("stats")
def gallery_stats(name: str, url: Url = None, api_key: Key = None) -> None:
    """One gallery's settings and counts, and the index that serves its searches, as JSON."""
    with connect(url, api_key) as kith:
        answer = kith.gallery(name).model_dump(mode="json", exclude_none=True)
        stats = kith.stats(name).index.model_dump(mode="json", exclude_none=True)
    print(json.dumps({**answer, "index": {"setting": answer["index"], **stats}}, indent=2))


@gallery_app.command("risk")
def gallery_risk(
    name: str,
    fpir: Annotated[list[float] | None, typer.Option(help="A target; repeatable. Default: 0.1 to 0.0001.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw FPIR by threshold here.")] = None,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Which threshold keeps which risk, today and at ten times the size, and what that rests on."""
    _check_picture(png, "--png", (".png",))
    with connect(url, api_key) as kith:
        report = kith.risk(name, *(fpir or ()))
    _print_json(report) if as_json else _print_risk(report)
    if png is not None:
        from service.risk_plot import risk_png  # matplotlib, which the server would hold too

        png.write_bytes(risk_png(report))


@app.command("calibrate")
def calibrate_command(gallery: Gallery, url: Url = None, api_key: Key = None, as_json: AsJson = False) -> None:
    """Derive a gallery's risk anew from everybody enrolled in it, and show it."""
    with connect(url, api_key) as kith:
        report = kith.calibrate(gallery)
    _print_json(report) if as_json else _print_risk(report)


def _print_risk(report: GalleryRiskOut) -> None:
    console = Console()
    evidence, own = report.evidence, ", ".join(f"{kind} {value:g}" for kind, value in report.risk.items())
    console.print(
        f"{report.subjects} subjects, fusion {report.fusion}; {own}: threshold {_reachable(report.threshold)}"
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
    console.print(table)
    console.print(
        f"from {evidence.source}: {evidence.pairs:,} pairs of this gallery ({evidence.gallery_share:.0%}), "
        f"{evidence.pack_pairs:,} of the pack; {evidence.duplicate_pairs:g} taken for duplicates and left out"
    )
    if (check := report.check) is not None:
        console.print(
            f"left out and searched for, {check.observed} of {check.probes} subjects reach the threshold of FPIR "
            f"{check.fpir:.0%}; {check.expected:.0f} should"
        )
    from service.risk_plot import risk_text

    print(risk_text(report, console.width))


def _print_rates(rates: Rates) -> None:
    table = Table("Network", "Engine", "Numbers", *(f"ms each, batch {n}" for n in BATCHES), "Points lost", "At start")
    for rate in rates.rates:
        lost = "not measured" if rate.points_lost is None else f"{rate.points_lost:g}"
        taken = (f"{ms:.2f}" for ms in rate.milliseconds)
        table.add_row(rate.network, rate.engine, rate.precision, *taken, lost, "chosen" if rate.chosen else "")
    Console().print(table, rates.advice)


def _reachable(similarity: float) -> str:
    return f"{similarity:.4f}" if similarity <= 1 else "out of reach"


def _check_picture(path: Path | None, option: str, suffixes: tuple[str, ...]) -> None:
    if path is not None and (path.suffix.lower() not in suffixes or not path.parent.is_dir()):
        raise typer.BadParameter(
            f"{path} must be a {' or '.join(suffixes)} file in a folder that exists", param_hint=option
        )


@gallery_app.command("hygiene")
def gallery_hygiene(
    name: str,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Show so many findings.")] = 50,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Who seems enrolled twice, filed wrongly, or easily taken for another; what to do about each."""
    with connect(url, api_key) as kith:
        report = kith.hygiene(name, limit)
    if as_json:
        print(report.model_dump_json(indent=2))
        return
    console = Console()
    table = Table("Finding", "Subjects", "Templates", "Similarity", "Chance", show_lines=True)
    for found in report.findings:
        table.add_row(
            found.kind.replace("_", " "),
            escape("\n".join(s.subject if s.name is None else f"{s.subject} ({s.name})" for s in found.subjects)),
            "\n".join(t.template for t in found.templates),
            "" if found.similarity is None else f"{found.similarity:.3f}",
            "" if found.chance is None else f"{found.chance:.2g}",
        )
    if report.findings:
        console.print(table)
    for kind, action in {(found.kind, found.action): None for found in report.findings}:
        console.print(f"{kind.replace('_', ' ')}: {action}", highlight=False)
    counts = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in report.total.items() if count)
    console.print(f"{len(report.findings)} shown of {counts}" if counts else "nothing found", highlight=False)


gallery_app.command("audit")(audit_commands.of_gallery)
gallery_app.command("migrate")(migration_commands.migrate)


@gallery_app.command("check")
def gallery_check(
    name: Annotated[str | None, typer.Argument(help="Which gallery; default: all.")] = None,
    repair: Annotated[bool, typer.Option("--repair", help="Mend what can be mended.")] = False,
    as_json: AsJson = False,
) -> None:
    """Is the database sound, and do searches answer by it? Looks at the database itself (KITH_DATABASE_URL, or the
    data directory's) and at Milvus if KITH_MILVUS_URI names it, also while services run on them; exit 1 if something
    is left to do."""
    from service.engines import open_milvus, open_own_database
    from service.gallery.check import open_check
    from service.spool import Spool

    settings = load_settings()
    spool = Spool(settings.data_dir / "spool")
    milvus = partial(open_milvus, settings)
    with (
        acting_as(Actor("operator")),
        open_check(open_own_database(settings), spool.abandoned, settings.index_path, milvus) as check,
    ):
        findings = list(check.findings(name, repair))
    if as_json:
        print(json.dumps([vars(finding) for finding in findings], indent=2))
    else:
        console = Console()
        for found in findings:
            where = f"gallery {found.gallery}" if found.gallery else "database"
            state = "repaired" if found.repaired else "--repair mends it" if found.mendable else "to be done by hand"
            console.print(
                f"{where}: {found.kind} ({found.count}): {found.what}. {found.action} [{state}]", markup=False
            )
        if not findings:
            console.print("all is well")
    if not all(finding.repaired for finding in findings):
        raise typer.Exit(1)


@gallery_app.command("export")
def gallery_export(
    name: str,
    file: Annotated[Path, typer.Argument(help="FILE.ndjson, FILE.ndjson.gz or FILE.parquet.")],
    embeddings: Annotated[bool, typer.Option(help="Without: subjects and metadata alone.")] = True,
    crops: Annotated[bool, typer.Option("--crops", help="With the faces that the gallery keeps.")] = False,
    url: Url = None,
    api_key: Key = None,
) -> None:
    """Write a gallery as it is at this moment to a file."""
    kind = _transfer_format(file)
    with connect(url, api_key) as kith, replacing(file) as plain:
        packed = gzip.GzipFile(fileobj=plain, mode="wb", compresslevel=1) if file.suffix == ".gz" else None
        with packed or nullcontext(plain) as to:
            for piece in kith.export_gallery(name, kind, embeddings=embeddings, crops=crops):
                to.write(piece)
    print(f"wrote {file}, {file.stat().st_size:,} bytes")


@gallery_app.command("import")
def gallery_import(
    name: str,
    file: Annotated[Path, typer.Argument(help="As export writes, or your own.", exists=True, dir_okay=False)],
    create: Annotated[bool, typer.Option("--create", help="Make the gallery if there is none.")] = False,
    recogniser: Annotated[
        str | None, typer.Option(help="Whose vectors these are, where the file does not say.")
    ] = None,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Take a file's people into a gallery; exit 1 if an item was refused. Run again to resume: templates are taken
    once."""
    _transfer_format(file)
    with connect(url, api_key) as kith, Progress(console=Console(stderr=True), transient=True) as shown:
        bar = shown.add_task("sending", total=file.stat().st_size)
        progress = partial(shown.advance, bar)
        report = kith.import_gallery(name, file, create=create, recogniser=recogniser, progress=progress)
    if as_json:
        _print_json(report)
    else:
        print(
            f"{report.templates} templates of {report.subjects} new subjects imported, {report.present} were there, "
            f"{report.refused} refused"
        )
        for refusal in report.refusals:
            print(f"  item {refusal.item}: {refusal.error.code}: {refusal.error.detail}")
    if report.refused:
        raise typer.Exit(1)


def _transfer_format(file: Path) -> Literal["ndjson", "parquet"]:
    if file.suffix == ".parquet":
        return "parquet"
    if file.name.endswith((".ndjson", ".ndjson.gz", ".jsonl", ".jsonl.gz")):
        return "ndjson"
    raise typer.BadParameter(f"{file.name}: expected .ndjson, .ndjson.gz or .parquet", param_hint="FILE")


@gallery_app.command("delete")
def gallery_delete(
    name: str,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    url: Url = None,
    api_key: Key = None,
) -> None:
    """Delete a gallery with everyone in it."""
    if not yes:
        typer.confirm(f"Delete gallery {name!r} and everyone in it?", abort=True)
    with connect(url, api_key) as kith:
        deleted = kith.delete_gallery(name)
    print(f"deleted {deleted.subjects} subjects, {deleted.templates} templates")


def _print_json(answer: BaseModel) -> None:
    print(answer.model_dump_json(indent=2, exclude_none=True))


def main() -> None:
    """Entry point: known errors become one line on stderr and exit status 2."""
    try:
        app()
    except (KithError, KithClientError, ModelError) as error:
        remedy = f". {error.remedy}" if isinstance(error, KithError) and not isinstance(error, SettingsError) else ""
        if isinstance(error, KithClientError) and error.code == "unauthorized":
            remedy = " Commands send the key of --api-key, or of KITH_CLIENT_KEY."
        Console(stderr=True).print(f"[red]error:[/red] {escape(f'{error}{remedy}')}", highlight=False)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
