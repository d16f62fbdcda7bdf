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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Final, Self

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


def post(path: str, media_type: str, body: bytes) -> bytes:
    """Build a complete POST request."""
    head = f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: {media_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def multipart(path: str, photo: bytes, part: str = "images") -> bytes:
    """Build a complete POST request of a form with one photo."""
    head = f'Content-Disposition: form-data; name="{part}"; filename="photo"\r\nContent-Type: image/jpeg\r\n\r\n'
    body = f"--{BOUNDARY}\r\n{head}".encode() + photo + f"\r\n--{BOUNDARY}--\r\n".encode()
    return post(path, f"multipart/form-data; boundary={BOUNDARY}", body)


class _Connection(asyncio.Protocol):
    """A connection of one client. ``done``: whether the client needs no other one."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._received = bytearray()
        self._missing: int | None = None
        self._is_last = False
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._next()

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._missing is None:
            end = self._received.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._received[:end])
            self._missing = end + 4 + content_length(head)
            self._is_last = b"connection: close" in head.lower()
        if len(self._received) < self._missing:
            return
        status = int(self._received[9:12])
        self._run.answered(status, self._received, (time.perf_counter() - self._sent) * 1000)
        self._received.clear()
        self._missing = None
        if self._is_last:
            self._end(False)
        else:
            self._next()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self._run.answered(0, bytearray(), (time.perf_counter() - self._sent) * 1000)
            self.done.set_result(False)

    def _next(self) -> None:
        request = self._run.next_request()
        if request is None:
            self._end(True)
            return
        self._sent = time.perf_counter()
        self._transport.write(request)

    def _end(self, is_enough: bool) -> None:
        self.done.set_result(is_enough)
        self._transport.close()


def content_length(head: bytes) -> int:
    """Return the length from an answer's head. Raise ValueError if it is missing: all measured servers send it."""
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return int(value)
    raise ValueError("an answer without a Content-Length")


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

    def answered(self, status: int, answer: bytearray, latency_ms: float) -> None:
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
    """Run the load. Raise ConnectionError if the server accepts no connection, TimeoutError if it does not answer."""
    run, loop = _Run(order), asyncio.get_running_loop()
    cpu_s = time.process_time()

    async def client() -> None:
        is_enough = False
        while not is_enough:
            _, connection = await loop.create_connection(lambda: _Connection(run), HOST, order.port)
            is_enough = await connection.done

    async with asyncio.timeout(order.warm_up_s + order.seconds + DRAIN_S):
        await asyncio.gather(*(client() for _ in range(order.clients)))
    tally = run.close()
    tally.cpu_s = (time.process_time() - cpu_s) * order.seconds / (order.seconds + order.warm_up_s)
    return tally


def _answer(orders: Connection, make: Callable[..., Callable[[Any], object]], arguments: tuple[object, ...]) -> None:
    handle = make(*arguments)
    orders.send(None)
    while (order := orders.recv()) is not None:
        try:
            orders.send(handle(order))
        except Exception as error:
            orders.send(error)


class Worker:
    """A process that answers orders by the function that ``make(*arguments)`` returns; a context manager. ``pid`` is
    its process."""

    def __init__(self, make: Callable[..., Callable[[Any], object]], *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")
        self._orders, self._theirs = context.Pipe()
        self._process = context.Process(target=_answer, args=(self._theirs, make, arguments), daemon=True)

    def __enter__(self) -> Self:
        self._process.start()
        self._theirs.close()
        self._orders.recv()
        self.pid = self._process.pid or 0
        return self

    def __exit__(self, *_: object) -> None:
        self._orders.send(None)
        self._process.join()
        self._orders.close()

    def ask(self, order: object) -> Any:
        """Send an order and return the answer. Raise it if it is an error, and EOFError if the process ended."""
        self._orders.send(order)
        if isinstance(result := self._orders.recv(), Exception):
            raise result
        return result


def _loader() -> Callable[[Order], Tally]:
    return lambda order: asyncio.run(load(order))


class Generator(Worker):
    """A running load loop."""

    def __init__(self) -> None:
        super().__init__(_loader)

    def run(self, order: Order) -> Tally:
        """Run an order. Raise the errors of :func:`load`."""
        tally: Tally = self.ask(order)
        return tally


@dataclass(frozen=True)
class ProcessFigures:
    """Processor seconds so far, resident bytes now, and peak resident bytes of a running process."""

    cpu_s: float
    rss_bytes: int
    peak_bytes: int


def look_at(pid: int) -> ProcessFigures:
    with open(f"/proc/{pid}/status", encoding="ascii") as status:  # noqa: PTH123 - as quick as can be
        memory = dict(line.split(":", 1) for line in status if line.startswith(("VmRSS", "VmHWM")))
    rss, peak = (int(memory[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    # The clock of a process, as clock_getcpuclockid(3) names it: /proc/PID/stat counts in hundredths of a second.
    return ProcessFigures(time.clock_gettime(~pid << 3 | 2), rss, peak)
