"""A gallery's FPIR by threshold, drawn for a terminal and as a picture. The only plotext import."""

from __future__ import annotations

import io
from typing import Final

import plotext
from matplotlib.figure import Figure

from service.api.schemas import GalleryRiskOut

TERMINAL_ROWS: Final = 18
WIDEST: Final = 100
TITLE: Final = "FPIR by threshold, {subjects} subjects"


def risk_text(report: GalleryRiskOut, columns: int) -> str:
    """Lines for a terminal of so many columns."""
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(min(columns, WIDEST), TERMINAL_ROWS)
    plotext.yscale("log")
    plotext.plot([point.similarity for point in report.curve], [point.fpir for point in report.curve])
    plotext.title(TITLE.format(subjects=report.subjects))
    return str(plotext.uncolorize(plotext.build()))  # of one colour, and without codes that pipes would keep


def risk_png(report: GalleryRiskOut) -> bytes:
    """The curve with its 95 % interval, the targets, and the gallery's own threshold."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    similarities = [point.similarity for point in report.curve]
    lows, highs = [point.low for point in report.curve], [point.high for point in report.curve]
    axes.fill_between(similarities, lows, highs, alpha=0.2, label="95 % interval")
    axes.plot(similarities, [point.fpir for point in report.curve], label=f"{report.subjects} subjects")
    known = [(target.today.threshold, target.fpir) for target in report.targets if target.today.threshold <= 1]
    axes.plot([t for t, _ in known], [fpir for _, fpir in known], "o", label="targets")
    if report.threshold <= 1:
        axes.axvline(report.threshold, linestyle="--", color="grey", label="this gallery's threshold")
    axes.set(yscale="log", xlabel="similarity", ylabel="FPIR", title=TITLE.format(subjects=report.subjects))
    axes.grid(alpha=0.3)
    axes.legend()
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=150)
    return stream.getvalue()
