"""Measure the latency of /healthz and of refusals, and the rate of accepted work, under overload.

A real server gets photos from as many clients as saturate it, then from four times as many. A refused client retries at
once, on the same connection if the server keeps it open. A probe in another process opens a new connection to /healthz
ten times a second. The two loads take turns, so that a slow phase of the machine affects both. Exits 1 if a goal is
missed.

    python -m bench.overload [--clients 64] [--rounds 3] [--seconds 15]
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from typing import Final

import numpy as np

from bench.common import RESULTS, ratios, say, write
from bench.load import HOST, Generator, Order, look_at, post
from bench.machine import commit, machine
from bench.photos import astronaut
from bench.servers import Running, kith_server
from models.pack.loading import BUNDLED_PACK

OVERLOAD: Final = 4
"""Clients under overload, in multiples of those that saturate the server."""
PROBES_PER_S: Final = 10
PROBE_TIMEOUT_S: Final = 60.0
SIDE_PX: Final = 250
HEALTH: Final = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
MAX_HEALTH_P99_MS: Final = 1000.0
MAX_REFUSAL_P99_MS: Final = 2000.0
MIN_ACCEPTED_RATIO: Final = 0.9


@contextmanager
def probed(port: int) -> Iterator[list[float]]:
    """Send requests to /healthz at a fixed rate, each on a new connection; yield their latencies in ms. Every probe has
    its own thread, so that a slow one does not delay the next (coordinated omission)."""
    latencies_ms, enough = list[float](), threading.Event()

    def probe() -> None:
        begin = time.perf_counter()
        try:
            with socket.create_connection((HOST, port), PROBE_TIMEOUT_S) as connection:
                connection.sendall(HEALTH)
                is_healthy = connection.recv(65536).startswith(b"HTTP/1.1 200")
        except OSError:
            is_healthy = False
        latencies_ms.append((time.perf_counter() - begin) * 1000 if is_healthy else float("inf"))

    def send() -> None:
        while not enough.wait(1 / PROBES_PER_S):
            threads.submit(probe)

    with ThreadPoolExecutor(int(PROBE_TIMEOUT_S * PROBES_PER_S) + 1) as threads:
        threads.submit(send)
        try:
            yield latencies_ms
        finally:
            enough.set()


@dataclass
class Measured:
    """All rounds at one number of clients."""

    rates: list[float] = field(default_factory=list)
    per_cpu_s: list[float] = field(default_factory=list)
    health_ms: list[float] = field(default_factory=list)
    accepted_ms: list[float] = field(default_factory=list)
    refused_ms: list[float] = field(default_factory=list)
    other: Counter[int] = field(default_factory=Counter)
    """Other answers by status; 0: the connection was lost."""

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
    message = post("/v1/embed", "image/jpeg", astronaut(SIDE_PX))
    saturated, overloaded = Measured(), Measured()
    with Generator() as generator:
        generator.run(Order(server.port, [message], clients, seconds / 2, 0, b""))
        for number, measured in [(clients, saturated), (OVERLOAD * clients, overloaded)] * rounds:
            with probed(server.port) as health_ms:
                cpu_s = look_at(server.pid).cpu_s
                tally = generator.run(Order(server.port, [message], number, seconds, 0, b""))
                cpu_s = look_at(server.pid).cpu_s - cpu_s
            measured.rates.append(tally.answered / seconds)
            measured.per_cpu_s.append(tally.answered / cpu_s)
            measured.health_ms += health_ms
            measured.accepted_ms += tally.latencies_ms.pop(200, [])
            measured.refused_ms += tally.latencies_ms.pop(503, [])
            measured.other += tally.statuses
            say(f"{number} clients: {measured.rates[-1]:.1f} accepted a second")
    return saturated, overloaded


def spread(samples: Sequence[float]) -> dict[str, float] | None:
    if not samples:
        return None
    found = np.percentile(samples, [50, 99, 100], method="inverted_cdf").round(1).tolist()
    return {"samples": len(samples), **dict(zip(("p50", "p99", "max"), found, strict=True))}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=64, help="clients that saturate the server")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15)
    arguments = parser.parse_args()
    seconds = arguments.rounds * arguments.seconds
    with kith_server(BUNDLED_PACK, {}, {}) as server:
        saturated, overloaded = measure(server, arguments.clients, arguments.rounds, arguments.seconds)
        networks = server.networks()
    rates, per_cpu_s = (
        [round(ratio, 3) for ratio in ratios(getattr(overloaded, name), getattr(saturated, name))]
        for name in ("rates", "per_cpu_s")
    )
    report = {
        "day": date.today().isoformat(),
        "commit": commit(),
        "machine": machine(),
        "networks": networks,
        f"{arguments.clients} clients": saturated.document(seconds),
        f"{OVERLOAD * arguments.clients} clients": overloaded.document(seconds),
        "accepted per second, overloaded over saturated": rates,
        "accepted per processor second, overloaded over saturated": per_cpu_s,
    }
    write(RESULTS / "overload.json", None, report)
    print(json.dumps(report, indent=1))
    health, refused = spread(overloaded.health_ms), spread(overloaded.refused_ms)
    goals = {
        "/healthz": health is not None and health["p99"] <= MAX_HEALTH_P99_MS,
        "503": refused is not None and refused["p99"] <= MAX_REFUSAL_P99_MS,
        "accepted work": statistics.median(rates) >= MIN_ACCEPTED_RATIO,
    }
    if missed := [goal for goal, is_met in goals.items() if not is_met]:
        raise SystemExit(f"missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
