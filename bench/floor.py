"""Measure the lower bound of a photo's cost on this machine, its real cost by stage, and its cost under load.

The floor of a network is its multiplications, divided by the rate at which the machine multiplies large matrices in the
same numeric format and runtime. The floor of steps that move pixels and vectors is their bytes, divided by the memory
bandwidth. The floor of decoding is libjpeg-turbo's own time; that of a request is the time of an empty one.

All figures are core-milliseconds per photo: processor time of all threads. Two cores answer at most 2000 photos a
second, divided by their sum. Prints, and writes bench/results/floor.md and .json. The cost under load is read from
bench/results/serving.json.

    python -m bench.floor
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from bench.common import RESULTS, ROOT, outside, say
from bench.load import HOST, Generator, Order, look_at
from bench.machine import machine
from bench.operations import work_of
from bench.photos import gallery_of, groups, lfw_probes, people
from bench.rates import bandwidth, core_ms, cores, matrix_rates
from bench.servers import GALLERY, kith_server
from bench.serving import IDENTIFY, SETS
from bench.serving import RESULT as SERVING
from models.engines.selection import EnginePreference, open_network
from models.pack.loading import BUNDLED_PACK, load_pack
from models.runtime.network import Float, Network
from models.vision import quality
from models.vision.alignment import align
from models.vision.detection import Detector, Faces, PreparedPhoto
from models.vision.recognition import Recognizer, l2_normalize
from service.index.faiss_structures import builders
from service.index.segmented_index import SegmentedIndex
from service.index.segments import Rows
from service.inference.images import DecodedPhoto, ImageLimits, open_photo
from service.inference.photo_pipeline import DECODE_SCALE

RESULT: Final = RESULTS / "floor.json"
TABLE: Final = RESULTS / "floor.md"
LIMITS: Final = ImageLimits(20_000_000, 50_000_000)
PHOTOS: Final = 32
TEMPLATES: Final = 10_000
CANDIDATES: Final = 2
CLIENTS: Final = 16
REQUEST_S: Final = 4.0
BYTES_OF: Final = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1}
GOAL: Final = 1.3
"""Design goal: cost under load, divided by the sum of the floors."""


@dataclass(frozen=True)
class Stage:
    """Core-milliseconds per photo. ``measured``: median, minimum and maximum; ``limit``: the parts of the floor."""

    name: str
    floor_ms: float
    limit: str
    measured: Mapping[str, float]


class Machine:
    def __init__(self) -> None:
        self.rates = matrix_rates()
        self.bandwidth = {str(threads): bandwidth(threads) for threads in sorted({1, cores()})}
        self._bytes_a_second = max(self.bandwidth[str(cores())].values())

    def moving(self, moved: float) -> float:
        """Return the core-milliseconds to move ``moved`` bytes from and to memory."""
        return moved / self._bytes_a_second * cores() * 1000

    def computing(self, network: Network, item_shape: Sequence[int], items: float, batch: int) -> float:
        """Return the core-milliseconds of ``items`` in batches: their operations, or loading the weights if that is
        slower."""
        work = work_of(network.path, item_shape)
        numbers = f"{network.engine} {network.precision}"
        operations_ms = work.operations * items / self.rates[numbers] * cores() * 1000
        return max(operations_ms, self.moving(work.weights * BYTES_OF[network.precision]) * items / batch)


def main() -> None:
    data = outside("KITH_DATA", "data")
    pack = load_pack(BUNDLED_PACK)
    here = Machine()
    nets = open_network(pack.detection, EnginePreference()), open_network(pack.recognition, EnginePreference())
    with ExitStack() as opened:
        gallery = gallery_of(people(data), pack, ROOT / "runs" / "cache")
        generator = opened.enter_context(Generator())
        server = opened.enter_context(kith_server(BUNDLED_PACK, {}, gallery))

        def request_ms(request: bytes) -> dict[str, float]:
            """Return the server's processor time."""
            rounds = []
            for _ in range(3):
                before = look_at(server.pid).cpu_s
                tally = generator.run(Order(server.port, [request], CLIENTS, REQUEST_S, 0.0, b""))
                rounds.append(1000 * (look_at(server.pid).cpu_s - before) / tally.served)
            return {"median": sorted(rounds)[1], "min": min(rounds), "max": max(rounds)}

        vector = next(iter(gallery.values()))
        empty = request_ms(f"GET /healthz HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
        asked = request_ms(by_vector(vector))
    request = Stage("request: HTTP, SQL, decision, answer", empty["median"], "an empty request", asked)
    kinds = {"lfw": lfw_probes(people(data), PHOTOS), "groups": groups(data)}
    stages = {name: [*photo_stages(here, nets, photos), request] for name, photos in kinds.items()}
    document = {
        "machine": machine(),
        "operations_per_s": here.rates,
        "bytes_per_s": here.bandwidth,
        "networks": {
            name: f"{net.engine} {net.precision}" for name, net in zip(("detector", "recognizer"), nets, strict=True)
        },
        "stages": {name: [asdict(stage) for stage in each] for name, each in stages.items()},
    }
    RESULT.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    TABLE.write_text(report(document, under_load()), encoding="utf-8")
    print(TABLE.read_text(encoding="utf-8"))


def by_vector(vector: Float) -> bytes:
    """Build an identification request without photo and networks."""
    body = json.dumps({"embeddings": [[round(float(v), 6) for v in vector]]}).encode()
    head = f"POST /v1/galleries/{GALLERY}/identify HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def photo_stages(here: Machine, nets: tuple[Network, Network], payloads: Sequence[bytes]) -> list[Stage]:
    """Measure the stages of photos taken one at a time, and the networks in the service's batches."""
    say(f"{len(payloads)} photos")
    pack = load_pack(BUNDLED_PACK)
    detector, recognizer = Detector(nets[0], pack.detection), Recognizer(nets[1], pack.recognition)

    def decoded(payload: bytes) -> DecodedPhoto:
        photo = open_photo(payload, LIMITS)
        return photo.decode(min(1.0, DECODE_SCALE * detector.canvas(photo.height, photo.width).scale))

    def laid_out(picture: DecodedPhoto) -> PreparedPhoto:
        canvas = detector.canvas(picture.photo.height, picture.photo.width)
        return detector.place_on_canvas(picture.shrunk(canvas.scale), canvas, picture.photo.height, picture.photo.width)

    def cut(picture: DecodedPhoto, found: Faces) -> NDArray[np.uint8]:
        return align(picture.pixels, picture.points_stored(found.landmarks_xy), recognizer.alignment)

    def qualities(cuts: NDArray[np.uint8], found: Faces) -> list[quality.Quality]:
        return [quality.measure_quality(c, p) for c, p in zip(cuts, found.landmarks_xy, strict=True)]

    images = [decoded(payload) for payload in payloads]
    laid = [laid_out(image) for image in images]
    answers = detector.run(laid)
    faces = [detector.decode_faces(one, answer) for one, answer in zip(laid, answers, strict=True)]
    crops = [cut(image, found) for image, found in zip(images, faces, strict=True)]
    n, count = len(images), sum(map(len, faces))
    every_crop = np.concatenate(crops)
    pixels = sum(image.pixels.nbytes for image in images) / n
    canvases = sum(one.planes.nbytes for one in laid) / n
    crop_bytes, read = every_crop.nbytes / n, sum(output.nbytes for output in answers[0])
    detector_floor = sum(here.computing(nets[0], one.planes.shape, 1, 8) for one in laid[:8]) / len(laid[:8])
    held = l2_normalize(np.random.default_rng(0).normal(size=(TEMPLATES, recognizer.dimension)))
    index = SegmentedIndex(recognizer.dimension, "exact", 0.999, builders("cpu"), lambda _: None)
    index.load(Rows(np.arange(TEMPLATES), np.arange(TEMPLATES), held), 0)

    def each(function: Any, *columns: Sequence[Any]) -> dict[str, float]:
        rows = list(zip(*columns, strict=True))
        return core_ms(lambda: [function(*row) for row in rows], n)

    library = each(lambda payload: simplejpeg.decode_jpeg(payload), payloads)["median"]
    return [
        Stage("decoding", library, "libjpeg-turbo", each(decoded, payloads)),
        Stage("laying out", here.moving(pixels + canvases), "bytes", each(laid_out, images)),
        Stage("detector", detector_floor, "operations", core_ms(lambda: batches(detector.run, laid, 8), n)),
        Stage("selection", here.moving(read), "bytes", each(detector.decode_faces, laid, answers)),
        Stage("alignment", here.moving(2 * crop_bytes), "bytes", each(cut, images, faces)),
        Stage("quality", here.moving(crop_bytes), "bytes", each(qualities, crops, faces)),
        Stage(
            "recognizer",
            here.computing(nets[1], (3, *every_crop.shape[1:3]), count / n, 8),
            "operations",
            core_ms(lambda: batches(recognizer.embed, every_crop, 8), n),
        ),
        Stage(
            f"search of {TEMPLATES:,}",
            here.moving(held.nbytes),
            "bytes",
            each(lambda found: index.search(index.view, held[: max(1, len(found))], CANDIDATES), faces),
        ),
    ]


def batches(function: Any, items: Any, size: int) -> None:
    for start in range(0, len(items), size):
        function(items[start : start + size])


def under_load() -> dict[str, float]:
    """Return the server's core-milliseconds per photo at 16 clients, by set of photos, from bench.serving."""
    if not SERVING.is_file():
        return {}
    sets = json.loads(SERVING.read_text(encoding="utf-8"))["sets"]
    return {
        name: stored["clients"][str(CLIENTS)]["systems"][IDENTIFY]["cpu_ms_per_photo"]["median"]
        for name, stored in sets.items()
        if str(CLIENTS) in stored["clients"]
    }


def report(document: Mapping[str, Any], loaded: Mapping[str, float]) -> str:
    rates = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in document["operations_per_s"].items())
    memory = "; ".join(
        f"{threads} thread{'s' * (threads != '1')}: " + ", ".join(f"{k} {v / 1e9:.0f}" for k, v in each.items())
        for threads, each in document["bytes_per_s"].items()
    )
    lines = ["# Floors", "", f"`python -m bench.floor` on {document['machine']}.", ""]
    lines += [f"Thousand million operations a second, by large products, all cores: {rates}.", ""]
    lines += [f"Thousand million bytes a second: {memory}.", ""]
    lines += [
        f"Networks: detector {document['networks']['detector']}, recognizer {document['networks']['recognizer']}."
    ]
    for name, stages in document["stages"].items():
        lines += [
            "",
            f"## {SETS[name].title}",
            "",
            "| Stage | Floor, core-ms | by | Measured | Gap |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {s['name']} | {s['floor_ms']:.3f} | {s['limit']} | {m['median']:.3f} "
            f"({m['min']:.3f} to {m['max']:.3f}) | {m['median'] / s['floor_ms']:.1f} |"
            for s, m in ((s, s["measured"]) for s in stages)
        ]
        floor = sum(s["floor_ms"] for s in stages)
        alone = sum(s["measured"]["median"] for s in stages)
        lines += [f"| **sum** | **{floor:.2f}** | | **{alone:.2f}** | **{alone / floor:.1f}** |"]
        if name in loaded:
            lines += [
                f"| under load, {CLIENTS} clients | | | {loaded[name]:.2f} | {loaded[name] / floor:.1f} |",
                "",
                f"Under load a photo takes {loaded[name] / floor:.2f} times the sum of its stages' floors (the goal is "
                f"{GOAL}: {'met' if loaded[name] <= GOAL * floor else 'missed'}), and {loaded[name] / alone:.2f} times "
                "the sum of its stages measured alone.",
            ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
