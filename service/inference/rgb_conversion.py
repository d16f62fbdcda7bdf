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


def to_rgb(image: Image.Image) -> NDArray[np.uint8]:
    """Return (height, width, 3) uint8 RGB. Transparent pixels are blended over white."""
    convert: Callable[[Image.Image], NDArray[np.uint8]] = _blend_over_white
    if image.mode.startswith("I"):  # gray of 16 or 32 bits, which Pillow clips at 255
        brightest = max(int(np.asarray(strip).max(initial=0)) for _, strip in _strips(image))
        # Files of 8 to 14 bits often have pixels of 16 bits, so the brightest pixel decides.
        convert = partial(_shift_gray, max(0, brightest.bit_length() - 8))
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    for rows, strip in _strips(image):
        pixels[rows] = convert(strip)
    return pixels


def _strips(image: Image.Image) -> Iterator[tuple[slice, Image.Image]]:
    step = max(1, STRIP_PIXELS // image.width)
    for top in range(0, image.height, step):
        bottom = min(top + step, image.height)
        yield slice(top, bottom), image.crop((0, top, image.width, bottom))


def _blend_over_white(image: Image.Image) -> NDArray[np.uint8]:
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"), np.uint8)


def _shift_gray(bits: int, image: Image.Image) -> NDArray[np.uint8]:
    levels = np.clip(np.asarray(image).astype(np.int64) >> bits, 0, 255).astype(np.uint8)
    return np.repeat(levels[..., None], 3, 2)
