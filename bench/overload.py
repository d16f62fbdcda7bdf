"""Measure the latency of /healthz and of refusals, and the rate of accepted work, under overload.

A real server gets photos from as many clients as saturate it, then from four times as many. A refused client retries at
once, on the same connection if the server keeps it open. A probe in another process opens a new connection to /healthz
ten times a second. The two loads take turns, so that a slow phase of the machine affects both. Exits 1 if a goal is
missed.

    python -m bench.overload [--clients 64] [--rounds 3] [--seconds 15]
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Final

import numpy as np

from bench.common import RESULTS, say
from bench.load import HOST, Worker, content_length, look_at
from bench.machine import commit, machine
from bench.overhead import photos, request
from bench.servers import Running, kith_server
from models.pack.loading import BUNDLED_PACK

RESULT: Final = RESULTS / "overload.json"
OVERLOAD: Final = 4
"""Clients under overload, in multiples of those that saturate the server."""
PROBES_PER_S: Final = 10
PROBE_HOST: Final = "127.0.0.2"
"""Address of the orchestrator; the connection limit counts it apart from the load's address."""
PROBE_TIMEOUT_S: Final = 60.0
DRAIN_S: Final = 60.0
HEALTH: Final = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
MAX_HEALTH_P99_MS: Final = 1000.0
MAX_REFUSAL_P99_MS: Final = 2000.0
MIN_ACCEPTED_RATIO: Final = 0.9


@dataclass
class Answers:
    """Latencies by status, and failed connections, within the measured time."""

    seconds: float
    latencies_ms: dict[int, list[float]] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)

    @property
    def accepted_per_s(self) -> float:
        return len(self.latencies_ms.get(200, [])) / self.seconds


async def load(port: int, message: bytes, clients: int, seconds: float, warm_up_s: float) -> Answers:
    """Run the load. Raise TimeoutError if a client still waits for an answer ``DRAIN_S`` after the end."""
    begin = time.perf_counter() + warm_up_s
    end, answers = begin + seconds, Answers(seconds)

    async def client() -> None:
        writer: asyncio.StreamWriter | None = None
        while (sent := time.perf_counter()) < end:
            try:
                if writer is None:
                    reader, writer = await asyncio.open_connection(HOST, port)
                writer.write(message)
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(content_length(head[:-4]))
            except (OSError, EOFError) as error:
                if begin <= time.perf_counter() < end:
                    answers.failures[type(error).__name__] += 1
                _close(writer)
                writer = None
                continue
            now = time.perf_counter()
            if begin <= now < end:
                answers.latencies_ms.setdefault(int(head[9:12]), []).append((now - sent) * 1000)
            if b"connection: close" in head:
                _close(writer)
                writer = None
        _close(writer)

    async with asyncio.timeout(warm_up_s + seconds + DRAIN_S):
        await asyncio.gather(*(client() for _ in range(clients)))
    return answers


def _close(writer: asyncio.StreamWriter | None) -> None:
    if writer is not None:
        writer.close()


def _serve_orders(orders: Connection) -> None:
    while (order := orders.recv()) is not None:
        orders.send(asyncio.run(load(*order)))


class Load(Worker):
    """Process that runs :func:`load`."""

    def __init__(self) -> None:
        super().__init__(_serve_orders)

    def run(self, port: int, message: bytes, clients: int, seconds: float, warm_up_s: float) -> Answers:
        self._orders.send((port, message, clients, seconds, warm_up_s))
        answers: Answers = self._orders.recv()
        return answers


