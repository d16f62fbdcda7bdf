"""``kith-train``: look at data, train, resume, compare, draw, export, measure, calibrate, pack."""

from __future__ import annotations

import contextlib
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Annotated, cast, get_args

import torch
import typer
from rich.console import Console
from rich.table import Table

from models.detection import Detector
from models.errors import ModelError
from models.pack import BUNDLED, load_pack
from models.runtime import OnnxNetwork, available_cores
from training import distributed, figures
from training.calibrate import described
from training.config import ConfigError, DataConfig, RunConfig
from training.data.preflight import contact_sheet, preflight
from training.detection.fit import POLISH, DetectorLoopConfig
from training.evaluate import evaluate_pack
from training.export import ParityError, Precision
from training.finished import embed_of
from training.html_report import write_pack_report
from training.loop import Checkpoint
from training.losses import HEADS, TERMS, bounds, options_of
from training.other_benchmarks import judge_others
from training.packing import calibrate_pack, export_run, make_pack, measure_pack, refresh_pack, write_variants
from training.recipes import COMPARED_PEOPLE, PUBLISHED_LOSSES, RECIPES
from training.report import rows, variant_rows
from training.run import compare as compare_losses
from training.run import report_run, train_detector, train_recogniser
from training.run_folder import CONFIG, read_run
from training.state import NonFiniteLossError

