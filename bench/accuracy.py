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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.common import RESULTS, outside, say, table, write
from bench.photos import lfw_or_exit, packs_beside_reference
from models.pack.loading import load_pack
from models.pack.manifest import ModelPack
from models.runtime.network import weights_file
from models.runtime.onnx_runtime import OnnxNetwork
from models.vision.detection import DEFAULT_MIN_SCORE, Detector
from models.vision.specs import DetectionSpec, Normalization
from training.evaluation.detection import evaluate_detection
from training.evaluation.embedding import Embedder, Embeddings
from training.evaluation.lfw import files_of, people_of, read_pairs, verify
from training.evaluation.metrics import bootstrap, fold_decisions
from training.evaluation.pack_evaluation import evaluate_pack
from training.export.model_card import MEASURES, megabytes, metric_rows

YUNET: Final = "detector_yunet.onnx"
Metrics = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """One pack, or a detector alone, with its results from :func:`evaluate_pack`. ``extra``: values of rows outside the
    card."""

    title: str
    metrics: Metrics
    extra: Mapping[str, str]

    def values(self) -> dict[str, str]:
        return {**self.extra, **dict(metric_rows(self.metrics))}


Goal = tuple[str, Callable[[Metrics, Metrics], bool]]
"""Target of a row, and whether the metrics of the pack and of YuNet meet it; KeyError if one is missing."""


def judged(goal: Goal, metrics: Metrics, yunet: Metrics) -> str:
    text, is_met = goal
    try:
        return f"{text}: {'met' if is_met(metrics, yunet) else 'missed'}"
    except KeyError:
        return f"{text}: not measured"


THROUGH_YUNET: Final = "LFW View 2 accuracy through YuNet instead"
DIFFERENCE: Final = "LFW View 2 accuracy, own detector less YuNet"
GOALS: Final[Mapping[str, Goal]] = {
    DIFFERENCE: ("within 0.3 points", lambda own, _: abs(own["lfw_view2_through_yunet"]["difference"]) <= 0.003),
    "LFW central face found": (">= 99.9 %", lambda own, _: own["lfw_central_faces"]["found"] >= 0.999),
    "LFW median landmark error": ("<= 4 %", lambda own, _: own["lfw_central_faces"]["median_landmark_error"] <= 0.04),
    "WIDER val recall at precision 95 %": (">= 90 %", lambda own, _: own["wider_val"]["recall_at_precision_95"] >= 0.9),
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
    columns = measure(chosen, data)
    text = f"{markdown(columns)}\n{NOTES.format(score=DEFAULT_MIN_SCORE)}"
    figures = {column.title: dict(column.metrics) for column in columns}
    write(RESULTS / "accuracy.md", f"# Accuracy\n\n`make bench-accuracy`\n\n{text}", figures)
    print(text)


def measure(packs: Sequence[ModelPack], data: Path) -> list[Column]:
    """Measure one column per pack, and one for YuNet, which is only a detector."""
    reference = outside("KITH_REFERENCE", "reference")
    yunet: DetectionSpec | None = None
    if (reference / YUNET).is_file():
        yunet = DetectionSpec(reference / YUNET, None, Normalization(0.0, 1.0, "BGR"), "yunet")
    else:
        say(f"There is no {YUNET} at {reference}: the comparison with YuNet is skipped.")
    columns = [pack_column(pack, yunet, data) for pack in packs]
    if yunet is not None:
        say("YuNet")
        metrics = evaluate_detection(Detector(OnnxNetwork(yunet.path), yunet), data)
        columns.append(Column("YuNet", metrics, {"Detector": f"{yunet.path.name}, {megabytes(yunet.path):.2f} MB"}))
    return columns


def pack_column(pack: ModelPack, yunet: DetectionSpec | None, data: Path) -> Column:
    say(f"{pack.model_id}: {pack.directory}")
    metrics = evaluate_pack(pack, data, RESULTS.parent / "cache")
    extra = {
        "Detector": f"{pack.detection.path.name}, {megabytes(pack.detection.path):.2f} MB",
        "Recognizer": f"{pack.recognition.path.name}, {megabytes(weights_file(pack.recognition.path)):.2f} MB",
        "Dimensions": str(pack.recognition.dimension),
    }
    if yunet is not None:
        compared = through_another(pack, yunet, data / "lfw")
        metrics["lfw_view2_through_yunet"] = compared
        ends = [100 * end for end in compared["difference_interval"]]
        extra[THROUGH_YUNET] = f"{compared['accuracy']:.2%}"
        extra[DIFFERENCE] = f"{100 * compared['difference']:+.2f} points (95 %: {ends[0]:+.2f} to {ends[1]:+.2f})"
    return Column(pack.model_id, json.loads(json.dumps(metrics)), extra)


def through_another(pack: ModelPack, detection: DetectionSpec, lfw: Path) -> dict[str, Any]:
    """Measure View 2 with another detector, and the paired accuracy difference to the pack's own detector. The pairs
    are the same, so the interval of the difference is much narrower than those of the two figures."""
    pairs = read_pairs(lfw / "pairs.txt")

    def embedded(by: ModelPack) -> Embeddings:
        files = sorted(files_of(lfw, "view2"))
        return Embeddings(tuple(files), *Embedder(by).embed([lfw / "images" / file for file in files]))

    own, other = embedded(pack), embedded(replace(pack, detection=detection))
    right = [fold_decisions(e.similarities(pairs), pairs.same, pairs.folds) == pairs.same for e in (own, other)]
    difference = right[0].astype(float) - right[1]
    low, high = bootstrap(lambda rows: np.array([difference[rows].mean()]), people_of(pairs.first))
    return {
        "accuracy": verify(other, pairs).accuracy.mean,
        "difference": float(difference.mean()),
        "difference_interval": [float(low[0]), float(high[0])],
    }


def markdown(columns: Sequence[Column]) -> str:
    """Format one row per figure; goals are judged for the first column."""
    values = [column.values() for column in columns]
    names = ["Detector", "Recognizer", "Dimensions", *MEASURES]
    names[4:4] = [THROUGH_YUNET, DIFFERENCE]
    yunet = next((column.metrics for column in columns if column.title == "YuNet"), {})
    rows = []
    for name in names:
        goal = judged(GOALS[name], columns[0].metrics, yunet) if name in GOALS else ""
        rows.append([name, *(value.get(name, "-") for value in values), goal])
    return table(["", *(column.title for column in columns), "Goal"], rows) + "\n"


if __name__ == "__main__":
    main()
