"""Photo to identity through a real server, beside what a user would otherwise run on the same ONNX files.

Real photos over loopback at 1, 4, 16 and 64 clients that keep their connections: Kith as it chooses by itself and
pinned to the peers' runtime and numbers, a naive FastAPI server around insightface.app.FaceAnalysis
(bench/peers/naive_server.py), and a plain loop with FaceAnalysis, which is one client without HTTP. Systems take turns,
round by round; a figure is a round's, its ratios are taken within the round. Prints, and writes
bench/results/serving.md and .json; what was not measured this time stays as it was.

    python -m bench.serving [--quick] [--sets lfw groups reference heavy] [--clients 1 16] [--rounds 3] [--seconds 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.accuracy import RESULTS, ROOT, outside, say
from bench.heavy import heavy_pack
from bench.load import Generator, Order, Tally, look_at, multipart
from bench.machine import machine
from bench.peers.loop import Loop
from bench.photos import gallery_of, groups, lfw_probes, people
from bench.servers import GALLERY, Running, kith_server, naive_server
from models.network import Float
from models.pack import BUNDLED, load_pack

RESULT: Final = RESULTS / "serving.json"
TABLE: Final = RESULTS / "serving.md"
CLIENTS: Final = (1, 4, 16, 64)
PINNED: Final = {"KITH_ENGINE": "onnxruntime", "KITH_PRECISION": "fp32"}
LOOP: Final = "FaceAnalysis loop"
NAIVE: Final = "naive server"
IDENTIFY, EMBED = "Kith, identify", "Kith, embed"
IDENTIFY_PINNED, EMBED_PINNED = "Kith fp32, identify", "Kith fp32, embed"
PEERS: Final = (LOOP, NAIVE)
WARM_UP_S: Final = 1.0
"""Before each cell of each round; the first comes after a round that does not count."""
Document = dict[str, Any]


@dataclass(frozen=True)
class PhotoSet:
    """``clients``: how many it is measured at, where nothing else is asked for."""

    title: str
    pack: Callable[[Path], Path | None]
    groups: bool = False
    clients: Sequence[int] = CLIENTS


SETS: Final = {
    "lfw": PhotoSet("LFW (250x250, one face), bundled pack", lambda _: BUNDLED),
    "groups": PhotoSet("groups (4 to 20 faces), bundled pack", lambda _: BUNDLED, True, (1, 16)),
    "reference": PhotoSet(
        "LFW, reference models (SCRFD-500M, MobileFaceNet)", lambda _: reference_pack(), clients=(1, 16)
    ),
    "heavy": PhotoSet("LFW, SCRFD-500M and IResNet-50 of random weights", lambda cache: heavy(cache), clients=(1, 16)),
}


def reference_pack() -> Path | None:
    directory = outside("KITH_REFERENCE", "reference")
    return directory if (directory / "recognizer.onnx").is_file() else None


def heavy(cache: Path) -> Path | None:
    reference = reference_pack()
    return None if reference is None else heavy_pack(reference / "detector.onnx", cache)


@dataclass(frozen=True)
class System:
    """``run``: at so many clients, for so many seconds after so many of warming up."""

    name: str
    pid: int
    run: Callable[[int, float, float], Tally]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--clients", nargs="+", type=int, help="default: as each set says")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of a cell")
    parser.add_argument("--quick", action="store_true", help="LFW and groups, 1 and 16 clients, three seconds a cell")
    parser.add_argument("--result", type=Path, default=RESULT)
    parser.add_argument("--cache", type=Path, default=ROOT / "runs" / "cache", help="vectors of the gallery's people")
    options = parser.parse_args()
    if options.quick:
        options.sets, options.clients, options.seconds = ["lfw", "groups"], [1, 16], 3.0
    data = outside("KITH_DATA", "data")
    if not (data / "lfw").is_dir():
        sys.exit(f"there is no LFW at {data}: set KITH_DATA (docs/training.md says what it must hold).")
    document: Document = json.loads(options.result.read_text("utf-8")) if options.result.is_file() else {"sets": {}}
    for name in options.sets:
        photo_set = SETS[name]
        if (pack := photo_set.pack(options.cache)) is None:
            say(f"{photo_set.title}: left out, there are no reference models (set KITH_REFERENCE)")
            continue
        stored = document["sets"].setdefault(name, {"title": photo_set.title, "clients": {}})
        photos = groups(data) if photo_set.groups else lfw_probes(people(data))
        gallery = gallery_of(people(data), load_pack(pack), options.cache)
        with systems(pack, photos, gallery) as running:
            for clients in options.clients or photo_set.clients:
                stored["clients"][str(clients)] = measure(running, clients, options.rounds, options.seconds)
                say(f"{photo_set.title}, {clients} clients\n" + "\n".join(rows(stored["clients"][str(clients)])))
    document["machine"] = machine()
    options.result.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if options.result == RESULT:
        TABLE.write_text(report(document), encoding="utf-8")
    print(report(document))


@contextmanager
def systems(pack: Path, photos: Sequence[bytes], gallery: Mapping[str, Float]) -> Iterator[list[System]]:
    with ExitStack() as opened:
        generator = opened.enter_context(Generator())

        def over_http(name: str, server: Running, path: str, part: str, marker: bytes) -> System:
            requests = [multipart(path, photo, part) for photo in photos]
            return System(
                name,
                server.pid,
                lambda clients, seconds, warm_up_s: generator.run(
                    Order(server.port, requests, clients, seconds, warm_up_s, marker)
                ),
            )

        own = opened.enter_context(kith_server(pack, {}, gallery))
        pinned = opened.enter_context(kith_server(pack, PINNED, gallery))
        naive = opened.enter_context(naive_server(pack))
        loop = opened.enter_context(Loop(pack))
        identify, embed, box = f"/v1/galleries/{GALLERY}/identify", "/v1/embed", b'"box":'
        yield [
            over_http(IDENTIFY, own, identify, "images", box),
            over_http(EMBED, own, embed, "images", box),
            over_http(IDENTIFY_PINNED, pinned, identify, "images", box),
            over_http(EMBED_PINNED, pinned, embed, "images", box),
            over_http(NAIVE, naive, "/faces", "image", b'"bbox":'),
            System(LOOP, loop.pid, lambda _, seconds, warm_up_s: loop.run(photos, seconds, warm_up_s)),
        ]


def measure(running: Sequence[System], clients: int, rounds: int, seconds: float) -> Document:
    """Every system's rounds, by turns, after one that does not count. The loop is one client whatever is asked for."""
    cells: dict[str, list[Document]] = {system.name: [] for system in running}
    for number in range(rounds + 1):
        for system in running:
            if number == 0:
                system.run(clients, 0.5, WARM_UP_S)
                continue
            before = look_at(system.pid)
            tally = system.run(clients, seconds, WARM_UP_S)
            after = look_at(system.pid)
            cells[system.name].append(cell(tally, after.cpu_s - before.cpu_s, after.rss_bytes, after.peak_bytes))
    return {
        "date": date.today().isoformat(),
        "seconds": seconds,
        "systems": {name: {key: spread([c[key] for c in each]) for key in each[0]} for name, each in cells.items()},
        "ratios": {
            f"{own} / {peer}": {
                key: spread([a[key] / b[key] for a, b in zip(cells[own], cells[peer], strict=True)])
                for key in ("photos_per_s", "p50_ms", "p99_ms")
            }
            for own in cells
            if own not in PEERS
            for peer in PEERS
            if peer in cells
        },
    }


