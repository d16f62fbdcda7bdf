"""Redraw the figures of the margin-loss papers: ``python -m tools.paper_figures OUTPUT [RUN ...]``.

Without runs it draws those that need no data, in a minute of one core; with runs also their angles. Toys are eight
people, random patterns of 16x16 pixels, with embeddings of two dimensions.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple, cast

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

from training.bounds import cosface_scale_bound, fixed_scale, normface_loss_bound
from training.config import ConfigError, HeadConfig, Option
from training.evaluation.metrics import Floats, Ints
from training.evaluation.plots import BLUE, GRAY, GREEN, VERMILION, png, read_columns, style_axes
from training.losses import build_head
from training.losses.core import CosineHead
from training.losses.margins import ArcFace, CombinedMargin, CosFace, NormFace, SphereFace
from training.losses.softmax import psi
from training.optimization.logs import ANGLE_BINS
from training.optimization.monitor import angle_window
from training.optimization.run_folder import ANGLES, LOSSES

COLORS: Final = ("#E69F00", "#56B4E9", BLUE, "#F0E442", GREEN, VERMILION, "#CC79A7", "#000000")
PEOPLE, IMAGES, SIDE_PX, STEPS, BATCH, RATE = 8, 150, 16, 400, 128, 3e-3
Curves = Mapping[str, Floats]
CLASSES: Final = 10_575
"""Of CASIA, with which the papers draw."""
HEADS: Final[Mapping[str, CosineHead]] = {  # of ArcFace's figures 4(b) and 5, at the values of its section 3.2
    "softmax": NormFace(2, 2),
    "SphereFace m = 1.35": SphereFace(2, 2),
    "ArcFace m = 0.5": ArcFace(2, 2, beyond="continuous"),
    "CosFace m = 0.35": CosFace(2, 2),
    "CM1 (1, 0.3, 0.2)": CombinedMargin(2, 2, m1=1.0, m2=0.3, m3=0.2),
    "CM2 (0.9, 0.4, 0.15)": CombinedMargin(2, 2, m1=0.9, m2=0.4, m3=0.15),
}


def target_curve(head: CosineHead, angles_rad: Floats) -> Floats:
    """Return the unscaled target logit at each angle."""
    angles = torch.from_numpy(angles_rad)
    values: Floats = head.target_cosines(angles, torch.ones_like(angles)).numpy()
    return values


def probability(angles_rad: Floats, scale: float, margin_rad: float) -> Floats:
    """Return P of the target at each angle, with all other classes at right angles: AdaCos, section 3."""
    target = target_curve(ArcFace(2, 2, margin=margin_rad, beyond="continuous"), angles_rad)
    return np.asarray(1 / (1 + (CLASSES - 1) * np.exp(-scale * target)), np.float64)


def acceptance(target: Floats, plain: Floats) -> Floats:
    """Return (n, n) decision regions from the logits of two classes with and without margin, class 2 by rows: the class
    that satisfies its margin, 0 for none, 3 for both."""
    return np.asarray((target[None, :] >= plain[:, None]) + 2.0 * (target[:, None] >= plain[None, :]), np.float64)


def cosine_regions(cosines: Floats) -> Curves:
    """Return the regions of CosFace's figure 2 over ascending cosines."""
    angles = np.arccos(cosines)
    return {
        "softmax, ||W1|| = 1.5 ||W2||": np.where(1.5 * cosines[None, :] >= cosines[:, None], 1.0, 2.0),
        "NSL (NormFace)": acceptance(target_curve(NormFace(2, 2), angles), cosines),
        "A-softmax, m = 4": acceptance(psi(torch.from_numpy(cosines), 4).numpy(), cosines),
        "LMCL (CosFace), m = 0.35": acceptance(target_curve(CosFace(2, 2), angles), cosines),
    }


class Toy(NamedTuple):
    """Embeddings with labels, and class weights."""

    x_N2: Floats
    labels_N: Ints
    weights_C2: Floats


