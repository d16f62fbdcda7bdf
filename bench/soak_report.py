"""Report of the soak test: criteria of growth, page and plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

BURST: Final = 64
RISE: Final = {"memory_mb": 24.0, "descriptors": 2.0, "threads": 2.0}
"""Maximum rise of each resource at rest, over the rounds after the warm-up."""
Figures = dict[str, Any]


def rise(values: Sequence[float]) -> float:
    """Return the rise of the regression line from the first to the last value (least squares)."""
    if len(values) < 2:
        return 0.0
    return float(np.polyfit(range(len(values)), np.array(values, np.float64), 1)[0]) * (len(values) - 1)


def markdown(figures: Figures) -> str:
    """Format the verdict and its evidence."""
    failures = figures["failures"]
    rest = [living for living, _ in figures["rest"]]
    lines = [
        "# Soak",
        "",
        f"`make soak`: {figures['minutes']:g} minutes on {figures['database']}, {figures['clients']} clients, "
        f"{len(figures['killed'])} times a server was killed or stopped. {figures['machine']}, commit "
        f"{figures['commit']}.",
        "",
        "**Passed.**" if not failures else "**Failed:** " + "; ".join(failures),
        "",
        f"{figures['answers']:,} answers, {len(figures['wrong'])} wrong.",
        "",
        "| At rest, the living server | after the warm-up | at the end | most | rise by the line | allowed |",
        "|---|---|---|---|---|---|",
    ]
    for name, allowed in RISE.items():
        values = [reading[name] for reading in rest[figures["warm"] :]]
        held = f"{values[0]:.0f} | {values[-1]:.0f} | {max(values):.0f} | {figures['rises'][name]:+.1f}"
        lines.append(f"| {name.replace('_mb', ', MB')} | {held} | {allowed:g} |")
    lines += ["", "| Identifying a photo, third after the warm-up | answers | p50, ms | p99, ms |", "|---|---|---|---|"]
    for number, third in enumerate(figures["thirds"], start=1):
        lines.append(f"| {number} | {third['answers']} | {third['p50_ms']:.0f} | {third['p99_ms']:.0f} |")
    lines += ["", "| What was asked: what came | times |", "|---|---|"]
    lines += [f"| {outcome} | {count} |" for outcome, count in figures["outcomes"].items()]
    bursts = [f"{', '.join(f'{count} times {status}' for status, count in one.items())}" for one in figures["bursts"]]
    lines += ["", f"Bursts of {BURST} clients: {'; '.join(bursts)}.", "", "![Memory](soak.png)", ""]
    return "\n".join(lines)


def draw(figures: Figures, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    memory, counts = figure.subplots(2, 1, sharex=True)
    minutes = [at / 60 for at in figures["rest_at_s"]]
    rest = [living for living, _ in figures["rest"]]
    memory.plot([at / 60 for at, _ in figures["running"]], [mb for _, mb in figures["running"]], label="under load")
    memory.plot(minutes, [reading["memory_mb"] for reading in rest], "o-", label="at rest")
    memory.plot(minutes, [killed["memory_mb"] for _, killed in figures["rest"]], "x", label="the other, at rest")
    for name in ("descriptors", "threads"):
        counts.plot(minutes, [reading[name] for reading in rest], "o-", label=f"{name}, at rest")
    for axes in (memory, counts):
        for gone, _ in figures["killed"]:
            axes.axvline(gone / 60, color="gray", linewidth=0.5)
        axes.axvline(minutes[figures["warm"]], linestyle=":", color="gray")
        axes.set_ylim(0, None)
        axes.legend()
    memory.set(
        ylabel="resident, MB",
        title=f"{figures['rises']['memory_mb']:+.1f} MB at rest right of the dotted line; gray: the other is killed",
    )
    counts.set(xlabel="minutes")
    figure.savefig(path, dpi=120)
