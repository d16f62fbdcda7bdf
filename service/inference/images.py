"""Photo decoding to upright RGB, with limits that are checked before pixels are decoded.

A JPEG can be decoded at 1/2, 1/4 or 1/8 of its size at a much lower cost. EXIF rotations are applied lazily, to the
downscaled image or to coordinates, instead of to the full photo.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import cv2
import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from models.runtime.network import Float
from models.vision.alignment import rotate_points
from models.vision.detection import downscale
from service.core.errors import KithError
from service.core.photo_errors import ImageDamagedError, ImageEmptyError, ImageFormatError, ImageTooLargeError
from service.inference.heif import HeifPhoto, is_heif
from service.inference.heif_boxes import count_pixels

# Pillow's own limit would warn or raise below ours.
Image.MAX_IMAGE_PIXELS = None

FORMATS: Final = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "AVIF")
"""Formats read with Pillow. HEIC is read by service.inference.heif."""
JPEG_REDUCTIONS: Final = (1 / 8, 1 / 4, 1 / 2)
"""Scales for decoding JPEG. Other scales of libjpeg are slower than full size."""
TURNS_BY_ORIENTATION: Final = {1: 0, 3: 2, 6: 3, 8: 1}
"""Counterclockwise quarter turns by EXIF orientation, without mirrored orientations."""
MIRRORED_ORIENTATIONS: Final = (2, 4, 5, 7)
MAX_SCANNED_FACTOR: Final = 20
"""Limit of scans times pixels of a progressive JPEG, as a multiple of the pixel limit.

Encoders write a dozen scans. Thousands fit in a few kilobytes, and take minutes to decode."""
MAX_JPEG_SEGMENTS: Final = 65_536
"""Limit of JPEG segments. A file of 20 MB needs 300 for metadata."""
JPEG_SEGMENT: Final = re.compile(rb"\xff[\xc0-\xcf\xd9-\xfe]")
"""Start of a JPEG segment, followed by its length. In entropy-coded data, FF is followed by other bytes."""
MAX_COLOR_PROFILES: Final = 4
"""Limit of iCCP chunks of a PNG. A valid file has one; Pillow decompresses each."""
MAX_COMPOSED_FACTOR: Final = 2
"""Limit of pixels that compose the grids and overlays of a HEIF, as a multiple of the pixel limit.

