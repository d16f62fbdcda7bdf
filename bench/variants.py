"""The bundled recogniser stored in fp32, fp16 and INT8: size, speed by turns, accuracy on LFW.

The pack's own file is fp16. fp32 is that with its weights widened, which is what onnxruntime computes with; INT8 is
quantised from it, its activations' ranges set by training crops. Prints and writes bench/results/variants.md and .json.

    python -m bench.variants [--rounds 15] [--cache runs/cache]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bench.accuracy import RESULTS, ROOT, outside, say
from models.pack import BUNDLED, ModelPack, load_pack
from models.recognition import Recogniser
from models.runtime import OnnxNetwork, available_cores
from training.config import DataConfig
from training.data.identities import list_identities
from training.evaluate import Embedder, files_of, read_pairs, verify
from training.export import widen
from training.quantisation import quantise
from training.report import interval, megabytes

CALIBRATION_CROPS: Final = 256
BATCHES: Final = (1, 32)
SHIPPED: Final = "fp16"
ABOUT: Final = """{machine}, {rounds} rounds by turns; in brackets the median, least and most of the ratio to {shipped},
the file of the pack, in the same round. fp32 is {shipped} with its weights widened; a run's own fp32 weights agree with
it to a cosine of 0.999, as `kith-train pack` checks. Training crops set INT8's ranges.
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--cache", type=Path, default=ROOT / "runs" / "cache", help="what networks answered is kept here"
    )
    options = parser.parse_args()
    data = outside("KITH_DATA", "data")
    if absent := [folder for folder in ("lfw", "celeba") if not (data / folder).is_dir()]:
        sys.exit(f"{data} lacks {' and '.join(absent)}: set KITH_DATA (docs/training.md says what it must hold).")
    pack = load_pack(BUNDLED)
    with tempfile.TemporaryDirectory() as folder:
        variants = make_variants(pack, data, Path(folder))
        crops = training_crops(data, max(BATCHES))
        speeds = {
            f"{threads} of {available_cores()} threads, batch {batch}": by_turns(
                variants, crops[:batch], threads, options.rounds
            )
            for threads in sorted({1, available_cores()})
            for batch in BATCHES
        }
        accuracies = {name: accuracy(variant, data / "lfw", options.cache) for name, variant in variants.items()}
        sizes = {name: megabytes(variant.recognition.path) for name, variant in variants.items()}
        cosines = agreement(variants, training_crops(data, CALIBRATION_CROPS))
    report = {
        "machine": f"{platform.machine()}, {available_cores()} cores",
        "rounds": options.rounds,
        "megabytes": sizes,
        "lowest cosine to fp32": cosines,
        "crops/s": speeds,
        "accuracy": accuracies,
    }
    text = markdown(report)
    (RESULTS / "variants.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    heading = f"# {pack.model_id}'s recogniser, stored three ways\n\n`python -m bench.variants`\n\n"
    (RESULTS / "variants.md").write_text(f"{heading}{text}", encoding="utf-8")
    print(text)


def make_variants(pack: ModelPack, data: Path, folder: Path) -> dict[str, ModelPack]:
    """The pack with its recogniser in fp32, as it is, and in INT8."""
    wide, small = folder / "fp32.onnx", folder / "int8.onnx"
    widen(pack.recognition.path, wide)
    normalisation = pack.recognition.normalisation
    crops = training_crops(data, CALIBRATION_CROPS).transpose(0, 3, 1, 2)
    quantise(wide, small, ((crops - np.float32(normalisation.mean)) / np.float32(normalisation.std)).astype(np.float32))
    stored = {"fp32": wide, SHIPPED: pack.recognition.path, "int8": small}
    return {name: replace(pack, recognition=replace(pack.recognition, path=path)) for name, path in stored.items()}


def training_crops(data: Path, count: int) -> NDArray[np.uint8]:
    """(count, 112, 112, 3) of CelebA, evenly from all people."""
    listed = list_identities(DataConfig(data / "celeba"))
    return np.stack([listed.read(int(row)) for row in np.linspace(0, len(listed) - 1, count)])


def by_turns(
    variants: Mapping[str, ModelPack], crops: NDArray[np.uint8], threads: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Crops/s of each, and the ratio of its speed to the shipped one's in the same round; one round warms up."""
    recognisers = {
        name: Recogniser(OnnxNetwork(pack.recognition.path, threads=threads), pack.recognition)
        for name, pack in variants.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds + 1):
        for name, recogniser in recognisers.items():
            start = time.perf_counter()
            recogniser.embed(crops)
            if turn:
                seconds[name].append(time.perf_counter() - start)
    found = {}
    for name, taken in seconds.items():
        ratios = [base / own for base, own in zip(seconds[SHIPPED], taken, strict=True)]
        found[name] = {
            "median": len(crops) / statistics.median(taken),
            "ratio": statistics.median(ratios),
            "least": min(ratios),
            "most": max(ratios),
        }
    return found


def accuracy(pack: ModelPack, lfw: Path, cache: Path) -> dict[str, Any]:
    say(pack.recognition.path.name)
    embedder = Embedder(pack, cache_dir=cache)
    embeddings = embedder.embeddings(sorted(files_of(lfw, "view1") | files_of(lfw, "view2")), lfw / "images")
    embedder.remember()
    view1, view2 = (verify(embeddings, read_pairs(lfw / name)) for name in ("pairsDevTest.txt", "pairs.txt"))
    return {
        "view1": view1.accuracy.mean,
        "view2": view2.accuracy.mean,
        "view2 interval": view2.intervals["accuracy"],
        "tar_at_far_1e3": view2.tar_at_far_1e3,
        "tar interval": view2.intervals["tar_at_far_1e3"],
    }


def agreement(variants: Mapping[str, ModelPack], crops: NDArray[np.uint8]) -> dict[str, float]:
    vectors = {
        name: Recogniser(OnnxNetwork(pack.recognition.path), pack.recognition).embed(crops).astype(np.float64)
        for name, pack in variants.items()
    }
    return {name: float(np.einsum("nd,nd->n", own, vectors["fp32"]).min()) for name, own in vectors.items()}


def markdown(report: Mapping[str, Any]) -> str:
    speeds: Mapping[str, Mapping[str, Mapping[str, float]]] = report["crops/s"]
    names = list(report["megabytes"])
    lines = [["", *names], ["---"] * (1 + len(names))]
    lines.append(["Size", *(f"{report['megabytes'][name]:.2f} MB" for name in names)])
    for how, found in speeds.items():
        cells = [
            f"{found[name]['median']:.0f} ({found[name]['ratio']:.2f}x, {found[name]['least']:.2f} to "
            f"{found[name]['most']:.2f})"
            for name in names
        ]
        lines.append([f"Crops/s, {how}", *cells])
    for label, key, ends in (
        ("LFW View 1 test accuracy (its own best threshold)", "view1", None),
        ("LFW View 2 accuracy", "view2", "view2 interval"),
        ("LFW View 2 TAR at FAR 0.1 %", "tar_at_far_1e3", "tar interval"),
    ):
        found_ones = [report["accuracy"][name] for name in names]
        lines.append([label, *(f"{f[key]:.2%}{interval(f[ends] if ends else None, 2)}" for f in found_ones)])
    lines.append(["Lowest cosine to fp32", *(f"{report['lowest cosine to fp32'][name]:.4f}" for name in names)])
    about = ABOUT.format(machine=report["machine"], rounds=report["rounds"], shipped=SHIPPED)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{about}"


if __name__ == "__main__":
    main()
