"""Headers of photos, with limits that are checked, and an estimate of the memory, before pixels are decoded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image
from PIL.JpegImagePlugin import JpegImageFile
from PIL.TiffImagePlugin import TiffImageFile

from service.core.photo_errors import ImageDamagedError, ImageEmptyError, ImageTooLargeError
from service.inference.av1 import max_frame_pixels
from service.inference.decoding import (
    OVERHEAD_BYTES,
    START_OF_IMAGE,
    TIFF_BITS_PER_SAMPLE,
    EncodedPhoto,
    HeifPhoto,
    count_scans,
    decode_heif,
    decode_whole,
    is_heif,
    open_image,
    read_orientation,
    translated_errors,
)
from service.inference.heif_boxes import coded_data, count_pixels

MAX_SCANNED_FACTOR: Final = 20
"""Limit of scans times pixels of a progressive JPEG, as a multiple of the pixel limit.

Encoders write a dozen scans. Thousands fit in a few kilobytes, and take minutes to decode."""
MAX_COLOR_PROFILES: Final = 4
"""Limit of iCCP chunks of a PNG. A valid file has one; Pillow decompresses each."""
MAX_COMPOSED_FACTOR: Final = 2
"""Limit of pixels that compose the grids and overlays of a HEIF or AVIF, as a multiple of the pixel limit.

Photos of phones, with depth and gain maps, need little more than 1."""
MAX_TILES: Final = 65_536
"""Limit of tiles or strips of a TIFF."""
SHORT_BYTES: Final = 65_536
SHORT_PIXELS: Final = 100_000
"""Pixels, times scans, of a JPEG that is decoded in about a millisecond."""
# Factors of memory include the decoded RGB pixels. docs/performance.md has the measured peaks.
RGB_BYTES: Final = 3
"""Bytes per decoded pixel."""
STORED_BYTES: Final = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16B": 2, "I;16L": 2, "I;16N": 2}
"""Bytes per pixel in Pillow's memory, by mode. Other modes, RGB too, have DEFAULT_STORED_BYTES."""
DEFAULT_STORED_BYTES: Final = 4
COEFFICIENT_BYTES: Final = 2
"""Bytes per sample of a JPEG with several scans, whose coefficients are all in memory."""
WEBP_BYTES: Final = {"RGB": 7.5, "RGBA": 8.5}
ANIMATED_WEBP_BYTES: Final = 12.5
AVIF_BYTES: Final = {"RGB": 9.5, "RGBA": 12.0}
LARGE_AVIF_BYTES: Final = {"RGB": 13.5, "RGBA": 17.0}
"""Bytes per pixel of AVIF with more than 8 bits, or without chroma subsampling."""
HEIF_BYTES: Final = 9.5
HEIF_ALPHA_BYTES: Final = 3.5
DEEP_HEIF_FACTOR: Final = 1.6
"""For more than 8 bits."""
REDUCED_SHARE: Final = 0.25
"""Share of the pixels in the largest reduction, which is held while the full photo is decoded."""
AV1_CONFIGURATION: Final = b"av1C"
HIGH_BIT_DEPTH, SUBSAMPLED = 0x40, 0x0C
"""Flags in the third byte of an AV1 configuration (AV1-ISOBMFF, 2.3.3). Subsampled: in both directions."""
TILE_WIDTH, TILE_HEIGHT, ROWS_PER_STRIP, SAMPLES = 322, 323, 278, 277


@dataclass(frozen=True)
class ImageLimits:
    max_bytes: int
    max_pixels: int


@dataclass(frozen=True, eq=False)
class PhotoHeader:
    """Parsed header of a photo. ``height`` and ``width``: its size in pixels.

    ``peak_bytes``: estimate of the memory that decoding needs at most, with the pixels that it returns. ``is_short``:
    decoding takes about a millisecond.
    """

    height: int
    width: int
    peak_bytes: int
    _open: Callable[[], EncodedPhoto]
    is_short: bool = False

    def open(self) -> EncodedPhoto:
        """Decode the photo, unless it can be decoded at a smaller scale.

        Raises:
            ImageDamagedError: The photo cannot be decoded.
        """
        with translated_errors():
            return self._open()


