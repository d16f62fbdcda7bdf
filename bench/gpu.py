"""Compare GPU and CPU: equality of results, speed, and memory.

Prints a table as its last output, and writes bench/results/gpu-NAME.json for each part. Without a GPU it reports that
and exits with 0. docs/gpu.md explains the figures.

    python -m bench.gpu [parity embedding detector identity memory search] [--templates 1000000 10000000]
                        [--minutes 10] [--rehearse]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bench.common import CACHE, RESULTS, ratios, say, spread, table, write
from bench.gallery import BATCH, K, gallery, recalls, timed, times
from bench.load import Generator, Order, look_at, multipart
from bench.machine import about
from bench.photos import gallery_of, groups, heavy_recognizer, lfw_or_exit, lfw_probes, people, read
from bench.servers import GALLERY, kith_server
from models.engines.selection import GPU_CANVAS_SIDES_PX, PHOTO_BATCH_SIZES, open_on_device
from models.errors import RuntimeUnavailableError
from models.pack.loading import BUNDLED_PACK, load_pack
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=[], help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--templates", nargs="+", type=int, default=[1_000_000, 10_000_000])
    parser.add_argument("--minutes", type=float, default=10, help="of varied shapes, for memory")
    parser.add_argument("--rehearse", action="store_true", help="small sizes on the CPU, to test the script")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {min(unknown)}: there are {', '.join(PARTS)}")
    plan = Plan(options.templates, 0.5, 7, 200, options.minutes)
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
                measure, text = PARTS[name]
                document = measure(plan, Path(folder))
            except SystemExit as missing:  # photos
                tables.append(f"{name}: left out, {missing}")
                continue
            if not plan.rehearsal:
                write(RESULTS / f"gpu-{name}.json", None, {**document, **about(), "gpus": _gpus()})
            tables.append(text(document))
    gpus = "; ".join(_gpus()) or "no GPU: this is a rehearsal on the CPU, with meaningless figures"
    print("\n" + "\n\n".join([f"{about()['machine']}; {gpus}", *tables]))


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


# Parity


def parity(plan: Plan, folder: Path) -> Document:
    """Compare GPU and CPU on the same photos: paired boxes, vectors of the same crops, and each node's provider."""
    pack, data = load_pack(BUNDLED_PACK), lfw_or_exit().parent
    photos = [read(person.photos[0]) for person in people(data)[: plan.photos]]
    opened, opened_here = (
        [open_on_device(spec, plan.device, folder) for spec in (pack.detection, pack.recognition)],
        [OnnxNetwork(spec.path, "CPUExecutionProvider") for spec in (pack.detection, pack.recognition)],
    )
    detectors = [Detector(net, pack.detection, buckets=GPU_CANVAS_SIDES_PX) for net in (opened[0], opened_here[0])]
    there, here = ([faces for photo in photos for faces in detector.detect([photo])] for detector in detectors)
    shifts, alone = _paired(there, here)
    crops = np.stack(
        [align(photo, faces.landmarks_xy[:1])[0] for photo, faces in zip(photos, here, strict=True) if len(faces)]
    )
    vectors = [Recognizer(network, pack.recognition).embed(crops) for network in (opened[1], opened_here[1])]
    cosines = (vectors[0] * vectors[1]).sum(1)
    return {
        "photos": len(photos),
        "faces": int(sum(map(len, here))),
        "faces_of_one_only": alone,
        "box_shift_px": {"max": float(max(shifts)), "median": float(np.median(shifts))},
        "cosine": {"min": float(cosines.min()), "median": float(np.median(cosines))},
        "numbers": opened[1].describe(),
        "nodes": {
            task: network.placement(_noise((1, 3, side, side)))
            for task, network, side in zip(("detection", "recognition"), opened, (256, SIDE_PX), strict=True)
        },
        "goal": {"box_shift_px": 0.5, "cosine": 0.999},
    }


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


def parity_table(document: Document) -> str:
    shift, cosine = document["box_shift_px"], document["cosine"]
    rows = [
        ["box, pixels", f"{shift['max']:.3f}", f"{shift['median']:.3f}", "0.5"],
        ["cosine of vectors", f"{cosine['min']:.6f}", f"{cosine['median']:.6f}", "0.999"],
        ["faces that only one found", document["faces_of_one_only"], "", "0"],
    ]
    rows += [
        [f"nodes of {task}", " ".join(f"{n} {p}" for p, n in ran.items()), "", ""]
        for task, ran in document["nodes"].items()
    ]
    return table(f"Parity, {document['photos']} photos, {document['faces']} faces | worst | median | goal", rows)


# Throughput


def embedding(plan: Plan, folder: Path) -> Document:
    """Measure the recognizer alone, from crops in memory to vectors in memory, including copies to and from the GPU."""
    files = {"bundled": BUNDLED_PACK / "recognizer.onnx"}
    if importlib.util.find_spec("torch") is not None and not plan.rehearsal:
        files["IResNet-50, random weights"] = heavy_recognizer(CACHE)
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
    plain = rates.get(PLAIN)
    return {
        "ran": {name: network.describe() for name, network in opened.items()},
        "left_out": left_out,
        "per_s": {name: {key: spread(each[key]) for key in each} for name, each in rates.items()},
        "ratio": {n: {k: spread(ratios(each[k], plain[k])) for k in each} for n, each in rates.items() if plain},
    }


