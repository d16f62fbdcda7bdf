"""``kith-train``: train, pack and measure."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from models.detection import Detector
from models.errors import ModelError
from models.pack import load_pack
from models.runtime import Network, available_cores
from training.config import ConfigError
from training.detection.fit import POLISH, DetectorLoopConfig
from training.evaluate import evaluate_pack
from training.export import ParityError
from training.loop import NonFiniteLossError
from training.recipes import RECIPES
from training.report import rows
from training.run import make_pack, train_detector, train_recogniser

app = typer.Typer(help="Train face networks and write them as a model pack.", no_args_is_help=True)
Data = Annotated[Path, typer.Option(help="Where the data lies.", exists=True, file_okay=False)]
Output = Annotated[Path, typer.Option(help="Where the run or pack is written.")]


@app.command()
def run(
    recipe: Annotated[str, typer.Argument(help=f"One of: {', '.join(RECIPES)}.")],
    data: Data,
    output: Output,
    head: Annotated[str | None, typer.Option(help="Another head: arcface, cosface, normface, adacos...")] = None,
    epochs: Annotated[int | None, typer.Option(help="Another number of epochs.")] = None,
    folder: Annotated[bool, typer.Option("--folder", help="DATA has a folder per person and no manifest.")] = False,
    align_with: Annotated[
        Path | None, typer.Option(help="Photos are no aligned crops: detect and align them with this pack.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Processor threads; default: all cores.")] = None,
) -> None:
    """Train a recogniser by a recipe; run again to resume."""
    if recipe not in RECIPES:
        raise ConfigError(f"there is no recipe {recipe!r}; known are {', '.join(RECIPES)}")
    torch.set_num_threads(threads or available_cores())
    config = RECIPES[recipe](data, output)
    if head is not None:
        config = replace(config, head=replace(config.head, name=head))  # type: ignore[arg-type]
    if epochs is not None:
        config = replace(config, loop=replace(config.loop, epochs=epochs))
    if folder:
        config = replace(config, data=replace(config.data, manifest=None))
    detector = None
    if align_with is not None:
        spec = load_pack(align_with).detection
        detector = Detector(Network(spec.path), spec)
        config = replace(config, data=replace(config.data, aligned=False))
    checkpoint = train_recogniser(config, detector)
    print(f"{checkpoint.path}: step {checkpoint.step}, last loss {checkpoint.loss:.4f}")


@app.command()
def detector(
    data: Data,
    output: Output,
    steps: Annotated[int | None, typer.Option(min=1, help="Another number of steps.")] = None,
    polish: Annotated[Path | None, typer.Option(help="Refine the landmarks of this finished detector run.")] = None,
    threads: Annotated[int | None, typer.Option(help="Processor threads; default: all cores.")] = None,
) -> None:
    """Train the detector; run again to resume."""
    torch.set_num_threads(threads or available_cores())
    loop = POLISH if polish else DetectorLoopConfig()
    train_detector(data, output, replace(loop, steps=steps or loop.steps), polish)


@app.command()
def pack(
    recogniser: Annotated[Path, typer.Option(help="A finished recogniser run.")],
    detector: Annotated[Path, typer.Option(help="A finished detector run.")],
    data: Data,
    output: Output,
    name: Annotated[str, typer.Option()] = "kith-compact",
    display_name: Annotated[str, typer.Option()] = "Kith compact",
    note: Annotated[str, typer.Option(help="For the model card: what the commands do not tell.")] = "",
) -> None:
    """Export two runs, calibrate, measure, and write the pack with its model card."""
    _print(rows(make_pack(recogniser, detector, data, output, name, display_name, note)))


@app.command()
def evaluate(
    pack: Annotated[Path, typer.Argument(help="A pack, or an unversioned directory of ONNX files.")],
    data: Data,
    view1: Annotated[bool, typer.Option(help="LFW View 1 only: for choosing settings.")] = False,
) -> None:
    """Measure a pack on LFW and WIDER FACE."""
    loaded = load_pack(pack)
    metrics = evaluate_pack(loaded, data, view1_only=view1)
    if view1:
        result = metrics["lfw_view1"]
        _print([("LFW View 1", f"{result['accuracy']['mean']:.2%}"), ("EER", f"{result['eer']:.2%}")])
    else:
        _print(rows(replace(loaded, metrics=metrics)))


def _print(figures: list[tuple[str, str]]) -> None:
    table = Table("Measure", "Value")
    for name, value in figures:
        table.add_row(name, value)
    Console().print(table)


def main() -> None:
    logging.basicConfig(level="INFO", format="%(levelname)s %(name)s: %(message)s")
    try:
        app()
    except (ConfigError, ModelError, ParityError, NonFiniteLossError) as error:
        Console(stderr=True).print(f"[red]error:[/red] {error}", highlight=False)
        raise SystemExit(2) from error
