"""Face crops, large enough for the alignment of any recognizer: cut, encode and decode."""

from __future__ import annotations

import io
from typing import Final

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from models.runtime.network import Float
from service.domain.gallery import Crop

CROP_MARGIN: Final = 0.5
"""Margin on each side of the face box, as a share of its longer side.

On LFW, no alignment of a catalog pack needs more than 0.43."""
MAX_SIDE_PX: Final = 320
WEBP_QUALITY: Final = 95
MAX_STORED_SIDE_PX: Final = 1024
"""Limit for reading, since imported crops are untrusted."""


def min_decode_scale(box_xyxy: Float) -> float:
    """Return the smallest decoding scale of a photo at which the crop of this face loses no detail."""
    return min(1.0, MAX_SIDE_PX / max(1.0, (1 + 2 * CROP_MARGIN) * float((box_xyxy[2:] - box_xyxy[:2]).max())))


def cut_crop(
    image: NDArray[np.uint8],
    box_xyxy: Float,
    landmarks_xy: Float,
) -> Crop:
    """Cut a face out of its (H, W, 3) RGB photo, and shrink it to MAX_SIDE_PX. The photo's border is not padded."""
    x0, y0, x1, y1 = box_xyxy.tolist()
    grown = CROP_MARGIN * max(x1 - x0, y1 - y0)
    left, top = (max(0, int(edge - grown)) for edge in (x0, y0))
    part = image[top : int(np.ceil(y1 + grown)), left : int(np.ceil(x1 + grown))]
    height, width = part.shape[:2]
    scale = min(1.0, MAX_SIDE_PX / max(height, width))
    size = max(1, round(width * scale)), max(1, round(height * scale))
    if scale < 1:
        part = np.asarray(cv2.resize(part, size, interpolation=cv2.INTER_AREA), np.uint8)
    # Pixel centers have integer coordinates.
    factors = np.array([size[0] / width, size[1] / height])
    points = (landmarks_xy.astype(np.float64) - (left, top) + 0.5) * factors - 0.5
    buffer = io.BytesIO()
    Image.fromarray(part).save(buffer, "WEBP", quality=WEBP_QUALITY)
    return Crop(buffer.getvalue(), tuple((round(x, 3), round(y, 3)) for x, y in points.tolist()))


def decode_crop(crop: Crop) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """Return the (h, w, 3) RGB image and its (5, 2) landmarks.

    Raises:
        OSError, ValueError: The crop is damaged or too large.
    """
    with Image.open(io.BytesIO(crop.image), formats=["WEBP"]) as image:
        if max(image.size) > MAX_STORED_SIDE_PX:
            raise ValueError(
                f"a crop of {image.width} x {image.height} pixels exceeds {MAX_STORED_SIDE_PX} pixels a side"
            )
        return np.asarray(image.convert("RGB")), np.array(crop.landmarks_xy, np.float64)
