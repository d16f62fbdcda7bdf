"""Figures of the margin-loss papers, drawn from the training heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from training.bounds import cosface_scale_bound, fixed_scale, normface_loss_bound
from training.config import ConfigError
from training.evaluation.metrics import Floats
from training.evaluation.plots import png, read_columns
from training.losses import ArcFace, CombinedMargin, CosFace, CosineHead, NormFace, SphereFace
from training.losses.softmax import psi
from training.optimization.run_folder import LOSSES, read_run_config

SCALES = (5.0, 10.0, 20.0, 30.0, 64.0)
MARGINS_RAD = (0.0, 0.2, 0.4, 0.6, 0.8)
MARGIN_FIGURES_SCALE = 30.0
"""Scale of the margin figures in AdaCos."""


def _heads() -> Mapping[str, CosineHead]:
    """Return the margins of ArcFace's figures 4(b) and 5, at the values of its section 3.2."""
    return {
        "softmax": NormFace(2, 2),
        "SphereFace m = 1.35": SphereFace(2, 2),
        "ArcFace m = 0.5": ArcFace(2, 2, beyond="continuous"),
        "CosFace m = 0.35": CosFace(2, 2),
        "CM1 (1, 0.3, 0.2)": CombinedMargin(2, 2, m1=1.0, m2=0.3, m3=0.2),
        "CM2 (0.9, 0.4, 0.15)": CombinedMargin(2, 2, m1=0.9, m2=0.4, m3=0.15),
    }


def target_curve(head: CosineHead, angles_rad: Floats) -> Floats:
    """Return the unscaled target logit at each angle."""
    cosines = torch.from_numpy(np.cos(angles_rad))
    values: Floats = head.target_cosines(cosines, torch.ones_like(cosines)).numpy()
    return values


def probability(angles_rad: Floats, scale: float, margin_rad: float, classes: int) -> Floats:
    """Return P of the target at each angle, with all other classes at right angles: AdaCos, section 3."""
    target = target_curve(ArcFace(2, 2, margin=margin_rad, beyond="continuous"), angles_rad)
    return np.asarray(1 / (1 + (classes - 1) * np.exp(-scale * target)), np.float64)


def scales(classes: int) -> Figure:
    """Plot P against theta for several s (AdaCos, section 3.1)."""
    theta = np.linspace(0.001, math.pi / 2, 400)
    automatic = fixed_scale(classes)
    curves = {f"s = {s:g}": probability(theta, s, 0.0, classes) for s in SCALES}
    curves[f"s = sqrt(2) ln(C - 1) = {automatic:.2f}"] = probability(theta, automatic, 0.0, classes)
    return _curves(f"Probability of the target, C = {classes:,}, no margin", "P", theta, curves, last_bold=True)


def margins(classes: int) -> Figure:
    """Plot P against theta for several m at s = 30 (AdaCos, section 3.2)."""
    theta = np.linspace(0.001, math.pi / 2, 400)
    curves = {f"m = {m:g}": probability(theta, MARGIN_FIGURES_SCALE, m, classes) for m in MARGINS_RAD}
    return _curves(f"Probability of the target, C = {classes:,}, s = {MARGIN_FIGURES_SCALE:g}", "P", theta, curves)


def target_logits(_classes: int) -> Figure:
    """Plot the target logit against theta (ArcFace, figure 4b)."""
    theta = np.linspace(0.001, math.pi - 0.001, 600)
    curves = {name: target_curve(head, theta) for name, head in _heads().items()}
    original = psi(torch.from_numpy(np.cos(theta)), 4).numpy()
    curves["SphereFace psi m = 4, lambda = 5"] = np.asarray((5 * np.cos(theta) + original) / 6, np.float64)
    return _curves("Target logit by angle, before the scale", "target logit / s", theta, curves)


def boundaries(_classes: int) -> Figure:
    """Plot decision boundaries of two classes and the margin between them (ArcFace, figure 5)."""
    angles = np.linspace(0.001, math.pi / 2, 400)
    chosen = {k: v for k, v in _heads().items() if not k.startswith("CM")}
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    for axes, (name, head) in zip(figure.subplots(1, len(chosen), sharey=True), chosen.items(), strict=True):
        regions = acceptance(head, angles)
        degrees = np.degrees(angles)
        axes.contourf(
            degrees, degrees, regions, levels=(-0.5, 0.5, 1.5, 2.5, 3.5), colors=("#BBBBBB", "#CFE5F3", "#F7DDC9", "w")
        )
        axes.plot(degrees, degrees, linestyle=":", color="#666666", linewidth=1)
        axes.set(title=name, xlabel="angle to class 1 (degrees)", aspect="equal")
    figure.axes[0].set_ylabel("angle to class 2 (degrees)")
    figure.suptitle("Blue: class 1, orange: class 2, gray: the margin between them")
    return figure


