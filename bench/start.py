"""Measure a server's start and its memory: until it is ready, and until it has identified the face of a first photo.

Each round restarts the server on a database that a first start migrated. Processor time, unlike wall time, barely
depends on what else the machine does. Anonymous memory is the process's own: without code, which processes share.
Writes JSON.

    python -m bench.start [--rounds 5] [--engine onnxruntime]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import httpx2 as httpx

from bench.common import RESULTS
from bench.load import look_at
from bench.machine import commit, machine
from bench.photos import astronaut
from bench.servers import GALLERY, Running, started
from kith import Kith
from tests.faults.servers import free_port

RESULT: Final = RESULTS / "start.json"
PHOTO_PX: Final = 250
SETTLED_S: Final = 1.0
"""Time after which a server that answered is idle."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engine", choices=["openvino", "onnxruntime"], default="openvino")
    options = parser.parse_args()
    photo = astronaut(PHOTO_PX)
    with TemporaryDirectory() as folder:
        with server(folder, options.engine) as running, Kith(running.url) as kith:
            kith.create_gallery(GALLERY)
            kith.enroll(GALLERY, "ada", photo)
        rounds = [measure(folder, options.engine, photo) for _ in range(options.rounds)]
    figures = {name: round(statistics.median(each[name] for each in rounds), 2) for name in rounds[0]}
    known = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
    known[options.engine] = {"machine": machine(), "commit": commit(), "rounds": len(rounds)} | figures
    RESULT.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")
    for name, value in figures.items():
        print(f"{name:<44}{value:8.2f}")


@contextmanager
def server(folder: str, engine: str) -> Iterator[Running]:
    port = free_port()
    given = {"KITH_DATA_DIR": folder, "KITH_PORT": str(port), "KITH_LOG_LEVEL": "ERROR", "KITH_ENGINE": engine}
    command = [sys.executable, "-m", "service.cli.entry", "serve"]
    with started(command, given, port, "/readyz") as running:
        yield running


def measure(folder: str, engine: str, photo: bytes) -> dict[str, float]:
    """Return seconds and megabytes of one start."""
    begun = time.perf_counter()
    with server(folder, engine) as running:
        ready = {"ready, seconds": time.perf_counter() - begun, "ready, processor seconds": look_at(running.pid).cpu_s}
        time.sleep(SETTLED_S)
        idle = memory(running.pid, "ready")
        asked = time.perf_counter()
        answer = httpx.post(
            f"{running.url}/v1/galleries/{GALLERY}/identify", content=photo, headers={"Content-Type": "image/jpeg"}
        )
        first = {
            "first answer, seconds": ready["ready, seconds"] + time.perf_counter() - asked,
            "first answer, processor seconds": look_at(running.pid).cpu_s,
        }
        if b"ada" not in answer.raise_for_status().content:
            raise SystemExit("the first answer is wrong")
        time.sleep(SETTLED_S)
        return ready | idle | first | memory(running.pid, "first answer")


def memory(pid: int, when: str) -> dict[str, float]:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    kb = {name: int(rest.split()[0]) for name, rest in (line.split(":", 1) for line in lines) if name.startswith("Rss")}
    return {f"{when}, resident MB": sum(kb.values()) * 1.024e-3, f"{when}, anonymous MB": kb["RssAnon"] * 1.024e-3}


if __name__ == "__main__":
    main()
