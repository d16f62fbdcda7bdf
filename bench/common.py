"""Paths, output and progress messages that the benchmarks share.

This module imports nothing of Kith, so a benchmark that trains nothing does not load torch.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent
RESULTS: Final = ROOT / "bench" / "results"


def outside(variable: str, folder: str) -> Path:
    """Return a folder outside the checkout: the value of the environment's ``variable``, or one in ``shared`` beside
    it."""
    return Path(os.environ.get(variable, ROOT.parent / "shared" / folder))


def say(text: str) -> None:
    """Print to standard error, because the result goes to standard output."""
    print(text, file=sys.stderr)


def write(path: Path, text: str, figures: Mapping[str, Any] | None = None, indent: int | None = 1) -> None:
    """Write a Markdown page and, beside it, its figures as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    if figures is not None:
        path.with_suffix(".json").write_text(json.dumps(figures, indent=indent) + "\n", encoding="utf-8")