def acceptance(head: CosineHead, angles_rad: Floats) -> Floats:
    """Return the (n, n) decision regions, theta_2 by rows and theta_1 by columns.

    1: class 1 satisfies its margin; 2: class 2 does; 0: neither; 3: both.
    """
    target, plain = target_curve(head, angles_rad), np.cos(angles_rad)
    first, second = target[None, :] >= plain[:, None], target[:, None] >= plain[None, :]
    return np.asarray(first + 2.0 * second, np.float64)


def bounds(classes: int) -> Figure:
    """Plot the minimum loss for a scale (NormFace, proposition 2) and the scale for a probability (CosFace)."""
    s = np.linspace(1, 40, 400)
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    counts = (10, 100, classes, 100 * classes)
    for count in counts:
        left.plot(s, [normface_loss_bound(count, math.sqrt(v)) for v in s], label=f"C = {count:,}")
    _style_axes(left, "Minimum loss of a normalized softmax", "s", "loss", log=True)
    probabilities = np.linspace(0.5, 0.999, 200)
    for count in counts:
        right.plot(probabilities, [cosface_scale_bound(count, p) for p in probabilities], label=f"C = {count:,}")
    _style_axes(right, "Minimum s for a probability", "P of a class center", "s")
    return figure


def adacos_scale(run: Path) -> Figure:
    """Plot the scale of AdaCos over a training run. Raises ConfigError if the run has another head."""
    head = read_run_config(run).head.name
    if head != "adacos":
        raise ConfigError(f"{run} has the head {head}. The figure adacos-scale needs a run with --head adacos")
    columns = read_columns(run / LOSSES)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(columns["step"], columns["scale"], label="s", color="#0072B2")
    _style_axes(axes, "AdaCos's scale over training", "step", "s")
    return figure


FIGURES: Mapping[str, Callable[[int], Figure]] = MappingProxyType(
    {"scales": scales, "margins": margins, "target-logits": target_logits, "boundaries": boundaries, "bounds": bounds}
)


def draw(name: str, folder: Path, classes: int, run: Path | None) -> list[Path]:
    """Write one figure, or all, as PNG. ``adacos-scale`` needs ``run``. Raises ConfigError on an unknown figure, or
    missing run."""
    known = (*FIGURES, "adacos-scale")
    if name not in (*known, "all"):
        raise ConfigError(f"unknown figure {name!r}. Figures: {', '.join(known)}, all")
    if name == "adacos-scale" and run is None:
        raise ConfigError("The figure adacos-scale needs --run with a run of the adacos head")
    figures = {k: make(classes) for k, make in FIGURES.items() if name in (k, "all")}
    if run is not None and (name == "adacos-scale" or (name == "all" and read_run_config(run).head.name == "adacos")):
        figures["adacos-scale"] = adacos_scale(run)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for key, figure in figures.items():
        paths.append(folder / f"{key}.png")
        paths[-1].write_bytes(png(figure))
    return paths


def _curves(title: str, y: str, theta_rad: Floats, curves: Mapping[str, Floats], last_bold: bool = False) -> Figure:
    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    axes = figure.subplots()
    styles: Sequence[str] = ("-", "--", "-.", ":", "-", "--", "-.")
    for i, (label, values) in enumerate(curves.items()):
        bold = last_bold and i == len(curves) - 1
        axes.plot(np.degrees(theta_rad), values, styles[i % len(styles)], label=label, linewidth=2.5 if bold else 1.5)
    _style_axes(axes, title, "angle between feature and class center (degrees)", y)
    return figure


def _style_axes(axes: Axes, title: str, x: str, y: str, log: bool = False) -> None:
    axes.set(title=title, xlabel=x, ylabel=y)
    if log:
        axes.set_yscale("log")
        axes.set_ylim(bottom=1e-6)
    axes.grid(alpha=0.3)
    axes.legend(framealpha=0.9)