app = typer.Typer(help="Train face networks and write them as a model pack.", no_args_is_help=True)
Data = Annotated[Path, typer.Option(help="Where the data lies.", exists=True, file_okay=False)]
IDENTITIES = "A folder with manifest.csv, a folder of folders (--folder), or a .rec file."
Identities = Annotated[Path, typer.Option(help=IDENTITIES, exists=True)]
Output = Annotated[Path, typer.Option(help="Where the run or pack is written.")]
Folder = Annotated[bool, typer.Option("--folder", help="The data has a folder per person and no manifest.")]
AlignWith = Annotated[
    Path | None, typer.Option(help="Photos are not aligned crops: detect and align them with this pack.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="section.key=value, e.g. head.margin=0.3, terms.intra=1, loop.epochs=2; repeatable."),
]
Threads = Annotated[int | None, typer.Option(help="Processor threads; default: all cores.")]


@app.command()
def inspect(
    data: Annotated[Path, typer.Argument(help=IDENTITIES, exists=True)],
    folder: Folder = False,
    unaligned: Annotated[bool, typer.Option("--unaligned", help="Photos are not aligned crops.")] = False,
    sheet: Annotated[Path | None, typer.Option(help="Write a contact sheet (PNG) here: look at it.")] = None,
    sample: Annotated[int | None, typer.Option(min=1, help="Decode so many images only.")] = None,
) -> None:
    """Look before a long run: people, images, damage, duplicates, colour order."""
    config = DataConfig(data, None if folder else "manifest.csv", aligned=not unaligned)
    found = preflight(config, sample)
    _print(found.rows)
    for warning in found.warnings:
        Console(stderr=True).print(f"[yellow]warning:[/yellow] {warning}", highlight=False)
    if sheet is not None:
        sheet.parent.mkdir(parents=True, exist_ok=True)
        contact_sheet(config, sheet)


@app.command()
def run(
    recipe: Annotated[str, typer.Argument(help=f"One of: {', '.join(RECIPES)}.")],
    data: Identities,
    output: Output,
    head: Annotated[str | None, typer.Option(help="Another head; `kith-train losses` lists them.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Another number of epochs.")] = None,
    teacher: Annotated[
        Path | None, typer.Option(help="Learn from this pack, ONNX or .pt2 file, or run.", exists=True)
    ] = None,
    folder: Folder = False,
    align_with: AlignWith = None,
    settings: Settings = None,
    threads: Threads = None,
) -> None:
    """Train a recogniser by a recipe; run again to resume. Under torchrun, on many processes."""
    if recipe not in RECIPES:
        raise ConfigError(f"there is no recipe {recipe!r}; known are {', '.join(RECIPES)}")
    config = RECIPES[recipe](data, output, teacher)
    if folder or data.suffix == ".rec":
        config = replace(config, data=replace(config.data, manifest=None))
    if align_with is not None:
        config = replace(config, data=replace(config.data, aligned=False))
    shortcuts = {"head.name": head, "loop.epochs": None if epochs is None else str(epochs)}
    overrides = {key: value for key, value in shortcuts.items() if value is not None}
    _train(config.overridden({**overrides, **_settings(settings)}), align_with, threads)


@app.command()
def resume(
    output: Annotated[Path, typer.Argument(help="The run's folder.", exists=True, file_okay=False)],
    settings: Settings = None,
    align_with: AlignWith = None,
    threads: Threads = None,
) -> None:
    """Go on with a run that was stopped; only loop.epochs and data.root may be --set otherwise."""
    _train(replace(read_run(output).overridden(_settings(settings)), output=output), align_with, threads)


def _settings(settings: list[str] | None) -> dict[str, str]:
    pairs = [text.partition("=") for text in settings or ()]
    if bad := [key for key, equals, _ in pairs if not equals]:
        raise ConfigError(f"--set takes section.key=value, not {bad[0]!r}")
    return {key: value for key, _, value in pairs}


def _train(config: RunConfig, align_with: Path | None, threads: int | None) -> None:
    torch.set_num_threads(threads or max(1, available_cores() // distributed.world_size_to_be()))
    detector = None
    if align_with is not None:
        spec = load_pack(align_with).detection
        detector = Detector(OnnxNetwork(spec.path), spec)
    with distributed.session():
        checkpoint: Checkpoint = train_recogniser(config, detector)
        if distributed.rank() == 0:
            print(f"{checkpoint.path}: step {checkpoint.step}, last loss {checkpoint.loss:.4f}")


@app.command()
def losses() -> None:
    """List every head and term with its options."""
    for title, section, factories in (("Head", "head", HEADS), ("Term", "terms", TERMS)):
        table = Table(title, "Options (--set " + f"{section}.OPTION=...)")
        for name, factory in factories.items():
            table.add_row(name, ", ".join(f"{k}={v}" for k, v in options_of(factory).items()))
        Console().print(table)


@app.command()
def compare(
    data: Data,
    output: Output,
    losses: Annotated[
        list[str] | None, typer.Argument(help=f"Some of: {', '.join(PUBLISHED_LOSSES)}. Default: all.")
    ] = None,
    epochs: Annotated[int, typer.Option(min=1)] = 4,
    people: Annotated[int, typer.Option(min=2, help="The subset's people.")] = COMPARED_PEOPLE,
    pack: Annotated[Path, typer.Option(help="Whose detector aligns LFW.")] = BUNDLED,
    threads: Threads = None,
) -> None:
    """Train the papers' losses on one subset and budget and print them side by side."""
    chosen = losses or list(PUBLISHED_LOSSES)
    if unknown := set(chosen) - set(PUBLISHED_LOSSES):
        known = ", ".join(PUBLISHED_LOSSES)
        raise ConfigError(f"there is no loss {', '.join(sorted(unknown))} here; known are {known}")
    torch.set_num_threads(threads or available_cores())
    print(compare_losses(chosen, data, output, load_pack(pack).detection, epochs, people))


@app.command()
def plot(
    figure: Annotated[str, typer.Argument(help=f"One of: {', '.join(figures.FIGURES)}, adacos-scale, all.")],
    output: Annotated[Path, typer.Option(help="A folder for PNG files.")],
    classes: Annotated[int, typer.Option(min=50, help="C of the probability curves.")] = 10_575,
    run: Annotated[Path | None, typer.Option(help="A run with the adacos head, for its scale over training.")] = None,
) -> None:
    """Redraw the papers' figures: probability by angle, target logits, decision boundaries, AdaCos's scale."""
    for path in figures.draw(figure, output, classes, run):
        print(path)


@app.command(name="bounds")
def bounds_command(
    classes: Annotated[int, typer.Option(min=3, help="C.")],
    dimension: Annotated[int, typer.Option(min=2, help="d of the embedding.")] = 512,
    probability: Annotated[float, typer.Option(help="That a class centre should reach.")] = 0.9,
) -> None:
    """What the papers prove about the scale s and the margin m for so many classes."""
    if not 0 < probability < 1:
        raise ConfigError(f"--probability lies between 0 and 1; {probability} does not")
    figures = [
        (f"CosFace: least s for P = {probability:g}", bounds.cosface_scale_bound(classes, probability)),
        (f"L2-softmax: least alpha for P = {probability:g}", bounds.l2_softmax_alpha_bound(classes, probability)),
        ("AdaCos: fixed s, sqrt(2) ln(C - 1)", bounds.fixed_scale(classes)),
        ("s of the steepest P at 45 degrees", bounds.steepest_scale(classes)),
        ("CosFace: m must stay below", bounds.cosface_margin_bound(classes, dimension)),
        ("NormFace: least loss at s = 64", bounds.normface_loss_bound(classes, 8.0)),
    ]
    with contextlib.suppress(ValueError):  # few classes have none
        figures.insert(3, ("s of an inflection of P at 45 degrees", bounds.inflection_scale(classes)))
    _print([(name, f"{value:.4g}") for name, value in figures])


@app.command()
def detector(
    data: Data,
    output: Output,
    steps: Annotated[int | None, typer.Option(min=1, help="Another number of steps.")] = None,
    polish: Annotated[Path | None, typer.Option(help="Refine the landmarks of this finished detector run.")] = None,
    threads: Threads = None,
) -> None:
    """Train the detector; run again to resume."""
    torch.set_num_threads(threads or available_cores())
    loop = POLISH if polish else DetectorLoopConfig()
    train_detector(data, output, replace(loop, steps=steps or loop.steps), polish)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A finished run.", exists=True, file_okay=False)],
    output: Annotated[Path, typer.Option(help="The ONNX file.")],
    precision: Annotated[str, typer.Option(help="fp32, fp16 (weights stored in halves) or int8 (QDQ).")] = "fp16",
    data: Annotated[Path | None, typer.Option(help="For int8: where lfw lies.", exists=True, file_okay=False)] = None,
    pack: Annotated[Path, typer.Option(help="For int8: whose detector aligns LFW.")] = BUNDLED,
) -> None:
    """Write a run's network as ONNX, if it agrees with torch on the run's own crops."""
    lfw = None if data is None else data / "lfw"
    worst = export_run(run, output, _precision(precision), lfw, load_pack(pack).detection)
    print(f"{output}: {output.stat().st_size / 1e6:.2f} MB, worst cosine to torch {worst:.6f}")


def _precision(name: str) -> Precision:
    if name not in get_args(Precision):
        raise ConfigError(f"precision {name!r} is not one of {', '.join(get_args(Precision))}")
    return cast(Precision, name)


@app.command()
def pack(
    recogniser: Annotated[Path, typer.Option(help="A finished recogniser run.")],
    data: Data,
    output: Output,
    detector: Annotated[Path | None, typer.Option(help="A finished detector run.")] = None,
    detector_of: Annotated[Path | None, typer.Option(help="A pack whose detector to take over.")] = None,
    name: Annotated[str, typer.Option()] = "kith-compact",
    display_name: Annotated[str, typer.Option()] = "Kith compact",
    note: Annotated[str, typer.Option(help="For the model card: what the commands do not tell.")] = "",
    precision: Annotated[str, typer.Option(help="Of the recogniser: fp32, fp16 or int8.")] = "fp16",
    data_terms: Annotated[
        str | None, typer.Option(help="For the model card: the terms of the training photos.")
    ] = None,
    log: Annotated[str | None, typer.Option(help="For the model card: where it is told what was tried.")] = None,
    centre: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the mean embedding to take off every embedding.")
    ] = 0.0,
) -> None:
    """Export two runs, calibrate, measure, and write the pack with its model card."""
    if (detector is None) == (detector_of is None):
        raise ConfigError("name either --detector (a run) or --detector-of (a pack)")
    source = detector or load_pack(detector_of or BUNDLED)
    made = make_pack(
        recogniser, source, data, output, name, display_name, note, data_terms, _precision(precision), log, centre
    )
    _print(rows(made))


@app.command()
def measure(
    pack: Annotated[Path, typer.Argument(help="A pack, or an unversioned directory of ONNX files.")],
    data: Data,
    output: Annotated[Path, typer.Option(help="The JSON file.")],
    cache: Annotated[Path | None, typer.Option(help="Keep what the networks answer here, for the next time.")] = None,
) -> None:
    """Calibrate and measure a pack that somebody else made: the evidence its thresholds at a risk would rest on."""
    evidence = measure_pack(load_pack(pack), data, cache)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(evidence) + "\n", encoding="utf-8")
    _print(rows(replace(load_pack(pack), metrics=json.loads(output.read_text(encoding="utf-8"))["metrics"])))