class Probe(threading.Thread):
    """Requests to /healthz at a fixed rate, each on a new connection, until ``enough`` is set. Every probe has its own
    thread, so that a slow one does not delay the next (coordinated omission)."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.enough = threading.Event()
        self.latencies_ms: list[float] = []
        self._port = port

    def run(self) -> None:
        probes = []
        while not self.enough.wait(1 / PROBES_PER_S):
            probes.append(threading.Thread(target=self._probe))
            probes[-1].start()
        for probe in probes:
            probe.join()

    def _probe(self) -> None:
        begin = time.perf_counter()
        try:
            with socket.create_connection((HOST, self._port), PROBE_TIMEOUT_S, (PROBE_HOST, 0)) as connection:
                connection.sendall(HEALTH)
                is_healthy = connection.recv(65536).startswith(b"HTTP/1.1 200")
        except OSError:
            is_healthy = False
        self.latencies_ms.append((time.perf_counter() - begin) * 1000 if is_healthy else float("inf"))


@dataclass
class Measured:
    """All rounds at one number of clients."""

    rates: list[float] = field(default_factory=list)
    per_cpu_s: list[float] = field(default_factory=list)
    health_ms: list[float] = field(default_factory=list)
    accepted_ms: list[float] = field(default_factory=list)
    refused_ms: list[float] = field(default_factory=list)
    other: Counter[str] = field(default_factory=Counter)

    def document(self, seconds: float) -> dict[str, object]:
        return {
            "accepted per second": [round(rate, 1) for rate in self.rates],
            "accepted per processor second of the server": [round(rate, 1) for rate in self.per_cpu_s],
            "refused per second": round(len(self.refused_ms) / seconds, 1),
            "health ms": spread(self.health_ms),
            "accepted ms": spread(self.accepted_ms),
            "refused ms": spread(self.refused_ms),
            "neither accepted nor refused": dict(self.other),
        }


def measure(server: Running, clients: int, rounds: int, seconds: float) -> tuple[Measured, Measured]:
    """Measure with ``clients``, and with :data:`OVERLOAD` times as many."""
    message = request("/v1/embed", "raw", photos()["20 kB"])
    saturated, overloaded = Measured(), Measured()
    with Load() as generator:
        generator.run(server.port, message, clients, seconds / 2, 0)
        for number, measured in [(clients, saturated), (OVERLOAD * clients, overloaded)] * rounds:
            probe, cpu_s = Probe(server.port), look_at(server.pid).cpu_s
            probe.start()
            answers = generator.run(server.port, message, number, seconds, 0)
            cpu_s = look_at(server.pid).cpu_s - cpu_s
            probe.enough.set()
            probe.join()
            measured.rates.append(answers.accepted_per_s)
            measured.per_cpu_s.append(answers.accepted_per_s * seconds / cpu_s)
            measured.health_ms += probe.latencies_ms
            measured.accepted_ms += answers.latencies_ms.pop(200, [])
            measured.refused_ms += answers.latencies_ms.pop(503, [])
            measured.other.update(answers.failures)
            measured.other.update({str(status): len(each) for status, each in answers.latencies_ms.items()})
            say(f"{number} clients: {measured.rates[-1]:.1f} accepted a second")
    return saturated, overloaded


def spread(samples: Sequence[float]) -> dict[str, float] | None:
    if not samples:
        return None
    p50, p99, most = np.percentile(samples, [50, 99, 100], method="inverted_cdf")
    return {
        "samples": len(samples),
        "p50": round(float(p50), 1),
        "p99": round(float(p99), 1),
        "max": round(float(most), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=64, help="clients that saturate the server")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15)
    arguments = parser.parse_args()
    seconds = arguments.rounds * arguments.seconds
    with kith_server(BUNDLED_PACK, {}, {}) as server:
        saturated, overloaded = measure(server, arguments.clients, arguments.rounds, arguments.seconds)
        about = {"networks": server.networks()}
    ratios = _ratios(overloaded.rates, saturated.rates)
    results = {
        f"{arguments.clients} clients": saturated.document(seconds),
        f"{OVERLOAD * arguments.clients} clients": overloaded.document(seconds),
        "accepted per second, overloaded over saturated": ratios,
        "accepted per processor second, overloaded over saturated": _ratios(overloaded.per_cpu_s, saturated.per_cpu_s),
    }
    report = {"day": str(datetime.date.today()), "commit": commit(), "machine": machine(), **about, **results}
    text = json.dumps(report, indent=1)
    RESULT.write_text(text + "\n", encoding="utf-8")
    print(text)
    health, refused = spread(overloaded.health_ms), spread(overloaded.refused_ms)
    missed = [
        goal
        for goal, is_met in {
            "/healthz": health is not None and health["p99"] <= MAX_HEALTH_P99_MS,
            "503": refused is not None and refused["p99"] <= MAX_REFUSAL_P99_MS,
            "accepted work": statistics.median(ratios) >= MIN_ACCEPTED_RATIO,
        }.items()
        if not is_met
    ]
    if missed:
        raise SystemExit(f"missed: {', '.join(missed)}")


def _ratios(overloaded: Sequence[float], saturated: Sequence[float]) -> list[float]:
    return [round(much / little, 3) for much, little in zip(overloaded, saturated, strict=True)]


if __name__ == "__main__":
    main()
