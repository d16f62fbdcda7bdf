"""Measure which faces are found in large photos at each detail, and the CPU time of the search.

``python -m bench.large_photos`` prints Markdown tables. Faces of LFW's View 1, without people of View 2, are pasted on
a mosaic of photos without people, at random places that do not overlap.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, get_args

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image as PillowImage

from bench.common import outside, say
from models.pack.loading import BUNDLED_PACK, load_pack
from models.runtime.onnx_runtime import OnnxNetwork
from models.vision.detection import Detector, Faces, downscale, overlaps
from models.vision.face_search import Detail, FaceSearch, find_faces
from service.cli.tools.demo import package_file
from training.data.identities import read_rgb

FACES: Final = 20
TRIES: Final = 500
BACKGROUND_PX: Final = 700
BACKGROUNDS: Final = ("coffee.png", "rocket.jpg", "motorcycle_left.png", "gravel.png", "grass.png", "brick.png")
CASES: Final = (
    *((12_000, 4000, size) for size in (150, 60, 30)),
    *((4000, 3000, size) for size in (60, 30)),
    *((3000, 12_000, 100), (8000, 6000, 100), (8000, 6000, 50), (1920, 1080, 30)),
)
"""Width and height of the photo, and width of its faces in pixels."""
CANVAS_PX: Final = 640
FACE_SHARES: Final = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9)
SHARE_PHOTOS: Final = 100
HALF_ELLIPSE: Final = (0.42, 0.46)

Image = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Portrait:
    """Photo of one face, and its ``box`` x0, y0, x1, y1 in pixels."""

    photo: Image
    box: NDArray[np.float32]

    def scaled(self, face_px: float) -> Portrait:
        """Return the portrait with a face of this width."""
        scale = face_px / float(self.box[2] - self.box[0])
        method = cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC
        photo = cv2.resize(self.photo, None, fx=scale, fy=scale, interpolation=method)
        return Portrait(np.asarray(photo, np.uint8), self.box * np.float32(scale))


def mosaic(height: int, width: int, parts: Sequence[Image], rng: np.random.Generator) -> Image:
    """Return a (height, width, 3) background of rows of ``parts``, in random order and mirrored at random."""
    canvas = np.zeros((height, width, 3), np.uint8)
    for top in range(0, height, BACKGROUND_PX):
        left = 0
        while left < width:
            part = parts[int(rng.integers(len(parts)))]
            size = (round(part.shape[1] * BACKGROUND_PX / part.shape[0]), BACKGROUND_PX)
            part = np.asarray(cv2.resize(part, size, interpolation=cv2.INTER_CUBIC), np.uint8)
            part = part[: height - top, : width - left]
            canvas[top : top + part.shape[0], left : left + part.shape[1]] = part[:, :: rng.choice((-1, 1))]
            left += part.shape[1]
    return canvas


def paste(canvas: Image, portrait: Portrait, left: int, top: int) -> NDArray[np.float32]:
    """Blend a portrait into the canvas and return the box of its face."""
    height, width = portrait.photo.shape[:2]
    mask = np.zeros((height, width), np.float32)
    axes = (round(width * HALF_ELLIPSE[0]), round(height * HALF_ELLIPSE[1]))
    cv2.ellipse(mask, (width // 2, height // 2), axes, 0, 0, 360, 1, -1)
    weight = cv2.GaussianBlur(mask, (0, 0), max(1.0, 0.02 * width))[..., None]
    place = canvas[top : top + height, left : left + width]
    place[:] = (portrait.photo * weight + place * (1 - weight)).astype(np.uint8)
    return portrait.box + np.array([left, top, left, top], np.float32)


def place_faces(
    canvas: Image, portraits: Sequence[Portrait], face_px: float, count: int, rng: np.random.Generator
) -> NDArray[np.float32]:
    """Paste ``count`` portraits at random places that do not overlap, if there is room, and return (n, 4) boxes."""
    taken: list[tuple[int, int, int, int]] = []
    boxes = []
    for number in range(count):
        portrait = portraits[number % len(portraits)].scaled(face_px)
        height, width = portrait.photo.shape[:2]
        for _ in range(TRIES):
            top, left = (int(rng.integers(0, room + 1)) for room in (canvas.shape[0] - height, canvas.shape[1] - width))
            if all(left + width < x0 or x1 < left or top + height < y0 or y1 < top for x0, y0, x1, y1 in taken):
                taken.append((left, top, left + width, top + height))
                boxes.append(paste(canvas, portrait, left, top))
                break
    return np.array(boxes)


def count_found(faces: Faces, boxes: NDArray[np.float32]) -> tuple[int, int]:
    """Return how many of the boxes were found, and how many faces are none of them."""
    found = overlaps(boxes, faces.boxes_xyxy)
    return int(found.any(1).sum()), int((~found.any(0)).sum())


def view_1_portraits(lfw: Path) -> list[Portrait]:
    """Return photos of the people of LFW's View 1 who are not in View 2."""

    def names(*files: str) -> set[str]:
        rows = [line.split("\t") for file in files for line in (lfw / file).read_text().splitlines()[1:]]
        return {name for row in rows for name in row if not name.isdigit()}

    people = names("pairsDevTrain.txt", "pairsDevTest.txt") - names("pairs.txt")
    with (lfw / "landmarks_yunet.csv").open(newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["file"].split("/")[0] in people]
    return [
        Portrait(read_rgb(lfw / "images" / row["file"]), np.array([row[k] for k in ("x0", "y0", "x1", "y1")], float))
        for row in rows
    ]


