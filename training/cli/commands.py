"""Commands of ``kith-train``."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from models.checksums import sha256_of
from models.pack.loading import BUNDLED_PACK, load_pack
from models.runtime.onnx_runtime import OnnxNetwork, available_cores
from models.vision.alignment import CROP_SIZE_PX
from models.vision.detection import Detector
from training import bounds, distributed
from training.backbones.iresnet import DEPTHS
from training.config import BackboneName, ConfigError, DataConfig, RunConfig, read_settings
from training.data.identities import list_identities
from training.data.preflight import preflight
from training.evaluation.benchmarks import Benchmarks, evaluate_other_benchmarks
from training.evaluation.embedding import load_embedder
from training.evaluation.liveness import evaluate_liveness as measure_liveness
from training.evaluation.pack_evaluation import evaluate_pack
from training.export import arcface_torch
from training.export.calibrate import describe_calibration
from training.export.model_card import pack_rows
from training.export.onnx_export import ExportPrecision
from training.export.packing import (
    calibrate_pack,
    crop_cache,
    export_run,
    make_pack,
    measure_pack,
    refresh_pack,
)
from training.losses import HEADS, TERMS, list_options
from training.optimization.loop import Checkpoint
from training.optimization.run_folder import CHECKPOINT, CONFIG, read_run_config
from training.recipes import COMPARISON_PEOPLE, PUBLISHED_LOSSES, RECIPES, SMALL_SET_IMAGES, shipped_sets, sized
from training.run.compare import compare as compare_losses
from training.run.people import MeasuredPeople, measure_folder, own_photos, people_figures, write_worst_pairs
from training.run.report import report_run, write_pack_report, write_report
from training.run.train import train_recognizer

app = typer.Typer(help="Train face networks and export them as model packs.", no_args_is_help=True)
Data = Annotated[Path, typer.Option(help="Data folder.", exists=True, file_okay=False)]
IDENTITIES = "Folder with manifest.csv, folder of folders (--folder), or .rec file."
Identities = Annotated[Path, typer.Option(help=IDENTITIES, exists=True)]
Output = Annotated[Path, typer.Option(help="Output folder of the run or pack.")]
Folder = Annotated[bool, typer.Option("--folder", help="One folder per person, no manifest.")]
AlignWith = Annotated[Path | None, typer.Option(help="For unaligned photos: pack that detects and aligns the faces.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="section.key=value, e.g. head.margin=0.3, terms.intra=1, loop.epochs=2; repeatable."),
]
log = logging.getLogger(__name__)
RECIPE = f"One of: {', '.join(RECIPES)}."
Teacher = Annotated[Path | None, typer.Option(help="Teacher: pack, ONNX or .pt2 file, or run.", exists=True)]
Threads = Annotated[int | None, typer.Option(help="CPU threads; default: all cores.")]


@app.command()
def inspect(
    data: Annotated[Path, typer.Argument(help=IDENTITIES, exists=True)],
    folder: Folder = False,
    unaligned: Annotated[bool, typer.Option("--unaligned", help="Photos are not aligned crops.")] = False,
    crop_px: Annotated[int, typer.Option(min=32, help="Side of the crops in pixels.")] = CROP_SIZE_PX,
    sample: Annotated[int | None, typer.Option(min=1, help="Number of images to check; default: all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print findings as JSON.")] = False,
) -> None:
    """Check a data set before training: damage, duplicates, sizes."""
    found = preflight(
        DataConfig(data, None if folder else "manifest.csv", aligned=not unaligned, crop_px=crop_px), sample
    )
    if as_json:
        print(json.dumps({**asdict(found), "warnings": found.warnings}))
    else:
        print_figures(found.rows)
    for warning in found.warnings:
        # Not wrapped: names of files stay whole.
        Console(stderr=True, soft_wrap=True).print(f"[yellow]warning:[/yellow] {escape(warning)}", highlight=False)


@app.command()
def run(
    data: Identities,
    recipe: Annotated[
        str | None, typer.Argument(help=f"{RECIPE} Default: few below 20,000 photos, or compact.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Output folder of the run; default: runs/NAME of the data.")
    ] = None,
    head: Annotated[
        str | None, typer.Option(help="Head instead of the recipe's; `kith-train losses` lists them.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Number of epochs instead of the recipe's.")] = None,
    teacher: Teacher = None,
    folder: Folder = False,
    align_with: AlignWith = None,
    config_file: Annotated[
        Path | None, typer.Option("--config", help="YAML or JSON file of settings; --set overrides it.", exists=True)
    ] = None,
    settings: Settings = None,
    threads: Threads = None,
) -> None:
    """Train a recognizer by a recipe; run again to resume. Supports torchrun.

    Without a recipe, the number of photos chooses it, and the bundled pack aligns photos that are no crops.
    """
    shortcuts = {"head.name": head, "loop.epochs": None if epochs is None else str(epochs)}
    overrides = {} if config_file is None else read_settings(config_file)
    overrides |= {key: value for key, value in shortcuts.items() if value is not None} | _settings(settings)
    output = output or Path("runs") / data.resolve().stem
    config = _configured(recipe or "few", data, output, teacher, folder, align_with)
    if recipe in (None, "few", "few-labels"):
        large = None if recipe else _configured("compact", data, output, teacher, folder, align_with)
        config, align_with = _by_size(config, large, overrides, align_with)
    _train(config.overridden(overrides), align_with, threads)


def _configured(
    recipe: str, data: Path, output: Path, teacher: Path | None, folder: bool, align_with: Path | None
) -> RunConfig:
    """Return the settings of a recipe."""
    if recipe not in RECIPES:
        raise ConfigError(f"unknown recipe {recipe!r}. Recipes: {', '.join(RECIPES)}")
    config = RECIPES[recipe](data, output, teacher)
    listed = config.data.manifest is not None and (data / config.data.manifest).is_file()
    manifest = config.data.manifest if listed and not folder else None
    of_data = replace(config.data, manifest=manifest, aligned=align_with is None)
    return replace(config, data=of_data, validation=shipped_sets(data))


def _by_size(
    few: RunConfig, large: RunConfig | None, overrides: dict[str, str], align_with: Path | None
) -> tuple[RunConfig, Path | None]:
    """Return the settings for the photos, and the pack that aligns them. ``large``: for large sets, None if the user
    named the recipe; otherwise the bundled pack aligns photos that are no crops. A started run keeps its settings."""
    if (few.output / CHECKPOINT).is_file():  # photos may have been added since
        started = read_run_config(few.output)
        return started, align_with or (None if started.data.aligned or large is None else BUNDLED_PACK)
    data = few.overridden({key: value for key, value in overrides.items() if key.startswith("data.")}).data
    listed = list_identities(data)
    if large is not None and align_with is None and listed.read(0).shape[:2] != (data.crop_px, data.crop_px):
        align_with = BUNDLED_PACK
    chosen = sized(few, len(listed.names), len(listed))
    if large is not None and len(listed) >= SMALL_SET_IMAGES:
        chosen = large
    log.info("recipe %s for %d photos of %d people", chosen.name, len(listed), len(listed.names))
    return replace(chosen, data=replace(chosen.data, aligned=align_with is None)), align_with


@app.command()
def resume(
    output: Annotated[Path, typer.Argument(help="The run's folder.", exists=True, file_okay=False)],
    settings: Settings = None,
    align_with: AlignWith = None,
    threads: Threads = None,
) -> None:
    """Resume a stopped run. Epochs, data.root, data.workers and loop.sharded_checkpoint may change by --set."""
    _train(replace(read_run_config(output).overridden(_settings(settings)), output=output), align_with, threads)


def _settings(settings: list[str] | None, option: str = "--set") -> dict[str, str]:
    pairs = [text.partition("=") for text in settings or ()]
    if bad := [key for key, equals, _ in pairs if not equals]:
        raise ConfigError(f"{option} needs section.key=value, not {bad[0]!r}")
    return {key: value for key, _, value in pairs}


def _train(config: RunConfig, align_with: Path | None, threads: int | None) -> None:
    torch.set_num_threads(threads or max(1, available_cores() // distributed.configured_world_size()))
    with distributed.process_group():
        checkpoint: Checkpoint = train_recognizer(config, None if align_with is None else _detector_of(align_with))
        if distributed.rank() == 0:
            print(f"{checkpoint.path}: step {checkpoint.step}, last loss {checkpoint.loss:.4f}")


@app.command()
def losses() -> None:
    """List every head and term with its options."""
    for title, key, factories in (("Head", "head.OPTION", HEADS), ("Term", "terms.NAME.OPTION", TERMS)):
        table = Table(title, f"Options (--set {key}=...)")
        for name, factory in factories.items():
            table.add_row(name, ", ".join(f"{k}={v}" for k, v in list_options(factory).items()))
        Console().print(table)


@app.command(name="bounds")
def print_bounds(
    classes: Annotated[int, typer.Option(min=3, help="Number of classes C.")],
    dimension: Annotated[int, typer.Option(min=2, help="Embedding dimension d.")] = 512,
    probability: Annotated[float, typer.Option(help="Target probability of a class center.")] = 0.9,
) -> None:
    """Print the papers' bounds of scale s and margin m for a number of classes."""
    if not 0 < probability < 1:
        raise ConfigError(f"--probability must be between 0 and 1, not {probability}")
    figures = [
        (f"CosFace: minimum s for P = {probability:g}", bounds.cosface_scale_bound(classes, probability)),
        (f"L2-softmax: minimum alpha for P = {probability:g}", bounds.l2_softmax_alpha_bound(classes, probability)),
        ("AdaCos: fixed s, sqrt(2) ln(C - 1)", bounds.fixed_scale(classes)),
        ("s of the steepest P at 45 degrees", bounds.steepest_scale(classes)),
        ("CosFace: m must stay below", bounds.cosface_margin_bound(classes, dimension)),
        ("NormFace: minimum loss at s = 64", bounds.normface_loss_bound(classes, 8.0)),
    ]
    with contextlib.suppress(ValueError):  # too few classes have no inflection
        figures.insert(3, ("s of an inflection of P at 45 degrees", bounds.inflection_scale(classes)))
    print_figures([(name, f"{value:.4g}") for name, value in figures])