@app.command()
def quantise(
    pack: Annotated[Path, typer.Argument(help="A pack with a manifest.", exists=True, file_okay=False)],
    data: Data,
) -> None:
    """Write INT8 variants of a pack's networks into it, and what they and bf16 lose."""
    torch.set_num_threads(available_cores())
    _print(variant_rows(write_variants(pack, data, Path("runs") / "cache")))


@app.command()
def calibrate(
    pack: Annotated[Path, typer.Argument(help="A pack, or an unversioned directory of ONNX files.")],
    data: Annotated[Path, typer.Option(help=IDENTITIES, exists=True)],
    folder: Folder = False,
    aligned: Annotated[bool, typer.Option("--aligned", help="Photos are aligned 112x112 crops already.")] = False,
    max_photos_per_person: Annotated[int | None, typer.Option(min=2, help="Of people with more, so many.")] = None,
    note: Annotated[str, typer.Option(help="For the record: what these photos are.")] = "",
) -> None:
    """Let a pack answer at a risk: compare everybody with everybody of your own people, and write what that shows."""
    records = data.suffix == ".rec"
    config = DataConfig(data, None if folder or records else "manifest.csv", aligned=aligned or records, min_images=1)
    done = calibrate_pack(pack, config, max_photos_per_person, note)
    _print(described(done.calibration or {}))


