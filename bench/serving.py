"""Measure photo to identity through a real server, beside common alternatives on the same ONNX files.

Sends real photos over loopback at 1 and 16 keep-alive clients. The systems are: Kith with its default runtimes;
Kith with the peers' runtime and numeric format; and a naive FastAPI server around insightface.app.FaceAnalysis
(bench/peers/naive_server.py).

Systems take turns in each round, and each round starts with another system. Ratios are taken within a round. Prints,
and writes bench/results/serving.md and .json. Cells that this run does not measure keep their old values, also those of
ended studies: published and heavy networks, a loop without a server, and InsightFace-REST. Each cell, a set of photos
at one number of clients, records its day, commit, machine and networks.

    python -m bench.serving [--quick]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.common import CACHE, RESULTS, ROOT, figures_table, range_of, ratios, say, spread, table, write
from bench.load import Generator, Order, ProcessFigures, Tally, look_at, multipart
from bench.machine import about, in_words
from bench.photos import gallery_of, groups, lfw_or_exit, lfw_probes, people
from bench.servers import GALLERY, Running, kith_server, naive_server
from models.pack.loading import BUNDLED_PACK, load_pack
from models.runtime.network import Float

RESULT: Final = RESULTS / "serving.json"
PAGE: Final = ROOT / "docs" / "performance.md"
BEGIN: Final = "<!-- By bench.serving: -->"
END: Final = "<!-- To here. -->"
CLIENTS: Final = (1, 16)
ROUNDS: Final = 3
PINNED: Final = {"KITH_RUNTIME": "onnxruntime,fp32"}
LOOP: Final = "FaceAnalysis loop"
NAIVE: Final = "naive server"
REST: Final = "InsightFace-REST"
SMALL_SIDE_PX: Final = 256
NAIVE_SMALL: Final = "naive server, canvas of 256"
LFW: Final = "lfw"
IDENTIFY, EMBED = "Kith, identify", "Kith, embed"
IDENTIFY_PINNED, EMBED_PINNED = "Kith fp32, identify", "Kith fp32, embed"
OWN: Final = (IDENTIFY, EMBED, IDENTIFY_PINNED, EMBED_PINNED)
PEERS: Final = (LOOP, NAIVE, REST)
"""Systems as their READMEs configure them, with a canvas of 640x640 for every photo; only stored runs have all."""
WARM_UP_S: Final = 0.6
"""Warm-up before each cell of each round; the first cell of a set also has an uncounted round before it."""
ABOUT: Final = """Figures are medians of rounds by turns; latencies are of answers with status 200.

*identify* is photo to identity in a gallery of 3,000 people, *embed* photo to vectors, as the peers do. *fp32* is
pinned to the peers' runtime and precision. The *canvas of 256* fits LFW's photos; a server cannot know the size of its
photos before. CPU is the server's alone; the load comes from a process on the same cores. A system with a p99 beyond
the warm-up is shown faster than it is, because its first answers come from a queue that fills."""
Document = dict[str, Any]


SETS: Final[Mapping[str, tuple[str, Callable[[Path], Sequence[bytes]]]]] = {
    LFW: ("LFW (250x250, one face), bundled pack", lambda data: lfw_probes(people(data))),
    "groups": ("groups (4 to 20 faces), bundled pack", groups),
}
"""Titles, and functions of the folder of data that return the photos."""
PHOTO_S: Final = 0.045
"""Time of a slow peer for a photo: a cell lasts at least twice that for every client."""


@dataclass(frozen=True)
class System:
    """``run``: a function of clients, seconds, and seconds of warm-up. ``networks``: description of Kith's networks."""

    name: str
    pid: int
    run: Callable[[int, float, float], Tally]
    networks: str | None = None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="three seconds a cell")
    minimum_s = 3.0 if parser.parse_args().quick else 5.0
    data = lfw_or_exit().parent
    document: Document = json.loads(RESULT.read_text("utf-8")) if RESULT.is_file() else {"sets": {}}
    for name, (title, photos_of) in SETS.items():
        stored = document["sets"].setdefault(name, {"title": title, "clients": {}})
        photos = photos_of(data)
        gallery = gallery_of(people(data), load_pack(BUNDLED_PACK), CACHE)
        with systems(photos, gallery, name == LFW) as running:
            for system in running:
                system.run(1, WARM_UP_S, WARM_UP_S)
            for clients in CLIENTS:
                seconds = max(minimum_s, 2 * clients * PHOTO_S)
                stored["clients"][str(clients)] = measure(running, clients, ROUNDS, seconds)
                stored["clients"] = dict(sorted(stored["clients"].items(), key=lambda item: int(item[0])))
                say(f"{title}, {clients} clients\n{figures(stored['clients'][str(clients)])}")
                write(RESULT, report(document), document)
                before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
                PAGE.write_text(before + quoted(document) + rest.partition(END)[2], encoding="utf-8")
    print(report(document))


