"""Shared setup of the benchmarks on LFW: the cache folder, the photos, and the packs to measure."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from bench.common import ROOT, outside, say
from models.pack.loading import BUNDLED_PACK, load_pack
from models.pack.manifest import ModelPack


def arguments() -> argparse.ArgumentParser:
    """Create a parser with ``--cache``; a benchmark adds its own options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cache", type=Path, default=ROOT / "runs" / "cache", help="folder for cached network outputs")
    return parser


def lfw_or_exit() -> Path:
    """Return LFW's folder in the research data, or exit if the photos are missing."""
    data = outside("KITH_DATA", "data")
    if not (data / "lfw" / "images").is_dir():
        sys.exit(f"The research data are not at {data}: set KITH_DATA (docs/training.md says what it must hold).")
    return data / "lfw"


def packs_beside_reference(load_reference: Callable[[Path], ModelPack] = load_pack) -> dict[str, ModelPack]:
    """Load ``bundled``, and ``reference`` if the reference models are present; report their absence."""
    packs = {"bundled": load_pack(BUNDLED_PACK)}
    reference = outside("KITH_REFERENCE", "reference")
    if any(reference.glob("*.onnx")):
        packs["reference"] = load_reference(reference)
    else:
        say(f"There are no reference models at {reference} (set KITH_REFERENCE): they are left out.")
    return packs
