"""Headers of photos, with limits that are checked, and an estimate of the memory, before pixels are decoded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL.JpegImagePlugin import JpegImageFile

from models.vision.photo_files import HEAD_BYTES, photo_format
from service.core.errors import ImageError
from service.inference.decoder_processes import DecoderProcesses
from service.inference.decoding import (
    OVERHEAD_BYTES,
    START_OF_IMAGE,
    DecodedPhoto,
    count_scans,
    decode_jpeg,
    decode_whole,
    open_image,
    read_orientation,
    translated_errors,
)

MAX_SCANNED_FACTOR: Final = 20
"""Limit of scans times pixels of a progressive JPEG, as a multiple of the pixel limit.

Encoders write a dozen scans. Thousands fit in a few kilobytes, and take minutes to decode."""
MAX_COLOR_PROFILES: Final = 4
"""Limit of iCCP chunks of a PNG. A valid file has one; Pillow decompresses each."""
SHORT_BYTES: Final = 65_536
SHORT_PIXELS: Final = 100_000
"""Pixels, times scans, of a JPEG that is decoded in about a millisecond."""
WEBP_BYTES: Final = 12.5
DECODED_BYTES: Final = 7
"""Bytes per pixel that decoding takes, with the RGB pixels that it returns, of WebP and of JPEG and PNG: the most of
each. docs/performance.md has the measured peaks."""
COEFFICIENT_BYTES: Final = 8
"""Further bytes per pixel of a JPEG with several scans, whose coefficients are all in memory."""
OTHER_BYTES: Final = 25
"""Bytes per pixel that a process may use for a photo in another format: the most is a HEIC of 10 bits with alpha."""


@dataclass(frozen=True)
class ImageLimits:
    max_bytes: int
    max_pixels: int


@dataclass(frozen=True, eq=False)
class PhotoHeader:
    """Parsed header of a photo. ``height`` and ``width``: its size in pixels, perhaps before it is turned upright.

    ``peak_bytes``: estimate of the memory that decoding needs at most, with the pixels that it returns. ``is_short``:
    decoding takes about a millisecond.
    """

    height: int
    width: int
    peak_bytes: int
    _decode: Callable[[float], DecodedPhoto]
    is_short: bool = False

    def decode(self, scale: float = 1.0) -> DecodedPhoto:
        """Decode at the smallest available scale that is at least ``scale``, in (0, 1].

        Raises:
            image_damaged: The photo cannot be decoded.
        """
        with translated_errors():
            return self._decode(scale)


class PhotoDecoder:
    """Reader of photos within limits. JPEG, PNG and WebP are read here, other formats in at most ``processes``."""

    def __init__(self, limits: ImageLimits, processes: int = 1) -> None:
        self._limits = limits
        self._processes = DecoderProcesses(processes, limits.max_pixels)

    def read_header(self, payload: bytes) -> PhotoHeader:
        """Parse the header of a photo, and check the limits.

        Raises:
            image_empty, image_format, image_damaged, image_too_large: The photo is unusable.
        """
        if not payload:
            raise ImageError("image_empty", "the photo has no bytes")
        if len(payload) > self._limits.max_bytes:
            raise ImageError("image_too_large", f"the photo has more than {self._limits.max_bytes} bytes, the limit")
        match photo_format(payload[:HEAD_BYTES]):
            case "JPEG" | "PNG" | "WebP":
                return _read_header(payload, self._limits)
            case None:
                raise ImageError(
                    "image_format",
                    "the bytes are not a photo in a supported format (base64 belongs in 'images' of a JSON body)",
                )
        width, height = self._processes.read_size(payload)
        _check_pixels(width, height, self._limits)
        peak_bytes = 2 * len(payload) + OTHER_BYTES * width * height + OVERHEAD_BYTES
        return PhotoHeader(height, width, peak_bytes, partial(self._decode_other, payload, peak_bytes))

    def decode(self, payload: bytes) -> NDArray[np.uint8]:
        """Return the full photo, upright, (H, W, 3) uint8 RGB. Raises as :meth:`read_header`.

        The EXIF orientation is applied, transparent pixels are blended over white, and the first frame is taken.
        """
        return self.read_header(payload).decode().pixels

    def close(self) -> None:
        self._processes.close()

    def _decode_other(self, payload: bytes, memory_bytes: int, _: float) -> DecodedPhoto:
        pixels = self._processes.decode(payload, memory_bytes)
        return DecodedPhoto(pixels.shape[0], pixels.shape[1], pixels)


def _read_header(payload: bytes, limits: ImageLimits) -> PhotoHeader:
    if payload.startswith(b"\x89PNG") and payload.count(b"iCCP") > MAX_COLOR_PROFILES:
        raise ImageError("image_damaged", "the photo has more than one color profile")
    with translated_errors(), open_image(payload) as image:
        width, height = image.size
        _check_pixels(width, height, limits)
        pixels = width * height
        scans = count_scans(payload) if image.format in ("JPEG", "MPO") else 1
        if scans * pixels > MAX_SCANNED_FACTOR * limits.max_pixels:
            raise ImageError("image_too_large", f"the photo has {scans} scans of {width} x {height} pixels")
        factor = (WEBP_BYTES if image.format == "WEBP" else DECODED_BYTES) + (COEFFICIENT_BYTES if scans > 1 else 0)
        peak_bytes = len(payload) + math.ceil(factor * pixels) + OVERHEAD_BYTES
        if not isinstance(image, JpegImageFile) or image.mode not in ("L", "RGB"):
            return PhotoHeader(height, width, peak_bytes, lambda _: decode_whole(payload))
        decode = partial(decode_jpeg, payload, image.size, read_orientation(image))
        return PhotoHeader(height, width, peak_bytes, decode, scans * pixels <= SHORT_PIXELS)


def has_short_header(payload: bytes) -> bool:
    """Return whether parsing the header takes a fraction of a millisecond."""
    return len(payload) <= SHORT_BYTES and payload.startswith(START_OF_IMAGE)


def _check_pixels(width: int, height: int, limits: ImageLimits) -> None:
    if width * height > limits.max_pixels:
        raise ImageError(
            "image_too_large", f"the photo has {width} x {height} pixels, the limit is {limits.max_pixels}"
        )
