"""Compare GPU and CPU: equality of results, speed, and memory.

Prints a table as its last output, and writes bench/results/gpu-NAME.json for each part. Without a GPU it reports that
and exits with 0. docs/gpu.md explains the figures.

    python -m bench.gpu [parity embedding detector identity memory search] [--templates 1000000 10000000]
                        [--minutes 10] [--rounds 7] [--rehearse]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bench.common import RESULTS, ROOT, outside, say
from bench.gallery import BATCH, K, gallery, speed, timed
from bench.heavy import heavy_pack
from bench.load import Generator, Order, look_at, multipart
from bench.machine import machine
from bench.photos import gallery_of, groups, lfw_probes, people, read
from bench.servers import GALLERY, kith_server
from models.engines.selection import GPU_CANVAS_SIDES_PX, PHOTO_BATCH_SIZES, open_on_device
from models.errors import RuntimeUnavailableError
from models.pack.loading import BUNDLED_PACK, load_pack
from models.pack.manifest import ModelPack
from models.runtime.cuda_network import CudaNetwork, Device, diagnose_cuda, visible_gpus
from models.runtime.network import Float
from models.runtime.onnx_runtime import BATCH_BUCKETS, OnnxNetwork
from models.vision.alignment import align
from models.vision.detection import Detections, Detector
from models.vision.recognition import Recognizer
from service.index.faiss_structures import exact, similarities_at, trainer_for
from service.index.protocol import Kind

PLAIN: Final = "fp32"
CONFIGURATIONS: Final = {PLAIN: False, "fp16": True}
"""Use of fp16 by name."""
SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CLIENTS: Final = (1, 16, 64)
SIDE_PX: Final = 112
PROMISED_RECALL: Final = 0.999
SAMPLES: Final = 100
"""Number of GPU memory samples."""
MB: Final = 1e6
Document = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """``rehearsal``: run everything small and on the CPU, to test the script; write nothing."""

    templates: Sequence[int]
    seconds: float
    rounds: int
    photos: int
    minutes: float
    sizes: Sequence[int] = SIZES
    rehearsal: bool = False

    @property
    def device(self) -> Device:
        return Device("cpu" if self.rehearsal else "cuda")


@dataclass(frozen=True)
class Part:
    measure: Callable[[Plan, Path], Document]
    table: Callable[[Document], list[str]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=[], help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--templates", nargs="+", type=int, default=[1_000_000, 10_000_000])
    parser.add_argument("--minutes", type=float, default=10, help="of varied shapes, for memory")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rehearse", action="store_true", help="small sizes on the CPU, to test the script")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {min(unknown)}: there are {', '.join(PARTS)}")
    plan = Plan(options.templates, 0.5, options.rounds, 200, options.minutes)
    if options.rehearse:
        plan = Plan([20_000], 0.01, 2, 4, 0.02, (1, 2), rehearsal=True)
    elif (trouble := _trouble()) is not None:
        print(f"No GPU: {trouble}. Nothing was measured.")
        return
    tables = []
    with TemporaryDirectory() as folder:
        for name in options.parts or PARTS:
            say(name)
            try:
                document = PARTS[name].measure(plan, Path(folder))
            except Missing as missing:
                tables.append([f"{name}: left out, {missing}"])
                continue
            document |= {"machine": machine(), "gpus": _gpus(), "date": date.today().isoformat()}
            if not plan.rehearsal:
                (RESULTS / f"gpu-{name}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            tables.append(PARTS[name].table(document))
    print(f"\n{machine()}; {'; '.join(_gpus()) or 'no GPU: this is a rehearsal on the CPU, with meaningless figures'}")
    for lines in tables:
        print("\n" + "\n".join(lines))


class Missing(Exception):  # noqa: N818
    """A dependency of a part is missing on this machine."""


def _trouble() -> str | None:
    try:
        return diagnose_cuda()
    except RuntimeUnavailableError as error:
        return str(error)


def _gpus() -> list[str]:
    """Return name, memory and driver of each GPU, from nvidia-smi."""
    try:
        said = _smi("name,memory.total,driver_version")
    except OSError:
        return visible_gpus()
    return [line.replace(", ", " / ") for line in said]


def _smi(fields: str) -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().splitlines()


def _lfw() -> Path:
    data = outside("KITH_DATA", "data")
    if not (data / "lfw").is_dir():
        raise Missing(f"there are no photos at {data}: set KITH_DATA")
    return data


# Parity


def parity(plan: Plan, folder: Path) -> Document:
    """Compare GPU and CPU on the same photos: paired boxes, vectors of the same crops, and each node's provider."""
    pack, data = load_pack(BUNDLED_PACK), _lfw()
    found = [person.photos[0] for person in people(data)][: plan.photos]
    photos = [read(path) for path in found]
    detectors = [
        Detector(network, pack.detection, buckets=GPU_CANVAS_SIDES_PX)
        for network in (
            _opened(pack, "detection", plan, folder),
            OnnxNetwork(pack.detection.path, "CPUExecutionProvider"),
        )
    ]
    there, here = ([faces for photo in photos for faces in detector.detect([photo])] for detector in detectors)
    shifts, alone = _paired(there, here)
    crops = np.stack(
        [align(photo, faces.landmarks_xy[:1])[0] for photo, faces in zip(photos, here, strict=True) if len(faces)]
    )
    on_gpu = _opened(pack, "recognition", plan, folder)
    vectors = [
        Recognizer(network, pack.recognition).embed(crops)
        for network in (on_gpu, OnnxNetwork(pack.recognition.path, "CPUExecutionProvider"))
    ]
    cosines = (vectors[0] * vectors[1]).sum(1)
    return {
        "photos": len(photos),
        "faces": int(sum(map(len, here))),
        "faces_of_one_only": alone,
        "box_shift_px": {"max": float(max(shifts)), "median": float(np.median(shifts))},
        "cosine": {"min": float(cosines.min()), "median": float(np.median(cosines))},
        "numbers": on_gpu.describe(),
        "nodes": {
            "detection": _opened(pack, "detection", plan, folder).placement(_noise((1, 3, 256, 256))),
            "recognition": on_gpu.placement(_noise((1, 3, SIDE_PX, SIDE_PX))),
        },
        "goal": {"box_shift_px": 0.5, "cosine": 0.999},
    }


