"""Measure photo to identity through a real server, beside common alternatives on the same ONNX files.

Sends real photos over loopback at 1, 4, 16 and 64 keep-alive clients. The systems are: Kith with its default runtimes;
Kith with the peers' runtime and numeric format; a naive FastAPI server around insightface.app.FaceAnalysis
(bench/peers/naive_server.py); a plain loop with FaceAnalysis, which is one client without HTTP; and InsightFace-REST,
for published networks and if there is a checkout (bench/peers/insightface_rest.py).

Systems take turns in each round, and each round starts with another system. Ratios are taken within a round. Prints,
and writes bench/results/serving.md and .json. Cells that this run does not measure keep their old values. Each cell, a
set of photos at one number of clients, records its day, commit, machine and networks, and the tables show them.

    python -m bench.serving [--quick] [--sets lfw groups reference six heavy] [--clients 1 16] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.common import CACHE, RESULTS, ROOT, in_words, outside, ratios, say, spread, table, write
from bench.load import Generator, Order, ProcessFigures, Tally, look_at, multipart
from bench.machine import about
from bench.peers.insightface_rest import checkout, insightface_rest, request
from bench.peers.loop import Loop
from bench.photos import HEAVY_DIMENSION, gallery_of, groups, heavy_recognizer, lfw_or_exit, lfw_probes, made_up, people
from bench.servers import GALLERY, Running, kith_server, naive_server
from models.checksums import sha256_of
from models.pack.loading import BUNDLED_PACK, load_pack
from models.pack.quantization import quantize_pack
from models.runtime.network import Float
from service.cli.tools.demo import package_file, varied_samples

RESULT: Final = RESULTS / "serving.json"
PAGE: Final = ROOT / "docs" / "performance.md"
BEGIN: Final = "<!-- By bench.serving: -->"
END: Final = "<!-- To here. -->"
CLIENTS: Final = (1, 4, 16, 64)
IN_FULL: Final = (1, 16)
"""Numbers of clients at which every system is measured; other numbers use the systems of IN_BRIEF."""
PINNED: Final = {"KITH_RUNTIME": "onnxruntime,fp32"}
LOOP: Final = "FaceAnalysis loop"
NAIVE: Final = "naive server"
REST: Final = "InsightFace-REST"
SMALL_SIDE_PX: Final = 256
NAIVE_SMALL: Final = "naive server, canvas of 256"
IDENTIFY, EMBED = "Kith, identify", "Kith, embed"
IDENTIFY_PINNED, EMBED_PINNED = "Kith fp32, identify", "Kith fp32, embed"
OWN: Final = (IDENTIFY, EMBED, IDENTIFY_PINNED, EMBED_PINNED)
PEERS: Final = (LOOP, NAIVE, REST)
"""Systems as their READMEs configure them, with a canvas of 640x640 for every photo."""
IN_BRIEF: Final = (IDENTIFY, EMBED, NAIVE)
WARM_UP_S: Final = 0.6
"""Warm-up before each cell of each round; the first cell of a set also has an uncounted round before it."""
ABOUT: Final = """Times are milliseconds.