Photos of phones, with depth and gain maps, need little more than 1."""
MAX_TILES: Final = 65_536
"""Limit of tiles or strips of a TIFF."""


@dataclass(frozen=True)
class ImageLimits:
    max_bytes: int
    max_pixels: int


@dataclass(frozen=True, eq=False)
class EncodedPhoto:
    """Photo with a parsed header. ``height`` and ``width`` are those of the upright photo in pixels.

    A JPEG must be rotated by ``turns`` counterclockwise quarter turns. Other formats, which cannot be decoded at a
    smaller scale, are already decoded to ``whole``, upright.
    """

    height: int
    width: int
    payload: bytes
    turns: int = 0
    whole: NDArray[np.uint8] | None = None

    def decode(self, scale: float = 1.0) -> DecodedPhoto:
        """Decode at the smallest available scale that is at least ``scale``, in (0, 1].

        Raises:
            ImageDamagedError: The photo cannot be decoded.
        """
        if self.whole is not None:
            return DecodedPhoto(self, self.whole, 1.0, 0)
        reduction = next((r for r in JPEG_REDUCTIONS if r >= scale), 1.0)
        with _translated_errors():
            pixels = self._decode_jpeg(reduction)
            if pixels is None:
                with _open(self.payload) as image:
                    return DecodedPhoto(self, _decode_with_pillow(image), 1.0, 0)
            return DecodedPhoto(self, pixels, reduction, self.turns)

    def _decode_jpeg(self, reduction: float) -> NDArray[np.uint8] | None:
        """Decode with libjpeg. Return None if it rejects the file; Pillow is more tolerant."""
        stored = (self.height, self.width) if self.turns % 2 == 0 else (self.width, self.height)
        height, width = (math.ceil(side * reduction) for side in stored)
        try:
            # Readers may find different sizes in a damaged file. Decode only the size that was checked.
            if simplejpeg.decode_jpeg_header(self.payload)[:2] != stored:
                return None
            pixels = simplejpeg.decode_jpeg(self.payload, "RGB", min_height=height, min_width=width)
        except ValueError:
            return None
        return pixels if pixels.shape[:2] == (height, width) else None


@dataclass(frozen=True, eq=False)
class DecodedPhoto:
    """Pixels of a photo, (h, w, 3) uint8 RGB, at scale ``reduction``.

    ``turns`` counterclockwise quarter turns make them upright.
    """

    photo: EncodedPhoto
    pixels: NDArray[np.uint8]
    reduction: float
    turns: int

    @property
    def upright(self) -> NDArray[np.uint8]:
        """Upright view of the pixels."""
        return np.rot90(self.pixels, self.turns)

    def at_least(self, scale: float) -> DecodedPhoto:
        """Return this photo, or decode it again if its scale is below ``scale``."""
        return self if self.reduction >= min(scale, 1.0) else self.photo.decode(scale)

    def shrunk(self, scale: float) -> NDArray[np.uint8]:
        """Return the upright photo at ``scale``, which must not exceed ``reduction``."""
        small = downscale(self.pixels, scale / self.reduction)
        if self.turns == 0:
            return small
        # Rounding can make the last row and column cover less of the photo; rotation would put them first.
        height, width = (self.photo.height, self.photo.width)[:: -1 if self.turns % 2 else 1]
        full = small[: max(1, round(height * scale)), : max(1, round(width * scale))]
        return np.asarray(cv2.rotate(full, ROTATIONS[self.turns]), np.uint8)

    def points_stored(self, points_xy: Float) -> Float:
        """Map (..., 2) points of the upright photo to coordinates of ``pixels``."""
        if self.turns == 0 and self.reduction == 1.0:
            return points_xy
        photo = rotate_points(points_xy, -self.turns, self.photo.width, self.photo.height)
        # Pixel centers have integer coordinates.
        return (photo + np.float32(0.5)) * np.float32(self.reduction) - np.float32(0.5)

    def points_upright(self, points_xy: Float) -> Float:
        """Map (..., 2) points of the upright photo to coordinates of ``upright``."""
        height, width = self.pixels.shape[:2]
        return rotate_points(self.points_stored(points_xy), self.turns, width, height)


ROTATIONS: Final = {1: cv2.ROTATE_90_COUNTERCLOCKWISE, 2: cv2.ROTATE_180, 3: cv2.ROTATE_90_CLOCKWISE}


def open_photo(payload: bytes, limits: ImageLimits) -> EncodedPhoto:
    """Parse the header of a photo and check the limits.

    Decoding applies the EXIF orientation, blends transparent pixels over white, and takes the first frame.

    Raises:
        ImageEmptyError, ImageFormatError, ImageDamagedError, ImageTooLargeError: The photo is unusable.
    """
    if not payload:
        raise ImageEmptyError("the photo has no bytes")
    if len(payload) > limits.max_bytes:
        raise ImageTooLargeError(f"the photo has more than {limits.max_bytes} bytes, the limit")
    if payload.startswith(b"\x89PNG") and payload.count(b"iCCP") > MAX_COLOR_PROFILES:
        raise ImageDamagedError("the photo has more than one color profile")
    if is_heif(payload):
        return _open_heif(payload, limits)
    with _translated_errors(), _open(payload) as image:
        width, height = image.size
        _check_pixels(width, height, limits)
        _check_work(image, payload, limits)
        jpeg = image.format in ("JPEG", "MPO") and image.mode in ("L", "RGB")
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1) if jpeg else 1
        if not jpeg or orientation in MIRRORED_ORIENTATIONS:
            whole = _decode_with_pillow(image)
            return EncodedPhoto(whole.shape[0], whole.shape[1], payload, whole=whole)
        turns = TURNS_BY_ORIENTATION.get(orientation, 0)
        if turns % 2:
            height, width = width, height
        return EncodedPhoto(height, width, payload, turns)


def decode(payload: bytes, limits: ImageLimits) -> NDArray[np.uint8]:
    """Return the full photo, upright, (H, W, 3) uint8 RGB. Raises as open_photo."""
    return np.ascontiguousarray(open_photo(payload, limits).decode().upright)


def _open(payload: bytes) -> Image.Image:
    return Image.open(io.BytesIO(payload), formats=FORMATS)


def _open_heif(payload: bytes, limits: ImageLimits) -> EncodedPhoto:
    with _translated_errors():
        largest, composed = count_pixels(payload)
        if largest > limits.max_pixels:
            raise ImageTooLargeError(f"an image of the file has {largest} pixels, the limit is {limits.max_pixels}")
        if composed > MAX_COMPOSED_FACTOR * limits.max_pixels:
            raise ImageTooLargeError(f"the images of the file are composed of {composed} pixels")
        photo = HeifPhoto(payload)
        width, height = photo.size
        _check_pixels(width, height, limits)
        return EncodedPhoto(height, width, payload, whole=np.asarray(_to_rgb(photo.decode()), np.uint8))


def _check_pixels(width: int, height: int, limits: ImageLimits) -> None:
    if width * height > limits.max_pixels:
        raise ImageTooLargeError(f"the photo has {width} x {height} pixels, the limit is {limits.max_pixels}")


def _check_work(image: Image.Image, payload: bytes, limits: ImageLimits) -> None:
    """Raise ImageTooLargeError if decoding takes disproportionate time or memory."""
    scans = _count_scans(image, payload)
    if scans * image.width * image.height > MAX_SCANNED_FACTOR * limits.max_pixels:
        raise ImageTooLargeError(f"the photo has {scans} scans of {image.width} x {image.height} pixels")
    tiles = getattr(image, "tile", ())
    if len(tiles) > MAX_TILES:
        raise ImageTooLargeError(f"the photo has {len(tiles)} tiles, the limit is {MAX_TILES}")


def _count_scans(image: Image.Image, payload: bytes) -> int:
    """Return the number of scans, the passes of the decoder over the pixels. Raises ImageTooLargeError."""
    if image.format in ("JPEG", "MPO"):
        return _count_jpeg_scans(payload, 0, len(payload))
    compression = image.info.get("compression")
    if compression != "jpeg":
        return payload.count(b"\xff\xda") if compression == "tiff_jpeg" else 1
    # Each tile or strip of the TIFF is a JPEG, and they do not overlap.
    tags = image.getexif()
    starts, sizes = (_as_tuple(tags.get(strips, tags.get(tiles))) for strips, tiles in ((273, 324), (279, 325)))
    pieces = {*zip(starts, sizes, strict=False)}
    if len(pieces) > MAX_TILES or sum(size for _, size in pieces) > len(payload):
        raise ImageTooLargeError("the photo declares more tiles than it has bytes for")
    return max((_count_jpeg_scans(payload, start, start + size) for start, size in pieces), default=1)


def _as_tuple(values: int | tuple[int, ...] | None) -> tuple[int, ...]:
    return values if isinstance(values, tuple) else () if values is None else (values,)


def _count_jpeg_scans(payload: bytes, at: int, end: int) -> int:
    """Count scans up to the end-of-image marker; videos and other photos may follow. Raises ImageTooLargeError."""
    scans = 0
    for _ in range(MAX_JPEG_SEGMENTS):
        found = JPEG_SEGMENT.search(payload, at, end)
        if found is None or found[0] == b"\xff\xd9":
            return scans
        scans += found[0] == b"\xff\xda"
        at = found.end() + max(2, int.from_bytes(payload[found.end() : found.end() + 2]))
    raise ImageTooLargeError(f"the photo has more than {MAX_JPEG_SEGMENTS} segments, the limit")


def _decode_with_pillow(image: Image.Image) -> NDArray[np.uint8]:
    ImageOps.exif_transpose(image, in_place=True)
    return np.asarray(_to_rgb(image), np.uint8)


@contextmanager
def _translated_errors() -> Iterator[None]:
    try:
        yield
    except (KithError, MemoryError):  # MemoryError: a shortage of the server, not a damaged photo
        raise
    except UnidentifiedImageError as error:
        raise ImageFormatError("the bytes are not a photo in a supported format") from error
    except Exception as error:  # decoders and EXIF readers raise unrelated exceptions on damaged files
        raise ImageDamagedError(f"the photo cannot be decoded: {error}") from error


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":
        # 16-bit gray: keep the high byte, since Pillow's conversion clips values above 255 to white.
        values = np.asarray(image)
        if image.mode == "F" and values.max(initial=0) <= 1:  # floats usually range from 0 to 1
            values = values * np.float32(255)
        if values.max(initial=0) > 255:
            values = values / np.float32(257) if image.mode == "F" else values >> 8
        return Image.fromarray(np.clip(values, 0, 255).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")
