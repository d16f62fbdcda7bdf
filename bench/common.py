"""Paths, tables, output and progress messages that the benchmarks share.

This module imports nothing of Kith, so a benchmark that trains nothing does not load torch.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent
RESULTS: Final = ROOT / "bench" / "results"
CACHE: Final = ROOT / "runs" / "cache"


def outside(variable: str, folder: str) -> Path:
    """Return a folder outside the checkout: the value of the environment's ``variable``, or one in ``shared`` beside
    it."""
    return Path(os.environ.get(variable, ROOT.parent / "shared" / folder))


def say(text: str) -> None:
    """Print to standard error, because the result goes to standard output."""
    print(text, file=sys.stderr)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, minimum and maximum of the rounds, with four significant digits."""
    return {name: float(f"{f(values):.4g}") for name, f in (("median", statistics.median), ("min", min), ("max", max))}


def ratios(own: Sequence[float], other: Sequence[float]) -> list[float]:
    """Return the ratio of each round."""
    return [a / b for a, b in zip(own, other, strict=True)]


def range_of(found: Mapping[str, float]) -> str:
    """Format what `spread` returned."""
    return f"{found['median']:.2f} ({found['min']:.2f} to {found['max']:.2f})"


def table(header: str | Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format a Markdown table. ``header``: its cells, or a text in which " | " parts them."""
    titles = header.split(" | ") if isinstance(header, str) else header
    lines = [f"| {' | '.join(map(str, cells))} |".replace("|  |", "| |") for cells in (titles, *rows)]
    return "\n".join([lines[0], "|---" * len(titles) + "|", *lines[1:]])


def figures_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format figures by name as a Markdown table: names as columns, numbers with four significant digits."""
    names = list(dict.fromkeys(name for row in rows for name in row))

    def cell(value: Any) -> str:
        return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)

    return table([name.replace("_", " ") for name in names], ([cell(row.get(n, "")) for n in names] for row in rows))


def write(path: Path, text: str | None, figures: Any = None, indent: int | None = 1) -> None:
    """Write a Markdown page and, beside it, its figures as JSON; either may be None."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if text is not None:
        path.with_suffix(".md").write_text(text, encoding="utf-8")
    if figures is not None:
        path.with_suffix(".json").write_text(json.dumps(figures, indent=indent) + "\n", encoding="utf-8")
