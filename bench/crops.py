"""What embedding a kept crop instead of its photo changes: the cosine between the two, for several sizes and qualities.

``python -m bench.crops`` writes bench/results/crops.md. Photos are those of LFW, as they are (faces of some 110 pixels)
and enlarged four times, where the crop has to be shrunk; all that a pack's recogniser sees is cut by its own alignment.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from models.alignment import align
from models.detection import Detector
from models.pack import BUNDLED, load_pack
from models.recognition import Recogniser
from models.runtime import Network
from service import crops

Photo = NDArray[np.uint8]
SIDES = (160, 224, 320, 448)
QUALITIES = (80, 90, 95)
ENLARGED = 4
RESULTS = Path(__file__).parent / "results" / "crops.md"


def measured(photos: list[Photo], detector: Detector, recogniser: Recogniser, side: int, quality: int) -> str:
    """A row of the table."""
    cosines, sizes = [], []
    for photo in photos:
        (faces,) = detector.detect([photo])
        if not len(faces.scores):
            continue
        crop = crops.cut(photo, faces.boxes_xyxy[0], faces.landmarks_xy[0], side, quality)
        image, points = crops.read(crop)
        direct = recogniser.embed(align(photo, faces.landmarks_xy[:1], recogniser.alignment))
        again = recogniser.embed(align(image, points[None], recogniser.alignment))
        cosines.append(float((direct @ again.T)[0, 0]))
        sizes.append(len(crop.image))
    low = np.quantile(cosines, [0.0, 0.01, 0.5])
    return f"| {side} | {quality} | {np.mean(sizes) / 1000:.1f} | {low[2]:.4f} | {low[1]:.4f} | {low[0]:.4f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--photos", type=int, default=300)
    parser.add_argument("--pack", type=Path, nargs="*", default=[BUNDLED])
    given = parser.parse_args()
    paths = sorted((given.data / "lfw" / "images").rglob("*.jpg"))
    chosen = [paths[i] for i in np.random.default_rng(0).permutation(len(paths))[: given.photos]]
    detection = load_pack(BUNDLED).detection
    detector = Detector(Network(detection.path), detection)
    lines = ["# Kept crops", "", f"Cosine between a photo's vector and its kept crop's, {len(chosen)} photos of LFW."]
    for directory in given.pack:
        pack = load_pack(directory)
        recogniser = Recogniser(Network(pack.recognition.path), pack.recognition)
        for factor in (1, ENLARGED):
            photos = []
            for path in chosen[: len(chosen) // factor]:
                with Image.open(path) as opened:
                    photo = np.asarray(opened.convert("RGB"))
                photos.append(cv2.resize(photo, None, fx=factor, fy=factor, interpolation=cv2.INTER_CUBIC))
            lines += ["", f"## {pack.model_id}, photos enlarged {factor} times ({len(photos)})", ""]
            lines += ["| Side px | WebP quality | kB | Median | 1 % | Lowest |", "|---|---|---|---|---|---|"]
            for side in SIDES:
                for quality in QUALITIES:
                    lines.append(
                        measured([np.asarray(p, np.uint8) for p in photos], detector, recogniser, side, quality)
                    )
                    print(lines[-1], flush=True)
    RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