def packaged_backgrounds() -> list[Image]:
    found = []
    for name in BACKGROUNDS:
        with PillowImage.open(package_file("skimage", "data", name)) as image:
            found.append(np.asarray(image.convert("RGB")))
    return found


def large_rows(detector: Detector, portraits: Sequence[Portrait]) -> Iterator[str]:
    """Yield a row per case: faces found, false alarms and milliseconds of CPU time, at low and at high."""
    rng, parts = np.random.default_rng(0), packaged_backgrounds()
    for width, height, face_px in CASES:
        photo = mosaic(height, width, parts, rng)
        boxes = place_faces(photo, [portraits[i] for i in rng.permutation(len(portraits))], face_px, FACES, rng)
        cells = []
        for detail in ("low", "high"):
            start = time.process_time()
            found, other = count_found(find_faces(detector, photo, detail), boxes)
            cells.append(f"{found} of {len(boxes)} | {other} | {1000 * (time.process_time() - start):.0f}")
        search = FaceSearch(detector, detector.prepare(photo), partial(downscale, photo), "high")
        yield f"| {width} x {height} | {face_px} | {' | '.join(cells)} | {search.min_face_px:.0f} |"


def share_rows(detector: Detector, portraits: Sequence[Portrait], rng: np.random.Generator) -> Iterator[str]:
    """Yield a row per share of the photo's side that the face's width takes: faces found at low and medium."""
    chosen = [portraits[i] for i in rng.permutation(len(portraits))[:SHARE_PHOTOS]]
    for share in FACE_SHARES:
        found = dict.fromkeys(get_args(Detail)[:2], 0)
        for portrait in chosen:
            scale = share * CANVAS_PX / float(portrait.box[2] - portrait.box[0])
            shift = CANVAS_PX / 2 - (portrait.box[:2] + portrait.box[2:]) / 2 * scale
            matrix = np.array([[scale, 0, shift[0]], [0, scale, shift[1]]])
            size = (CANVAS_PX, CANVAS_PX)
            photo = cv2.warpAffine(portrait.photo, matrix, size, flags=cv2.INTER_CUBIC, borderMode=cv2.BORDER_REFLECT)
            box = (portrait.box * scale + np.tile(shift, 2)).astype(np.float32)
            for detail in found:
                faces = find_faces(detector, np.asarray(photo, np.uint8), detail)
                found[detail] += count_found(faces, np.clip(box, 0, CANVAS_PX)[None])[0]
        yield f"| {share:.0%} | {' | '.join(f'{count / len(chosen):.0%}' for count in found.values())} |"


def main() -> None:
    portraits = view_1_portraits(outside("KITH_DATA", "data") / "lfw")
    for directory in (BUNDLED_PACK, BUNDLED_PACK.parent / "kith-open"):
        say(f"{directory.name}, {len(portraits)} portraits")
        spec = load_pack(directory).detection
        detector = Detector(OnnxNetwork(spec.path), spec)
        print(f"\n## {directory.name}\n")
        print("| Photo | Face px | low: found | false | CPU ms | high: found | false | CPU ms | min_face_px |")
        print("|---|---|---|---|---|---|---|---|---|")
        print("\n".join(large_rows(detector, portraits)), flush=True)
        print("\n| Face width, share of the photo | low | medium |\n|---|---|---|")
        print("\n".join(share_rows(detector, portraits, np.random.default_rng(0))), flush=True)


if __name__ == "__main__":
    main()
