"""Measure the cost of a gallery's risk evidence at 10,000 and 100,000 subjects, by fusion rule.

Prints, and writes bench/results/evidence.md. The cost per enrollment is that of one derivation, divided by the number
of templates that may arrive before the next derivation.

    python -m bench.evidence [--subjects 10000 100000] [--repeats 3]
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Final, get_args

import numpy as np

from bench.common import RESULTS
from models.pack.loading import BUNDLED_PACK, load_pack
from models.risk.calibration import Calibration
from models.risk.gallery_risk import GalleryRisk
from models.vision.recognition import l2_normalize
from service.domain.evidence import MAX_PROBES, impostor_evidence
from service.domain.fusion import Fusion
from service.domain.gallery import Snapshot
from service.services.gallery_risks import STALE_SHARE

TEMPLATES: Final = 2
SEED: Final = 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--subjects", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS / "evidence.md")
    options = parser.parse_args()
    pack = load_pack(BUNDLED_PACK)
    assert pack.calibration is not None  # noqa: S101 - the bundled pack has one
    calibration = Calibration.from_document(pack.calibration)
    lines = [
        "| Subjects | Fusion | Similarities | Evidence, s | of it a processor's | Curve, s | A template's share, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for subjects in options.subjects:
        snapshot = simulated(subjects, pack.recognition.dimension)
        rules: tuple[Fusion, ...] = get_args(Fusion)
        for fusion in rules:
            seconds, processor, curve = zip(
                *(timed(snapshot, fusion, calibration) for _ in range(options.repeats)), strict=True
            )
            share = min(seconds) / (STALE_SHARE * len(snapshot.vectors)) * 1000
            lines.append(
                f"| {subjects:,} | {fusion} | {min(subjects, MAX_PROBES) * (subjects - 1):,} | {spread(seconds)} | "
                f"{spread(processor)} | {spread(curve)} | {share:.2f} |"
            )
    text = "\n".join(lines)
    note = (
        f"{TEMPLATES} simulated templates a subject, {os.cpu_count()} processors; least and largest of "
        f"{options.repeats} runs. Evidence is derived in the background once {STALE_SHARE:.0%} of the templates have "
        f"come or gone, by at most {MAX_PROBES:,} searches.\n"
    )
    options.output.write_text(
        f"# Keeping a risk true\n\n`python -m bench.evidence`\n\n{note}\n{text}\n", encoding="utf-8"
    )
    print(f"{note}\n{text}")


def simulated(subjects: int, dimension: int) -> Snapshot:
    rng = np.random.default_rng(SEED)
    m = TEMPLATES * subjects
    vectors = l2_normalize(rng.normal(size=(m, dimension)).astype(np.float32) + 1.5)
    owners = np.repeat(np.arange(1, subjects + 1), TEMPLATES)
    return Snapshot(m, np.arange(1, m + 1), owners, vectors, rng.uniform(0.3, 1, m).astype(np.float32))


def timed(snapshot: Snapshot, fusion: Fusion, calibration: Calibration) -> tuple[float, float, float]:
    """Return seconds for the evidence, processor seconds for it, and seconds for its risk curve."""
    started, used = time.perf_counter(), time.process_time()
    evidence = impostor_evidence(snapshot, fusion)
    derived, burned = time.perf_counter() - started, time.process_time() - used
    started = time.perf_counter()
    GalleryRisk(evidence, calibration)
    return derived, burned, time.perf_counter() - started


def spread(values: tuple[float, ...]) -> str:
    return f"{min(values):.2f}-{max(values):.2f}"


if __name__ == "__main__":
    main()
