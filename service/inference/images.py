"""Photo decoding to RGB, with limits that are checked, and a memory estimate, before pixels are decoded.

A JPEG can be decoded at 1/2, 1/4 or 1/8 of its size at a much lower cost. EXIF rotations are applied lazily, to the
downscaled image or to coordinates, instead of to the full photo.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Final

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile
from PIL.TiffImagePlugin import TiffImageFile

from models.runtime.network import Float
from models.vision.alignment import rotate_points
from models.vision.detection import downscale
from models.vision.photo_files import TIFF_SIGNATURES
from service.core.errors import KithError
from service.core.photo_errors import ImageDamagedError, ImageEmptyError, ImageFormatError, ImageTooLargeError
from service.inference import decode_memory, jpeg
from service.inference.av1 import max_frame_pixels
from service.inference.heif import HeifPhoto, is_heif
from service.inference.heif_boxes import coded_data, count_pixels
from service.inference.rgb_conversion import GrayLevels, mirror, to_rgb

# Pillow's own limit would warn or raise below ours.
Image.MAX_IMAGE_PIXELS = None
# OpenCV would write a line to stderr for each damaged photo.
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)

FORMATS: Final = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "AVIF")
"""Formats read with Pillow. HEIC is read by service.inference.heif."""
MIRRORED_AND_TURNS: Final = {
    2: (True, 0),
    3: (False, 2),
    4: (True, 2),
    5: (True, 1),
    6: (False, 3),
    7: (True, 3),
    8: (False, 1),
}
"""Swap of left and right, and then counterclockwise quarter turns, by EXIF orientation."""
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
TIFF_MAX_SAMPLE: Final = 281
TIFF_PHOTOMETRIC: Final = 262
WHITE_IS_ZERO: Final = 0
BASE64_STARTS: Final = (b"data:", b"/9j/", b"_9j_", b"iVBORw0K", b"UklGR", b"R0lGOD")
"""Data URLs, and the signatures of JPEG, PNG, WebP and GIF in base64."""


@dataclass(frozen=True)
class ImageLimits:
    max_bytes: int
    max_pixels: int


@dataclass(frozen=True, eq=False)
class PhotoHeader:
    """Parsed header of a photo. ``height`` and ``width``: its size in pixels.

    ``peak_bytes``: estimate of the memory that decoding needs at most, with the pixels that it returns.
    """

    height: int
    width: int
    peak_bytes: int
    _open: Callable[[], EncodedPhoto]

    def open(self) -> EncodedPhoto:
        """Decode the photo, unless it can be decoded at a smaller scale.

        Raises:
            ImageDamagedError: The photo cannot be decoded.
        """
        with _translated_errors():
            return self._open()


@dataclass(frozen=True, eq=False)
class EncodedPhoto:
    """Photo with a parsed header. ``height`` and ``width`` are those of the upright photo in pixels.

    The stored photo becomes upright by swapping left and right, if ``mirrored``, and then by ``turns`` counterclockwise
    quarter turns. A format that cannot be decoded at a smaller scale is already decoded to ``whole``, and mirrored.

    ``again_bytes``: estimate of the memory for decoding the photo in full after it was decoded at a smaller scale.
    """

    height: int
    width: int
    payload: bytes
    turns: int = 0
    mirrored: bool = False
    again_bytes: int = 0
    whole: NDArray[np.uint8] | None = None

    @cached_property
    def completed(self) -> bytes:
        """Content of a JPEG, with the end-of-image marker if only that is missing."""
        return jpeg.complete(self.payload)

    def decode(self, scale: float = 1.0) -> DecodedPhoto:
        """Decode at the smallest available scale that is at least ``scale``, in (0, 1].

        A mirrored photo is decoded at full size: the last column of a reduction, which may show less of the photo,
        would come first and shift the others.

        Raises:
            ImageDamagedError: The photo cannot be decoded.
        """
        if self.whole is not None:
            return DecodedPhoto(self, self.whole, 1.0, self.turns)
        reduction = 1.0 if self.mirrored else next((r for r in jpeg.REDUCTIONS if r >= scale), 1.0)
        size = (self.width, self.height) if self.turns % 2 == 0 else (self.height, self.width)
        with _translated_errors():
            pixels = jpeg.decode_rgb(self.completed, size, reduction)
            if pixels is None:  # Pillow is more tolerant
                with _open(self.completed) as image:
                    return DecodedPhoto(self, _decode_with_pillow(image, self.mirrored), 1.0, self.turns)
            if self.mirrored:
                mirror(pixels)
            return DecodedPhoto(self, pixels, reduction, self.turns)


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
    def held_bytes(self) -> int:
        """Memory in bytes that the photo needs from now on, with a possible decoding at a larger scale."""
        return self.pixels.nbytes + decode_memory.OVERHEAD_BYTES if self.reduction == 1.0 else self.photo.again_bytes

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
    if is_heif(payload):
        return _read_heif_header(payload, limits)
    with _translated_errors(), _open(payload) as image:
        width, height = image.size
        _check_pixels(width, height, limits)
        pixels = width * height
        if image.format == "AVIF":
            pixels = max(pixels, _check_avif(payload, image.mode == "RGBA", limits))
        scans = _count_scans(image, payload)
        _check_work(image, scans, limits)
        peak_bytes = decode_memory.estimate_decode(image, payload, pixels, scans)
        if not isinstance(image, JpegImageFile) or image.mode not in ("L", "RGB"):
            return PhotoHeader(height, width, peak_bytes, partial(_decode_whole, payload))
        mirrored, turns = _orientation(image)
        if turns % 2:
            height, width = width, height
        again_bytes = decode_memory.estimate_repeated_decode(image, payload, scans)
        photo = EncodedPhoto(height, width, payload, turns, mirrored, again_bytes)
        return PhotoHeader(height, width, peak_bytes, lambda: photo)


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


def _open(payload: bytes) -> Image.Image:
    try:
        return Image.open(io.BytesIO(payload), formats=FORMATS)
    except UnidentifiedImageError as error:
        if payload.startswith(TIFF_SIGNATURES):
            raise ImageFormatError(
                "the TIFF file is damaged, or has a pixel format that is not supported",
                remedy="Save it with 8 or 16 bits per channel, or as PNG.",
            ) from error
        if payload.startswith(BASE64_STARTS):
            raise ImageFormatError(
                "the bytes are base64 text, not a photo",
                remedy="Send the content of the file, or send the base64 in 'images' of a JSON body.",
            ) from error
        raise ImageFormatError("the bytes are not a photo in a supported format") from error


def _orientation(image: Image.Image) -> tuple[bool, int]:
    """Return whether to swap left and right, and counterclockwise quarter turns."""
    return MIRRORED_AND_TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1), (False, 0))


def _decode_whole(payload: bytes) -> EncodedPhoto:
    with _open(jpeg.complete(payload) if payload.startswith(jpeg.START_OF_IMAGE) else payload) as image:
        if image.format == "WEBP":
            mirrored, turns = _orientation(image)
            pixels = _decode_webp(payload, image, mirrored)
        else:
            image.load()  # EXIF may follow the pixels, and Pillow applies the orientation of TIFF
            mirrored, turns = _orientation(image)
            pixels = _decode_with_pillow(image, mirrored)
    height, width = pixels.shape[:2][:: -1 if turns % 2 else 1]
    return EncodedPhoto(height, width, b"", turns, mirrored, whole=pixels)


def _decode_with_pillow(image: Image.Image, mirrored: bool) -> NDArray[np.uint8]:
    """Return (h, w, 3) RGB as stored, mirrored on request."""
    width = image.width
    levels = GrayLevels()
    if isinstance(image, TiffImageFile):
        # Pillow scales and inverts gray of up to 8 bits itself.
        bits = image.tag_v2.get(decode_memory.BITS_PER_SAMPLE, (8,))[0]
        match image.tag_v2.get(TIFF_MAX_SAMPLE):
            case (int(white), *_) if 255 < white < 1 << bits:  # 10 to 14 bits are often stored in 16
                bits = white.bit_length()
        levels = GrayLevels(bits if bits < 16 else None, image.tag_v2.get(TIFF_PHOTOMETRIC) == WHITE_IS_ZERO)
    return to_rgb(image.size, lambda top, bottom: image.crop((0, top, width, bottom)), levels, mirrored)


def _decode_webp(payload: bytes, image: Image.Image, mirrored: bool) -> NDArray[np.uint8]:
    """Decode the first frame with OpenCV. Pillow would hold four copies of it.

    Args:
        image: opened file, not loaded.
    """
    has_alpha = image.mode == "RGBA"
    encoded = np.frombuffer(payload, np.uint8)
    flags = cv2.IMREAD_UNCHANGED if has_alpha else cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
    decoded = cv2.imdecode(encoded, flags)
    width, height = image.size
    if decoded is None or decoded.shape != (height, width, 4 if has_alpha else 3):
        raise ImageDamagedError("the photo cannot be decoded: its WebP data is damaged")
    pixels = np.asarray(decoded, np.uint8)
    if has_alpha:
        return to_rgb(image.size, lambda top, bottom: _bgra(pixels[top:bottom]), mirrored=mirrored)
    if mirrored:
        mirror(pixels)
    return pixels


def _read_heif_header(payload: bytes, limits: ImageLimits) -> PhotoHeader:
    with _translated_errors():
        largest, composed = count_pixels(payload)
        if largest > limits.max_pixels:
            raise ImageTooLargeError(f"an image of the file has {largest} pixels, the limit is {limits.max_pixels}")
        if composed > MAX_COMPOSED_FACTOR * limits.max_pixels:
            raise ImageTooLargeError(f"the images of the file are composed of {composed} pixels")
        photo = HeifPhoto(payload)
        width, height = photo.size
        _check_pixels(width, height, limits)
        pixels = max(width * height, largest, composed)
        peak_bytes = decode_memory.estimate_heif(payload, pixels, photo.has_alpha, photo.bit_depth)
        return PhotoHeader(height, width, peak_bytes, partial(_decode_heif, payload))


def _decode_heif(payload: bytes) -> EncodedPhoto:
    photo = HeifPhoto(payload)
    photo.decode()
    pixels = to_rgb(photo.size, photo.strip)
    height, width = pixels.shape[:2]
    return EncodedPhoto(height, width, b"", whole=pixels)


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
    if isinstance(image, TiffImageFile) and (pixels := decode_memory.tile_pixels(image)) > limits.max_pixels:
        raise ImageTooLargeError(f"a tile of the photo has {pixels} pixels, the limit is {limits.max_pixels}")


def _count_scans(image: Image.Image, payload: bytes) -> int:
    """Return the number of scans, the passes of the decoder over the pixels. Raises ImageTooLargeError."""
    if image.format in ("JPEG", "MPO"):
        return jpeg.count_scans(payload)
    compression = image.info.get("compression")
    if compression != "jpeg":
        return payload.count(b"\xff\xda") if compression == "tiff_jpeg" else 1
    # Each tile or strip of the TIFF is a JPEG, and they do not overlap.
    tags = image.getexif()
    starts, sizes = (_as_tuple(tags.get(strips, tags.get(tiles))) for strips, tiles in ((273, 324), (279, 325)))
    pieces = {*zip(starts, sizes, strict=False)}
    if len(pieces) > MAX_TILES or sum(size for _, size in pieces) > len(payload):
        raise ImageTooLargeError("the photo declares more tiles than it has bytes for")
    return max((jpeg.count_scans(payload, start, start + size) for start, size in pieces), default=1)


def _as_tuple(values: int | tuple[int, ...] | None) -> tuple[int, ...]:
    return values if isinstance(values, tuple) else () if values is None else (values,)


@contextmanager
def _translated_errors() -> Iterator[None]:
    try:
        yield
    except (KithError, MemoryError):  # MemoryError: a shortage of the server, not a damaged photo
        raise
    except jpeg.TooManySegmentsError as error:
        raise ImageTooLargeError(str(error)) from error
    except Exception as error:  # decoders and EXIF readers raise unrelated exceptions on damaged files
        raise ImageDamagedError(f"the photo cannot be decoded: {error}") from error


def _bgra(pixels: NDArray[np.uint8]) -> Image.Image:
    """Return (h, w, 4) BGRA as an image."""
    height, width = pixels.shape[:2]
    return Image.frombuffer("RGBA", (width, height), np.ascontiguousarray(pixels), "raw", "BGRA", 0, 1)
