"""What benches have in common: where what they need and what they find lies, and a word while they run.

It imports nothing of Kith, so that a bench that trains nothing does not wait for torch.
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
    """What no checkout holds: where the environment's ``variable`` says, or in ``shared`` beside the checkout."""
    return Path(os.environ.get(variable, ROOT.parent / "shared" / folder))


def say(text: str) -> None:
    """On standard error, since the result goes to standard output."""
    print(text, file=sys.stderr)


def write(path: Path, text: str, figures: Mapping[str, Any] | None = None, indent: int | None = 1) -> None:
    """A Markdown page and, beside it, its figures as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    if figures is not None:
        path.with_suffix(".json").write_text(json.dumps(figures, indent=indent) + "\n", encoding="utf-8")
