"""Plots of runs and benchmarks with matplotlib: arrays in, a Figure out.

Colors are from the color-blind safe palette of M. Okabe and K. Ito.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Figure  # re-exported for callers that only pass figures on
from matplotlib.ticker import FuncFormatter, PercentFormatter
from numpy.typing import NDArray
from scipy.stats import norm

from training.data.folders import read_list
from training.evaluation.metrics import Bools, Floats, Roc, fnir_curve, roc

BLUE: Final = "#0072B2"
VERMILION: Final = "#D55E00"
GREEN: Final = "#009E73"
GRAY: Final = "#666666"
DET_TICKS: Final = (0.0001, 0.001, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8)
FIRST_PANELS: Final[tuple[str, ...]] = (
    "loss",
    "margin_share",
    "accuracy",
    "target_angle_deg",
    "scale",
    "learning_rate",
)
"""Panels at the top, two per line: the margin beside the loss, which it raises."""
SMOOTHED_SHARE: Final = 0.02
"""Window of the moving average of a loss curve, as a share of all steps."""


def png(figure: Figure, dpi: int = 120) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, pil_kwargs={"optimize": True})
    return buffer.getvalue()


def loss_curves(csv_path: Path) -> Figure:
    """Plot one panel per column of a run's losses.csv (``step``, ``loss``, ``learning_rate``, ``scale``...).

    Losses and the accuracy also get a moving average. Losses are shaded where the margin grows, since it raises them.
    """
    columns = read_columns(csv_path)
    steps = columns.pop("step")
    names = [name for name in FIRST_PANELS if name in columns]
    names += [name for name in columns if name not in names]
    figure = Figure(figsize=(12, 1 + 2 * math.ceil(len(names) / 2)), layout="constrained")
    window = max(1, round(SMOOTHED_SHARE * len(steps)))
    warmup = steps[columns["margin_share"] < 1] if "margin_share" in columns else steps[:0]
    panels = figure.subplots(math.ceil(len(names) / 2), min(2, len(names)), sharex=True, squeeze=False).ravel()
    for axes, name in zip(panels, names, strict=False):
        values, noisy = columns[name], "loss" in name or name == "accuracy"
        style_axes(axes, "", "step" if name in names[-2:] else "", name.replace("_", " "))
        axes.plot(steps, values, color=BLUE, alpha=0.3 if noisy else 1, linewidth=0.8 if noisy else 1.5)
        if noisy:
            mean = np.full(window, 1 / window)
            axes.plot(np.convolve(steps, mean, "valid"), np.convolve(values, mean, "valid"), color=BLUE)
        if "loss" in name and len(warmup):
            axes.axvspan(warmup[0], warmup[-1], color=GRAY, alpha=0.15, label="the margin grows, and raises the loss")
            axes.legend(loc="upper right", frameon=False)
    for lowest in panels[max(0, len(names) - 2) : len(names)]:
        lowest.tick_params(labelbottom=True)
    for unused in panels[len(names) :]:
        unused.set_visible(False)
    figure.suptitle(f"Training: each step, and the moving average of {window}")
    return figure


def curves(similarities: Floats, same: Bools, threshold: float, chosen_on: str, hits: Floats, alarms: Floats) -> Figure:
    """Draw pairs as histograms, ROC and DET, and the open set as FNIR against FPIR. ``hits`` and ``alarms`` as
    `fnir_curve` takes them."""
    figure = Figure(figsize=(11.2, 8.4), layout="constrained")
    histograms, roc_axes, det_axes, open_set = figure.subplots(2, 2).ravel()
    draw_histograms(histograms, similarities, same, threshold, chosen_on)
    curve = roc(similarities, same)
    draw_roc(roc_axes, curve)
    draw_det(det_axes, curve)
    draw_fnir(open_set, fnir_curve(hits, alarms))
    return figure


def draw_roc(axes: Axes, curve: Roc) -> None:
    """Plot TAR against FAR on a logarithmic axis."""
    style_axes(axes, "ROC", "false acceptances (FAR)", "true acceptances (TAR)")
    shown = curve.fmr > 0
    axes.step(curve.fmr[shown], curve.tar[shown], where="post", color=BLUE)
    _log_percent(axes)
    axes.set_ylim(min(0.9, float(curve.tar[shown][0]) - 0.05), 1.005)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.annotate(f"area {curve.auc:.4f}", (0.97, 0.05), xycoords="axes fraction", ha="right")


def draw_det(axes: Axes, curve: Roc) -> None:
    """Plot FNMR against FMR on normal-deviate axes (A. Martin et al., "The DET curve", Eurospeech 1997).

    Normally distributed similarities give a straight line.
    """
    style_axes(axes, "DET", "false match rate (FMR)", "false non-match rate (FNMR)")
    # A rate of 0 or 1 lies at infinity.
    shown = (curve.fmr > 0) & (curve.fmr < 1) & (curve.fnmr > 0) & (curve.fnmr < 1)
    axes.plot(norm.ppf(curve.fmr[shown]), norm.ppf(curve.fnmr[shown]), color=BLUE)
    rates = np.concatenate([curve.fmr[shown], curve.fnmr[shown]])
    ends = norm.ppf([min([0.001, *rates]), 0.8])
    axes.plot(ends, ends, color=GRAY, linestyle=":", linewidth=1, label="equal rates")
    axes.legend(loc="upper right", frameon=False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(
            norm.ppf(DET_TICKS), [f"{tick:.2%}" if tick < 1e-3 else f"{100 * tick:g}%" for tick in DET_TICKS]
        )
    axes.set_xlim(*ends)
    axes.set_ylim(*ends)


def draw_histograms(axes: Axes, similarities: Floats, same: Bools, threshold: float, chosen_on: str) -> None:
    """Plot densities of mated and non-mated similarities, and the threshold with its origin ``chosen_on``."""
    style_axes(axes, "Similarities of pairs", "cosine similarity", "density")
    edges = np.linspace(min(-0.2, float(similarities.min())), 1, 71)
    for kind, color, hatch, name in ((~same, VERMILION, "", "non-mated"), (same, BLUE, "///", "mated")):
        axes.hist(
            similarities[kind],
            edges.tolist(),
            density=True,
            histtype="stepfilled",
            facecolor=(color, 0.25),
            edgecolor=color,
            hatch=hatch,
            label=f"{name} ({int(kind.sum()):,})",
        )
    axes.axvline(threshold, color="black", linestyle="--", label=f"threshold {threshold:.3f}, {chosen_on}")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.3)  # room for the legend
    axes.legend(loc="upper right", framealpha=1, edgecolor="white")


def draw_fnir(axes: Axes, curve: Roc) -> None:
    """Plot the open-set trade-off at rank 1, from `fnir_curve`, FPIR on a logarithmic axis."""
    style_axes(
        axes,
        "Open-set identification",
        "false positive identification rate (FPIR)",
        "false negative identification rate (FNIR)",
    )
    shown = curve.fmr > 0
    axes.step(curve.fmr[shown], curve.fnmr[shown], where="post", color=BLUE)
    _log_percent(axes)
    axes.set_ylim(0, max(0.01, min(1.0, 1.1 * float(curve.fnmr[shown].max()))))
    axes.yaxis.set_major_formatter(PercentFormatter(1))


def pair_sheet(lines: Mapping[str, Sequence[tuple[NDArray[np.uint8], str]]]) -> Figure:
    """Draw titled lines of pictures, each (h, w, 3) uint8 RGB with a caption, the first at the left."""
    width = max(len(pictures) for pictures in lines.values())
    figure = Figure(figsize=(2.6 * width, 2.2 * len(lines)), layout="constrained")
    parts = figure.subfigures(len(lines), 1, squeeze=False)[:, 0]
    for part, (title, pictures) in zip(parts, lines.items(), strict=True):
        part.suptitle(title)
        for axes in (panels := part.subplots(1, width, squeeze=False)[0]):
            axes.axis("off")
        for axes, (picture, caption) in zip(panels, pictures, strict=False):
            axes.imshow(picture)
            axes.set_title(caption, fontsize=7, parse_math=False)
    return figure


def style_axes(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _log_percent(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{100 * rate:g}%"))


def read_columns(csv_path: Path) -> dict[str, Floats]:
    """Return the columns of a log of a run. Raises ConfigError if it is missing."""
    rows = list(csv.DictReader(read_list(csv_path).splitlines()))
    return {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}