def cell(tally: Tally, cpu_s: float, rss_bytes: int, peak_bytes: int) -> dict[str, float]:
    if not tally.answered:
        raise RuntimeError(f"nothing was answered: {dict(tally.statuses)}")
    p50, p95, p99 = np.percentile(tally.latencies_ms, (50, 95, 99)).tolist()
    return {
        "photos_per_s": tally.answered / tally.seconds,
        "faces_per_s": tally.faces / tally.seconds,
        "p50_ms": p50,
        "p95_ms": p95,
        "p99_ms": p99,
        "failed": tally.failed,
        # Over the warm-up too, in which photos are answered at the same rate.
        "cpu_ms_per_photo": 1000 * cpu_s / (tally.answered * (1 + WARM_UP_S / tally.seconds)),
        "generator_cores": tally.cpu_s / tally.seconds,
        "rss_mb": rss_bytes / 1e6,
        "peak_mb": peak_bytes / 1e6,
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    return {name: float(f"{f(values):.4g}") for name, f in (("median", statistics.median), ("min", min), ("max", max))}


def rows(measured: Document) -> list[str]:
    lines = [
        "| | photos/s | faces/s | p50 | p95 | p99 ms | failed | CPU ms a photo | MB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, figures in measured["systems"].items():
        m = {key: value["median"] for key, value in figures.items()}
        lines.append(
            f"| {name} | {m['photos_per_s']:.4g} | {m['faces_per_s']:.4g} | {m['p50_ms']:.3g} | {m['p95_ms']:.3g} | "
            f"{m['p99_ms']:.3g} | {m['failed']:g} | {m['cpu_ms_per_photo']:.3g} | {m['rss_mb']:.0f} |"
        )
    return lines


def report(document: Document) -> str:
    lines = ["# Serving", "", f"`make bench-serving` on {document['machine']}.", ""]
    for stored in document["sets"].values():
        for clients, measured in stored["clients"].items():
            lines += [f"## {stored['title']}: {clients} client{'s' * (clients != '1')}", "", *rows(measured), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
