"""Measure an identification without the networks: search and decision for a vector, in process and through a server.

Each figure appears with the caches on and off. Without caches, every request reads the gallery's row, its change log
and the subjects' names. The rounds are interleaved in one run. The server runs alone, and with a process that
enrolls 20 times a second into another gallery or into the searched one. Prints, and writes bench/results/reads.json and
.md.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

import service.storage.repositories.store as stores
from bench.common import RESULTS
from bench.gallery import fill
from models.pack.loading import BUNDLED_PACK, load_pack
from models.runtime.network import Float
from models.runtime.onnx_runtime import available_cores
from models.vision.recognition import l2_normalize
from service.api.routes.identify import search_gallery
from service.app import create_app
from service.domain.decision import RiskTarget
from service.domain.gallery import Gallery, GallerySettings, NewTemplate
from service.index.replicas import LogReplica
from service.server import serve
from service.settings import Settings
from service.storage.db.bulk_rows import raise_highest_key
from service.storage.db.tables import subjects, templates
from service.storage.repositories.read_cache import Page, ReadCache
from service.storage.repositories.store import Store
from tests.databases import open_database
from tests.postgres import Postgres

SEARCHED: Final = "searched"
OTHER: Final = "other"
WRITES_A_SECOND: Final = 20
CLIENTS: Final = 4
PHOTOS_A_PERSON: Final = 2
ROUNDS: Final = 3
LOOK_S: Final = 0.2
SETTLED_LOOKS: Final = 4
IDLE: Final = 0.05
Row = dict[str, Any]


class Forgetful(ReadCache):
    """Cache that stores nothing."""

    def page(self, name: str) -> Page | None:
        return None

    def page_of(self, gallery: Gallery) -> Page | None:
        return None


def forget() -> None:
    """Disable the caches of this process."""
    stores.ReadCache = Forgetful  # type: ignore[attr-defined]
    LogReplica.is_at = lambda self, version: False  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--templates", type=int, nargs="+", default=[1000, 100_000])
    parser.add_argument("--databases", nargs="+", default=["sqlite", "postgresql"])
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        globals()[f"part_{options.part[0]}"](*options.part[1:])
        return
    path = RESULTS / "reads.json"
    report: Row = json.loads(path.read_text("utf-8")) if path.exists() else {}
    report["machine"] = {"platform": platform.platform(), "cores": available_cores()}
    for kind in options.databases:
        for size in options.templates:
            report.setdefault(kind, {})[str(size)] = measured(kind, size, options.requests)
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    (RESULTS / "reads.md").write_text(text(report), encoding="utf-8")
    print(text(report))


def measured(kind: str, size: int, requests: int) -> Row:
    found: Row = {}
    with tempfile.TemporaryDirectory() as folder, database(kind, Path(folder)) as url:
        vectors = prepare(url, size)
        np.save(Path(folder) / "probes.npy", vectors[:64])
        for kept in ("kept", "forgetful"):
            done = run("in_process", url, folder, kept, str(requests))
            found[kept] = {"in process": json.loads(done)}
        for beside in ("alone", OTHER, SEARCHED):
            samples: dict[str, list[Row]] = {"kept": [], "forgetful": []}
            with (
                ExitStack() as stack,
                server(url, folder, "kept") as one,
                server(url, folder, "forgetful") as other,
            ):
                for port, pid in (one, other):
                    ask(port, bodies_of(vectors[:64]), 2)
                    settle(pid)
                stack.enter_context(writing(url, beside))
                for _ in range(ROUNDS):
                    for name, (port, pid) in (("kept", one), ("forgetful", other)):
                        samples[name].append(asked(port, pid, vectors[:64], requests))
            for name, rows in samples.items():
                found[name][beside] = {key: spread([row[key] for row in rows]) for key in rows[0]}
    return found


def spread(values: list[float]) -> list[float]:
    """Return the minimum, the median and the maximum."""
    return [min(values), float(np.median(values)), max(values)]


# Parts that run in separate processes


def run(part: str, *arguments: str) -> str:
    command = [sys.executable, "-m", "bench.reads", "--part", part, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]


def part_in_process(url: str, folder: str, kept: str, requests: str) -> None:
    """Print the CPU milliseconds of a search and its decision, with everything around them except HTTP."""
    if kept == "forgetful":
        forget()
    probes = np.load(Path(folder) / "probes.npy")

    async def search() -> list[float]:
        app = create_app(Settings(data_dir=Path(folder), database_url=url, log_level="ERROR", _env_file=None))
        async with app.router.lifespan_context(app):
            context, taken = app.state.context, []
            for part in range(ROUNDS + 1):
                started = time.process_time()
                for i in range(int(requests)):
                    gallery = await context.find_gallery(SEARCHED)
                    await search_gallery(context, gallery, probes[i % 64][None], RiskTarget("fpir", 0.001), 5, None)
                taken.append((time.process_time() - started) * 1000 / int(requests))
                if not part:
                    await asyncio.to_thread(settle, os.getpid())
            return taken[1:]

    print(json.dumps(spread(asyncio.run(search()))))


def part_serve(url: str, folder: str, kept: str, port: str) -> None:
    if kept == "forgetful":
        forget()
    serve(Settings(data_dir=Path(folder), database_url=url, port=int(port), log_level="ERROR", _env_file=None))


def part_write(url: str, name: str) -> None:
    """Enroll until the input ends."""
    store = Store(open_database(url))
    rng = np.random.default_rng(os.getpid())
    ended = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    while not ended.wait(1 / WRITES_A_SECOND):
        gallery = store.galleries.get(name)
        (vector,) = l2_normalize(rng.normal(size=(1, gallery.dimension)))
        new = NewTemplate(uuid.uuid4().hex, np.asarray(vector, np.float32), "embedding")
        store.templates.enroll(gallery, new.id, [new], None)
    store.close()


@contextmanager
def writing(url: str, beside: str) -> Iterator[None]:
    if beside == "alone":
        yield
        return
    command = [sys.executable, "-m", "bench.reads", "--part", "write", url, beside]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None  # noqa: S101 - it is a pipe
        yield
        process.stdin.close()


@contextmanager
def server(url: str, folder: str, kept: str) -> Iterator[tuple[int, int]]:
    """Yield the server's port and process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "bench.reads", "--part", "serve", url, folder, kept, str(port)]
    with subprocess.Popen(command) as process:
        try:
            while not ready(port):
                if process.poll() is not None:
                    sys.exit("the server exited unexpectedly")
                time.sleep(0.1)
            yield port, process.pid
        finally:
            process.kill()


def ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


# Data and load


@contextmanager
def database(kind: str, folder: Path) -> Iterator[str]:
    if kind == "sqlite":
        yield f"sqlite:///{folder / 'kith.db'}"
        return
    with tempfile.TemporaryDirectory() as own:
        cluster = Postgres(Path(own), durable=True)
        cluster.start()
        try:
            yield cluster.create("kith")
        finally:
            cluster.stop()


def prepare(url: str, size: int) -> Float:
    pack = load_pack(BUNDLED_PACK).recognition
    rng = np.random.default_rng(5)
    vectors = np.asarray(l2_normalize(rng.normal(size=(size, pack.dimension))), np.float32)
    opened = open_database(url)
    store, engine = Store(opened), opened.engine
    for name, held in ((OTHER, vectors[:2]), (SEARCHED, vectors)):
        made = store.galleries.create(name, pack.fingerprint(), pack.dimension, GallerySettings())
        with engine.execution_options(write=True).begin() as connection:
            fill(connection, made.pk, made.seal, held, PHOTOS_A_PERSON)
    with engine.execution_options(write=True).begin() as connection:  # the caller provided them
        for table in (subjects, templates):
            raise_highest_key(connection, table, 2 * size)
    store.close()
    return vectors


def asked(port: int, pid: int, probes: Float, requests: int) -> Row:
    """Return the server's CPU milliseconds, the median milliseconds of sequential requests, and requests a second of
    several concurrent clients."""
    bodies = bodies_of(probes)
    ask(port, bodies, requests // 10)
    before = processor_s(pid)
    taken = ask(port, bodies, requests)
    spent = processor_s(pid) - before
    clients = [threading.Thread(target=ask, args=(port, bodies, requests // CLIENTS)) for _ in range(CLIENTS)]
    started = time.perf_counter()
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    return {
        "cpu_ms": spent * 1000 / requests,
        "p50_ms": float(np.median(taken)),
        "a_second": CLIENTS * (requests // CLIENTS) / (time.perf_counter() - started),
    }


def bodies_of(probes: Float) -> list[bytes]:
    return [json.dumps({"embeddings": [probe.tolist()]}).encode() for probe in probes]


def ask(port: int, bodies: list[bytes], count: int) -> list[float]:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    taken = []
    for i in range(count):
        started = time.perf_counter()
        path = f"/v1/galleries/{SEARCHED}/identify"
        connection.request("POST", path, bodies[i % len(bodies)], {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            sys.exit(f"{answer.status}: {answer.read().decode()}")
        answer.read()
        taken.append((time.perf_counter() - started) * 1000)
    connection.close()
    return taken


def settle(pid: int) -> None:
    """Wait until a process finished its background work: index maintenance and risk evidence."""
    quiet = 0
    while quiet < SETTLED_LOOKS:
        before = processor_s(pid)
        time.sleep(LOOK_S)
        quiet = quiet + 1 if processor_s(pid) - before < IDLE * LOOK_S else 0


def processor_s(pid: int) -> float:
    """Return a process' processor seconds."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


# Results


def text(report: Row) -> str:
    lines = [
        "# Identification by vector, beside the networks",
        "",
        "By `python -m bench.reads`; with / without caches, medians of three interleaved rounds, and the ratio",
        "(minimum to maximum of the rounds).",
        "",
        "| Database | Templates | Writer | CPU, ms a request | One client, p50 ms | Four clients, requests/s |",
        "|---|---|---|---|---|---|",
    ]
    inside = []
    for kind in ("sqlite", "postgresql"):
        for size, found in report.get(kind, {}).items():
            kept, forgetful = found["kept"], found["forgetful"]
            for beside, said in (("alone", "none"), (OTHER, "another gallery"), (SEARCHED, "this gallery")):
                a, b = kept[beside], forgetful[beside]
                cells = [_compared(b[key], a[key], a[key], b[key]) for key in ("cpu_ms", "p50_ms")]
                cells.append(_compared(a["a_second"], b["a_second"], a["a_second"], b["a_second"]))
                lines.append(f"| {kind} | {int(size):,} | {said} | {' | '.join(cells)} |")
            a, b = kept["in process"], forgetful["in process"]
            inside.append(f"| {kind} | {int(size):,} | {_compared(b, a, a, b)} |")
    lines += [
        "",
        "In process, without HTTP, no writer:",
        "",
        "| Database | Templates | CPU, ms a search |",
        "|---|---|---|",
    ]
    return "\n".join([*lines, *inside, "", f"{report['machine']['platform']}, {report['machine']['cores']} cores", ""])


def _compared(more: list[float], less: list[float], kept: list[float], forgetful: list[float]) -> str:
    ratio = f"{more[1] / less[1]:.1f} times ({more[0] / less[2]:.1f} to {more[2] / less[0]:.1f})"
    return f"{kept[1]:.3g} / {forgetful[1]:.3g}: {ratio}"


if __name__ == "__main__":
    main()