def train_toy(head: str, seed: int = 0, options: Mapping[str, Option] | None = None) -> Toy:
    """Train a small network with a head, in seconds. Equal seeds give equal results."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randn(PEOPLE, 1, 4, 4, generator=generator)
    people = F.interpolate(patterns, size=(SIDE_PX, SIDE_PX), mode="bilinear").flatten(1)
    labels = torch.arange(PEOPLE).repeat_interleave(IMAGES)
    others = (labels + torch.randint(1, PEOPLE, labels.shape, generator=generator)) % PEOPLE
    share = torch.rand(len(labels), 1, generator=generator) / 2
    noise = 0.6 * torch.randn(len(labels), SIDE_PX**2, generator=generator)
    images = (1 - share) * people[labels] + share * people[others] + noise
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = (nn.Linear(SIDE_PX**2, 128), nn.PReLU(), nn.Linear(128, 64), nn.PReLU(), nn.Linear(64, 2))
        network, loss = nn.Sequential(*layers), build_head(HeadConfig(head, options or {}), 2, PEOPLE)
        optimizer = torch.optim.AdamW([*network.parameters(), *loss.parameters()], RATE, weight_decay=5e-4)
        for step in range(STEPS):
            rows = torch.randint(len(images), (BATCH,))
            optimizer.param_groups[0]["lr"] = RATE * 0.5 * (1 + math.cos(math.pi * step / STEPS))
            optimizer.zero_grad()
            loss(network(images[rows]), labels[rows]).backward()
            optimizer.step()
    weights = cast(Tensor, loss.class_weights())
    x_N2, weights_C2 = (values.detach().double().numpy() for values in (network(images), weights))
    return Toy(x_N2, labels.numpy(), weights_C2)


def misleading_triple(toy: Toy) -> tuple[int, int, int]:
    """Return rows f1, f2, f3: f2 is of the person of f3, but much nearer to f1, of another (NormFace, figure 2)."""
    distances = np.linalg.norm(toy.x_N2[:, None] - toy.x_N2, axis=2)
    same = toy.labels_N[:, None] == toy.labels_N
    pair = np.unravel_index((distances * same).argmax(), same.shape)
    second, third = sorted(map(int, pair), key=lambda row: float(np.linalg.norm(toy.x_N2[row])))
    return int(np.where(same, np.inf, distances)[second].argmin()), second, third


def arcs_rad(toy: Toy) -> Floats:
    """Return (C, 2) ends of the arcs around the people's mean directions that cover 95 % of their embeddings."""
    found = []
    for person in range(PEOPLE):
        own = toy.x_N2[toy.labels_N == person]
        directions = np.arctan2(own[:, 1], own[:, 0])
        middle = np.arctan2(np.sin(directions).mean(), np.cos(directions).mean())
        found.append(middle + np.quantile(np.angle(np.exp(1j * (directions - middle))), [0.025, 0.975]))
    return np.array(found)


def draw_formulas() -> dict[str, Figure]:
    """Draw the figures of formulas: AdaCos 2 and 3, ArcFace 4b and 5, CosFace 2, and bounds of CosFace and NormFace."""
    theta, wide, cosines = np.linspace(0.001, math.pi / 2, 400), np.linspace(0.001, 3.14, 600), np.linspace(-1, 1, 401)
    named = {f"s = {s:g}": s for s in (5.0, 10.0, 20.0, 30.0, 64.0)}
    named[f"s = sqrt(2) ln(C - 1) = {fixed_scale(CLASSES):.2f}"] = fixed_scale(CLASSES)
    targets = {name: target_curve(head, wide) for name, head in HEADS.items()}
    targets["SphereFace psi m = 4, lambda = 5"] = (
        5 * np.cos(wide) + psi(torch.from_numpy(np.cos(wide)), 4).numpy()
    ) / 6
    margins = {f"m = {m:g}": probability(theta, 30.0, m) for m in (0.0, 0.2, 0.4, 0.6, 0.8)}
    plain = {name: head for name, head in HEADS.items() if not name.startswith("CM")}
    regions = {name: acceptance(target_curve(head, theta), np.cos(theta)) for name, head in plain.items()}
    s, p, counts = np.linspace(1, 40, 400), np.linspace(0.5, 0.999, 200), (10, 100, CLASSES, 100 * CLASSES)
    losses = {f"C = {c:,}": np.array([normface_loss_bound(c, math.sqrt(v)) for v in s]) for c in counts}
    least = {f"C = {c:,}": np.array([cosface_scale_bound(c, v) for v in p]) for c in counts}
    angle, degrees = "angle between feature and class center (degrees)", np.degrees(theta)
    bounds, (left, right) = panels("Minimum loss of a normalized softmax", "Minimum s for a probability")
    _lines(left, s, losses, "s", "loss")
    left.set(yscale="log", ylim=(1e-6, None))
    _lines(right, p, least, "P of a class center", "s")
    figures = {"bounds": bounds}
    for key, title, x, curves in (
        ("scales", "P of the target", degrees, {k: probability(theta, v, 0.0) for k, v in named.items()}),
        ("margins", "P of the target, s = 30", degrees, margins),
        ("target-logits", "Target logit / s", np.degrees(wide), targets),
    ):
        figures[key], (axes,) = panels(title)
        _lines(axes, x, curves, angle, "")
    for key, x, drawn in (("boundaries", degrees, regions), ("cosine-boundaries", cosines, cosine_regions(cosines))):
        figures[key], row = panels(*drawn)
        figures[key].suptitle("Blue: class 1, orange: class 2, gray: the margin between them, white: both classes")
        for axes, region in zip(row, drawn.values(), strict=True):
            levels = (-0.5, 0.5, 1.5, 2.5, 3.5)
            axes.contourf(x, x, region, levels=levels, colors=("#BBBBBB", "#CFE5F3", "#F7DDC9", "w"))
            axes.set(xlabel="class 1", ylabel="class 2", aspect="equal")
    return figures


