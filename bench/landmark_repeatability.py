"""Measure how repeatable a detector's landmarks are on the same photo shifted, mirrored or scaled.

This bounds the agreement that two detectors can reach. Prints the median over photos of the mean distance of the five
points, in eye distances, and writes JSON.

    python -m bench.landmark_repeatability --pack DIRECTORY --photos LFW_IMAGES [--detector FILE --yunet]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from models.pack.loading import BUNDLED_PACK, load_pack
from models.runtime.onnx_runtime import OnnxNetwork
from models.vision.detection import Detector
from models.vision.specs import Normalization
from training.data.identities import read_rgb
from training.detection.pages import MIRRORED_LANDMARKS

Image = NDArray[np.uint8]
Points = NDArray[np.float64]
SHIFT_PX = 13
PHOTOS = 292
RESULT = Path(__file__).parent / "results" / "landmark_repeatability.json"


def scaled(factor: float) -> tuple[Callable[[Image], Image], Callable[[Points, int], Points]]:
    return (
        lambda image: np.asarray(cv2.resize(image, None, fx=factor, fy=factor), np.uint8),
        lambda points, _: (points + 0.5) / factor - 0.5,
    )


# Each change of the photo, and its inverse for landmarks (given the photo's width).
CHANGES: dict[str, tuple[Callable[[Image], Image], Callable[[Points, int], Points]]] = {
    f"shifted {SHIFT_PX} px": (
        lambda image: np.pad(image, ((SHIFT_PX, 0), (SHIFT_PX, 0), (0, 0))),
        lambda points, _: points - SHIFT_PX,
    ),
    "mirrored": (
        lambda image: np.ascontiguousarray(image[:, ::-1]),
        lambda points, width: np.stack([width - 1 - points[..., 0], points[..., 1]], -1)[:, MIRRORED_LANDMARKS],
    ),
    **{f"scaled {factor:g}": scaled(factor) for factor in (0.5, 0.75, 1.5, 2.0)},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pack", type=Path, default=BUNDLED_PACK)
    parser.add_argument("--detector", type=Path, help="another detector file")
    parser.add_argument("--yunet", action="store_true", help="the detector file has YuNet's head")
    parser.add_argument("--photos", type=Path, required=True)
    options = parser.parse_args()
    spec = load_pack(options.pack).detection
    if options.detector:
        spec = replace(spec, path=options.detector)
    if options.yunet:
        spec = replace(spec, head="yunet", normalization=Normalization(0.0, 1.0, "BGR"))
    detector = Detector(OnnxNetwork(spec.path), spec)

    every = sorted(options.photos.glob("*/*.jpg"))
    files = every[:: max(1, len(every) // PHOTOS)][:PHOTOS]
    differences: dict[str, list[float]] = {name: [] for name in CHANGES}
    for file in files:
        image = read_rgb(file)
        (faces,) = detector.detect([image])
        if not len(faces):
            continue
        points = faces.landmarks_xy[faces.nearest(image.shape[1] / 2, image.shape[0] / 2)].astype(np.float64)
        eye_distance = float(np.linalg.norm(points[1] - points[0]))
        for name, (change, back) in CHANGES.items():
            (again,) = detector.detect([change(image)])
            if len(again):
                found = back(again.landmarks_xy.astype(np.float64), image.shape[1])
                off = np.linalg.norm(found - points, axis=2).mean(1).min()
                differences[name].append(float(off) / eye_distance)
    medians = {name: round(float(np.median(values)), 4) for name, values in differences.items()}
    RESULT.parent.mkdir(exist_ok=True)
    report = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    report[spec.path.stem] = {"photos": len(files), "median, eye distances": medians}
    RESULT.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for name, value in medians.items():
        print(f"{name:<16}{value:7.1%}")


if __name__ == "__main__":
    main()
