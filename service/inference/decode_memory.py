"""Estimates of the memory that decoding a photo needs at its peak, from the photo's header.

The factors include the decoded RGB pixels. docs/performance.md has the measured peaks.
"""

from __future__ import annotations

import math
from typing import Final

from PIL import ExifTags, Image
from PIL.JpegImagePlugin import JpegImageFile
from PIL.TiffImagePlugin import TiffImageFile

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
OVERHEAD_BYTES: Final = 8_000_000
"""Strips during the conversion, and the canvas of the detector."""
AV1_CONFIGURATION: Final = b"av1C"
HIGH_BIT_DEPTH, SUBSAMPLED = 0x40, 0x0C
"""Flags in the third byte of an AV1 configuration (AV1-ISOBMFF, 2.3.3). Subsampled: in both directions."""
TILE_WIDTH, TILE_HEIGHT, ROWS_PER_STRIP, BITS_PER_SAMPLE, SAMPLES = 322, 323, 278, 258, 277


def estimate_decode(image: Image.Image, payload: bytes, pixels: int, scans: int) -> int:
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


def estimate_repeated_decode(image: JpegImageFile, payload: bytes, scans: int) -> int:
    """Return the peak memory in bytes for decoding a JPEG in full with libjpeg, with its reduction in memory."""
    factor = RGB_BYTES * (1 + REDUCED_SHARE) + _coefficient_bytes(image, scans)
    return len(payload) + math.ceil(factor * image.width * image.height) + OVERHEAD_BYTES


def estimate_heif(payload: bytes, pixels: int, has_alpha: bool, bit_depth: int) -> int:
    """Return the peak memory in bytes for decoding a HEIF file of ``pixels``, with its tiles."""
    factor = HEIF_BYTES + (HEIF_ALPHA_BYTES if has_alpha else 0)
    return len(payload) + math.ceil(factor * (DEEP_HEIF_FACTOR if bit_depth > 8 else 1) * pixels) + OVERHEAD_BYTES


def tile_pixels(image: TiffImageFile) -> int:
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
        bits, samples = image.tag_v2.get(BITS_PER_SAMPLE, (8,)), int(image.tag_v2.get(SAMPLES, 1))
        # libtiff converts some colors to RGBA.
        each = max(DEFAULT_STORED_BYTES, math.ceil(max(bits) / 8) * samples)
        each += COEFFICIENT_BYTES * samples if scans > 1 else 0
    return max(copy, each * tile_pixels(image) / (image.width * image.height))


def _is_large_avif(payload: bytes) -> bool:
    """Return whether an image of an AVIF file has more than 8 bits, or more color samples than 4:2:0."""
    at = payload.find(AV1_CONFIGURATION)
    while at >= 0:
        flags = payload[at + 6 : at + 7]
        if not flags or flags[0] & HIGH_BIT_DEPTH or flags[0] & SUBSAMPLED != SUBSAMPLED:
            return True
        at = payload.find(AV1_CONFIGURATION, at + 4)
    return False
