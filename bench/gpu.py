"""Measure the speed of GPU and CPU. tests/models/runtime/test_cuda_network.py compares their results.

Prints tables, and writes bench/results/gpu-NAME.json for each part. Without a GPU it reports that and exits with 0.
docs/scale.md explains the figures.

    python -m bench.gpu [embedding detector identity search] [--rehearse]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bench.common import CACHE, RESULTS, figures_table, ratios, say, write
from bench.gallery import K, gallery, recalls, speed
from bench.load import Generator, Order, multipart
from bench.machine import about
from bench.photos import gallery_of, groups, lfw_or_exit, lfw_probes, people
from bench.servers import GALLERY, kith_server
from models.engines.selection import GPU_CANVAS_SIDES_PX, PHOTO_BATCH_SIZES
from models.errors import RuntimeUnavailableError
from models.pack.loading import BUNDLED_PACK, load_pack
from models.runtime.cuda_network import CudaNetwork, Device, diagnose_cuda, visible_gpus
from models.runtime.network import Float
from service.index.faiss_structures import exact, similarities_at, trainer_for

PLAIN: Final = "fp32"
CONFIGURATIONS: Final = {PLAIN: False, "fp16": True}
"""Use of fp16 by name."""
SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CLIENTS: Final = (1, 16, 64)
SIDE_PX: Final = 112
PROMISED_RECALL: Final = 0.999
Row = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """How much to measure. ``rehearsal``: everything small and on the CPU, to test the script; nothing is written."""

    templates: Sequence[int] = (1_000_000, 10_000_000)
    seconds: float = 0.5
    rounds: int = 7
    sizes: Sequence[int] = SIZES
    rehearsal: bool = False

    @property
    def device(self) -> Device:
        return Device("cpu" if self.rehearsal else "cuda")


def main() -> None:
    parts, rehearsal = [word for word in sys.argv[1:] if word != "--rehearse"], "--rehearse" in sys.argv
    if unknown := set(parts) - set(PARTS):
        sys.exit(f"no part {min(unknown)}: there are {', '.join(PARTS)}")
    plan = Plan([20_000], 0.01, 2, (1, 2), True) if rehearsal else Plan()
    if not rehearsal and (trouble := diagnose_cuda()) is not None:
        print(f"No GPU: {trouble}. Nothing was measured.")
        return
    gpus = visible_gpus() or ["no GPU: this is a rehearsal on the CPU, with meaningless figures"]
    print(f"{about()['machine']}; {'; '.join(gpus)}")
    with TemporaryDirectory() as folder:
        for name in parts or PARTS:
            say(name)
            try:
                rows = PARTS[name](plan, Path(folder))
            except SystemExit as missing:  # photos
                print(f"\n{name}: left out, {missing}")
                continue
            if not rehearsal:
                write(RESULTS / f"gpu-{name}.json", None, {"rows": rows, **about(), "gpus": gpus})
            print(f"\n{name}\n\n{figures_table(rows)}")


def embedding(plan: Plan, _: Path) -> list[Row]:
    """Measure the recognizer alone, from crops in memory to vectors in memory, including copies to and from the GPU."""
    shapes = [(size, 3, SIDE_PX, SIDE_PX) for size in plan.sizes]
    return _rates(BUNDLED_PACK / "recognizer.onnx", shapes, plan)


def detector(plan: Plan, _: Path) -> list[Row]:
    """Measure the detector alone, from canvases in memory to its raw outputs in memory."""
    sides = GPU_CANVAS_SIDES_PX[:1] if plan.rehearsal else GPU_CANVAS_SIDES_PX
    shapes = [(size, 3, side, side) for side in sides for size in PHOTO_BATCH_SIZES if size <= max(plan.sizes)]
    return _rates(BUNDLED_PACK / "detector.onnx", shapes, plan)


def _rates(file: Path, shapes: Sequence[tuple[int, ...]], plan: Plan) -> list[Row]:
    """Return items a second by configuration and shape: medians of interleaved rounds, and the ratio to fp32."""
    opened: dict[str, CudaNetwork] = {}
    for numbers, half in CONFIGURATIONS.items():
        try:
            opened[numbers] = CudaNetwork(file, shapes, _noise(min(shapes)), plan.device, half)
        except RuntimeUnavailableError as error:
            say(f"{numbers} is left out: {error}")
    rates: dict[tuple[str, tuple[int, ...]], list[float]] = {(n, shape): [] for n in opened for shape in shapes}
    for _ in range(plan.rounds):
        for (numbers, shape), measured in rates.items():
            measured.append(shape[0] / _seconds_a_run(opened[numbers], _noise(shape), plan.seconds))
    return [
        {
            "numbers": numbers,
            "ran": opened[numbers].reason,
            "shape": "x".join(map(str, shape)),
            "items_per_s": float(np.median(measured)),
            "times_fp32": float(np.median(ratios(measured, rates.get((PLAIN, shape), measured)))),
        }
        for (numbers, shape), measured in rates.items()
    ]


def _seconds_a_run(network: CudaNetwork, batch: Float, seconds: float) -> float:
    network.run(batch)
    runs, started = 0, time.perf_counter()
    while (passed := time.perf_counter() - started) < seconds:
        network.run(batch)
        runs += 1
    return passed / runs


def identity(plan: Plan, _: Path) -> list[Row]:
    """Identify LFW's photos and group photos through a real server, with networks on GPU and CPU in turn."""
    data, pack = lfw_or_exit().parent, BUNDLED_PACK
    everybody = people(data)
    held = {} if plan.rehearsal else gallery_of(everybody, load_pack(pack), CACHE)
    rows = []
    sets = {"lfw": lfw_probes(everybody)} | ({} if plan.rehearsal else {"groups": groups(data)})
    for photo_set, photos in sets.items():
        requests = [multipart(f"/v1/galleries/{GALLERY}/identify", photo) for photo in photos]
        for device in ("cpu",) if plan.rehearsal else ("gpu", "cpu"):
            with kith_server(pack, {"KITH_DEVICE": device}, held) as server, Generator() as generator:
                for count in (1,) if plan.rehearsal else CLIENTS:
                    order = Order(server.port, requests, count, 10 * plan.seconds, 4 * plan.seconds, b'"box":')
                    row = {"photos": photo_set, "device": device, "clients": count}
                    rows.append(row | generator.run(order).figures())
    return rows