A figure is the median of rounds by turns. *identify* is photo to identity in a gallery of 3,000 people, *embed* photo
to vectors, which is what the peers do; *fp32* is pinned to onnxruntime and fp32, the peers' own; the *canvas of 256* is
the naive server told how small LFW's photos are, which one does not know of photos to come. The loop is one client
whatever is asked for. CPU is the server's alone; the load comes from a process on the same cores. Latencies are of what
was answered with 200; a system whose latency is beyond the warm-up is shown faster than it is, for its first answers
come from a queue that fills."""
MORE_PHOTOS: Final = ("photos_per_s", lambda ratio: ratio >= 1.5)
GOALS: Final[Sequence[tuple[str, str, str, str | None, str, Callable[[float], bool]]]] = (
    ("16 clients: at least 4 x the best peer's photos/s", "16", IDENTIFY, None, "photos_per_s", lambda r: r >= 4),
    ("16 clients, embed: at least 4 x its photos/s", "16", EMBED, None, "photos_per_s", lambda r: r >= 4),
    ("16 clients: at most 1/4 of its p99", "16", IDENTIFY, None, "p99_ms", lambda r: r <= 0.25),
    ("16 clients, embed: at most 1/4 of its p99", "16", EMBED, None, "p99_ms", lambda r: r <= 0.25),
    ("16 clients, the peers' numbers: at least 1.5 x its photos/s", "16", IDENTIFY_PINNED, None, *MORE_PHOTOS),
    ("... of the naive server with a canvas of 256", "16", IDENTIFY_PINNED, NAIVE_SMALL, *MORE_PHOTOS),
    ("1 client: at most half of the loop's latency", "1", IDENTIFY, LOOP, "p50_ms", lambda r: r <= 0.5),
)
"""Text, clients, system, peer (None: the best one), figure, and whether its ratio meets the goal."""
MAX_WAITING: Final = 2.0
"""Ratio of one client's p50 to the processor time of a photo above which the server waits for something."""
Document = dict[str, Any]


@dataclass(frozen=True)
class PhotoSet:
    """``pack``: function of the cache. ``photos``: function of the folder of data. ``clients``: default numbers of
    clients. ``small``: also measure the naive server with the smallest sufficient canvas. ``random``: the recognizer
    has random weights, and the gallery random vectors. ``photo_s``: time of a slow peer per photo; a cell lasts at
    least twice that for every client."""

    title: str
    pack: Callable[[Path], Path | None]
    photos: Callable[[Path], Sequence[bytes]] = lambda data: lfw_probes(people(data))
    clients: Sequence[int] = CLIENTS
    small: bool = False
    random: bool = False
    photo_s: float = 0.025


def quantized(cache: Path, recognizer: Path) -> Path | None:
    """Return a pack of the reference detector and a recognizer with the INT8 files that are faster here than any other
    precision, or None without them. It is made once."""
    sources = (outside("KITH_REFERENCE", "reference") / "detector.onnx", recognizer)
    if not all(source.is_file() for source in sources):
        return None
    pack = cache / "-".join(["quantized", *(sha256_of(source)[:8] for source in sources)])
    if not pack.is_dir():
        unfinished = pack.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        for source in sources:
            shutil.copy(source, unfinished / source.name)
        for result in quantize_pack(load_pack(unfinished), varied_samples()):
            kept = "kept" if result.accepted else "not kept"
            say(f"{result.task}: INT8 at {result.speedup:.2f} times the rate, {kept}")
        unfinished.rename(pack)
    return pack


def published(cache: Path) -> Path | None:
    """Return the pack of the reference networks."""
    return quantized(cache, outside("KITH_REFERENCE", "reference") / "recognizer.onnx")


SETS: Final = {
    "lfw": PhotoSet("LFW (250x250, one face), bundled pack", lambda _: BUNDLED_PACK, small=True),
    "groups": PhotoSet("groups (4 to 20 faces), bundled pack", lambda _: BUNDLED_PACK, groups, photo_s=0.045),
    "reference": PhotoSet(
        "LFW, SCRFD-2.5G in KITH_REFERENCE and MobileFaceNet after `kith models quantize`",
        published,
        clients=IN_FULL,
        photo_s=0.1,
    ),
    "six": PhotoSet(
        "six faces (InsightFace's photo of 1280x886), networks of *reference*",
        published,
        lambda _: [package_file("insightface", "data", "images", "t1.jpg").read_bytes()],
        clients=IN_FULL,
        photo_s=0.15,
    ),
    "heavy": PhotoSet(
        "LFW, SCRFD-2.5G and IResNet-50 of random weights after `kith models quantize`",
        lambda cache: quantized(cache, heavy_recognizer(cache)),
        clients=IN_FULL,
        random=True,
        photo_s=0.15,
    ),
}


