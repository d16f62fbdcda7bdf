"""Photo to embeddings: Kith's stages, and the same work by a plain insightface.app.FaceAnalysis loop.

Same process, same ONNX files, same photo, by turns; prints medians with their spread and the ratio, writes JSON.

    python -m bench.request [--rounds 15]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from models.alignment import align
from models.detection import Detector
from models.pack import BUNDLED, load_pack
from models.recognition import Recogniser
from models.runtime import OnnxNetwork, available_cores
from service.demo import package_file
from service.imaging import ImageLimits, open_photo

LIMITS = ImageLimits(20_000_000, 50_000_000)
RESULT = Path(__file__).parent / "results" / "request.json"


def timed(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1000


def spread(samples: list[float]) -> dict[str, float]:
    return {"min": min(samples), "median": statistics.median(samples), "max": max(samples)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    payload = package_file("insightface", "data", "images", "t1.jpg").read_bytes()
    pack = load_pack(BUNDLED)
    detector = Detector(OnnxNetwork(pack.detection.path), pack.detection)
    recogniser = Recogniser(OnnxNetwork(pack.recognition.path), pack.recognition)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from insightface.app import FaceAnalysis

        peer = FaceAnalysis(name=str(BUNDLED), providers=["CPUExecutionProvider"])
        peer.prepare(ctx_id=-1, det_size=(640, 640))

        image = open_photo(payload, LIMITS).decode().upright
        (faces,) = detector.detect([image])
        crops = align(image, faces.landmarks_xy, recogniser.alignment)

        def ours() -> None:
            photo = open_photo(payload, LIMITS).decode().upright
            (found,) = detector.detect([photo])
            recogniser.embed(align(photo, found.landmarks_xy, recogniser.alignment))

        def theirs() -> None:
            peer.get(cv2.imdecode(np.frombuffer(payload, np.uint8), cv2.IMREAD_COLOR))

        stages: dict[str, Callable[[], Any]] = {
            "decode": lambda: open_photo(payload, LIMITS).decode().upright,
            "detect": lambda: detector.detect([image]),
            "align": lambda: align(image, faces.landmarks_xy, recogniser.alignment),
            "embed": lambda: recogniser.embed(crops),
            "whole": ours,
            "FaceAnalysis": theirs,
        }
        for stage in stages.values():
            stage()
        samples: dict[str, list[float]] = {name: [] for name in stages}
        for _ in range(rounds):
            for name, stage in stages.items():
                samples[name].append(timed(stage))
    ratios = [b / a for a, b in zip(samples["whole"], samples["FaceAnalysis"], strict=True)]
    report = {
        "photo": f"{image.shape[1]}x{image.shape[0]}, {len(faces)} faces",
        "machine": f"{platform.machine()}, {available_cores()} cores",
        "rounds": rounds,
        "milliseconds": {name: spread(values) for name, values in samples.items()},
        "FaceAnalysis over Kith": spread(ratios),
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"{report['photo']} on {report['machine']}, {rounds} rounds, milliseconds: min / median / max")
    for name, values in samples.items():
        s = spread(values)
        print(f"  {name:<14}{s['min']:8.1f}{s['median']:8.1f}{s['max']:8.1f}")
    s = spread(ratios)
    print(f"FaceAnalysis takes {s['median']:.2f} times as long as Kith ({s['min']:.2f} to {s['max']:.2f})")


if __name__ == "__main__":
    main()
