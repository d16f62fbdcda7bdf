"""Drawings of toys, runs and verification pairs; `training.evaluation.toy` and `run_angles` compute what they show."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from training.evaluation.metrics import Floats
from training.evaluation.plots import BLUE, GRAY, GREEN, VERMILION, style_axes
from training.evaluation.run_angles import BIN_DEG, PairAngles, RunAngles
from training.evaluation.toy import Toy, arcs_rad, gaps_deg, misleading_triple, shortest_person, train_toy
from training.optimization.logs import ANGLE_BINS

COLORS = ("#E69F00", "#56B4E9", BLUE, "#F0E442", GREEN, VERMILION, "#CC79A7", "#000000")
TOY_SEEDS = range(6)
RADIAL_JITTER = 0.02
GRID = 101


def plane() -> Figure:
    """Draw embeddings of softmax without bias, and the probability of one person (NormFace, figure 2)."""
    toy = train_toy("softmax_no_bias")
    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _scatter(left, toy, toy.x_N2)
    first, second, third = misleading_triple(toy)
    for name, row in (("f1", first), ("f2", second), ("f3", third)):
        left.annotate(name, toy.x_N2[row], (8, 8), textcoords="offset points", weight="bold")
        left.plot(*toy.x_N2[row], "o", markersize=9, markerfacecolor="none", markeredgecolor="black")
    near, far = (np.linalg.norm(toy.x_N2[second] - toy.x_N2[row]) for row in (first, third))
    left.set_title(f"|f1 - f2| = {near:.1f}, but |f2 - f3| = {far:.1f} of one person")
    limit = float(np.abs(toy.x_N2).max()) * 1.05
    ticks = np.linspace(-limit, limit, GRID)
    points = np.stack(np.meshgrid(ticks, ticks), 2).reshape(-1, 2)
    person = int(toy.labels_N[second])
    shown = toy.probability(person, points).reshape(GRID, GRID)
    drawn = right.contourf(ticks, ticks, shown, levels=np.linspace(0, 1, 11), cmap="Blues")
    figure.colorbar(drawn, ax=right, label=f"softmax probability of the person of f2 ({person})")
    right.set(title="Longer embeddings are more certain", aspect="equal")
    return figure


def bias() -> Figure:
    """Draw embeddings of softmax with bias, as they are and on the unit circle (NormFace, figure 3).

    Of TOY_SEEDS, the two toys in which a person is nearest to zero are shown, as the paper selected its two.
    """
    toys = sorted((train_toy("softmax", seed=seed) for seed in TOY_SEEDS), key=lambda toy: shortest_person(toy)[1])
    figure = Figure(figsize=(11, 3), layout="constrained")
    panels = figure.subplots(1, 4)
    for i, toy in enumerate(toys[:2]):
        person, share = shortest_person(toy)
        _scatter(panels[2 * i], toy, toy.x_N2)
        panels[2 * i].set_title(f"person {person}: {share:.0%} of the median length", fontsize=8)
        _circle(panels[2 * i + 1], toy)
        panels[2 * i + 1].set_title(f"normalized: {toy.accuracy(normalized=True):.1%} nearest to own mean", fontsize=8)
    return figure


def arcs() -> Figure:
    """Draw eight people on the unit circle with softmax and ArcFace (ArcFace, figure 3)."""
    toys = {
        "softmax": train_toy("softmax_no_bias"),
        "ArcFace, s = 16, m = 0.5": train_toy("arcface", {"scale": 16.0, "margin": 0.5, "beyond": "continuous"}),
    }
    figure = Figure(figsize=(8.4, 4.6), layout="constrained")
    for axes, (name, toy) in zip(figure.subplots(1, 2), toys.items(), strict=True):
        _circle(axes, toy)
        spans = arcs_rad(toy)
        for color, (start, end) in zip(COLORS, spans, strict=True):
            angles = np.linspace(start, end, 30)
            axes.plot(1.15 * np.cos(angles), 1.15 * np.sin(angles), color=color, linewidth=4)
        for weight in toy.weights_C2 / np.linalg.norm(toy.weights_C2, axis=1, keepdims=True):
            axes.plot([0, weight[0]], [0, weight[1]], color=GRAY, linewidth=1)
        gaps = gaps_deg(spans)
        axes.set_title(f"{name}\ngaps of {gaps.mean():.0f}° on average, {gaps.min():.0f}° at least")
    return figure


def run_angles(run: RunAngles) -> Figure:
    """Draw the angles and scale of a run over its steps, and their histograms at start, middle and end (AdaCos, section
    3; ArcFace, figure 4a)."""
    figure = Figure(figsize=(10, 6), layout="constrained")
    above, below = figure.subfigures(2, 1, squeeze=False)[:, 0]
    panels = above.subplots(1, 1 if run.scale is None else 2, squeeze=False)[0]
    style_axes(panels[0], run.name, "step", "mean angle (degrees)")
    panels[0].plot(run.steps, run.target, color=BLUE, label="own class")
    panels[0].plot(run.steps, run.other, color=VERMILION, label="other classes")
    panels[0].axhline(90, color=GRAY, linestyle=":", linewidth=1)
    panels[0].legend(frameon=False)
    if run.scale is not None:
        style_axes(panels[1], "Scale", "step", "s")
        panels[1].plot(run.steps, run.scale, color=GREEN)
    edges = np.arange(ANGLE_BINS + 1) * BIN_DEG
    for axes, (window, densities) in zip(
        below.subplots(1, len(run.densities), sharey=True, squeeze=False)[0], run.densities.items(), strict=True
    ):
        style_axes(axes, window, "angle to class weight (degrees)", "density" if window == "start" else "")
        for density, color, label in zip(densities, (BLUE, VERMILION), ("own class", "other classes"), strict=True):
            axes.stairs(density, edges, color=color, fill=True, alpha=0.4, label=label)
        axes.axvline(90, color=GRAY, linestyle=":", linewidth=1)
        axes.set_xlim(0, 140)
    return figure


def pair_angles(models: Mapping[str, Mapping[str, PairAngles]]) -> Figure:
    """Draw the angles of same-person and different-person pairs: a row per model (ArcFace, figure 6), a column per set
    (figure 7)."""
    sets = list(next(iter(models.values())))
    figure = Figure(figsize=(3.6 * len(sets), 0.5 + 2.3 * len(models)), layout="constrained")
    panels = figure.subplots(len(models), len(sets), sharex=True, squeeze=False)
    edges = np.arange(0, 131, 2.5).tolist()
    for row, (model, measured) in zip(panels, models.items(), strict=True):
        for axes, name in zip(row, sets, strict=True):
            pairs = measured[name]
            title = f"{model}, {name}: {pairs.overlap():.1%} wrong"
            style_axes(axes, "", "", "")
            axes.set_title(title, fontsize=8)
            for chosen, color, label in ((pairs.same, VERMILION, "same"), (~pairs.same, BLUE, "different")):
                axes.hist(pairs.angles[chosen], edges, density=True, color=color, alpha=0.5, label=label)
            axes.set_yticks([])
    for axes in panels[-1]:
        axes.set_xlabel("angle (degrees)")
    panels[0, 0].legend(frameon=False, title="person")
    return figure


def _scatter(axes: Axes, toy: Toy, points_N2: Floats) -> None:
    axes.scatter(points_N2[:, 0], points_N2[:, 1], c=toy.labels_N, s=3, cmap=ListedColormap(COLORS), antialiased=False)
    axes.plot(0, 0, "+", color="black", markersize=10)
    axes.set_aspect("equal")


def _circle(axes: Axes, toy: Toy) -> None:
    """Draw the embeddings on the unit circle, moved a little along the radius so that they do not hide each other."""
    unit_N2 = toy.x_N2 / np.linalg.norm(toy.x_N2, axis=1, keepdims=True)
    radii_N1 = 1 + RADIAL_JITTER * np.random.default_rng(0).normal(size=(len(unit_N2), 1))
    _scatter(axes, toy, unit_N2 * radii_N1)
    around = np.linspace(0, 2 * math.pi, 200)
    axes.plot(np.cos(around), np.sin(around), color=GRAY, linewidth=0.5)