def _opened(pack: ModelPack, task: str, plan: Plan, folder: Path) -> CudaNetwork:
    return open_on_device(pack.detection if task == "detection" else pack.recognition, plan.device, folder)


def _paired(there: Sequence[Detections], here: Sequence[Detections]) -> tuple[list[float], int]:
    """Return the distance in pixels from each box to the nearest reference box, and the number of faces without a
    partner within 10 pixels."""
    shifts, alone = [], 0
    for a, b in zip(there, here, strict=True):
        alone += abs(len(a) - len(b))
        for box in b.boxes_xyxy if len(a) else []:
            shift = float(np.abs(a.boxes_xyxy - box).max(1).min())
            alone += shift >= 10
            shifts += [shift] if shift < 10 else []
    return shifts, alone


def parity_table(document: Document) -> list[str]:
    shift, cosine = document["box_shift_px"], document["cosine"]
    return [
        f"| Parity, {document['photos']} photos, {document['faces']} faces | worst | median | goal |",
        "|---|---|---|---|",
        f"| box, pixels | {shift['max']:.3f} | {shift['median']:.3f} | 0.5 |",
        f"| cosine of vectors | {cosine['min']:.6f} | {cosine['median']:.6f} | 0.999 |",
        f"| faces that only one found | {document['faces_of_one_only']} | | 0 |",
        *(
            f"| nodes of {task} | {' '.join(f'{n} {p}' for p, n in ran.items())} | | |"
            for task, ran in document["nodes"].items()
        ),
    ]


# Throughput


def embedding(plan: Plan, folder: Path) -> Document:
    """Measure the recognizer alone, from crops in memory to vectors in memory, including copies to and from the GPU."""
    files = {"bundled": BUNDLED_PACK / "recognizer.onnx"}
    if importlib.util.find_spec("torch") is not None and not plan.rehearsal:
        heavy = heavy_pack(BUNDLED_PACK / "detector.onnx", ROOT / "runs" / "cache")
        files["IResNet-50, random weights"] = heavy / "recognizer.onnx"
    shapes = [(size, 3, SIDE_PX, SIDE_PX) for size in plan.sizes]
    return {"networks": {name: _rates(file, shapes, plan, folder) for name, file in files.items()}}


def detector(plan: Plan, folder: Path) -> Document:
    """Measure the detector alone, from canvases in memory to its raw outputs in memory."""
    sides = GPU_CANVAS_SIDES_PX[:1] if plan.rehearsal else GPU_CANVAS_SIDES_PX
    shapes = [(size, 3, side, side) for side in sides for size in PHOTO_BATCH_SIZES if size <= max(plan.sizes)]
    return {"networks": {"bundled": _rates(BUNDLED_PACK / "detector.onnx", shapes, plan, folder)}}


