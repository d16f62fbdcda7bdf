"""Measure batching across requests: closed loops of clients through the pipeline, photo to vectors, without HTTP.

Compares configurations with the same networks and photos, in interleaved rounds: batches on one device that both
networks share, on two devices of one thread each, and batches of one. Prints photos a second and waiting times:
medians over the rounds, with ratios to batches of one. Also measures the overhead of a batcher. Writes JSON.

    python -m bench.batching [--rounds 3] [--seconds 2]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from bench.common import RESULTS, in_words, ratios, spread, write
from bench.machine import machine
from bench.photos import lfw_or_exit, lfw_probes, people
from models.engines.selection import EnginePreference, open_network
from models.pack.loading import BUNDLED_PACK, load_pack
from models.runtime.onnx_runtime import available_cores
from models.vision.detection import Detector
from models.vision.recognition import Recognizer
from service.core.actor import RequestThreads
from service.inference.batcher import Batcher, DevicePool
from service.inference.images import ImageLimits
from service.inference.photo_pipeline import DecodeBudget, PhotoPipeline
from service.inference.recognizers import ServedRecognizer

LIMITS: Final = ImageLimits(20_000_000, 50_000_000)
CLIENTS: Final = (1, 4, 16, 64)
QUEUE: Final = 1000
AT_ONCE: Final = 12
"""Limit on decoded photos in memory; service.app uses this value on two cores."""
SIZES: Final = (1, 2, 4, 8)
OVERHEAD_ITEMS: Final = 20_000


@dataclass(frozen=True)
class Way:
    """``devices``: number of devices, each with a network of one thread if there are several. ``sizes``: of batches."""

    devices: int
    sizes: Sequence[int]


WAYS: Final = {
    "one device": Way(1, SIZES),
    "two devices of one thread": Way(2, SIZES),
    "batches of one": Way(1, (1,)),
}


class Bench:
    """Networks of the bundled pack, opened once."""

    def __init__(self, data: Path) -> None:
        self._pack = load_pack(BUNDLED_PACK)
        self._networks = {1: [self._open(None)], 2: [self._open(1) for _ in range(2)]}
        self._photos = lfw_probes(people(data))

    def _open(self, threads: int | None) -> tuple[Detector, Recognizer]:
        wish = EnginePreference(threads=threads)
        detection, recognition = (open_network(spec, wish) for spec in (self._pack.detection, self._pack.recognition))
        return Detector(detection, self._pack.detection), Recognizer(recognition, self._pack.recognition)

    async def run(self, way: Way, clients: int, seconds: float) -> dict[str, float]:
        async with self._pipeline(way) as (opened, served):
            photos, waits = itertools.cycle(self._photos), list[float]()
            await asyncio.gather(*(opened.embed(next(photos), served) for _ in range(2 * clients)))
            begin, cpu = time.perf_counter(), time.process_time()

            async def client() -> None:
                while (start := time.perf_counter()) < begin + seconds:
                    await opened.embed(next(photos), served)
                    waits.append((time.perf_counter() - start) * 1000)

            await asyncio.gather(*(client() for _ in range(clients)))
            took, used = time.perf_counter() - begin, time.process_time() - cpu
        waits.sort()
        return {
            "photos/s": len(waits) / took,
            "p50 ms": statistics.median(waits),
            "p99 ms": waits[int(len(waits) * 0.99)],
            "CPU ms a photo": used * 1000 / len(waits),
        }

    @asynccontextmanager
    async def _pipeline(self, way: Way) -> AsyncIterator[tuple[PhotoPipeline, ServedRecognizer]]:
        networks = self._networks[way.devices]
        async with AsyncExitStack() as opened:
            threads = opened.enter_context(RequestThreads(max(4, 2 * available_cores())))
            devices = opened.enter_context(DevicePool(way.devices))
            detect, embed = [one.run for one, _ in networks], [one.embed_each for _, one in networks]
            canvases: Batcher[Any, Any] = Batcher(
                "detector", devices, detect, way.sizes, QUEUE, attrgetter("planes.shape")
            )
            crops: Batcher[Any, Any] = Batcher("recognizer", devices, embed, way.sizes, QUEUE, None)
            detecting = await opened.enter_async_context(canvases)
            embedding = await opened.enter_async_context(crops)
            detector, recognizer = self._networks[1][0]
            network = open_network(self._pack.recognition, EnginePreference())
            served = ServedRecognizer(self._pack, network, recognizer, None, embedding)
            yield PhotoPipeline(detector, detecting, LIMITS, 100, threads, DecodeBudget(AT_ONCE, 10**9)), served


async def overhead(clients: int) -> float:
    """Return the CPU microseconds per item when the network does nothing."""
    with DevicePool() as devices:
        async with Batcher[int, int]("none", devices, [list], SIZES, QUEUE) as batcher:

            async def client() -> None:
                for item in range(OVERHEAD_ITEMS // clients):
                    await batcher.submit([item])

            begin = time.process_time()
            await asyncio.gather(*(client() for _ in range(clients)))
            return (time.process_time() - begin) / OVERHEAD_ITEMS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    given = parser.parse_args()
    bench = Bench(lfw_or_exit().parent)
    found: dict[int, dict[str, list[dict[str, float]]]] = {n: {way: [] for way in WAYS} for n in CLIENTS}
    for _, clients, way in itertools.product(range(given.rounds), CLIENTS, WAYS):
        found[clients][way].append(asyncio.run(bench.run(WAYS[way], clients, given.seconds)))
    alone = {clients: [asyncio.run(overhead(clients)) for _ in range(given.rounds)] for clients in CLIENTS}
    report = {"machine": machine(), "rounds": given.rounds, "runs": found, "microseconds an item, no network": alone}
    write(RESULTS / "batching.json", None, report)
    print(f"{report['machine']}; medians of {given.rounds} rounds")
    for clients, ways in found.items():
        print(f"{clients} clients; a batcher alone: {statistics.median(alone[clients]):.0f} us an item")
        for way, runs in ways.items():
            line = "".join(f"{name}{statistics.median(run[name] for run in runs):9.2f}  " for name in runs[0])
            own, single = ([run["photos/s"] for run in ways[name]] for name in (way, "batches of one"))
            print(f"  {way:<28}{line}x {in_words(spread(ratios(own, single)))}")


if __name__ == "__main__":
    main()