@dataclass(frozen=True)
class System:
    """``run``: a function of clients, seconds, and seconds of warm-up. ``networks``: description of Kith's networks."""

    name: str
    pid: int
    run: Callable[[int, float, float], Tally]
    networks: str | None = None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--clients", nargs="+", type=int, help="default: the numbers of each set")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="minimum duration of a system in a round")
    parser.add_argument("--quick", action="store_true", help="LFW and groups, 1 and 16 clients, three seconds a cell")
    parser.add_argument("--cache", type=Path, default=CACHE, help="vectors of the gallery's people")
    options = parser.parse_args()
    if options.quick:
        options.sets, options.clients, options.seconds = ["lfw", "groups"], [1, 16], 3.0
    data = lfw_or_exit().parent
    document: Document = json.loads(RESULT.read_text("utf-8")) if RESULT.is_file() else {"sets": {}}
    for name in options.sets:
        photo_set = SETS[name]
        if (pack := photo_set.pack(options.cache)) is None:
            say(f"{photo_set.title}: skipped, because the reference models are missing (set KITH_REFERENCE)")
            continue
        stored = document["sets"].setdefault(name, {"title": photo_set.title, "clients": {}})
        stored["title"] = photo_set.title
        photos = photo_set.photos(data)
        loaded = load_pack(pack)
        gallery = made_up(HEAVY_DIMENSION) if photo_set.random else gallery_of(people(data), loaded, options.cache)
        with systems(pack, photos, gallery, photo_set.small) as running:
            for system in running:
                system.run(1, WARM_UP_S, WARM_UP_S)
            for clients in options.clients or photo_set.clients:
                asked = [s for s in running if clients in IN_FULL or s.name in IN_BRIEF]
                seconds = max(options.seconds, 2 * clients * photo_set.photo_s)
                stored["clients"][str(clients)] = measure(asked, clients, options.rounds, seconds)
                stored["clients"] = dict(sorted(stored["clients"].items(), key=lambda item: int(item[0])))
                say(f"{photo_set.title}, {clients} clients\n{figures(stored['clients'][str(clients)])}")
                write(RESULT, report(document), document)
                before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
                PAGE.write_text(before + quoted(document) + rest.partition(END)[2], encoding="utf-8")
    print(report(document))


@contextmanager
def systems(pack: Path, photos: Sequence[bytes], gallery: Mapping[str, Float], small: bool) -> Iterator[list[System]]:
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
            own = opened.enter_context(kith_server(pack, settings, gallery))
            for name, path in zip(names, (identify, embed), strict=True):
                running.append(over_http(name, own, [multipart(path, p) for p in photos], box, own.networks()))
        for name, side_px in ((NAIVE, 640), *([(NAIVE_SMALL, SMALL_SIDE_PX)] if small else [])):
            naive = opened.enter_context(naive_server(pack, side_px))
            running.append(over_http(name, naive, [multipart("/faces", p, "image") for p in photos], b'"bbox":'))
        # It runs detectors of one fixed size only.
        if pack != BUNDLED_PACK and (source := checkout()) is not None:
            rest = opened.enter_context(insightface_rest(source, pack))
            running.append(over_http(REST, rest, [request(photo) for photo in photos], b'"bbox":'))
        loop = opened.enter_context(Loop(pack))
        running.append(System(LOOP, loop.pid, lambda _, seconds, warm_up_s: loop.run(photos, seconds, warm_up_s)))
        yield running


def measure(running: Sequence[System], clients: int, rounds: int, seconds: float) -> Document:
    """Run the rounds of every system in turn; each round starts with another system. The loop is always one client."""
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
    formats = {"photos_per_s": ".4g", "faces_per_s": ".4g", "p50_ms": ".3g", "p95_ms": ".3g", "p99_ms": ".3g"}
    formats |= {"failed": "g", "cpu_ms_per_photo": ".3g", "rss_mb": ".0f"}
    return table(
        " | photos/s | faces/s | p50 | p95 | p99 ms | failed | CPU ms a photo | MB",
        (
            [name, *(f"{found[key]['median']:{form}}" for key, form in formats.items())]
            for name, found in measured["systems"].items()
        ),
    )


def quoted(document: Document) -> str:
    """Return the part that docs/performance.md quotes."""
    return "\n\n".join([BEGIN, summary(document, brief=True), END])