def _rates(file: Path, shapes: Sequence[tuple[int, ...]], plan: Plan, folder: Path) -> Document:
    """Return items a second by configuration and shape: medians of interleaved rounds, ratios within a round."""
    opened: dict[str, CudaNetwork] = {}
    left_out: dict[str, str] = {}
    for name, half in CONFIGURATIONS.items():
        try:
            opened[name] = CudaNetwork(file, shapes, _noise(min(shapes)), folder, plan.device, half)
        except RuntimeUnavailableError as error:
            left_out[name] = str(error)
        else:
            if half and opened[name].file == file:
                left_out[name] = "its numbers do not fit into fp16"
                del opened[name]
    rates: dict[str, dict[str, list[float]]] = {name: {str(list(shape)): [] for shape in shapes} for name in opened}
    for _ in range(plan.rounds):
        for shape in shapes:
            batch = _noise(shape)
            for name, network in opened.items():
                rates[name][str(list(shape))].append(shape[0] / _seconds_a_run(network, batch, plan.seconds))
    return {
        "ran": {name: network.describe() for name, network in opened.items()},
        "left_out": left_out,
        "per_s": {name: {key: _spread(values) for key, values in each.items()} for name, each in rates.items()},
        "ratio": {
            name: {
                key: _spread([a / b for a, b in zip(values, rates[PLAIN][key], strict=True)])
                for key, values in each.items()
            }
            for name, each in rates.items()
            if PLAIN in rates
        },
    }


def _seconds_a_run(network: CudaNetwork, batch: Float, seconds: float) -> float:
    network.run(batch)
    runs, started = 0, time.perf_counter()
    while (passed := time.perf_counter() - started) < seconds:
        network.run(batch)
        runs += 1
    return passed / runs


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def rates_table(document: Document) -> list[str]:
    lines: list[str] = []
    for name, network in document["networks"].items():
        keys = list(next(iter(network["per_s"].values())))
        lines += [f"| {name}: items/s (ratio to {PLAIN}) | {' | '.join(keys)} |", "|---" * (len(keys) + 1) + "|"]
        for configuration, cells in network["per_s"].items():
            ratios = network["ratio"].get(configuration, {})
            texts = [
                f"{cell['median']:,.0f}" + (f" ({ratios[key]['median']:.1f})" if key in ratios else "")
                for key, cell in cells.items()
            ]
            lines.append(f"| {configuration} | {' | '.join(texts)} |")
        lines += [f"{configuration}: left out, {why}" for configuration, why in network["left_out"].items()]
    return lines


# Photo to identity


def identity(plan: Plan, _: Path) -> Document:
    """Identify LFW's photos and group photos through a real server, with networks on GPU and CPU in turn."""
    data, pack = _lfw(), BUNDLED_PACK
    everybody = people(data)
    held = {} if plan.rehearsal else gallery_of(everybody, load_pack(pack), ROOT / "runs" / "cache")
    clients = (1,) if plan.rehearsal else CLIENTS
    path = f"/v1/galleries/{GALLERY}/identify"
    cells: Document = {}
    devices = ("cpu",) if plan.rehearsal else ("gpu", "cpu")
    sets = {"lfw": lfw_probes(everybody)} | ({} if plan.rehearsal else {"groups": groups(data)})
    for photo_set, photos in sets.items():
        requests = [multipart(path, photo) for photo in photos]
        for device in devices:
            with kith_server(pack, {"KITH_DEVICE": device}, held) as server, Generator() as generator:
                for count in clients:
                    order = Order(server.port, requests, count, 10 * plan.seconds, 4 * plan.seconds, b'"box":')
                    tally = generator.run(order)
                    p50, p95, p99 = np.percentile(tally.latencies_ms[200], (50, 95, 99)).tolist()
                    cells[f"{photo_set}, {device}, {count} clients"] = {
                        "photos_per_s": tally.answered / tally.seconds,
                        "faces_per_s": tally.faces / tally.seconds,
                        "p50_ms": p50,
                        "p95_ms": p95,
                        "p99_ms": p99,
                        "failed": tally.failed,
                        "generator_cores": tally.cpu_s / tally.seconds,
                    }
    return {"cells": cells}


def identity_table(document: Document) -> list[str]:
    return [
        "| Photo to identity | photos/s | faces/s | p50 ms | p95 ms | p99 ms | failed |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {name} | {c['photos_per_s']:,.0f} | {c['faces_per_s']:,.0f} | {c['p50_ms']:.1f} | {c['p95_ms']:.1f} "
            f"| {c['p99_ms']:.1f} | {c['failed']} |"
            for name, c in document["cells"].items()
        ),
    ]


# Memory


