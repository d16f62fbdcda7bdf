"""How the benches on LFW begin: the folder where answers are kept, the photos, and the packs that are judged."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from bench.common import ROOT, outside, say
from models.pack import BUNDLED, ModelPack, load_pack


def arguments() -> argparse.ArgumentParser:
    """A parser of ``--cache``, to which a bench adds its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--cache", type=Path, default=ROOT / "runs" / "cache", help="what networks answered is kept here"
    )
    return parser


def lfw_or_exit() -> Path:
    """LFW's folder in the research data; without its photos nothing can be measured."""
    data = outside("KITH_DATA", "data")
    if not (data / "lfw" / "images").is_dir():
        sys.exit(f"The research data are not at {data}: set KITH_DATA (docs/training.md says what it must hold).")
    return data / "lfw"


def packs_beside_reference(load_reference: Callable[[Path], ModelPack] = load_pack) -> dict[str, ModelPack]:
    """``bundled``, and ``reference`` where the reference models are; that they are absent is said."""
    packs = {"bundled": load_pack(BUNDLED)}
    reference = outside("KITH_REFERENCE", "reference")
    if any(reference.glob("*.onnx")):
        packs["reference"] = load_reference(reference)
    else:
        say(f"There are no reference models at {reference} (set KITH_REFERENCE): they are left out.")
    return packs