def taken(document: Document) -> list[str]:
    """List the day, code, machine and networks of the cells."""
    cells: dict[str, dict[str, list[str]]] = {}
    for name, stored in document["sets"].items():
        for clients, measured in stored["clients"].items():
            networks = "; ".join(f"{own}: {words}" for own, words in measured["networks"].items())
            key = f"{measured['date']}, commit {measured['commit']}, {measured['machine']}. {networks}."
            cells.setdefault(key, {}).setdefault(name, []).append(clients)
    return [
        "- " + "; ".join(f"{name} at {', '.join(each)} clients" for name, each in sets.items()) + f": {key}"
        for key, sets in cells.items()
    ]


def best_peer(measured: Document) -> str:
    """Return the peer with the most photos a second, among those configured as in their READMEs."""
    present = [peer for peer in PEERS if peer in measured["systems"]]
    return max(present, key=lambda peer: measured["systems"][peer]["photos_per_s"]["median"])


def summary(document: Document, brief: bool = False) -> str:
    """Format the ratios to the best peer at the same number of clients, ``brief`` for docs/performance.md."""
    columns = [*((IDENTIFY, key) for key in ("photos_per_s", "p50_ms", "p99_ms"))]
    columns += [(own, "photos_per_s") for own in OWN[1:]]
    rows = []
    for name, stored in document["sets"].items():
        for clients, measured in stored["clients"].items():
            for peer in (best_peer(measured), *([NAIVE_SMALL] if NAIVE_SMALL in measured["systems"] else [])):
                found = [measured["ratios"].get(f"{own} / {peer}", {}).get(key) for own, key in columns]
                told = ["" if one is None else f"{one['median']:.2f}" if brief else in_words(one) for one in found]
                rows.append([f"{name}, {clients}", peer, *told])
    fields = "identify: photos/s | p50 | p99 | embed: photos/s | fp32, identify: photos/s | fp32, embed: photos/s"
    return table(f"Photos, clients | against | {fields}", rows)


def one_client(document: Document) -> str:
    """Format the times of one kept-alive client.

    The processor works on such a client's photo all the time. A p50 above twice its processor time is spent waiting,
    as for a client's delayed acknowledgment.
    """
    rows = []
    for name, stored in document["sets"].items():
        for system, found in stored["clients"].get("1", {"systems": {}})["systems"].items():
            if system in OWN:
                share = found["p50_ms"]["median"] / found["cpu_ms_per_photo"]["median"]
                times = [in_words(found[key]) for key in ("p50_ms", "p99_ms")]
                rows.append([f"{name}, {system}", *times, f"{share:.2f}{' **waits**' * (share > MAX_WAITING)}"])
    return table("Photos, one kept-alive client | p50 ms | p99 ms | p50 / processor time a photo", rows)


def goals(document: Document) -> str:
    """Format the design's goals and the results, by set of photos."""
    rows = []
    for name, stored in document["sets"].items():
        for text, clients, own, peer, key, is_met in GOALS:
            measured = stored["clients"].get(clients, {"systems": {}, "ratios": {}})
            against = peer or (best_peer(measured) if measured["systems"] else None)
            if (ratio := measured["ratios"].get(f"{own} / {against}", {}).get(key)) is not None:
                verdict = "met" if is_met(ratio["median"]) else "missed"
                rows.append([f"{name}, {text}", f"{in_words(ratio)} of {against}", verdict])
    return table("Goal | Reached | ", rows)


def report(document: Document) -> str:
    parts = [
        "# Serving",
        f"`make bench-serving`. {ABOUT}",
        "Each section below is from one run, by turns; which from which code, and in which numbers:",
        "\n".join(taken(document)),
        *(part(document) for part in (goals, summary, one_client)),
    ]
    for name, stored in document["sets"].items():
        for clients, measured in stored["clients"].items():
            parts.append(
                f"## {name}, {clients} client{'s' * (clients != '1')}: {stored['title']}\n\n{figures(measured)}"
            )
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