def memory(plan: Plan, folder: Path) -> Document:
    """Run batches of every size and canvas in random order; read the GPU's memory from nvidia-smi."""
    pack = load_pack(BUNDLED_PACK)
    networks = [_opened(pack, "detection", plan, folder), _opened(pack, "recognition", plan, folder)]
    rng = np.random.default_rng(0)
    used, items = [_used_mb(plan)], 0
    for end in np.linspace(0, 60 * plan.minutes, SAMPLES + 1)[1:] + time.monotonic():
        while time.monotonic() < end:
            sides = rng.choice(GPU_CANVAS_SIDES_PX, 2).tolist()
            for network, most, shape in (
                (networks[0], PHOTO_BATCH_SIZES[-1], (3, *sides)),
                (networks[1], 2 * BATCH_BUCKETS[-1], (3, SIDE_PX, SIDE_PX)),
            ):
                count = int(rng.integers(1, most + 1))
                network.run(np.zeros((count, *shape), np.float32))
                items += count
        used.append(_used_mb(plan))
    warm = used[len(used) // 10 :]
    return {"minutes": plan.minutes, "items": items, "used_mb": used, "growth_mb": max(warm) - warm[0]}


def _used_mb(plan: Plan) -> float:
    if plan.rehearsal:
        return look_at(os.getpid()).rss_bytes / MB
    return float(_smi("memory.used")[plan.device.index]) * 1.048576


def memory_table(document: Document) -> list[str]:
    used = document["used_mb"]
    return [
        f"| Memory, {document['items']:,} items of varied shapes in {document['minutes']:g} minutes | MB |",
        "|---|---|",
        f"| before, everything prepared | {used[0]:,.0f} |",
        f"| at the end | {used[-1]:,.0f} |",
        f"| growth after the first tenth | {document['growth_mb']:,.0f} |",
    ]


# Search


def search(plan: Plan, _: Path) -> Document:
    """Search as galleries do: candidates from the GPU, then an exact comparison. The depth is the smallest that meets
    the recall target. Uses the index structures alone, without SQL."""
    rows: list[Document] = []
    kinds: tuple[Kind, ...] = ("exact", "compact")
    build = trainer_for("cpu" if plan.rehearsal else "gpu")
    for size in plan.templates:
        held, probes = gallery(size)[:2]
        truth = exact(probes, held, K)[0]
        for kind in kinds if not plan.rehearsal else kinds[1:]:
            builder = build(kind, held[:: max(1, size // 50_000)])
            started = time.perf_counter()
            index = builder.build(held, lambda: False)
            built_s = time.perf_counter() - started
            for depth in builder.depths:
                found = _searched(index, held, depth, probes)
                recall = [float((found[:, :n] >= truth[:, n - 1 : n] - 1e-5).mean()) for n in (1, K)]
                if recall[0] >= PROMISED_RECALL:
                    break
            searched = partial(_searched, index, held, depth)
            one = speed(searched, probes, 500)
            batches = [timed(searched, probes[at : at + BATCH]) for at in range(0, len(probes) - BATCH + 1, BATCH)]
            rows.append(
                {
                    "kind": kind,
                    "templates": size,
                    "build_s": built_s,
                    "depth": depth,
                    "recall_1": recall[0],
                    "recall_10": recall[1],
                    "p50_ms": one["p50_ms"],
                    "p99_ms": one["p99_ms"],
                    "batch_p50_ms": float(np.percentile(batches, 50)),
                    "batch_p99_ms": float(np.percentile(batches, 99)),
                }
            )
            del index, builder
    return {"rows": rows, "batch": BATCH}


def _searched(index: Any, held: Float, depth: int, probes: Float) -> Float:
    """Return (q, K) similarities, best first."""
    _, rows = index.candidates(probes, depth)
    similarities = similarities_at(probes, held, rows)
    best: Float = -np.sort(-similarities, axis=1)[:, :K]
    return best


def search_table(document: Document) -> list[str]:
    return [
        f"| Search | p50 ms | p99 ms | {document['batch']} at once: p50 ms | p99 ms | recall@1 | recall@10 | depth |",
        "|---|---|---|---|---|---|---|---|",
        *(
            f"| {r['kind']}, {r['templates']:,} templates | {r['p50_ms']:.2f} | {r['p99_ms']:.2f} "
            f"| {r['batch_p50_ms']:.2f} | {r['batch_p99_ms']:.2f} | {r['recall_1']:.4f} | {r['recall_10']:.4f} "
            f"| {r['depth']} |"
            for r in document["rows"]
        ),
    ]


def _noise(shape: tuple[int, ...]) -> NDArray[np.float32]:
    return np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)


PARTS: Final = {
    "parity": Part(parity, parity_table),
    "embedding": Part(embedding, rates_table),
    "detector": Part(detector, rates_table),
    "identity": Part(identity, identity_table),
    "memory": Part(memory, memory_table),
    "search": Part(search, search_table),
}

if __name__ == "__main__":
    main()
