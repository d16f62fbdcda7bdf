"""Conversion of decoded images to 8-bit RGB, strip by strip. Pure functions.

A strip is converted while the rest of the image stays in the decoder's format, so that the conversion needs no second
copy of the image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

STRIP_PIXELS: Final = 1 << 16
"""Pixels per strip. Conversions of a strip stay in the processor's cache."""
Strip = Callable[[int, int], Image.Image]
"""Returns the rows from a first to a last one, which is excluded."""


def to_rgb(size: tuple[int, int], strip: Strip) -> NDArray[np.uint8]:
    """Return (height, width, 3) uint8 RGB. Transparent pixels are blended over white.

    Args:
        size: width and height in pixels.
        strip: reader of rows; all strips have the same mode.
    """
    width, height = size
    convert: Callable[[Image.Image], NDArray[np.uint8]] = _blend_over_white
    if strip(0, 1).mode.startswith("I"):  # gray of 16 or 32 bits, which Pillow clips at 255
        brightest = max(int(np.asarray(strip(*rows)).max(initial=0)) for rows in _rows(width, height))
        # Files of 8 to 14 bits often have pixels of 16 bits, so the brightest pixel decides.
        convert = partial(_shift_gray, max(0, brightest.bit_length() - 8))
    pixels = np.empty((height, width, 3), np.uint8)
    for top, bottom in _rows(width, height):
        pixels[top:bottom] = convert(strip(top, bottom))
    return pixels


def mirror(pixels: NDArray[np.uint8]) -> None:
    """Swap left and right of (height, width, 3) pixels in place."""
    height, width = pixels.shape[:2]
    for top, bottom in _rows(width, height):
        pixels[top:bottom] = pixels[top:bottom, ::-1].copy()


def _rows(width: int, height: int) -> Iterator[tuple[int, int]]:
    step = max(1, STRIP_PIXELS // width)
    return ((top, min(top + step, height)) for top in range(0, height, step))


def _blend_over_white(image: Image.Image) -> NDArray[np.uint8]:
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"), np.uint8)


def _shift_gray(bits: int, image: Image.Image) -> NDArray[np.uint8]:
    levels = np.clip(np.asarray(image).astype(np.int64) >> bits, 0, 255).astype(np.uint8)
    return np.repeat(levels[..., None], 3, 2)
