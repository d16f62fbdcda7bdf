"""Commands of ``kith-train`` that need no torch and start in a fraction of a second."""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from training import bounds
from training.config import ConfigError

app = typer.Typer()


@app.callback()
def _several() -> None:
    """Keep the name of the only command on the command line."""


@app.command(name="bounds")
def bounds_command(
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


def print_figures(figures: list[tuple[str, str]]) -> None:
    table = Table("Measure", "Value")
    for name, value in figures:
        table.add_row(name, value)
    Console().print(table)
