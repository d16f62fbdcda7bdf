"""Draw the figures of README.md from bench/results, after a new measurement: ``python -m tools.figures``. This module
measures nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.common import RESULTS, ROOT
from bench.serving import EMBED_PINNED, IDENTIFY, NAIVE, NAIVE_SMALL

FOLDER: Final = ROOT / "docs" / "images"
INK, PAPER, GRID = "#1f2933", "#ffffff", "#d9dee3"
OURS, OTHERS, THIRD = "#0b6e8a", "#c2571a", "#7a8691"
"""Colors that differ in gray and with red-green color blindness."""
ASKED: Final = 0.01
ASKED_FPIR: Final = ("ratio", "low", "high")
FIXED_FPIR: Final = 3 * ("fixed_fpir",)
"""Fields of open_set.json: the line, and its lower and upper edges."""
FIXED: Final = 0.4
STYLE: Final[Any] = {
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "figure.facecolor": PAPER,
    "font.size": 10.5,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "kith",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}
FAMILY: Final = re.compile(r"font-family: [^;]+")
FONTS: Final = "font-family: system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif"


def risk_kept(axes: Axes) -> None:
    """Draw FPIR over gallery size for a fixed cosine and for a threshold set for 1 % FPIR. The bundled recognizer
    appears only with the threshold: at a cosine of 0.4 its FPIR, 37 % with 2,000 people, is off the scale."""
    rows = [
        row
        for row in _read("open_set.json")["rows"]
        if (row["domain"], row["templates"], row["fpir"]) == ("LFW", 1, ASKED)
    ]
    for pack, fields, color, marker, label, rise in (
        ("reference", FIXED_FPIR, OTHERS, "s", f"MobileFaceNet, a fixed cosine of {FIXED:g}", 0),
        ("kith-compact", ASKED_FPIR, THIRD, "^", "bundled pack, Kith asked for 1 %", 8),
        ("reference", ASKED_FPIR, OURS, "o", "MobileFaceNet, Kith asked for 1 %", -6),
    ):
        drawn = [row for row in rows if row["pack"] == pack]
        sizes = [row["people"] for row in drawn]
        scale = 100.0 if fields is FIXED_FPIR else 100 * ASKED
        middle, low, high = ([scale * row[field] for row in drawn] for field in fields)
        axes.fill_between(sizes, low, high, color=color, alpha=0.15, linewidth=0)
        axes.plot(sizes, middle, color=color, marker=marker, linewidth=2)
        axes.annotate(label, (sizes[-1], middle[-1]), (8, rise), textcoords="offset points", color=color, va="center")
    axes.axhline(100 * ASKED, color=INK, linewidth=0.8, linestyle=":")
    axes.set(
        title="Strangers identified as a subject, as the gallery grows",
        xlabel="people enrolled (LFW, one photo each)",
        ylabel="of strangers' searches, %",
        xlim=(0, 3300),
        ylim=(0, None),
    )
    axes.grid(axis="y", color=GRID, linewidth=0.6)


def speed(axes: Axes) -> None:
    """Draw photos a second as multiples of the naive server, with the range over the rounds. Shows the bundled
    pack."""
    sets = _read("serving.json")["sets"]
    rows: list[tuple[str, str, Mapping[str, float]]] = []
    for name, clients, many in (
        ("lfw", "1", "LFW, 1 client"),
        ("lfw", "16", "LFW, 16 clients"),
        ("groups", "1", "group photos, 1 client"),
        ("groups", "16", "group photos, 16 clients"),
    ):
        ratios = sets[name]["clients"][clients]["ratios"]
        rows.append((many, OURS, ratios[f"{IDENTIFY} / {NAIVE}"]["photos_per_s"]))
        same = NAIVE_SMALL if f"{EMBED_PINNED} / {NAIVE_SMALL}" in ratios else NAIVE
        rows.append(("in the same fp32 and runtime", THIRD, ratios[f"{EMBED_PINNED} / {same}"]["photos_per_s"]))
    places = [place + 0.2 * (place % 2) for place in range(len(rows), 0, -1)]
    for place, (_, color, ratio) in zip(places, rows, strict=True):
        middle = ratio["median"]
        reach = [[middle - ratio["min"]], [ratio["max"] - middle]]
        axes.barh(place, middle, 0.7, color=color, xerr=reach, error_kw={"ecolor": INK, "elinewidth": 1, "capsize": 2})
        axes.annotate(f"{middle:.1f} x", (ratio["max"], place), (6, 0), textcoords="offset points", va="center")
    axes.set_yticks(places, [row[0] for row in rows])
    axes.axvline(1, color=INK, linewidth=0.8, linestyle=":")
    axes.set(
        title="Photos a second, in multiples of a minimal server's",
        xlabel="two cores, bundled pack in bf16\nblue: photo to decision; gray: to vector",
        xlim=(0, 4),
    )
    axes.tick_params(axis="y", length=0)


FIGURES: Final[Mapping[str, tuple[Callable[[Axes], None], tuple[float, float]]]] = {
    "risk-kept.svg": (risk_kept, (8.2, 3.6)),
    "speed.svg": (speed, (7.6, 4.1)),
}


def draw(folder: Path) -> None:
    """Draw all figures; the same input gives the same bytes."""
    with matplotlib.rc_context(STYLE):
        for name, (drawn, size) in FIGURES.items():
            figure = Figure(size, layout="constrained")
            drawn(figure.subplots())
            figure.savefig(folder / name, format="svg", metadata={"Date": None, "Creator": None})
            text = (folder / name).read_text(encoding="utf-8")
            # A reader may not have the fonts of the machine that draws.
            lines = (line.rstrip() for line in FAMILY.sub(FONTS, text).splitlines())
            (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


if __name__ == "__main__":
    draw(FOLDER)