def search(plan: Plan, _: Path) -> list[Row]:
    """Search as galleries do: candidates from the GPU, then an exact comparison. The depth is the smallest that meets
    the recall target. Uses the index structures alone, without SQL."""
    rows = []
    build = trainer_for("cpu" if plan.rehearsal else "gpu")
    for size in plan.templates:
        held, probes = gallery(size)[:2]
        truth = exact(probes, held, K)[0]
        builder = build(held[:: max(1, size // 50_000)])
        started = time.perf_counter()
        index = builder.build(held, lambda: False)
        row = {"templates": size, "build_s": time.perf_counter() - started}
        for depth in builder.depths:
            recall = recalls(_searched(index, held, depth, probes), truth)
            if recall["recall_1"] >= PROMISED_RECALL:
                break
        searched = partial(_searched, index, held, depth)
        rows.append(row | {"depth": depth} | recall | speed(searched, probes, 500))
        del index, builder, searched
    return rows


def _searched(index: Any, held: Float, depth: int, probes: Float) -> Float:
    """Return (q, K) similarities, best first."""
    rows = index.candidates(probes, depth)
    similarities = similarities_at(probes, held, rows)
    best: Float = -np.sort(-similarities, axis=1)[:, :K]
    return best


def _noise(shape: tuple[int, ...]) -> NDArray[np.float32]:
    return np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)


PARTS: Final[dict[str, Callable[[Plan, Path], list[Row]]]] = {
    part.__name__: part for part in (embedding, detector, identity, search)
}

if __name__ == "__main__":
    main()
