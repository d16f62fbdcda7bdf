"""Compare the accuracy figures of packs with the goals: the bundled pack, the reference models, and others.

Prints one table, writes it as Markdown, and writes all figures as JSON. KITH_DATA names the folder of the research
data, KITH_REFERENCE that of the reference models (default: a folder `shared` beside the checkout). Missing data are
reported and skipped.

    python -m bench.accuracy [PACK ...]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.common import RESULTS, say, table, write
from bench.machine import stamp
from bench.photos import lfw_or_exit, packs_beside_reference
from models.pack.loading import load_pack
from models.pack.manifest import ModelPack
from models.runtime.network import weights_file
from models.vision.detection import DEFAULT_MIN_SCORE
from training.evaluation.pack_evaluation import evaluate_pack
from training.export.model_card import MEASURES, megabytes, metric_rows

Metrics = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """One pack with its results from :func:`evaluate_pack`. ``extra``: values of rows outside the
    card."""

    title: str
    metrics: Metrics
    extra: Mapping[str, str]

    def values(self) -> dict[str, str]:
        return {**self.extra, **dict(metric_rows(self.metrics))}


Goal = tuple[str, Callable[[Metrics], bool]]
"""Target of a row, and whether the metrics of the pack meet it; KeyError if one is missing."""


def judged(goal: Goal, metrics: Metrics) -> str:
    text, is_met = goal
    try:
        return f"{text}: {'met' if is_met(metrics) else 'missed'}"
    except KeyError:
        return f"{text}: not measured"


GOALS: Final[Mapping[str, Goal]] = {
    "LFW central face found": (">= 99.9 %", lambda own: own["lfw_central_faces"]["found"] >= 0.999),
    "LFW median landmark error": ("<= 4 %", lambda own: own["lfw_central_faces"]["median_landmark_error"] <= 0.04),
    "WIDER val recall at precision 95 %": (">= 90 %", lambda own: own["wider_val"]["recall_at_precision_95"] >= 0.9),
}
NOTES: Final = """Each pack uses its own detector and alignment at score {score}, without flip averaging. Intervals
are 95 %, over people on LFW and over photos on WIDER. Goals are judged for the first column.

- View 2 is LFW's ten-fold protocol, with the threshold of each fold from the other nine.
- Open set: 610 people with one photo each, 4,397 mated probes, 4,069 strangers, thresholds set in hindsight. Five
  strangers are gallery people under another name, or mislabeled; FPIR 0.1 % is four false alarms.
- WIDER: the 74 validation photos, at most 576 pixels wide; IoU 0.5.
- Landmark error: mean over five points against YuNet's, which differ from themselves by 5 to 8 % when a photo is
  shifted or scaled (docs/decisions.md, 55).
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packs", type=Path, nargs="*", help="more packs, or directories of ONNX files")
    options = parser.parse_args()
    data = lfw_or_exit().parent
    packs = packs_beside_reference()
    chosen = [packs.pop("bundled"), *(load_pack(directory) for directory in options.packs), *packs.values()]
    columns = [pack_column(pack, data) for pack in chosen]
    text = f"{markdown(columns)}\n{NOTES.format(score=DEFAULT_MIN_SCORE)}"
    figures = {column.title: dict(column.metrics) for column in columns}
    write(RESULTS / "accuracy.md", f"# Accuracy\n\n`make bench-accuracy`: {stamp()}.\n\n{text}", figures)
    print(text)


def pack_column(pack: ModelPack, data: Path) -> Column:
    say(f"{pack.model_id}: {pack.directory}")
    metrics = evaluate_pack(pack, data, RESULTS.parent / "cache")
    extra = {
        "Detector": f"{pack.detection.path.name}, {megabytes(pack.detection.path):.2f} MB",
        "Recognizer": f"{pack.recognition.path.name}, {megabytes(weights_file(pack.recognition.path)):.2f} MB",
        "Dimensions": str(pack.recognition.dimension),
    }
    return Column(pack.model_id, json.loads(json.dumps(metrics)), extra)


def markdown(columns: Sequence[Column]) -> str:
    """Format one row per figure; goals are judged for the first column."""
    values = [column.values() for column in columns]
    names = ["Detector", "Recognizer", "Dimensions", *MEASURES]
    rows = []
    for name in names:
        goal = judged(GOALS[name], columns[0].metrics) if name in GOALS else ""
        rows.append([name, *(value.get(name, "-") for value in values), goal])
    return table(["", *(column.title for column in columns), "Goal"], rows) + "\n"


if __name__ == "__main__":
    main()
