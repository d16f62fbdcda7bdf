"""Conversion of decoded images to 8-bit RGB, strip by strip. Pure functions.

A strip is converted while the rest of the image stays in the decoder's format, so that the conversion needs no second
copy of the image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

STRIP_PIXELS: Final = 1 << 16
"""Pixels per strip. Conversions of a strip stay in the processor's cache."""
Strip = Callable[[int, int], Image.Image]
"""Returns the rows from a first to a last one, which is excluded."""


@dataclass(frozen=True)
class GrayLevels:
    """Levels of gray images with more than 8 bits.

    Attributes:
        bits: declared bits per pixel; None: derived from the brightest pixel.
        inverted: 0 is white.
    """

    bits: int | None = None
    inverted: bool = False


def to_rgb(
    size: tuple[int, int], strip: Strip, levels: GrayLevels | None = None, mirrored: bool = False
) -> NDArray[np.uint8]:
    """Return (height, width, 3) uint8 RGB. Transparent pixels are blended over white.

    Args:
        size: width and height in pixels.
        strip: reader of rows; all strips have the same mode.
        levels: levels of gray; default: derived from the pixels.
        mirrored: swap left and right.
    """
    width, height = size
    convert: Callable[[Image.Image], NDArray[np.uint8]] = _blend_over_white
    if _is_deep_gray(strip(0, 1).mode):
        levels = GrayLevels() if levels is None else levels
        factor = _gray_factor(levels.bits, (np.asarray(strip(*rows)) for rows in _rows(width, height)))
        inverted = levels.inverted

        def convert(image: Image.Image) -> NDArray[np.uint8]:
            return _scale_gray(np.asarray(image), factor, inverted)

    pixels = np.empty((height, width, 3), np.uint8)
    for top, bottom in _rows(width, height):
        converted = convert(strip(top, bottom))
        pixels[top:bottom] = converted[:, ::-1] if mirrored else converted
    return pixels


def mirror(pixels: NDArray[np.uint8]) -> None:
    """Swap left and right of (height, width, 3) pixels in place."""
    height, width = pixels.shape[:2]
    for top, bottom in _rows(width, height):
        pixels[top:bottom] = pixels[top:bottom, ::-1].copy()


def _rows(width: int, height: int) -> Iterator[tuple[int, int]]:
    step = max(1, STRIP_PIXELS // width)
    return ((top, min(top + step, height)) for top in range(0, height, step))


def _is_deep_gray(mode: str) -> bool:
    """Return whether a Pillow mode is gray in 16 or 32 bits, or in floats. Pillow clips their values at 255."""
    return mode.startswith("I") or mode == "F"


def _blend_over_white(image: Image.Image) -> NDArray[np.uint8]:
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"), np.uint8)


def _gray_factor(bits: int | None, strips: Iterator[NDArray[np.generic]]) -> float:
    """Return the factor from pixels to levels from 0 to 255.

    Some files have 8-bit values in pixels of 16 bits, and floats usually range from 0 to 1. The brightest pixel decides
    where the file does not declare the bits.
    """
    if bits is not None:
        return 2.0 ** (8 - bits)
    brightest, is_float = 0.0, False
    for values in strips:
        is_float = values.dtype.kind == "f"
        brightest = max(brightest, float(_finite(values).max(initial=0)))
    if is_float and brightest <= 1:
        return 255.0
    if brightest <= 255:
        return 1.0
    if is_float:
        return 1 / 257
    return 2.0 ** (8 - max(16, int(brightest).bit_length()))


def _scale_gray(values: NDArray[np.generic], factor: float, inverted: bool) -> NDArray[np.uint8]:
    levels = np.clip(_finite(values) * np.float32(factor), 0, 255).astype(np.uint8)
    return np.repeat((255 - levels if inverted else levels)[..., None], 3, 2)


def _finite(values: NDArray[np.generic]) -> NDArray[np.float32]:
    """Return float32 values, 0 for infinity and NaN."""
    floats = values.astype(np.float32)
    return np.nan_to_num(floats, copy=False, nan=0, posinf=0, neginf=0)