def _seconds_a_run(network: CudaNetwork, batch: Float, seconds: float) -> float:
    network.run(batch)
    runs, started = 0, time.perf_counter()
    while (passed := time.perf_counter() - started) < seconds:
        network.run(batch)
        runs += 1
    return passed / runs


def rates_table(document: Document) -> str:
    lines: list[str] = []
    for name, network in document["networks"].items():
        rows = []
        for configuration, cells in network["per_s"].items():
            found = network["ratio"].get(configuration, {})
            told = {key: f" ({ratio['median']:.1f})" for key, ratio in found.items()}
            rows.append([configuration, *(f"{cell['median']:,.0f}{told.get(key, '')}" for key, cell in cells.items())])
        lines.append(table([f"{name}: items/s (ratio to {PLAIN})", *next(iter(network["per_s"].values()))], rows))
        lines += [f"{configuration}: left out, {why}" for configuration, why in network["left_out"].items()]
    return "\n".join(lines)


# Photo to identity


def identity(plan: Plan, _: Path) -> Document:
    """Identify LFW's photos and group photos through a real server, with networks on GPU and CPU in turn."""
    data, pack = lfw_or_exit().parent, BUNDLED_PACK
    everybody = people(data)
    held = {} if plan.rehearsal else gallery_of(everybody, load_pack(pack), CACHE)
    path = f"/v1/galleries/{GALLERY}/identify"
    cells: Document = {}
    devices = ("cpu",) if plan.rehearsal else ("gpu", "cpu")
    sets = {"lfw": lfw_probes(everybody)} | ({} if plan.rehearsal else {"groups": groups(data)})
    for photo_set, photos in sets.items():
        requests = [multipart(path, photo) for photo in photos]
        for device in devices:
            with kith_server(pack, {"KITH_DEVICE": device}, held) as server, Generator() as generator:
                for count in (1,) if plan.rehearsal else CLIENTS:
                    order = Order(server.port, requests, count, 10 * plan.seconds, 4 * plan.seconds, b'"box":')
                    cells[f"{photo_set}, {device}, {count} clients"] = generator.run(order).figures()
    return {"cells": cells}


def identity_table(document: Document) -> str:
    formats = {"photos_per_s": ",.0f", "faces_per_s": ",.0f", "p50_ms": ".1f", "p95_ms": ".1f", "p99_ms": ".1f"}
    return table(
        "Photo to identity | photos/s | faces/s | p50 ms | p95 ms | p99 ms | failed",
        (
            [name, *(f"{cell[key]:{form}}" for key, form in formats.items()), cell["failed"]]
            for name, cell in document["cells"].items()
        ),
    )


# Memory


def memory(plan: Plan, folder: Path) -> Document:
    """Run batches of every size and canvas in random order; read the GPU's memory from nvidia-smi."""
    pack = load_pack(BUNDLED_PACK)
    networks = [open_on_device(spec, plan.device, folder) for spec in (pack.detection, pack.recognition)]
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


def memory_table(document: Document) -> str:
    rows = {"before, everything prepared": document["used_mb"][0], "at the end": document["used_mb"][-1]}
    rows["growth after the first tenth"] = document["growth_mb"]
    header = f"Memory, {document['items']:,} items of varied shapes in {document['minutes']:g} minutes | MB"
    return table(header, ([name, f"{mb:,.0f}"] for name, mb in rows.items()))


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
                recall = recalls(found, truth)
                if recall["recall_1"] >= PROMISED_RECALL:
                    break
            searched = partial(_searched, index, held, depth)
            singles = [timed(searched, probes[i % len(probes)][None]) for i in range(500)]
            batches = [timed(searched, probes[at : at + BATCH]) for at in range(0, len(probes) - BATCH + 1, BATCH)]
            row = {"kind": kind, "templates": size, "build_s": built_s, "depth": depth}
            rows.append(row | recall | times("", singles) | times("batch_", batches))
            del index, builder
    return {"rows": rows, "batch": BATCH}


def _searched(index: Any, held: Float, depth: int, probes: Float) -> Float:
    """Return (q, K) similarities, best first."""
    _, rows = index.candidates(probes, depth)
    similarities = similarities_at(probes, held, rows)
    best: Float = -np.sort(-similarities, axis=1)[:, :K]
    return best


def search_table(document: Document) -> str:
    formats = dict.fromkeys(("p50_ms", "p99_ms", "batch_p50_ms", "batch_p99_ms"), ".2f")
    formats |= {"recall_1": ".4f", "recall_10": ".4f", "depth": ""}
    return table(
        f"Search | p50 ms | p99 ms | {document['batch']} at once: p50 ms | p99 ms | recall@1 | recall@10 | depth",
        (
            [f"{row['kind']}, {row['templates']:,} templates", *(f"{row[key]:{form}}" for key, form in formats.items())]
            for row in document["rows"]
        ),
    )


def _noise(shape: tuple[int, ...]) -> NDArray[np.float32]:
    return np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)


PARTS: Final[dict[str, tuple[Callable[[Plan, Path], Document], Callable[[Document], str]]]] = {
    "parity": (parity, parity_table),
    "embedding": (embedding, rates_table),
    "detector": (detector, rates_table),
    "identity": (identity, identity_table),
    "memory": (memory, memory_table),
    "search": (search, search_table),
}

if __name__ == "__main__":
    main()
