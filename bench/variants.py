"""Measure the bundled recognizer in each runtime and numeric format, and with --large an IResNet-50 (random weights,
speed only).

Rounds are interleaved, so that each gives a ratio to onnxruntime's fp32. The bundled recognizer's accuracy loss is read
from the pack, where `kith-train quantize` wrote it. Prints, and writes bench/results/variants.md and .json.

    python -m bench.variants [--rounds 30] [--large]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bench.common import RESULTS, ROOT, outside
from bench.heavy import DIMENSION, heavy_recognizer
from models.checksums import sha256_of
from models.engines.selection import EngineChoice, EnginePreference, available_precisions, open_with_engine
from models.pack.loading import BUNDLED_PACK, load_pack
from models.runtime.onnx_runtime import available_cores
from models.runtime.quantization import quantize
from models.vision.recognition import Recognizer
from models.vision.specs import RecognitionSpec, Variant
from training.config import DataConfig
from training.data.identities import list_identities
from training.optimization.loop import to_tensor

RESULT: Final = RESULTS / "variants.json"
TABLE: Final = RESULTS / "variants.md"
BATCHES: Final = (1, 8)
CALIBRATION_CROPS: Final = 32
REFERENCE: Final = "onnxruntime fp32"
GOALS: Final = {1: 3.4, 8: 5.0}
Rows = dict[str, dict[str, dict[str, float]]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument(
        "--large", action="store_true", help="also measure an IResNet-50 of random weights (takes minutes)"
    )
    options = parser.parse_args()
    data = outside("KITH_DATA", "data")
    if not (data / "celeba").is_dir():
        sys.exit(f"{data} lacks celeba: set KITH_DATA (docs/training.md says what it must hold).")
    spec = load_pack(BUNDLED_PACK).recognition
    crops = training_crops(data, CALIBRATION_CROPS)
    speeds = {"bundled": by_turns(spec, crops, options.rounds)}
    if options.large:
        with tempfile.TemporaryDirectory() as folder:
            speeds["IResNet-50"] = by_turns(large(spec, crops, Path(folder)), crops, options.rounds)
    report = {
        "machine": f"{platform.machine()}, {available_cores()} cores",
        "rounds": options.rounds,
        "speeds": speeds,
        "points lost": {
            f"{engine} {variant.precision}": measured["points_lost"]
            for variant in spec.variants
            for engine, measured in variant.measured["engines"].items()
        },
    }
    text = markdown(report)
    RESULT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    TABLE.write_text(text, encoding="utf-8")
    print(text)


def training_crops(data: Path, count: int) -> NDArray[np.uint8]:
    """Return (count, 112, 112, 3) crops of CelebA, evenly from all people."""
    listed = list_identities(DataConfig(data / "celeba"))
    return np.stack([listed.read(int(row)) for row in np.linspace(0, len(listed) - 1, count)])


def large(spec: RecognitionSpec, crops: NDArray[np.uint8], folder: Path) -> RecognitionSpec:
    """Build an IResNet-50 of random weights with an INT8 variant."""
    whole, small = heavy_recognizer(ROOT / "runs" / "cache"), folder / "large.int8.onnx"
    quantize(whole, small, np.split(to_tensor(crops).numpy(), len(crops) // 8))
    variant = Variant("int8", small, sha256_of(small), sha256_of(whole), {})
    return replace(spec, path=whole, sha256=None, dimension=DIMENSION, variants=(variant,))


def by_turns(spec: RecognitionSpec, crops: NDArray[np.uint8], rounds: int) -> Rows:
    """Return ms per crop and the speedup over the reference in the same round, by batch size and numeric format."""
    recognizers = {
        f"{choice.engine} {choice.precision}": Recognizer(open_with_engine(spec, choice, EnginePreference()), spec)
        for choice in choices()
    }
    found: Rows = {}
    for batch in BATCHES:
        seconds: dict[str, list[float]] = {name: [] for name in recognizers}
        for turn in range(rounds + 2):
            for name, recognizer in recognizers.items():
                start = time.perf_counter()
                recognizer.embed(crops[:batch])
                if turn >= 2:
                    seconds[name].append(time.perf_counter() - start)
        found[str(batch)] = {name: figures(taken, seconds[REFERENCE], batch) for name, taken in seconds.items()}
    return found


def choices() -> Iterator[EngineChoice]:
    for engine, precisions in available_precisions().items():
        for precision in ("fp32", "bf16", "int8"):
            if precision in precisions:
                yield EngineChoice(engine, precision, "measured")


def figures(taken: list[float], reference: list[float], batch: int) -> dict[str, float]:
    ratios = [base / own for base, own in zip(reference, taken, strict=True)]
    low, median, high = np.quantile(ratios, (0.1, 0.5, 0.9))
    return {"ms": 1e3 * statistics.median(taken) / batch, "ratio": median, "low": low, "high": high}


def markdown(report: Mapping[str, Any]) -> str:
    command = "python -m bench.variants" + " --large" * ("IResNet-50" in report["speeds"])
    lines = ["# Recognizers in every runtime's numbers", "", f"`{command}`", ""]
    for network, by_batch in report["speeds"].items():
        lines += [f"## {network}", "", f"| | {' | '.join(f'Batch {batch}' for batch in by_batch)} | Points lost |"]
        lines.append("|---|" + "---|" * (len(by_batch) + 1))
        for name in by_batch["1"]:
            cells = [
                f"{f['ratio']:.2f}x ({f['low']:.2f} to {f['high']:.2f}), {f['ms']:.2f} ms"
                for f in (found[name] for found in by_batch.values())
            ]
            lost = report["points lost"].get(name) if network == "bundled" else None
            lines.append(f"| {name} | {' | '.join(cells)} | {'-' if lost is None else f'{lost:+.3f}'} |")
        lines.append("")
        for batch, goal in GOALS.items():
            best = max(found["ratio"] for found in by_batch[str(batch)].values())
            lines.append(f"- batch {batch}: {best:.2f}x of {goal:g}x asked: {'met' if best >= goal else 'missed'}")
        lines.append("")
    about = f"{report['machine']}, {report['rounds']} rounds by turns; ratio to {REFERENCE} in the same round,"
    return "\n".join([*lines, f"{about}\nits median and the middle 80 %. Points lost: of LFW View 2 accuracy.", ""])


if __name__ == "__main__":
    main()