@app.command()
def compare(
    data: Data,
    output: Output,
    losses: Annotated[
        list[str] | None, typer.Argument(help=f"Any of: {', '.join(PUBLISHED_LOSSES)}. Default: all.")
    ] = None,
    epochs: Annotated[int, typer.Option(min=1)] = 4,
    people: Annotated[int, typer.Option(min=2, help="Number of people.")] = COMPARISON_PEOPLE,
    seeds: Annotated[int, typer.Option(min=1, help="Runs per loss, for mean ± standard deviation.")] = 1,
    settings: Settings = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(help="section.key=A,B,C: train each loss with each value, and each combination. Repeatable."),
    ] = None,
    pack: Annotated[Path, typer.Option(help="Pack whose detector aligns LFW and unaligned photos.")] = BUNDLED_PACK,
    threads: Threads = None,
) -> None:
    """Train the papers' losses on one subset and budget, and print a comparison."""
    chosen = losses or list(PUBLISHED_LOSSES)
    if unknown := set(chosen) - set(PUBLISHED_LOSSES):
        raise ConfigError(f"unknown loss {', '.join(sorted(unknown))}. Losses: {', '.join(PUBLISHED_LOSSES)}")
    torch.set_num_threads(threads or available_cores())
    # Commas within brackets belong to a value, such as backbone.widths=[16,16,16],[32,32,32].
    points = {key: re.split(r",(?![^\[]*\])", text) for key, text in _settings(grid, "--grid").items()}
    if len(points) < len(grid or ()):
        raise ConfigError("--grid names a setting twice. Name all of its values once, separated by commas")
    detection, shared = load_pack(pack).detection, _settings(settings)
    print(compare_losses(chosen, data, output, detection, epochs, people, seeds, shared, points))


