"""Kept faces: cut so large that any recogniser's alignment finds what it needs in it, and read again."""

from __future__ import annotations

import io
from typing import Final

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from models.alignment import POINTS
from models.network import Float
from service.gallery.subjects import Crop

GROWTH: Final = 0.5
"""Of the face box's longer side, added on each side: no alignment of a pack known here needs more than
0.43 on photos of LFW (python -m bench.crops)."""
MAX_SIDE_PX: Final = 320
QUALITY: Final = 95
"""Of WebP."""
MAX_READ_PX: Final = 1024
"""Of a side; what is larger was imported, and is not believed."""


def wanted_scale(box_xyxy: Float, max_side_px: int = MAX_SIDE_PX) -> float:
    """Of its photo, from which a face's crop is as good as from the whole."""
    return min(1.0, max_side_px / max(1.0, (1 + 2 * GROWTH) * float((box_xyxy[2:] - box_xyxy[:2]).max())))


def cut(
    image: NDArray[np.uint8],
    box_xyxy: Float,
    landmarks_xy: Float,
    max_side_px: int = MAX_SIDE_PX,
    quality: int = QUALITY,
) -> Crop:
    """Cut a face out of its (H, W, 3) RGB photo, shrunk where it is larger than ``max_side_px``; nothing is made up
    beyond the photo's border."""
    x0, y0, x1, y1 = box_xyxy.tolist()
    grown = GROWTH * max(x1 - x0, y1 - y0)
    left, top = (max(0, int(edge - grown)) for edge in (x0, y0))
    part = image[top : int(np.ceil(y1 + grown)), left : int(np.ceil(x1 + grown))]
    height, width = part.shape[:2]
    scale = min(1.0, max_side_px / max(height, width))
    size = max(1, round(width * scale)), max(1, round(height * scale))
    if scale < 1:
        part = np.asarray(cv2.resize(part, size, interpolation=cv2.INTER_AREA), np.uint8)
    # Centres of pixels lie at whole numbers, their edges between them.
    factors = np.array([size[0] / width, size[1] / height])
    points = (landmarks_xy.astype(np.float64) - (left, top) + 0.5) * factors - 0.5
    buffer = io.BytesIO()
    Image.fromarray(part).save(buffer, "WEBP", quality=quality)
    return Crop(buffer.getvalue(), tuple((round(x, 3), round(y, 3)) for x, y in points.tolist()))


def read(crop: Crop) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """The (h, w, 3) RGB image and its (5, 2) landmarks.

    Raises:
        OSError, ValueError: the crop is damaged.
    """
    try:
        points = np.array(crop.landmarks_xy, np.float64)
    except TypeError as error:
        raise ValueError("landmarks are numbers") from error
    if points.shape != (POINTS, 2) or not np.isfinite(points).all():
        raise ValueError(f"a crop has {POINTS} finite landmarks")
    try:
        opened = Image.open(io.BytesIO(crop.image), formats=["WEBP"])
    except Image.DecompressionBombError as error:
        raise ValueError(str(error)) from error
    with opened as image:
        if max(image.size) > MAX_READ_PX:
            raise ValueError(f"a crop of {image.width} x {image.height} pixels was not cut here")
        return np.asarray(image.convert("RGB")), points