def read_header(payload: bytes, limits: ImageLimits) -> PhotoHeader:
    """Parse the header of a photo, and check the limits.

    Raises:
        ImageEmptyError, ImageFormatError, ImageDamagedError, ImageTooLargeError: The photo is unusable.
    """
    if not payload:
        raise ImageEmptyError("the photo has no bytes")
    if len(payload) > limits.max_bytes:
        raise ImageTooLargeError(f"the photo has more than {limits.max_bytes} bytes, the limit")
    if payload.startswith(b"\x89PNG") and payload.count(b"iCCP") > MAX_COLOR_PROFILES:
        raise ImageDamagedError("the photo has more than one color profile")
    if not payload.startswith(START_OF_IMAGE) and is_heif(payload):
        return _read_heif_header(payload, limits)
    with translated_errors(), open_image(payload) as image:
        width, height = image.size
        _check_pixels(width, height, limits)
        pixels = width * height
        if image.format == "AVIF":
            pixels = max(pixels, _check_avif(payload, image.mode == "RGBA", limits))
        scans = _count_scans(image, payload)
        _check_work(image, scans, limits)
        peak_bytes = _estimate_decode(image, payload, pixels, scans)
        if not isinstance(image, JpegImageFile) or image.mode not in ("L", "RGB"):
            return PhotoHeader(height, width, peak_bytes, partial(decode_whole, payload))
        mirrored, turns = read_orientation(image)
        if turns % 2:
            height, width = width, height
        again_bytes = _estimate_repeated_decode(image, payload, scans)
        photo = EncodedPhoto(height, width, payload, turns, mirrored, again_bytes)
        return PhotoHeader(height, width, peak_bytes, lambda: photo, scans * pixels <= SHORT_PIXELS)


def has_short_header(payload: bytes) -> bool:
    """Return whether parsing the header takes a fraction of a millisecond."""
    return len(payload) <= SHORT_BYTES and payload.startswith(START_OF_IMAGE)


def open_photo(payload: bytes, limits: ImageLimits) -> EncodedPhoto:
    """Parse the header of a photo, check the limits, and decode formats that cannot be decoded at a smaller scale.

    Decoding applies the EXIF orientation, blends transparent pixels over white, and takes the first frame.

    Raises:
        ImageEmptyError, ImageFormatError, ImageDamagedError, ImageTooLargeError: The photo is unusable.
    """
    return read_header(payload, limits).open()


def decode(payload: bytes, limits: ImageLimits) -> NDArray[np.uint8]:
    """Return the full photo, upright, (H, W, 3) uint8 RGB. Raises as open_photo."""
    return np.ascontiguousarray(open_photo(payload, limits).decode().upright)


def _read_heif_header(payload: bytes, limits: ImageLimits) -> PhotoHeader:
    with translated_errors():
        largest, composed = count_pixels(payload)
        if largest > limits.max_pixels:
            raise ImageTooLargeError(f"an image of the file has {largest} pixels, the limit is {limits.max_pixels}")
        if composed > MAX_COMPOSED_FACTOR * limits.max_pixels:
            raise ImageTooLargeError(f"the images of the file are composed of {composed} pixels")
        photo = HeifPhoto(payload)
        width, height = photo.size
        _check_pixels(width, height, limits)
        pixels = max(width * height, largest, composed)
        peak_bytes = _estimate_heif(payload, pixels, photo.has_alpha, photo.bit_depth)
        return PhotoHeader(height, width, peak_bytes, partial(decode_heif, payload))


def _check_pixels(width: int, height: int, limits: ImageLimits) -> None:
    if width * height > limits.max_pixels:
        raise ImageTooLargeError(f"the photo has {width} x {height} pixels, the limit is {limits.max_pixels}")