Live = Annotated[Path, typer.Option(help="Folder of photos of live people.", exists=True, file_okay=False)]
Attack = Annotated[
    Path, typer.Option(help="Folder of attacks, a sub-folder per instrument.", exists=True, file_okay=False)
]


@app.command()
def evaluate_liveness(
    pack: Annotated[Path, typer.Argument(help="Pack with a liveness network.", exists=True)],
    live: Live,
    attack: Attack,
) -> None:
    """Measure a pack's liveness network on photos of other people: APCER and BPCER (ISO/IEC 30107-3)."""
    print_figures(measure_liveness(load_pack(pack), live, attack))


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Finished run.", exists=True, file_okay=False)],
    output: Annotated[Path, typer.Option(help="ONNX file to write.")],
    precision: Annotated[ExportPrecision, typer.Option(help="fp32, or fp16 (weights only).")] = "fp16",
) -> None:
    """Export a run as ONNX, checked against torch on the run's own crops."""
    worst = export_run(run, output, precision)
    print(f"{output}: {output.stat().st_size / 1e6:.2f} MB, worst cosine to torch {worst:.6f}")


@app.command()
def import_weights(
    weights: Annotated[Path, typer.Argument(help="model.pt or checkpoint_gpu_0.pt.", exists=True, dir_okay=False)],
    backbone: Annotated[BackboneName, typer.Option(help=f"One of: {', '.join((*DEPTHS, 'mobilefacenet'))}.")],
    output: Annotated[Path | None, typer.Option(help="Folder to write; default: runs/NAME of the file.")] = None,
) -> None:
    """Read the weights of arcface_torch, to evaluate, export, pack, or continue by --set backbone.weights=FOLDER."""
    output = output or Path("runs") / weights.stem
    classes = arcface_torch.import_weights(weights, backbone, output)
    print(f"{output}: {backbone}, {f'{classes:,} class centers' if classes else 'without class centers'}")


