"""Measure the search cost of a small gallery, by its size and its probes, beside plain numpy products.

Figures are processor time of all threads, including busy waiting, with pauses between searches like in a server.
numpy's BLAS splits a product among threads, which spin for a while after it. The table also has the wall time of
sequential searches, and of the way to a thread and back. Rounds are interleaved; figures are median, minimum and
maximum. Prints, and writes bench/results/searches.md.

    python -m bench.searches
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np

from bench.common import RESULTS
from bench.machine import machine
from models.vision.recognition import l2_normalize
from service.index.faiss_structures import builders
from service.index.segmented_index import SegmentedIndex
from service.index.segments import Rows

TABLE: Final = RESULTS / "searches.md"
DIMENSION: Final = 512
SIZES: Final = (1000, 3000, 10_000)
PROBES: Final = (1, 2, 6, 20)
ROUNDS: Final = 3
SEARCHES: Final = 25
PAUSE_S: Final = 0.005
HOPS: Final = 2000


def main() -> None:
    vectors = l2_normalize(np.random.default_rng(0).normal(size=(max(SIZES), DIMENSION)))
    lines = ["# Searches of small galleries", "", f"`python -m bench.searches` on {machine()}. Core-milliseconds.", ""]
    lines += ["| Templates | Probes | Search | A probe | numpy's product | Wall time, no pauses |"]
    lines += ["|---|---|---|---|---|---|"]
    for size in SIZES:
        index = SegmentedIndex(DIMENSION, "exact", 0.999, builders("cpu"), lambda _: None)
        index.load(Rows(np.arange(size), np.arange(size), vectors[:size]), 0)
        for count in PROBES:
            lines.append(row(index, vectors[:size], count))
            print(lines[-1], flush=True)
    cpu, wall = zip(*(asyncio.run(hop_ms()) for _ in range(ROUNDS)), strict=True)
    lines += ["", f"To a thread and back: {told(cpu)} core-ms, {told(wall)} ms."]
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


def row(index: SegmentedIndex, vectors: Any, count: int) -> str:
    probes = vectors[:count]

    def search() -> None:
        index.search(index.view, probes, 5)

    def product() -> None:
        _ = vectors @ probes[0] if count == 1 else probes @ vectors.T

    rounds = [(paused_ms(search), paused_ms(product), wall_ms(search)) for _ in range(ROUNDS)]
    ours, numpys, walls = zip(*rounds, strict=True)
    each = [ms / count for ms in ours]
    return f"| {len(vectors):,} | {count} | {told(ours)} | {told(each)} | {told(numpys)} | {told(walls)} |"


def told(values: Any) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def paused_ms(function: Callable[[], None]) -> float:
    """Return processor milliseconds of all threads, less those of the pauses."""
    time.sleep(0.1)  # until spinning threads go to sleep
    spent = []
    for searching in (False, True):
        start = time.process_time()
        for _ in range(SEARCHES):
            if searching:
                function()
            time.sleep(PAUSE_S)
        time.sleep(0.1)
        spent.append(time.process_time() - start)
    return (spent[1] - spent[0]) * 1000 / SEARCHES


def wall_ms(function: Callable[[], None]) -> float:
    spans = []
    for _ in range(SEARCHES):
        start = time.perf_counter()
        function()
        spans.append(time.perf_counter() - start)
    return statistics.median(spans) * 1000


async def hop_ms() -> tuple[float, float]:
    """Return processor and wall milliseconds of a sequential call in a thread that does nothing."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(4) as pool:
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(HOPS):
            await loop.run_in_executor(pool, int)
        return (time.process_time() - cpu) * 1000 / HOPS, (time.perf_counter() - wall) * 1000 / HOPS


if __name__ == "__main__":
    main()
