"""Compare each decoding step with the step that it replaced, in core time of one thread.

The large photo is the group photo of the package insightface, enlarged to 4000x2768, with grain.

    python -m bench.decoding [--rounds 7]
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from PIL import Image

from models.vision.detection import downscale
from service.cli.tools.demo import package_file
from service.inference.images import ImageLimits, open_photo

LIMITS = ImageLimits(50_000_000, 50_000_000)
LARGE_PX = (4000, 2768)
RESULT = Path(__file__).parent / "results" / "decoding.json"


def seconds(function: Callable[[], Any]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def by_pillow(payload: bytes) -> None:
    with Image.open(io.BytesIO(payload)) as image:
        np.asarray(image.convert("RGB"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    cv2.setNumThreads(1)
    group = package_file("insightface", "data", "images", "t1.jpg").read_bytes()
    with Image.open(io.BytesIO(group)) as image:
        enlarged = np.asarray(image.convert("RGB").resize(LARGE_PX, Image.Resampling.BICUBIC), np.float32)
    grain = np.random.default_rng(0).normal(0, 4, enlarged.shape)
    pixels = np.clip(enlarged + grain, 0, 255).astype(np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG", quality=90)
    large = stream.getvalue()
    scale = 640 / LARGE_PX[0]
    canvas = (640, round(LARGE_PX[1] * scale))
    steps: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "1280x886 whole, for Pillow's": (lambda: open_photo(group, LIMITS).decode(), lambda: by_pillow(group)),
        "4000x2768 whole, for Pillow's": (lambda: open_photo(large, LIMITS).decode(), lambda: by_pillow(large)),
        "4000x2768 at a half, for the whole": (
            lambda: open_photo(large, LIMITS).decode(0.5),
            lambda: open_photo(large, LIMITS).decode(),
        ),
        "4000x2768 at a quarter, for the whole": (
            lambda: open_photo(large, LIMITS).decode(0.25),
            lambda: open_photo(large, LIMITS).decode(),
        ),
        "shrinking by halves, for means over any area": (
            lambda: downscale(pixels, scale),
            lambda: cv2.resize(pixels, canvas, interpolation=cv2.INTER_AREA),
        ),
    }
    report = {}
    for name, (new, old) in steps.items():
        ratios = [seconds(new) / seconds(old) for _ in range(rounds + 1)][1:]
        report[name] = {"min": min(ratios), "median": statistics.median(ratios), "max": max(ratios)}
        print(f"{name:<48}" + "{min:6.2f}{median:6.2f}{max:6.2f}".format(**report[name]))
    RESULT.write_text(json.dumps({"rounds": rounds, "core time, ratio": report}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
