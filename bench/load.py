"""A closed loop of HTTP clients over loopback, cheap enough to share the machine with the server that it loads.

Requests are prebuilt bytes on keep-alive connections. Each client sends its next request after the answer arrives, on a
new connection if the server closed the old one. The loop runs in a separate process, so its own processor time can be
reported.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

HOST: Final = "127.0.0.1"
BOUNDARY: Final = "kith-bench-7MA4YWxkTrZu0gW"
DRAIN_S: Final = 120.0
"""Time for the slowest server to answer the pending requests after the measurement."""


@dataclass(frozen=True)
class Order:
    """A load of ``clients`` on ``port`` for ``seconds``, after ``warm_up_s`` that do not count. ``marker``: a string
    that occurs in an answer once per face. ``limit``: maximum number of requests, None for no limit."""

    port: int
    requests: Sequence[bytes]
    clients: int
    seconds: float
    warm_up_s: float
    marker: bytes
    limit: int | None = None


@dataclass
class Tally:
    """Answers within ``seconds``. ``latencies_ms``: by status, and by 0 for requests whose connection was lost;
    ``served``: status 200, including warm-up and drain; ``cpu_s``: processor seconds of the generator itself."""

    seconds: float = 0.0
    faces: int = 0
    served: int = 0
    latencies_ms: dict[int, list[float]] = field(default_factory=dict)
    cpu_s: float = 0.0

    @property
    def statuses(self) -> Counter[int]:
        return Counter({status: len(each) for status, each in self.latencies_ms.items()})

    @property
    def answered(self) -> int:
        return self.statuses[200]

    def figures(self) -> dict[str, float]:
        """Return rates, latencies of answers (NaN without any), failures, and cores that the generator used."""
        p50, p95, p99 = np.percentile(self.latencies_ms.get(200, [np.nan]), (50, 95, 99)).tolist()
        return {
            "photos_per_s": self.answered / self.seconds,
            "faces_per_s": self.faces / self.seconds,
            "p50_ms": p50,
            "p95_ms": p95,
            "p99_ms": p99,
            "failed": self.statuses.total() - self.answered,
            "generator_cores": self.cpu_s / self.seconds,
        }


def multipart(path: str, photo: bytes, part: str = "images", headers: str = "") -> bytes:
    """Build a complete POST request of a form with one photo. Each of ``headers`` ends with a line break."""
    part_head = f'Content-Disposition: form-data; name="{part}"; filename="photo"\r\nContent-Type: image/jpeg\r\n\r\n'
    body = f"--{BOUNDARY}\r\n{part_head}".encode() + photo + f"\r\n--{BOUNDARY}--\r\n".encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: multipart/form-data; boundary={BOUNDARY}\r\n"
    return f"{head}{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body


def content_length(head: bytes) -> int:
    """Return the length from an answer's head. Raise ValueError if it is missing: all measured servers send it."""
    return int(head.lower().partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0])


class _Run:
    def __init__(self, order: Order) -> None:
        self._requests: Iterator[bytes] = itertools.cycle(order.requests)
        self._marker = order.marker
        self._left = order.limit
        self._begin = time.perf_counter() + order.warm_up_s
        self._end = self._begin + order.seconds
        self.tally = Tally(order.seconds)
        self._last = self._begin

    def next_request(self) -> bytes | None:
        if time.perf_counter() >= self._end or self._left == 0:
            return None
        if self._left is not None:
            self._left -= 1
        return next(self._requests)

    def answered(self, status: int, answer: bytes, latency_ms: float) -> None:
        now = time.perf_counter()
        self.tally.served += status == 200
        if not self._begin <= now < self._end:
            return
        self._last = now
        self.tally.latencies_ms.setdefault(status, []).append(latency_ms)
        if status == 200:
            self.tally.faces += answer.count(self._marker)

    def close(self) -> Tally:
        if self._left == 0:
            self.tally.seconds = self._last - self._begin
        return self.tally


async def load(order: Order) -> Tally:
    """Run the load. Raise OSError if the server accepts no connection, TimeoutError if it does not answer."""
    run, cpu_s = _Run(order), time.process_time()

    async def client() -> None:
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        while (request := run.next_request()) is not None:
            reader, writer = streams = streams or await asyncio.open_connection(HOST, order.port)
            sent = time.perf_counter()
            status, head, body = 0, b"", b""
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                writer.write(request)
                head = await reader.readuntil(b"\r\n\r\n")
                body = await reader.readexactly(content_length(head))
                status = int(head[9:12])
            run.answered(status, body, (time.perf_counter() - sent) * 1000)
            if not status or b"connection: close" in head.lower():
                writer.close()
                streams = None
        if streams is not None:
            streams[1].close()

    async with asyncio.timeout(order.warm_up_s + order.seconds + DRAIN_S):
        await asyncio.gather(*(client() for _ in range(order.clients)))
    tally = run.close()
    tally.cpu_s = (time.process_time() - cpu_s) * order.seconds / (order.seconds + order.warm_up_s)
    return tally


def _run(order: Order) -> Tally:
    return asyncio.run(load(order))


class Generator(ProcessPoolExecutor):
    """A load loop in its own process."""

    def __init__(self) -> None:
        super().__init__(1, multiprocessing.get_context("spawn"))

    def run(self, order: Order) -> Tally:
        """Run an order. Raise the errors of :func:`load`."""
        return self.submit(_run, order).result()


@dataclass(frozen=True)
class ProcessFigures:
    """Processor seconds so far, resident bytes now, and peak resident bytes of a running process."""

    cpu_s: float
    rss_bytes: int
    peak_bytes: int


def look_at(pid: int) -> ProcessFigures:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    memory = dict(line.split(":", 1) for line in lines)
    rss, peak = (int(memory[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    # The clock of a process, as clock_getcpuclockid(3) names it: /proc/PID/stat counts in hundredths of a second.
    return ProcessFigures(time.clock_gettime(~pid << 3 | 2), rss, peak)
