"""Figures of the margin-loss papers, drawn from the training heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from models.vision.specs import DetectionSpec
from training.bounds import cosface_scale_bound, fixed_scale, normface_loss_bound
from training.config import ConfigError
from training.evaluation import measured_figures
from training.evaluation.metrics import Floats
from training.evaluation.plots import png
from training.evaluation.run_angles import measure_pair_angles, read_run_angles
from training.losses import ArcFace, CombinedMargin, CosFace, CosineHead, NormFace, SphereFace
from training.losses.softmax import psi
from training.optimization.run_folder import CONFIG

SCALES = (5.0, 10.0, 20.0, 30.0, 64.0)
MARGINS_RAD = (0.0, 0.2, 0.4, 0.6, 0.8)
MARGIN_FIGURES_SCALE = 30.0
"""Scale of the margin figures in AdaCos."""
REGION_LEVELS = (-0.5, 0.5, 1.5, 2.5, 3.5)
REGION_COLORS = ("#BBBBBB", "#CFE5F3", "#F7DDC9", "w")
"""Neither class, class 1, class 2, both: see `acceptance`."""
FIGURE_DPI = 72


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
        axes.contourf(degrees, degrees, regions, levels=REGION_LEVELS, colors=REGION_COLORS)
        axes.plot(degrees, degrees, linestyle=":", color="#666666", linewidth=1)
        axes.set(title=name, xlabel="angle to class 1 (degrees)", aspect="equal")
    figure.axes[0].set_ylabel("angle to class 2 (degrees)")
    figure.suptitle("Blue: class 1, orange: class 2, gray: the margin between them")
    return figure


def acceptance(head: CosineHead, angles_rad: Floats) -> Floats:
    """Return the (n, n) decision regions, theta_2 by rows and theta_1 by columns.

    1: class 1 satisfies its margin; 2: class 2 does; 0: neither; 3: both.
    """
    return _regions(target_curve(head, angles_rad), np.cos(angles_rad))


def _regions(target: Floats, plain: Floats) -> Floats:
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


def cosine_boundaries(_classes: int) -> Figure:
    """Plot decision boundaries of two classes over the cosines to their weights (CosFace, figure 2)."""
    cosines = np.linspace(-0.999, 0.999, 401)
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    for axes, (name, regions) in zip(figure.subplots(1, 4, sharey=True), cosine_regions(cosines).items(), strict=True):
        axes.contourf(cosines, cosines, regions, levels=REGION_LEVELS, colors=REGION_COLORS)
        axes.plot(cosines, cosines, linestyle=":", color="#666666", linewidth=1)
        axes.set(title=name, xlabel="cosine to class 1", aspect="equal")
    figure.axes[0].set_ylabel("cosine to class 2")
    figure.suptitle("Blue: class 1, orange: class 2, gray: the margin between them, white: both classes")
    return figure


def cosine_regions(cosines: Floats) -> dict[str, Floats]:
    """Return the decision regions of CosFace's figure 2, (n, n) as in `acceptance`, over ascending cosines."""
    angles = np.arccos(cosines)
    longer = 1.5 * cosines  # the logit of class 1, whose weight is longer
    first = longer[None, :] >= cosines[:, None]
    softmax = np.asarray(np.where(first, 1.0, 2.0), np.float64)
    original = psi(torch.from_numpy(cosines), 4).numpy()
    return {
        "softmax, ||W1|| = 1.5 ||W2||": softmax,
        "NSL (NormFace)": acceptance(NormFace(2, 2), angles),
        "A-softmax, m = 4": _regions(np.asarray(original, np.float64), cosines),
        "LMCL (CosFace), m = 0.35": acceptance(CosFace(2, 2), angles),
    }


FIGURES: Mapping[str, Callable[[int], Figure]] = MappingProxyType(
    {
        "scales": scales,
        "margins": margins,
        "target-logits": target_logits,
        "boundaries": boundaries,
        "cosine-boundaries": cosine_boundaries,
        "bounds": bounds,
        "plane": lambda _: measured_figures.plane(),
        "bias": lambda _: measured_figures.bias(),
        "arcs": lambda _: measured_figures.arcs(),
    }
)
RUN_FIGURE, PAIR_FIGURE = "run-angles", "pair-angles"
NAMES = (*FIGURES, RUN_FIGURE, PAIR_FIGURE)


@dataclass(frozen=True)
class Measured:
    """Inputs of the figures of measurements: runs (for pair-angles also packs), data, the detector of its photos."""

    models: Sequence[Path] = ()
    data: Path | None = None
    detection: DetectionSpec | None = None


def draw(name: str, folder: Path, classes: int, measured: Measured | None = None) -> list[Path]:
    """Write one figure, or all for which there are runs and data, as PNG.

    ``run-angles`` is drawn for each run, and ``pair-angles`` for all models together. Raises ConfigError: the figure is
    unknown, or lacks a run or data, or a run logged no angles.
    """
    measured = measured or Measured()
    if name not in (*NAMES, "all"):
        raise ConfigError(f"unknown figure {name!r}. Figures: {', '.join(NAMES)}, all")
    if name == RUN_FIGURE and not measured.models:
        raise ConfigError(f"The figure {RUN_FIGURE} needs --run with a run")
    if name == PAIR_FIGURE and not (measured.models and measured.data and measured.detection):
        raise ConfigError(f"The figure {PAIR_FIGURE} needs --run with a run or pack, and --data")
    figures = {k: make(classes) for k, make in FIGURES.items() if name in (k, "all")}
    runs = [model for model in measured.models if (model / CONFIG).is_file() or name == RUN_FIGURE]
    for run in runs if name in (RUN_FIGURE, "all") else ():
        figures[f"{RUN_FIGURE}-{run.name}"] = measured_figures.run_angles(read_run_angles(run))
    if name in (PAIR_FIGURE, "all") and measured.models and measured.data and measured.detection:
        cache = (runs[0].parent if runs else Path("runs")) / "cache"
        angles = {
            model.name: measure_pair_angles(model, measured.data, measured.detection, cache)
            for model in measured.models
        }
        figures[PAIR_FIGURE] = measured_figures.pair_angles(angles)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for key, figure in figures.items():
        paths.append(folder / f"{key}.png")
        paths[-1].write_bytes(png(figure, FIGURE_DPI))
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
