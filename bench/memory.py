"""Check that the server's memory stays flat over many requests of varied sizes.

The requests are photos of LFW scaled to between 80 and 2000 pixels, group photos, other formats, and invalid images, in
a random order. After each part, the script reads the server's resident memory. Before the measurement it sends every
payload once, so that networks are compiled for every canvas. Memory counts as flat if, once warm, its regression line
rises by at most 2 MB in 10,000 requests. Prints, and writes bench/results/memory.json.

    python -m bench.memory [--requests 100000]
"""

from __future__ import annotations

import argparse
import io
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from bench.common import CACHE, RESULTS, say, write
from bench.load import Generator, Order, look_at, multipart
from bench.machine import about
from bench.photos import gallery_of, groups, lfw_or_exit, people
from bench.servers import GALLERY, Running, kith_server
from models.pack.loading import BUNDLED_PACK, load_pack

SIDES_PX: Final = (80, 2000)
POOL: Final = 400
CLIENTS: Final = 8
PASSES: Final = 2
"""Warm-up passes through the pool."""
PARTS: Final = 200
WARM: Final = 0.4
"""Share of the requests that warm up: caches fill, allocators find their size."""
MAX_GROWTH_MB: Final = 2.0
"""Maximum growth per 10,000 requests, once warm."""
FORMATS: Final = (("JPEG", "RGB"), ("JPEG", "RGB"), ("JPEG", "RGB"), ("JPEG", "L"), ("PNG", "RGBA"), ("WEBP", "RGB"))
PATHS: Final = (f"/v1/galleries/{GALLERY}/identify", "/v1/embed", "/v1/detect")
Figures = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=100_000)
    options = parser.parse_args()
    data = lfw_or_exit().parent
    chance = random.Random(0)
    requests = [multipart(chance.choice(PATHS), payload) for payload in varied(data, chance)]
    vectors = gallery_of(people(data), load_pack(BUNDLED_PACK), CACHE)
    with Generator() as generator, kith_server(BUNDLED_PACK, {}, vectors) as server:
        # Each pass has another order, so that small canvases run alone and in batches.
        for _ in range(PASSES):
            chance.shuffle(requests)
            generator.run(Order(server.port, requests, CLIENTS, 3600.0, 0.0, b"", limit=len(requests)))
        figures = ask(generator, server, requests, options.requests, chance)
    write(RESULTS / "memory.json", None, figures)
    print(verdict(figures))
    sys.exit(not is_flat(figures))


def varied(data: Path, chance: random.Random) -> list[bytes]:
    """Build a pool of payloads: mostly small photos; one in twelve shows a group, one in twenty is not a photo."""
    everybody, together = people(data), groups(data)
    pool: list[bytes] = []
    while len(pool) < POOL:
        payload = scaled(chance.choice(everybody).photos[0], chance)
        roll = chance.random()
        if roll < 1 / 40:
            payload = payload[: len(payload) // 2]
        elif roll < 1 / 20:
            payload = chance.randbytes(chance.randrange(0, 50_000))
        elif roll < 1 / 20 + 1 / 12:
            payload = chance.choice(together)
        pool.append(payload)
    return pool


def scaled(path: Path, chance: random.Random) -> bytes:
    low, high = (math.log(side) for side in SIDES_PX)
    # The smaller of two draws: one in fifty is then larger than 1500 pixels.
    longest = math.exp(min(chance.uniform(low, high), chance.uniform(low, high)))
    width, height = (round(longest * chance.uniform(0.6, 1)), round(longest))
    kind, mode = chance.choice(FORMATS)
    buffer = io.BytesIO()
    with Image.open(path) as image:
        image.resize((width, height), Image.Resampling.BILINEAR).convert(mode).save(buffer, kind)
    return buffer.getvalue()


def ask(generator: Generator, server: Running, requests: Sequence[bytes], count: int, chance: random.Random) -> Figures:
    part = max(1, count // PARTS)
    statuses: Counter[int] = Counter()
    asked, resident = [0], [look_at(server.pid).rss_bytes / 1e6]
    start = said = time.perf_counter()
    while asked[-1] < count:
        chosen = chance.choices(requests, k=part)
        tally = generator.run(Order(server.port, chosen, CLIENTS, 3600.0, 0.0, b"", limit=part))
        statuses += tally.statuses
        asked.append(asked[-1] + part)
        resident.append(look_at(server.pid).rss_bytes / 1e6)
        if time.perf_counter() - said > 20:
            said = time.perf_counter()
            say(f"  {asked[-1]} of {count}: {resident[-1]:.0f} MB, {asked[-1] / (said - start):.0f} requests/s")
    return {
        **about(),
        "clients": CLIENTS,
        "requests": asked,
        "rss_mb": [round(mb, 1) for mb in resident],
        "peak_mb": round(look_at(server.pid).peak_bytes / 1e6, 1),
        "statuses": {str(status): number for status, number in sorted(statuses.items())},
        "slope_mb": round(slope(asked, resident), 2),
    }


def slope(asked: Sequence[int], resident_mb: Sequence[float]) -> float:
    """Return MB per 10,000 requests, by least squares over the values after the warm-up."""
    requests, mb = (np.array(values, np.float64) for values in (asked, resident_mb))
    warm: NDArray[np.bool_] = requests >= WARM * requests[-1]
    return float(np.polyfit(requests[warm] / 10_000, mb[warm], 1)[0])


def is_flat(figures: Figures) -> bool:
    return bool(figures["slope_mb"] <= MAX_GROWTH_MB and figures["statuses"].keys() <= {"200", "422"})


def verdict(figures: Figures) -> str:
    return (
        f"{figures['requests'][-1]:,} requests of varied sizes: {'flat' if is_flat(figures) else 'NOT flat'}. Once "
        f"warm memory moves by {figures['slope_mb']:+.2f} MB per 10,000 requests (at most {MAX_GROWTH_MB:g}); "
        f"{figures['rss_mb'][0]:.0f} MB at first, {figures['rss_mb'][-1]:.0f} MB at last, "
        f"{figures['peak_mb']:.0f} MB at most; answers by status: {figures['statuses']}"
    )


if __name__ == "__main__":
    main()