def draw_toys() -> dict[str, Figure]:
    """Draw the figures of embeddings of two dimensions: NormFace 2 and 3, ArcFace 3."""
    softmax = train_toy("softmax_no_bias")
    plane, (axes, second) = panels("", "Longer embeddings are more certain")
    _scatter(axes, softmax)
    f1, f2, f3 = misleading_triple(softmax)
    for name, point in (("f1", f1), ("f2", f2), ("f3", f3)):
        axes.annotate(name, softmax.x_N2[point], weight="bold")
    near, far = (np.linalg.norm(softmax.x_N2[f2] - softmax.x_N2[point]) for point in (f1, f3))
    axes.set_title(f"|f1 - f2| = {near:.1f}, but\n|f2 - f3| = {far:.1f} of one person")
    ticks = np.linspace(-1, 1, 101) * np.abs(softmax.x_N2).max()
    logits = torch.from_numpy(np.stack(np.meshgrid(ticks, ticks), 2) @ softmax.weights_C2.T)
    drawn = second.contourf(ticks, ticks, logits.softmax(2)[:, :, softmax.labels_N[f2]].numpy(), cmap="Blues")
    plane.colorbar(drawn, ax=second, label="probability of the person of f2")
    bias, row = panels("softmax with bias", "on the unit circle")
    biased = train_toy("softmax", seed=2)  # of six, the seed with which a person comes nearest to zero
    _scatter(row[0], biased)
    _scatter(row[1], biased, on_circle=True)
    arcs, row = panels("softmax", "ArcFace, s = 16, m = 0.5")
    arcface = train_toy("arcface", options={"scale": 16.0, "margin": 0.5, "beyond": "continuous"})
    for axes, toy in zip(row, (softmax, arcface), strict=True):
        _scatter(axes, toy, on_circle=True)
        for color, (start, end), (x, y) in zip(COLORS, arcs_rad(toy), toy.weights_C2, strict=True):
            around = np.linspace(start, end, 30)
            axes.plot(1.15 * np.cos(around), 1.15 * np.sin(around), color=color, linewidth=4)
            axes.plot([0, x / math.hypot(x, y)], [0, y / math.hypot(x, y)], color=GRAY, linewidth=1)
    return {"plane": plane, "bias": bias, "arcs": arcs}


def draw_run(run: Path) -> Figure:
    """Draw histograms of a run's angles to class weights at start, middle and end: AdaCos, section 3; ArcFace, figure
    4a. Raises ConfigError if its head has no class weights."""
    if not (run / ANGLES).is_file():
        raise ConfigError(f"{run} logged no angles: its head holds no class weights, or a sample of them")
    counted, last = read_columns(run / ANGLES), int(read_columns(run / LOSSES)["step"][-1])
    windows = np.array([angle_window(int(step), last) for step in counted.pop("step")])
    counts = np.stack(list(counted.values()), 1).reshape(len(windows), 2, ANGLE_BINS)
    figure, row = panels("start", "middle", "end")
    figure.suptitle(f"{run.name}: blue: own class, red: other classes")
    for axes, window in zip(row, ("start", "middle", "end"), strict=True):
        for density, color in zip(counts[windows == window].sum(0), (BLUE, VERMILION), strict=True):
            edges = np.linspace(0, 180, ANGLE_BINS + 1)
            axes.stairs(density / max(1, density.sum()), edges, color=color, fill=True, alpha=0.4)
        axes.set(xlabel="angle to class weight (degrees)", xlim=(0, 140))
    return figure


def panels(*titles: str) -> tuple[Figure, list[Axes]]:
    """Return a figure with a panel for each title, in one row."""
    figure = Figure(figsize=(max(7.5, 3.6 * len(titles)), 4.4), layout="constrained")
    found = list(figure.subplots(1, len(titles), squeeze=False).ravel())
    for axes, title in zip(found, titles, strict=True):
        style_axes(axes, title, "", "")
    return figure, found


def _lines(axes: Axes, x: Floats, curves: Curves, x_label: str, y_label: str) -> None:
    for i, (label, values) in enumerate(curves.items()):
        axes.plot(x, values, ("-", "--", "-.", ":")[i % 4], label=label)
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.legend(framealpha=0.9, fontsize=8)


def _scatter(axes: Axes, toy: Toy, on_circle: bool = False) -> None:
    """Draw the embeddings; on the unit circle moved a little along the radius, so that they do not hide each other."""
    radii_N1 = 1 + 0.02 * np.random.default_rng(0).normal(size=(len(toy.x_N2), 1))
    unit_N2 = radii_N1 * toy.x_N2 / np.linalg.norm(toy.x_N2, axis=1, keepdims=True)
    points_N2 = unit_N2 if on_circle else toy.x_N2
    axes.scatter(points_N2[:, 0], points_N2[:, 1], c=toy.labels_N, s=3, cmap=ListedColormap(COLORS), antialiased=False)
    axes.set_aspect("equal")


def main() -> None:
    output, *runs = map(Path, sys.argv[1:])
    figures = draw_formulas() | draw_toys() | {f"run-angles-{run.name}": draw_run(run) for run in runs}
    output.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        (output / f"{name}.png").write_bytes(png(figure, 72))


if __name__ == "__main__":
    main()
