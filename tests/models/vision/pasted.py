"""Photos with faces pasted at random places on a background without people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image as PillowImage

from models.vision.detection import Detections, overlaps
from service.cli.tools.demo import package_file

TRIES: Final = 500
BACKGROUND_PX: Final = 700
BACKGROUNDS: Final = ("coffee.png", "rocket.jpg", "motorcycle_left.png", "gravel.png", "grass.png", "brick.png")
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


def count_found(faces: Detections, boxes: NDArray[np.float32]) -> tuple[int, int]:
    """Return how many of the boxes were found, and how many faces are none of them."""
    found = overlaps(boxes, faces.boxes_xyxy)
    return int(found.any(1).sum()), int((~found.any(0)).sum())


def packaged_backgrounds() -> list[Image]:
    found = []
    for name in BACKGROUNDS:
        with PillowImage.open(package_file("skimage", "data", name)) as image:
            found.append(np.asarray(image.convert("RGB")))
    return found
