"""Plots that the benchmarks draw of their own results, as PNG beside the figures. This module measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.figure import Figure

MIN_RATIO: Final = 0.05
"""Smaller ratios are drawn here, on a logarithmic scale."""
LAYOUT: Final = "constrained"


def memory(figures: Mapping[str, Any], warm: float, path: Path) -> None:
    """Plot the memory of a server over its requests. ``warm``: share of them that warms up."""
    figure = Figure(figsize=(8, 3.5), layout=LAYOUT)
    axes = figure.subplots()
    axes.plot(figures["requests"], figures["rss_mb"])
    axes.axvline(warm * figures["requests"][-1], linestyle=":", color="gray")
    axes.set(
        xlabel="requests, of 80 to 2000 pixels, some of them no photos",
        ylabel="resident memory of the server, MB",
        ylim=(0, None),
        title=f"{figures['slope_mb']:+.2f} MB per 10,000 requests right of the dotted line",
    )
    figure.savefig(path, dpi=120)


def risk(rows: Sequence[Mapping[str, Any]], asked: Sequence[float], goal: tuple[float, float], path: Path) -> None:
    """Plot measured over requested FPIR, by pack and domain, from the rows of open_set.json.

    Args:
        asked: FPIR to plot beside each other.
        goal: range of ratios to shade.
    """
    packs = list(dict.fromkeys(row["pack"] for row in rows))
    cells = list(dict.fromkeys((row["domain"], row["templates"], row["people"]) for row in rows))
    figure = Figure(figsize=(12, 0.22 * len(cells) + 1.5), layout=LAYOUT)
    for axes, fpir in zip(figure.subplots(1, len(asked), sharey=True), asked, strict=True):
        axes.axvspan(*goal, color="tab:green", alpha=0.12)
        for shift, pack in enumerate(packs):
            drawn = [row for row in rows if row["pack"] == pack and row["fpir"] == fpir]
            at = [cells.index((row["domain"], row["templates"], row["people"])) + 0.22 * (shift - 1) for row in drawn]
            low, middle, high = (
                np.maximum([row[name] for row in drawn], MIN_RATIO) for name in ("low", "ratio", "high")
            )
            spread = (middle - low, high - middle)
            axes.errorbar(middle, at, xerr=spread, fmt="o", markersize=3, linewidth=1, label=pack)
        axes.set(xscale="log", xlim=(MIN_RATIO, 10), title=f"FPIR {fpir:.0%}", xlabel="measured / requested FPIR")
        axes.set_yticks(range(len(cells)), [f"{d}, {p:,} people, {t}" for d, t, p in cells], fontsize=7)
        axes.grid(alpha=0.3)
        axes.set_ylim(len(cells) - 0.4, -0.6)
        axes.legend(fontsize="small", loc="lower right")
    figure.savefig(path, dpi=110)
