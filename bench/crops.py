"""Compare the embedding of a stored crop with that of its photo: the cosine between both, by size and quality.

``python -m bench.crops`` writes bench/results/crops.md. The photos are those of LFW, in their own size (faces of about
110 pixels) and enlarged four times, so that the crop has to be shrunk. Each pack's recognizer uses its own alignment.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from models.pack import open_model_zoo
from models.pack.loading import BUNDLED_PACK, load_pack
from models.runtime.onnx_runtime import OnnxNetwork
from models.vision.alignment import STANDARD_ALIGNMENT, Alignment, align, similarity_transforms, transform_points
from models.vision.detection import Detector
from models.vision.recognition import Recognizer
from service.inference import crops

Photo = NDArray[np.uint8]
SIDES = (160, 224, 320, 448)
QUALITIES = (80, 90, 95)
ENLARGED = 4
RESULTS = Path(__file__).parent / "results" / "crops.md"


def opened(path: Path, factor: int) -> Photo:
    with Image.open(path) as image:
        photo = np.asarray(image.convert("RGB"))
    return np.asarray(cv2.resize(photo, None, fx=factor, fy=factor, interpolation=cv2.INTER_CUBIC), np.uint8)


def measured(photos: list[Photo], detector: Detector, recognizer: Recognizer, side: int, quality: int) -> str:
    """Measure one row of the table."""
    cosines, sizes = [], []
    for photo in photos:
        (faces,) = detector.detect([photo])
        if not len(faces.scores):
            continue
        crop = crops.cut_crop(photo, faces.boxes_xyxy[0], faces.landmarks_xy[0], side, quality)
        image, points = crops.decode_crop(crop)
        direct = recognizer.embed(align(photo, faces.landmarks_xy[:1], recognizer.alignment))
        again = recognizer.embed(align(image, points[None], recognizer.alignment))
        cosines.append(float((direct @ again.T)[0, 0]))
        sizes.append(len(crop.image))
    low = np.quantile(cosines, [0.0, 0.01, 0.5])
    return f"| {side} | {quality} | {np.mean(sizes) / 1000:.1f} | {low[2]:.4f} | {low[1]:.4f} | {low[0]:.4f} |"


def needed(photos: list[Photo], detector: Detector, alignment: Alignment) -> NDArray[np.float64]:
    """Return the margin that each first face box needs to hold the aligned crop, as a share of its longer side."""
    found = []
    side = alignment.size_px
    corners = np.array([[0, 0], [side, 0], [0, side], [side, side]])
    for photo in photos:
        (faces,) = detector.detect([photo])
        for box, points in zip(faces.boxes_xyxy[:1], faces.landmarks_xy[:1], strict=True):
            (matrix,) = similarity_transforms(points[None], alignment)
            seen = transform_points(cv2.invertAffineTransform(matrix), corners)
            beyond = max(float((box[:2] - seen.min(0)).max()), float((seen.max(0) - box[2:]).max()))
            found.append(beyond / float(max(box[2:] - box[:2])))
    return np.array(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--photos", type=int, default=300)
    parser.add_argument("--pack", type=Path, nargs="*", default=[BUNDLED_PACK])
    given = parser.parse_args()
    paths = sorted((given.data / "lfw" / "images").rglob("*.jpg"))
    chosen = [paths[i] for i in np.random.default_rng(0).permutation(len(paths))[: given.photos]]
    detection = load_pack(BUNDLED_PACK).detection
    detector = Detector(OnnxNetwork(detection.path), detection)
    lines = ["# Kept crops", "", f"Cosine between a photo's vector and its kept crop's, {len(chosen)} photos of LFW."]
    photos = [opened(path, 1) for path in chosen]
    for name, alignment in (("standard", STANDARD_ALIGNMENT), ("open-model-zoo", open_model_zoo.ALIGNMENT)):
        low, high = np.quantile(needed(photos, detector, alignment), [0.5, 1])
        lines += [
            "",
            f"The box must grow by {low:.2f} of its longer side for the {name} crop (median), {high:.2f} at most.",
        ]
        print(lines[-1], flush=True)
    for directory in given.pack:
        pack = load_pack(directory)
        recognizer = Recognizer(OnnxNetwork(pack.recognition.path), pack.recognition)
        for factor in (1, ENLARGED):
            photos = [opened(path, factor) for path in chosen[: len(chosen) // factor]]
            lines += ["", f"## {pack.model_id}, photos enlarged {factor} times ({len(photos)})", ""]
            lines += ["| Side px | WebP quality | kB | Median | 1 % | Lowest |", "|---|---|---|---|---|---|"]
            for side in SIDES:
                for quality in QUALITIES:
                    lines.append(measured(photos, detector, recognizer, side, quality))
                    print(lines[-1], flush=True)
    RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