@app.command()
def export_weights(
    run: Annotated[Path, typer.Argument(help="Finished run.", exists=True, file_okay=False)],
    output: Annotated[Path, typer.Option(help="File to write, such as model.pt.")],
    classes: Annotated[
        bool, typer.Option("--classes", help="Write the checkpoint of one rank, with the class centers.")
    ] = False,
) -> None:
    """Write a run's weights for arcface_torch."""
    arcface_torch.export_weights(run, output, classes)
    print(f"{output}: {output.stat().st_size / 1e6:.1f} MB")


@app.command()
def pack(
    data: Data,
    output: Output,
    recognizer: Annotated[Path, typer.Option(help="Finished run.")],
    detector_of: Annotated[Path, typer.Option(help="Pack whose detector is reused.")] = BUNDLED_PACK,
    name: Annotated[
        str | None, typer.Option(help="Name: letters, digits, '.', '_' or '-'. Default: that of the output folder.")
    ] = None,
    display_name: Annotated[str | None, typer.Option(help="Name for people. Default: --name.")] = None,
    precision: Annotated[ExportPrecision, typer.Option(help="Precision of the recognizer: fp32 or fp16.")] = "fp16",
    data_terms: Annotated[
        str | None, typer.Option(help="Terms of the recognizer's training photos, for the model card.")
    ] = None,
) -> None:
    """Export a run, calibrate, measure, and write a pack with its model card."""
    name = name or output.resolve().name
    networks, names = (recognizer, load_pack(detector_of)), (name, display_name or name)
    print_figures(pack_rows(make_pack(*networks, data, output, *names, data_terms, precision)))


@app.command()
def measure(
    pack: Annotated[Path, typer.Argument(help="Pack, or unversioned directory of ONNX files.")],
    data: Data,
    output: Annotated[Path, typer.Option(help="JSON file to write.")],
) -> None:
    """Calibrate and measure a third-party pack, and write the evidence as JSON."""
    evidence = measure_pack(load_pack(pack), data)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(evidence) + "\n", encoding="utf-8")
    print_figures(pack_rows(replace(load_pack(pack), metrics=evidence["metrics"])))


