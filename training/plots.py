"""Figures of a run or a benchmark. The only place that draws them with matplotlib; arrays in, a Figure out.

Colours are from the palette of M. Okabe and K. Ito, which colour-blind people can tell apart.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Figure  # for those who only pass figures on
from matplotlib.ticker import FuncFormatter, PercentFormatter
from scipy.stats import norm

from training.config import ConfigError
from training.metrics import Bools, Floats, FnirCurve, Roc

BLUE: Final = "#0072B2"
VERMILION: Final = "#D55E00"
GREEN: Final = "#009E73"
GREY: Final = "#666666"
DET_TICKS: Final = (0.0001, 0.001, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8)
CMC_TICKS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
SMOOTHED_SHARE: Final = 0.02
"""Of all steps, in the running mean of a loss curve."""


def png(figure: Figure, dpi: int = 120) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def loss_curves(csv_path: Path) -> Figure:
    """One panel a column of a run's losses.csv (``step``, ``loss``, ``learning_rate``, ``scale``...): every step, and
    the running mean of losses.

    Raises:
        ConfigError: the file is absent, has no step, or holds something other than numbers.
    """
    columns = read_columns(csv_path)
    steps = columns.pop("step")
    figure = Figure(figsize=(8, 1 + 2 * len(columns)), layout="constrained")
    window = max(1, round(SMOOTHED_SHARE * len(steps)))
    panels = figure.subplots(len(columns), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, values) in zip(panels, columns.items(), strict=True):
        _dress(axes, "", "", name.replace("_", " "))
        noisy = "loss" in name
        axes.plot(steps, values, color=BLUE, alpha=0.3 if noisy else 1, linewidth=0.8 if noisy else 1.5)
        if noisy:
            mean = np.full(window, 1 / window)
            axes.plot(np.convolve(steps, mean, "valid"), np.convolve(values, mean, "valid"), color=BLUE)
    panels[0].set_title(f"Training: each step, and the running mean of {window}")
    panels[-1].set_xlabel("step")
    return figure


def roc_curve(curve: Roc) -> Figure:
    """TAR against FAR, which is logarithmic."""
    figure, axes = _single("ROC: who is accepted", "false acceptances (FAR)", "true acceptances (TAR)")
    drawn = curve.fmr > 0
    axes.step(curve.fmr[drawn], curve.tar[drawn], where="post", color=BLUE)
    _log_percent(axes)
    axes.set_ylim(min(0.9, float(curve.tar[drawn][0]) - 0.05), 1.005)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.annotate(f"area {curve.auc:.4f}", (0.97, 0.05), xycoords="axes fraction", ha="right")
    return figure


def error_against_reject(
    rejected: Floats, fnmr: Mapping[str, Floats], chance: tuple[Floats, Floats], title: str
) -> Figure:
    """FNMR over the share of comparisons rejected, a line a quality measure, and the band within which chance lies."""
    figure, axes = _single(title, "comparisons rejected", "false non-match rate (FNMR)")
    axes.fill_between(rejected, *chance, color=GREY, alpha=0.25, linewidth=0, label="chance, 95 %")
    for (name, values), colour in zip(fnmr.items(), cycle((BLUE, VERMILION, GREEN, GREY))):
        axes.plot(rejected, values, color=colour, label=name)
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.legend(frameon=False)
    return figure


def det_curve(curve: Roc) -> Figure:
    """FNMR against FMR on normal-deviate axes (A. Martin et al., "The DET curve", Eurospeech 1997): normally
    distributed similarities give a straight line."""
    figure, axes = _single("DET: how it errs", "false match rate (FMR)", "false non-match rate (FNMR)")
    # A rate of 0 or 1 lies at infinity.
    drawn = (curve.fmr > 0) & (curve.fmr < 1) & (curve.fnmr > 0) & (curve.fnmr < 1)
    axes.plot(norm.ppf(curve.fmr[drawn]), norm.ppf(curve.fnmr[drawn]), color=BLUE)
    rates = np.concatenate([curve.fmr[drawn], curve.fnmr[drawn]])
    ends = norm.ppf([min([0.001, *rates]), 0.8])
    axes.plot(ends, ends, color=GREY, linestyle=":", linewidth=1, label="equal rates")
    axes.legend(frameon=False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(
            norm.ppf(DET_TICKS), [f"{tick:.2%}" if tick < 1e-3 else f"{100 * tick:g}%" for tick in DET_TICKS]
        )
    axes.set_xlim(*ends)
    axes.set_ylim(*ends)
    return figure


def similarity_histograms(similarities: Floats, same: Bools, threshold: float, chosen_on: str) -> Figure:
    """Densities of mated and non-mated similarities, and the threshold between them, ``chosen_on`` some pairs."""
    figure, axes = _single("Similarities of pairs", "cosine similarity", "density")
    edges = np.linspace(min(-0.2, float(similarities.min())), 1, 71)
    for kind, colour, hatch, name in ((~same, VERMILION, "", "non-mated"), (same, BLUE, "///", "mated")):
        axes.hist(
            similarities[kind],
            edges.tolist(),
            density=True,
            histtype="stepfilled",
            facecolor=(colour, 0.25),
            edgecolor=colour,
            hatch=hatch,
            label=f"{name} ({int(kind.sum()):,})",
        )
    axes.axvline(threshold, color="black", linestyle="--", label=f"threshold {threshold:.3f}, {chosen_on}")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.3)  # room for the legend
    axes.legend(loc="upper right", framealpha=1, edgecolor="white")
    return figure


def fnir_against_fpir(curve: FnirCurve) -> Figure:
    """The open-set trade-off at rank 1; FPIR is logarithmic."""
    figure, axes = _single(
        "Open set: enrolled people missed", "strangers who raise an alarm (FPIR)", "enrolled people missed (FNIR)"
    )
    drawn = curve.fpir > 0
    axes.step(curve.fpir[drawn], curve.fnir[drawn], where="post", color=BLUE)
    _log_percent(axes)
    axes.set_ylim(0, max(0.01, min(1.0, 1.1 * float(curve.fnir[drawn].max()))))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    return figure


def cmc_curve(shares: Floats) -> Figure:
    """(K,) share of probes whose mate is among the best 1, 2, ... K candidates."""
    figure, axes = _single("CMC: rank of the mate", "rank", "mates found up to this rank")
    axes.plot(np.arange(1, len(shares) + 1), shares, color=GREEN, marker="o", markersize=3)
    axes.set_xscale("log")
    ticks = [tick for tick in CMC_TICKS if tick <= len(shares)]
    axes.xaxis.set_ticks(ticks, [str(tick) for tick in ticks])
    axes.xaxis.set_ticks([], minor=True)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    return figure


def _single(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5.6, 4.2), layout="constrained")
    axes = figure.subplots()
    _dress(axes, title, x, y)
    return figure, axes


def _dress(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _log_percent(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{100 * rate:g}%"))


def read_columns(csv_path: Path) -> dict[str, Floats]:
    if not csv_path.is_file():
        raise ConfigError(f"{csv_path} does not exist")
    with csv_path.open(newline="", encoding="utf-8") as stream:
        reader = csv.DictReader(stream)
        names, rows = reader.fieldnames or (), list(reader)
    if "step" not in names or len(names) < 2 or not rows:
        raise ConfigError(f"{csv_path} needs a column 'step', another one, and a line")
    try:
        return {name: np.array([float(row[name]) for row in rows]) for name in names}
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{csv_path}: {error}") from error
