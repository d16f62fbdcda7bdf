"""Measure batching across requests: closed loops of clients through the pipeline, photo to vectors, without HTTP.

Compares configurations with the same networks and photos, in interleaved rounds: Kith's batches on one device that
both networks share; one device per network; two devices of one thread each, both shared; batches of one; and the usual
batcher, which waits a fixed number of milliseconds or until the batch is full. Prints photos a second and waiting
times: medians over the rounds, with ratios to batches of one. Also measures the overhead of a batcher. Writes JSON.

    python -m bench.batching [--rounds 3] [--seconds 2] [--data ../shared/data]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import time
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final, Generic, Self, TypeVar

from bench.machine import machine
from bench.photos import lfw_probes, people
from models.engines.selection import EnginePreference, open_network
from models.pack.loading import BUNDLED_PACK, load_pack
from models.runtime.onnx_runtime import available_cores
from models.vision.detection import Detector
from models.vision.recognition import Recognizer
from service.core.request_threads import RequestThreads
from service.inference.batcher import Batcher, DevicePool
from service.inference.decode_budget import DecodeBudget
from service.inference.images import ImageLimits
from service.inference.photo_pipeline import PhotoPipeline
from service.inference.recognizers import ServedRecognizer

RESULT: Final = Path(__file__).parent / "results" / "batching.json"
LIMITS: Final = ImageLimits(20_000_000, 50_000_000)
CLIENTS: Final = (1, 4, 16, 64)
WINDOW_S: Final = 0.005
QUEUE: Final = 1000
AT_ONCE: Final = 12
"""Limit on decoded photos in memory; service.app uses this value on two cores."""
SIZES: Final = {"detector": (1, 2, 4, 8), "recognizer": (1, 2, 4, 8)}
OVERHEAD_ITEMS: Final = 20_000

Item = TypeVar("Item")
Result = TypeVar("Result")


class Timed(Generic[Item, Result]):
    """Batcher that sends a batch when it is full, or :data:`WINDOW_S` after its first item."""

    def __init__(self, function: Callable[[list[Item]], Sequence[Result]], most: int, shape_of: Any = None) -> None:
        self._function = function
        self._most = most
        self._shape_of = shape_of or (lambda item: None)
        self._waiting: dict[Hashable, list[tuple[Item, asyncio.Future[Result]]]] = {}
        self._thread = ThreadPoolExecutor(1)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._thread.shutdown()

    def admit(self, count: int, coming: int = 0) -> None:
        """Admit every item."""

    async def submit(self, items: Sequence[Item], background: bool = False) -> list[Result]:
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in items]
        for item, future in zip(items, futures, strict=True):
            key = self._shape_of(item)
            waiting = self._waiting.setdefault(key, [])
            waiting.append((item, future))
            if len(waiting) == self._most:
                self._leave(key, waiting)
            elif len(waiting) == 1:
                loop.call_later(WINDOW_S, self._leave, key, waiting)
        return list(await asyncio.gather(*futures))

    def _leave(self, key: Hashable, batch: list[tuple[Item, asyncio.Future[Result]]]) -> None:
        if self._waiting.get(key) is not batch:
            return  # the batch filled before its deadline
        del self._waiting[key]
        running = asyncio.get_running_loop().run_in_executor(self._thread, self._function, [item for item, _ in batch])

        def deliver(done: asyncio.Future[Sequence[Result]]) -> None:
            for (_, future), result in zip(batch, done.result(), strict=True):
                future.set_result(result)

        running.add_done_callback(deliver)


Opener = Callable[[AsyncExitStack, dict[str, Any], Any], Any]


async def shared(opened: AsyncExitStack, functions: dict[str, Any], shape_of: Any) -> list[Any]:
    devices = opened.enter_context(DevicePool())
    return [await _batcher(opened, devices, name, [functions[name]], SIZES[name], shape_of) for name in SIZES]


async def apart(opened: AsyncExitStack, functions: dict[str, Any], shape_of: Any) -> list[Any]:
    each = {name: opened.enter_context(DevicePool()) for name in SIZES}
    return [await _batcher(opened, each[name], name, [functions[name]], SIZES[name], shape_of) for name in SIZES]


async def streams(opened: AsyncExitStack, functions: dict[str, Any], shape_of: Any) -> list[Any]:
    devices = opened.enter_context(DevicePool(2))
    return [await _batcher(opened, devices, n, functions[f"{n}, one thread"], SIZES[n], shape_of) for n in SIZES]


async def single(opened: AsyncExitStack, functions: dict[str, Any], shape_of: Any) -> list[Any]:
    devices = opened.enter_context(DevicePool())
    return [await _batcher(opened, devices, name, [functions[name]], (1,), shape_of) for name in SIZES]


async def timed(opened: AsyncExitStack, functions: dict[str, Any], shape_of: Any) -> list[Any]:
    pairs = zip(SIZES, (shape_of, None), strict=True)
    return [await opened.enter_async_context(Timed(functions[n], SIZES[n][-1], shape)) for n, shape in pairs]


async def _batcher(
    opened: AsyncExitStack, devices: DevicePool, name: str, functions: Any, sizes: Sequence[int], shape_of: Any
) -> Any:
    shape = shape_of if name == "detector" else None
    return await opened.enter_async_context(Batcher(name, devices, functions, sizes, QUEUE, shape))


WAYS: Final[dict[str, Opener]] = {
    "one device": shared,
    "a device each": apart,
    "two devices of one thread": streams,
    "batches of one": single,
    "timer": timed,
}


class Bench:
    """Networks of the bundled pack, opened once."""

    def __init__(self, data: Path) -> None:
        self._pack = load_pack(BUNDLED_PACK)
        self._detection, self._recognition = self._open(None)
        narrow = [self._open(1) for _ in range(2)]
        self._functions: dict[str, Any] = {
            "detector": self._detection.run,
            "recognizer": self._recognition.embed_each,
            "detector, one thread": [detector.run for detector, _ in narrow],
            "recognizer, one thread": [recognizer.embed_each for _, recognizer in narrow],
        }
        self._photos = lfw_probes(people(data))

    def _open(self, threads: int | None) -> tuple[Detector, Recognizer]:
        wish = EnginePreference(threads=threads)
        detection, recognition = (open_network(spec, wish) for spec in (self._pack.detection, self._pack.recognition))
        return Detector(detection, self._pack.detection), Recognizer(recognition, self._pack.recognition)

    async def run(self, way: Opener, clients: int, seconds: float) -> dict[str, float]:
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
    async def _pipeline(self, way: Opener) -> AsyncIterator[tuple[PhotoPipeline, ServedRecognizer]]:
        async with AsyncExitStack() as opened:
            threads = opened.enter_context(RequestThreads(max(4, 2 * available_cores())))
            detecting, embedding = await way(opened, self._functions, lambda canvas: canvas.planes.shape)
            network = open_network(self._pack.recognition, EnginePreference())
            served = ServedRecognizer(self._pack, network, self._recognition, None, embedding)
            photos = PhotoPipeline(self._detection, detecting, LIMITS, 100, threads, DecodeBudget(AT_ONCE, 10**9))
            yield photos, served


async def overhead(clients: int) -> float:
    """Return the CPU microseconds per item when the network does nothing."""
    with DevicePool() as devices:
        async with Batcher[int, int]("none", devices, [list], SIZES["recognizer"], QUEUE) as batcher:

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
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("KITH_DATA", "../shared/data")))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    given = parser.parse_args()
    bench = Bench(given.data)
    found: dict[int, dict[str, list[dict[str, float]]]] = {
        clients: {way: [] for way in given.ways} for clients in given.clients
    }
    for _, clients, way in itertools.product(range(given.rounds), given.clients, given.ways):
        found[clients][way].append(asyncio.run(bench.run(WAYS[way], clients, given.seconds)))
    alone = {clients: [asyncio.run(overhead(clients)) for _ in range(given.rounds)] for clients in given.clients}
    report = {"machine": machine(), "rounds": given.rounds, "runs": found, "microseconds an item, no network": alone}
    RESULT.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"{report['machine']}; medians of {given.rounds} rounds")
    for clients, ways in found.items():
        print(f"{clients} clients; a batcher alone: {statistics.median(alone[clients]):.0f} us an item")
        for way, runs in ways.items():
            line = "".join(f"{name}{statistics.median(run[name] for run in runs):9.2f}  " for name in runs[0])
            print(f"  {way:<28}{line}{_ratio(ways, way)}")


def _ratio(ways: dict[str, list[dict[str, float]]], way: str) -> str:
    if "batches of one" not in ways:
        return ""
    ratios = sorted(a["photos/s"] / b["photos/s"] for a, b in zip(ways[way], ways["batches of one"], strict=True))
    return f"x {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


if __name__ == "__main__":
    main()
