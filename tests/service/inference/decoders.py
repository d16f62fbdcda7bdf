"""Decoding of photos as a server does it, with one decoder for each set of limits."""

from __future__ import annotations

import atexit
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from service.inference.decoding import EncodedPhoto
from service.inference.images import ImageLimits, PhotoDecoder, PhotoHeader

FORMATS: Final = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "AVIF")
"""Formats that Pillow writes. HEIC has its own encoder."""


@cache
def decoder(limits: ImageLimits) -> PhotoDecoder:
    opened = PhotoDecoder(limits)
    atexit.register(opened.close)
    return opened


def read_header(payload: bytes, limits: ImageLimits) -> PhotoHeader:
    return decoder(limits).read_header(payload)


def open_photo(payload: bytes, limits: ImageLimits) -> EncodedPhoto:
    return read_header(payload, limits).open()


def decode(payload: bytes, limits: ImageLimits) -> NDArray[np.uint8]:
    """Return the full photo, upright, (H, W, 3) uint8 RGB."""
    return decoder(limits).decode(payload)