@contextmanager
def systems(photos: Sequence[bytes], gallery: Mapping[str, Float], small: bool) -> Iterator[list[System]]:
    with ExitStack() as opened:
        generator = opened.enter_context(Generator())
        identify, embed, box = f"/v1/galleries/{GALLERY}/identify", "/v1/embed", b'"box":'

        def over_http(
            name: str, server: Running, requests: Sequence[bytes], marker: bytes, networks: str | None = None
        ) -> System:
            def run(clients: int, seconds: float, warm_up_s: float) -> Tally:
                return generator.run(Order(server.port, requests, clients, seconds, warm_up_s, marker))

            return System(name, server.pid, run, networks)

        running = []
        for settings, names in (({}, (IDENTIFY, EMBED)), (PINNED, (IDENTIFY_PINNED, EMBED_PINNED))):
            own = opened.enter_context(kith_server(BUNDLED_PACK, settings, gallery))
            for name, path in zip(names, (identify, embed), strict=True):
                running.append(over_http(name, own, [multipart(path, p) for p in photos], box, own.networks()))
        for name, side_px in ((NAIVE, 640), *([(NAIVE_SMALL, SMALL_SIDE_PX)] if small else [])):
            naive = opened.enter_context(naive_server(BUNDLED_PACK, side_px))
            running.append(over_http(name, naive, [multipart("/faces", p, "image") for p in photos], b'"bbox":'))
        yield running


def measure(running: Sequence[System], clients: int, rounds: int, seconds: float) -> Document:
    """Run the rounds of every system in turn; each round starts with another system."""
    cells: dict[str, list[Document]] = {system.name: [] for system in running}
    for number in range(rounds):
        first = number % len(running)
        for system in [*running[first:], *running[:first]]:
            before = look_at(system.pid)
            tally = system.run(clients, seconds, WARM_UP_S)
            after = look_at(system.pid)
            cells[system.name].append(cell(system.name, tally, after.cpu_s - before.cpu_s, after))
    peers = [peer for peer in (*PEERS, NAIVE_SMALL) if peer in cells]
    return {
        **about(),
        "networks": {system.name.split(",")[0]: system.networks for system in running if system.networks},
        "rounds": rounds,
        "seconds": seconds,
        "systems": {name: {key: spread([c[key] for c in each]) for key in each[0]} for name, each in cells.items()},
        "ratios": {
            f"{own} / {peer}": {
                key: spread(ratios([cell[key] for cell in cells[own]], [cell[key] for cell in cells[peer]]))
                for key in ("photos_per_s", "p50_ms", "p99_ms")
            }
            for own in cells
            if own not in peers
            for peer in peers
        },
    }


def cell(name: str, tally: Tally, cpu_s: float, process: ProcessFigures) -> dict[str, float]:
    if not tally.answered:
        raise RuntimeError(f"{name} answered nothing: {dict(tally.statuses)}")
    return {
        **tally.figures(),
        "cpu_ms_per_photo": 1000 * cpu_s / tally.served,
        "rss_mb": process.rss_bytes / 1e6,
        "peak_mb": process.peak_bytes / 1e6,
    }


def figures(measured: Document) -> str:
    """Format the medians of each system."""
    rows = [{"": name} | {key: found[key]["median"] for key in found} for name, found in measured["systems"].items()]
    return figures_table(rows)


def quoted(document: Document) -> str:
    """Return the part that docs/performance.md quotes."""
    return "\n\n".join([BEGIN, summary(document, brief=True), END])


def summary(document: Document, brief: bool = False) -> str:
    """Format the ratios to the peer with the most photos a second at the same number of clients, ``brief`` for
    docs/performance.md."""
    columns = [*((IDENTIFY, key) for key in ("photos_per_s", "p50_ms", "p99_ms"))]
    columns += [(own, "photos_per_s") for own in OWN[1:]]
    rows = []
    for name, stored in document["sets"].items():
        for clients, measured in stored["clients"].items():
            rates = {name: found["photos_per_s"]["median"] for name, found in measured["systems"].items()}
            best = max((peer for peer in PEERS if peer in rates), key=rates.__getitem__)
            for peer in (best, *([NAIVE_SMALL] if NAIVE_SMALL in measured["systems"] else [])):
                found = [measured["ratios"].get(f"{own} / {peer}", {}).get(key) for own, key in columns]
                told = ["" if one is None else f"{one['median']:.2f}" if brief else range_of(one) for one in found]
                rows.append([f"{name}, {clients}", peer, *told])
    fields = "identify: photos/s | p50 | p99 | embed: photos/s | fp32, identify: photos/s | fp32, embed: photos/s"
    return table(f"Photos, clients | against | {fields}", rows)


def report(document: Document) -> str:
    parts = ["# Serving", f"`make bench-serving`. {ABOUT}", summary(document)]
    for name, stored in document["sets"].items():
        for clients, measured in stored["clients"].items():
            networks = "; ".join(f"{own}: {words}" for own, words in measured["networks"].items())
            parts += [
                f"## {name}, {clients} client{'s' * (clients != '1')}: {stored['title']}",
                f"{in_words(measured)}. {networks}.",
                figures(measured),
            ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
