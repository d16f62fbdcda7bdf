"""What a small gallery's search costs, by its size and its probes, beside the products alone by numpy.

Processor time of all threads, what they spend waiting included, with pauses between searches, as a server has them:
numpy's BLAS shares a product among threads, which look for more work for a while after it. Beside it the wall time of
one search after the other, and of the way to a thread and back. By turns; median, least and most of the rounds.
Prints, and writes bench/results/searches.md.

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
from models.recognition import unit
from service.gallery.faiss_index import builders
from service.gallery.segmented import SegmentedIndex
from service.gallery.segments import Rows

TABLE: Final = RESULTS / "searches.md"
DIMENSION: Final = 512
SIZES: Final = (1000, 3000, 10_000)
PROBES: Final = (1, 2, 6, 20)
ROUNDS: Final = 3
SEARCHES: Final = 25
PAUSE_S: Final = 0.005
HOPS: Final = 2000


def main() -> None:
    vectors = unit(np.random.default_rng(0).normal(size=(max(SIZES), DIMENSION)))
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
    """Processor milliseconds of all threads, less those of the pauses."""
    time.sleep(0.1)  # until threads that look for work give up
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
    """Processor and wall milliseconds of a call in a thread that does nothing, of one at a time."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(4) as pool:
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(HOPS):
            await loop.run_in_executor(pool, int)
        return (time.process_time() - cpu) * 1000 / HOPS, (time.perf_counter() - wall) * 1000 / HOPS


if __name__ == "__main__":
    main()
