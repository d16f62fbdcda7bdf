"""Compare the accuracy figures of packs with the goals: the bundled pack, the reference models, and others.

Prints one table, writes it as Markdown, and writes all figures as JSON. KITH_DATA names the folder of the research
data, KITH_REFERENCE that of the reference models (default: a folder `shared` beside the checkout). Missing data are
reported and skipped.

    python -m bench.accuracy [PACK ...]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from bench.common import RESULTS, say, table, write
from bench.machine import about, in_words
from bench.photos import lfw_or_exit, packs_beside_reference
from models.pack.loading import load_pack
from models.pack.manifest import ModelPack
from models.runtime.network import weights_file
from models.vision.detection import DEFAULT_MIN_SCORE
from training.evaluation.figures import MEASURES, metric_rows
from training.evaluation.pack_evaluation import evaluate_pack
from training.export.model_card import megabytes

Metrics = Mapping[str, Any]
GOALS: Final[Mapping[str, tuple[str, str, str, Callable[[float], bool]]]] = {
    "LFW central face found": (">= 99.9 %", "lfw_central_faces", "found", lambda share: share >= 0.999),
    "LFW median landmark error": ("<= 4 %", "lfw_central_faces", "median_landmark_error", lambda error: error <= 0.04),
    "WIDER val recall at precision 95 %": (">= 90 %", "wider_val", "recall_at_precision_95", lambda one: one >= 0.9),
}
"""Target of a row, its section and key in the metrics, and whether a value meets it."""
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
    columns = {}
    for pack in chosen:
        say(f"{pack.model_id}: {pack.directory}")
        columns[pack.model_id] = json.loads(json.dumps(evaluate_pack(pack, data, RESULTS.parent / "cache")))
    networks = "\n".join(map(networks_of, chosen))
    text = f"{networks}\n\n{markdown(columns)}\n{NOTES.format(score=DEFAULT_MIN_SCORE)}"
    write(RESULTS / "accuracy.md", f"# Accuracy\n\n`make bench-accuracy`: {in_words(about())}.\n\n{text}", columns)
    print(text)


def networks_of(pack: ModelPack) -> str:
    files = [pack.detection.path, weights_file(pack.recognition.path)]
    sizes = " and ".join(f"{file.name} of {megabytes(file):.2f} MB" for file in files)
    return f"- {pack.model_id}: {sizes}, {pack.recognition.dimension} dimensions"


def markdown(columns: Mapping[str, Metrics]) -> str:
    """Format one row per figure; goals are judged for the first column."""
    values = [dict(metric_rows(metrics)) for metrics in columns.values()]
    judged = next(iter(columns.values()))
    rows = [[name, *(value.get(name, "-") for value in values), goal(name, judged)] for name in MEASURES]
    return table(["", *columns, "Goal"], rows) + "\n"


def goal(name: str, metrics: Metrics) -> str:
    """Return the goal of a row, and whether the metrics meet it; empty without a goal."""
    if name not in GOALS:
        return ""
    text, section, key, is_met = GOALS[name]
    if key not in metrics.get(section, {}):
        return f"{text}: not measured"
    return f"{text}: {'met' if is_met(metrics[section][key]) else 'missed'}"


if __name__ == "__main__":
    main()