@app.command()
def calibrate(
    context: typer.Context,
    pack: Annotated[Path, typer.Argument(help="Pack, or unversioned directory of ONNX files.")],
    data: Annotated[Path, typer.Option(help=IDENTITIES, exists=True)],
    folder: Folder = False,
    aligned: Annotated[bool, typer.Option("--aligned", help="Photos are aligned crops of the pack's size.")] = False,
    max_photos_per_person: Annotated[
        int | None, typer.Option(min=2, help="Maximum number of photos per person.")
    ] = None,
    note: Annotated[str, typer.Option(help="Description of the photos, for the record.")] = "",
) -> None:
    """Calibrate a pack on photos of your own people."""
    records = data.suffix == ".rec"
    _refuse_without_effect(
        context,
        folder=(not records, "a folder; a .rec file has its own list of people"),
        aligned=(not records, "a folder; photos of a .rec file are always aligned crops"),
    )
    config = DataConfig(data, None if folder or records else "manifest.csv", aligned=aligned or records, min_images=1)
    done = calibrate_pack(pack, config, max_photos_per_person, note)
    print_figures(describe_calibration(done.calibration or {}))


@app.command()
def evaluate(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(help="Run, pack, directory of ONNX files, or exported recognizer.onnx.")],
    data: Annotated[Path | None, typer.Option(help="Folder with lfw and wider.", exists=True, file_okay=False)] = None,
    people: Annotated[
        Path | None,
        typer.Option(help="Your photos: one folder per person, folder with manifest.csv, or .rec file.", exists=True),
    ] = None,
    aligned: Annotated[
        bool, typer.Option("--aligned", help="Photos of --people are aligned crops of the model's size.")
    ] = False,
    pairs: Annotated[
        Path | None, typer.Option("--worst-pairs", help="Picture (PNG) of the worst pairs of --people to write.")
    ] = None,
    view1: Annotated[bool, typer.Option(help="LFW View 1 only, for selecting settings.")] = False,
    report: Annotated[Path | None, typer.Option(help="Report to write: NAME.json, with a picture NAME.png.")] = None,
    pack: Annotated[
        Path, typer.Option(help="For a run or exported recognizer: pack whose detector aligns photos.")
    ] = BUNDLED_PACK,
    flip: Annotated[bool, typer.Option("--flip", help="For a run: average with the mirror image.")] = False,
    norms: Annotated[
        bool, typer.Option("--norms", help="For a run, with --ijb: weight photos by the length of their embedding.")
    ] = False,
    bins: Annotated[list[Path] | None, typer.Option("--bin", help="LFW-style .bin set; repeatable.")] = None,
    ijb: Annotated[Path | None, typer.Option(help="Folder in the layout of IJB-B and IJB-C.")] = None,
    probes: Annotated[Path | None, typer.Option(help="MegaFace protocol: folder with one folder per person.")] = None,
    distractors: Annotated[Path | None, typer.Option(help="MegaFace protocol: folder of other people.")] = None,
    refined: Annotated[Path | None, typer.Option(help="MegaFace protocol: list of photos to leave out.")] = None,
    ytf: Annotated[Path | None, typer.Option(help="Folder of YouTube Faces, with splits.txt.")] = None,
    iqiyi: Annotated[Path | None, typer.Option(help="Folder of iQIYI-VID, or one of its parts.")] = None,
    frames: Annotated[
        int, typer.Option(min=1, max=1000, help="With --ytf and --iqiyi: frames of a video, evenly spaced.")
    ] = 20,
    trillion: Annotated[
        Path | None, typer.Option("--trillion-pairs", help="Folder of Trillion-Pairs, with testdata_lmk.txt.")
    ] = None,
    features: Annotated[
        Path | None, typer.Option(help="With --trillion-pairs: file to write the embeddings to, for DeepGlint.")
    ] = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="For a pack: replace the figures of its card.")] = False,
) -> None:
    """Evaluate a run, pack or recognizer on your photos, LFW, WIDER FACE (packs) and other benchmarks.

    Without a benchmark, a run is measured on the people and photos that it held out.
    """
    is_run = (model / CONFIG).is_file()
    others = Benchmarks(bins or (), ijb, probes, distractors, refined, ytf, iqiyi, trillion, features, frames)
    named = others or people
    if data is None and not named and not is_run:
        raise ConfigError(
            "Name a benchmark: --people, --data, --bin, --ijb, --probes and --distractors, --ytf, --iqiyi or "
            "--trillion-pairs"
        )
    if (probes is None) != (distractors is None):
        raise ConfigError("--probes and --distractors need each other")
    torch.set_num_threads(available_cores())
    alone = is_run or model.suffix == ".onnx"
    if data is not None and model.suffix == ".onnx":
        raise ConfigError("--data needs a run or a pack. Measure a network alone on --people")
    if refresh and (is_run or data is None or view1):
        raise ConfigError("--refresh needs a pack and --data, without --view1")
    found_by_detector = any((data, people and not aligned, ijb, probes, ytf, iqiyi, trillion))
    _refuse_without_effect(
        context,
        aligned=(people, "--people"),
        pairs=(people, "--people"),
        view1=(data, "--data"),
        report=(is_run or people or data, "a run, --people or --data; other benchmarks are only printed"),
        pack=(
            alone and found_by_detector,
            "a run or an .onnx file, and photos whose faces are to be found, such as --data or unaligned --people",
        ),
        flip=(alone, "a run or an .onnx file; a pack is measured as served"),
        norms=(is_run and ijb, "a run and --ijb"),
        refined=(probes, "--probes and --distractors"),
        frames=(ytf or iqiyi, "--ytf or --iqiyi"),
        features=(trillion, "--trillion-pairs"),
    )
    if report is not None and report.suffix != ".json":
        raise ConfigError(f"--report must end with .json, not {report.name!r}")
    if report is not None and view1 and not is_run:
        raise ConfigError("the report of a pack shows LFW View 2. Leave out --view1, or --report")
    cache = crop_cache(model if is_run else load_pack(model)) if model.suffix != ".onnx" else Path("runs/cache")
    figures: list[tuple[str, str]] = []
    aligner, own = pack if alone else model, list[MeasuredPeople]()
    if people is not None:
        photos = own_photos(people, aligned)
        of_detector = cache / sha256_of(load_pack(aligner).detection.path)[:16]
        own = [measure_folder(*load_embedder(model), _detector_of(aligner), photos, of_detector, flip)]
        figures += people_figures(own)
        if pairs is not None:
            write_worst_pairs(pairs, own)
    if is_run and (data is not None or report is not None or not named):
        figures += report_run(model, data, load_pack(pack).detection, report, flip, view1, own)
    elif data is not None:
        if refresh:
            measured = refresh_pack(model, data)
        else:
            measured = replace(load_pack(model), metrics=evaluate_pack(load_pack(model), data, cache, view1))
        figures += pack_rows(measured)
        if report is not None:
            write_pack_report(report, load_pack(model), data / "lfw", cache, own)
    elif report is not None and own:
        write_report(report, model.name, people=own)
    if others:
        figures += evaluate_other_benchmarks(
            *load_embedder(model),
            _detector_of(aligner),
            cache,
            others,
            flip,
            load_embedder(model, normalized=False)[0] if norms else None,
        )
    print_figures(figures)


def print_figures(figures: list[tuple[str, str]]) -> None:
    table = Table("Measure", "Value")
    for name, value in figures:
        table.add_row(name, value)
    Console().print(table)


def _refuse_without_effect(context: typer.Context, **needs: tuple[object, str]) -> None:
    """Raise ConfigError for an option that was given and has no effect. ``needs``: by parameter, whether what it needs
    is given, and what that is."""
    for parameter in context.command.params:
        met, needed = needs.get(parameter.name or "", (True, ""))
        source = context.get_parameter_source(parameter.name or "")
        if not met and source is not None and source.name != "DEFAULT":
            option = parameter.opts[0]
            raise ConfigError(f"{option} would need {needed}, and has no effect here. Add it, or leave {option} out")


def _detector_of(pack: Path) -> Detector:
    spec = load_pack(pack).detection
    return Detector(OnnxNetwork(spec.path), spec)