@app.command()
def evaluate(
    what: Annotated[Path, typer.Argument(help="A run, a pack, or an unversioned directory of ONNX files.")],
    data: Annotated[Path | None, typer.Option(help="Where lfw and wider lie.", exists=True, file_okay=False)] = None,
    view1: Annotated[bool, typer.Option(help="LFW View 1 only: for choosing settings.")] = False,
    report: Annotated[Path | None, typer.Option(help="Write an HTML report here.")] = None,
    pack: Annotated[Path, typer.Option(help="For a run: whose detector aligns photos.")] = BUNDLED,
    flip: Annotated[bool, typer.Option("--flip", help="For a run: average with the mirror image.")] = False,
    bins: Annotated[list[Path] | None, typer.Option("--bin", help="An LFW-style .bin set; repeatable.")] = None,
    ijb: Annotated[Path | None, typer.Option(help="A folder as IJB-B and IJB-C are shared.")] = None,
    probes: Annotated[Path | None, typer.Option(help="MegaFace's protocol: a folder of photos per person...")] = None,
    distractors: Annotated[Path | None, typer.Option(help="...and one of people who are none of them.")] = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="Of a pack: write its figures and its card anew.")] = False,
    note: Annotated[str | None, typer.Option(help="With --refresh: the card's note.")] = None,
    log: Annotated[str | None, typer.Option(help="With --refresh: where it is told what was tried.")] = None,
) -> None:
    """Measure a run on LFW, or a pack on LFW and WIDER FACE; either on other benchmarks too."""
    if data is None and not (bins or ijb or probes):
        raise ConfigError("name something to measure on: --data, --bin, --ijb, or --probes and --distractors")
    if (probes is None) != (distractors is None):
        raise ConfigError("--probes and --distractors go together")
    torch.set_num_threads(available_cores())
    is_run = (what / CONFIG).is_file()
    if not is_run and (flip or pack != BUNDLED):
        raise ConfigError("--flip and --pack are for runs: a pack is measured as it is served")
    if refresh and (is_run or data is None or view1):
        raise ConfigError("--refresh writes a pack's figures anew: name a pack and --data, without --view1")
    if not refresh and (note is not None or log is not None):
        raise ConfigError("--note and --log are for --refresh")
    cache = (what.parent if is_run else Path("runs")) / "cache"
    figures: list[tuple[str, str]] = []
    if data is not None and is_run:
        figures += report_run(what, data, load_pack(pack).detection, report, flip, view1)
    elif data is not None:
        figures += rows(refresh_pack(what, data, cache, note, log)) if refresh else _measured(what, data, view1, cache)
        if report is not None:
            write_pack_report(report, load_pack(what), data / "lfw", cache)
    if bins or ijb or probes:
        spec = load_pack(pack if is_run else what).detection
        detector = Detector(OnnxNetwork(spec.path), spec)
        figures += judge_others(*embed_of(what), detector, cache, bins or (), ijb, probes, distractors)
    _print(figures)


def _measured(what: Path, data: Path, view1: bool, cache: Path) -> list[tuple[str, str]]:
    pack = load_pack(what)
    metrics = evaluate_pack(pack, data, view1, cache)
    if not view1:
        return rows(replace(pack, metrics=metrics))
    result = metrics["lfw_view1"]
    return [("LFW View 1", f"{result['accuracy']['mean']:.2%}"), ("EER", f"{result['eer']:.2%}")]


def _print(figures: list[tuple[str, str]]) -> None:
    table = Table("Measure", "Value")
    for name, value in figures:
        table.add_row(name, value)
    Console().print(table)


def main() -> None:
    logging.basicConfig(level="INFO", format="%(levelname)s %(name)s: %(message)s")
    for exporter in ("onnx_ir", "onnxscript"):  # which tell every pass of theirs
        logging.getLogger(exporter).setLevel("WARNING")
    try:
        app()
    except (ConfigError, ModelError, ParityError, NonFiniteLossError) as error:
        Console(stderr=True).print(f"[red]error:[/red] {error}", highlight=False)
        raise SystemExit(2) from error