def _check_avif(payload: bytes, has_alpha: bool, limits: ImageLimits) -> int:
    """Return the pixels that are decoded, besides those of transparency. They may exceed the declared size.

    Raises:
        ImageTooLargeError: The images have too many pixels.
    """
    coded = [max_frame_pixels(data) for data in coded_data(payload, b"av01")]
    largest, total = max(coded, default=0), sum(coded)
    if largest > limits.max_pixels:
        raise ImageTooLargeError(f"an image of the file has {largest} pixels, the limit is {limits.max_pixels}")
    if total > 2 * MAX_COMPOSED_FACTOR * limits.max_pixels:
        raise ImageTooLargeError(f"the images of the file have {total} pixels")
    return max(largest, total // 2 if has_alpha else total)


def _check_work(image: Image.Image, scans: int, limits: ImageLimits) -> None:
    """Raise ImageTooLargeError if decoding takes disproportionate time or memory."""
    if scans * image.width * image.height > MAX_SCANNED_FACTOR * limits.max_pixels:
        raise ImageTooLargeError(f"the photo has {scans} scans of {image.width} x {image.height} pixels")
    tiles = getattr(image, "tile", ())
    if len(tiles) > MAX_TILES:
        raise ImageTooLargeError(f"the photo has {len(tiles)} tiles, the limit is {MAX_TILES}")
    if isinstance(image, TiffImageFile) and (pixels := _tile_pixels(image)) > limits.max_pixels:
        raise ImageTooLargeError(f"a tile of the photo has {pixels} pixels, the limit is {limits.max_pixels}")


def _count_scans(image: Image.Image, payload: bytes) -> int:
    """Return the number of scans, the passes of the decoder over the pixels. Raises ImageTooLargeError."""
    if image.format in ("JPEG", "MPO"):
        return count_scans(payload)
    compression = image.info.get("compression")
    if compression != "jpeg":
        return payload.count(b"\xff\xda") if compression == "tiff_jpeg" else 1
    # Each tile or strip of the TIFF is a JPEG, and they do not overlap.
    tags = image.getexif()
    starts, sizes = (_as_tuple(tags.get(strips, tags.get(tiles))) for strips, tiles in ((273, 324), (279, 325)))
    pieces = {*zip(starts, sizes, strict=False)}
    if len(pieces) > MAX_TILES or sum(size for _, size in pieces) > len(payload):
        raise ImageTooLargeError("the photo declares more tiles than it has bytes for")
    return max((count_scans(payload, start, start + size) for start, size in pieces), default=1)


def _as_tuple(values: int | tuple[int, ...] | None) -> tuple[int, ...]:
    return values if isinstance(values, tuple) else () if values is None else (values,)


def _estimate_decode(image: Image.Image, payload: bytes, pixels: int, scans: int) -> int:
    """Return the peak memory in bytes for decoding an opened, not yet loaded image.

    Args:
        pixels: number of pixels that are decoded.
        scans: passes of a JPEG decoder over the pixels.
    """
    if image.format == "WEBP":
        factor = ANIMATED_WEBP_BYTES if getattr(image, "is_animated", False) else WEBP_BYTES[image.mode]
    elif image.format == "AVIF":
        factor = (LARGE_AVIF_BYTES if _is_large_avif(payload) else AVIF_BYTES)[image.mode]
    else:
        stored = STORED_BYTES.get(image.mode, DEFAULT_STORED_BYTES)
        factor = stored + max(RGB_BYTES, _buffer_bytes(image, scans)) + _coefficient_bytes(image, scans)
    return len(payload) + math.ceil(factor * pixels) + OVERHEAD_BYTES


def _estimate_repeated_decode(image: JpegImageFile, payload: bytes, scans: int) -> int:
    """Return the peak memory in bytes for decoding a JPEG in full with libjpeg, with its reduction in memory."""
    factor = RGB_BYTES * (1 + REDUCED_SHARE) + _coefficient_bytes(image, scans)
    return len(payload) + math.ceil(factor * image.width * image.height) + OVERHEAD_BYTES


def _estimate_heif(payload: bytes, pixels: int, has_alpha: bool, bit_depth: int) -> int:
    """Return the peak memory in bytes for decoding a HEIF file of ``pixels``, with its tiles."""
    factor = HEIF_BYTES + (HEIF_ALPHA_BYTES if has_alpha else 0)
    return len(payload) + math.ceil(factor * (DEEP_HEIF_FACTOR if bit_depth > 8 else 1) * pixels) + OVERHEAD_BYTES


def _tile_pixels(image: TiffImageFile) -> int:
    """Return the pixels of a tile or strip, which may exceed the image."""
    tags = image.tag_v2
    if TILE_WIDTH in tags and TILE_HEIGHT in tags:
        return int(tags[TILE_WIDTH]) * int(tags[TILE_HEIGHT])
    return image.width * min(image.height, int(tags.get(ROWS_PER_STRIP, image.height)))


def _coefficient_bytes(image: Image.Image, scans: int) -> float:
    """Return bytes per pixel for the coefficients of a JPEG."""
    if scans <= 1 or not isinstance(image, JpegImageFile):
        return 0
    across, down = (max(layer[axis] for layer in image.layer) for axis in (1, 2))
    return COEFFICIENT_BYTES * sum(layer[1] * layer[2] for layer in image.layer) / (across * down)


def _buffer_bytes(image: Image.Image, scans: int) -> float:
    """Return bytes per pixel for a buffer that holds decompressed data while the image is decoded."""
    if not isinstance(image, TiffImageFile):
        # Run-length encoded BMP files are decompressed in Python.
        return RGB_BYTES + 1 if any(tile[0] == "bmp_rle" for tile in getattr(image, "tile", ())) else 0
    # Pillow applies the orientation to a copy.
    copy = DEFAULT_STORED_BYTES if image.getexif().get(ExifTags.Base.Orientation, 1) != 1 else 0
    each = 0
    if image.info.get("compression", "raw") != "raw":
        bits, samples = image.tag_v2.get(TIFF_BITS_PER_SAMPLE, (8,)), int(image.tag_v2.get(SAMPLES, 1))
        # libtiff converts some colors to RGBA.
        each = max(DEFAULT_STORED_BYTES, math.ceil(max(bits) / 8) * samples)
        each += COEFFICIENT_BYTES * samples if scans > 1 else 0
    return max(copy, each * _tile_pixels(image) / (image.width * image.height))


def _is_large_avif(payload: bytes) -> bool:
    """Return whether an image of an AVIF file has more than 8 bits, or more color samples than 4:2:0."""
    at = payload.find(AV1_CONFIGURATION)
    while at >= 0:
        flags = payload[at + 6 : at + 7]
        if not flags or flags[0] & HIGH_BIT_DEPTH or flags[0] & SUBSAMPLED != SUBSAMPLED:
            return True
        at = payload.find(AV1_CONFIGURATION, at + 4)
    return False
