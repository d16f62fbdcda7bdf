"""Decoding of JPEG, PNG and WebP to RGB pixels, upright on request. Only this module of the service uses simplejpeg.

A JPEG can be decoded at 1/2, 1/4 or 1/8 of its size at a much lower cost. EXIF rotations are applied lazily, to the
downscaled image or to coordinates, instead of to the full photo. service.inference.images checks the limits before.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import cv2
import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError

from models.runtime.network import Float
from models.vision.alignment import rotate_points
from models.vision.detection import downscale
from service.core.errors import ImageError, KithError
from service.inference.rgb_conversion import to_rgb

# Pillow's own limit would warn or raise below ours.
Image.MAX_IMAGE_PIXELS = None
# OpenCV would write a line to stderr for each damaged photo.
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)

FORMATS: Final = ("JPEG", "PNG", "WEBP")
"""Formats that this module decodes. service.inference.decoder_child decodes the others."""
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
ROTATIONS: Final = {1: cv2.ROTATE_90_COUNTERCLOCKWISE, 2: cv2.ROTATE_180, 3: cv2.ROTATE_90_CLOCKWISE}
REDUCTIONS: Final = (1 / 8, 1 / 4, 1 / 2)
"""Scales for decoding. Other scales of libjpeg are slower than full size."""
MAX_SEGMENTS: Final = 65_536
"""Limit of segments. A file of 20 MB needs 300 for metadata."""
SEGMENT: Final = re.compile(rb"\xff[\xc0-\xcf\xd9-\xfe]")
"""Start of a segment, followed by its length. In entropy-coded data, FF is followed by other bytes."""
START_OF_IMAGE: Final = b"\xff\xd8"
END_OF_IMAGE: Final = b"\xff\xd9"
START_OF_SCAN: Final = 0xDA
BASELINE: Final = frozenset({0xC0, 0xC1})
"""Markers of frame headers of sequential files."""
OVERHEAD_BYTES: Final = 8_000_000
"""Memory of strips during the conversion, and of the canvas of the detector."""


@dataclass(frozen=True, eq=False)
class EncodedPhoto:
    """Photo with a parsed header. ``height`` and ``width`` are those of the upright photo in pixels.

    The stored photo becomes upright by swapping left and right, if ``mirrored``, and then by ``turns`` counterclockwise
    quarter turns. A format that cannot be decoded at a smaller scale is already decoded to ``whole``, and mirrored.
    """

    height: int
    width: int
    payload: bytes
    turns: int = 0
    mirrored: bool = False
    whole: NDArray[np.uint8] | None = None

    @cached_property
    def completed(self) -> bytes:
        """Content of a JPEG, with the end-of-image marker if only that is missing."""
        return complete(self.payload)

    def decode(self, scale: float = 1.0) -> DecodedPhoto:
        """Decode at the smallest available scale that is at least ``scale``, in (0, 1].

        A mirrored photo is decoded at full size: the last column of a reduction, which may show less of the photo,
        would come first and shift the others.

        Raises:
            image_damaged: The photo cannot be decoded.
        """
        if self.whole is not None:
            return DecodedPhoto(self, self.whole, 1.0, self.turns)
        reduction = 1.0 if self.mirrored else next((r for r in REDUCTIONS if r >= scale), 1.0)
        size = (self.width, self.height) if self.turns % 2 == 0 else (self.height, self.width)
        with translated_errors():
            pixels = decode_rgb(self.completed, size, reduction)
            if pixels is None:  # Pillow is more tolerant
                reduction = 1.0
                with open_image(self.completed) as image:
                    pixels = decode_with_pillow(image)
            if self.mirrored:
                cv2.flip(pixels, 1, pixels)
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


def whole_photo(pixels: NDArray[np.uint8], turns: int) -> EncodedPhoto:
    """Return a photo that is decoded already, as :func:`read_whole` does."""
    height, width = pixels.shape[:2][:: -1 if turns % 2 else 1]
    return EncodedPhoto(height, width, b"", turns, whole=pixels)


def decode_whole(payload: bytes) -> EncodedPhoto:
    content = complete(payload) if payload.startswith(START_OF_IMAGE) else payload
    return whole_photo(*read_whole(content, open_image(content)))


def read_whole(payload: bytes, image: Image.Image) -> tuple[NDArray[np.uint8], int]:
    """Return (h, w, 3) RGB, mirrored if necessary, and the counterclockwise quarter turns that make it upright.

    Args:
        image: the photo as an opened file, not loaded.
    """
    with image:
        pixels = _decode_webp(payload, image) if image.format == "WEBP" else decode_with_pillow(image)
        mirrored, turns = read_orientation(image)
    if mirrored:
        cv2.flip(pixels, 1, pixels)
    return pixels, turns


def decode_with_pillow(image: Image.Image) -> NDArray[np.uint8]:
    """Return (h, w, 3) RGB as stored."""
    image.load()  # turns a TIFF
    return to_rgb(image)


def _decode_webp(payload: bytes, image: Image.Image) -> NDArray[np.uint8]:
    """Decode the first frame with OpenCV. Pillow would hold four copies of it."""
    has_alpha = image.mode == "RGBA"
    encoded = np.frombuffer(payload, np.uint8)
    flags = cv2.IMREAD_UNCHANGED if has_alpha else cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
    decoded = cv2.imdecode(encoded, flags)
    width, height = image.size
    if decoded is None or decoded.shape != (height, width, 4 if has_alpha else 3):
        raise ImageError("image_damaged", "the photo cannot be decoded: its WebP data is damaged")
    if has_alpha:
        return to_rgb(Image.fromarray(cv2.cvtColor(decoded, cv2.COLOR_BGRA2RGBA, decoded)))
    return np.asarray(decoded, np.uint8)


def open_image(payload: bytes, formats: tuple[str, ...] = FORMATS) -> Image.Image:
    """Parse the header of a photo in one of Pillow's formats. Raises image_format, and Pillow's other errors."""
    try:
        return Image.open(io.BytesIO(payload), formats=formats)
    except UnidentifiedImageError as error:
        raise ImageError("image_format", "the bytes are not a photo in a supported format") from error


def read_orientation(image: Image.Image) -> tuple[bool, int]:
    """Return whether to swap left and right, and counterclockwise quarter turns.

    Call after the pixels were read: EXIF may follow them, Pillow applies the orientation of TIFF, and libheif of HEIC.
    """
    return MIRRORED_AND_TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1), (False, 0))


@contextmanager
def translated_errors() -> Iterator[None]:
    try:
        yield
    except (KithError, MemoryError):  # MemoryError: a shortage of the server, not a damaged photo
        raise
    except Exception as error:  # decoders and EXIF readers raise unrelated exceptions on damaged files
        raise ImageError("image_damaged", f"the photo cannot be decoded: {error}") from error


def count_scans(payload: bytes) -> int:
    """Count scans up to the end-of-image marker; videos and other photos may follow. Raises image_too_large."""
    return sum(marker == START_OF_SCAN for marker in _segments(payload))


def complete(payload: bytes) -> bytes:
    """Return the file with an end-of-image marker if only that is missing, else unchanged.

    Some cameras omit the marker. If scan data is missing too, the file stays truncated, and decoders reject it. So does
    a progressive file, of whose scans some may be missing. Raises image_too_large.
    """
    if payload.endswith(END_OF_IMAGE):
        return payload
    unpadded = payload.rstrip(b"\0")  # some devices fill the file's last block
    return _completed(payload) or (_completed(unpadded) if unpadded != payload else None) or payload


def _completed(payload: bytes) -> bytes | None:
    """Return the file with an end-of-image marker; None if more is missing, or nothing. Raises as :func:`complete`."""
    markers = list(_segments(payload))
    if END_OF_IMAGE[1] in markers or BASELINE.isdisjoint(markers):
        return None
    completed = payload + END_OF_IMAGE
    try:
        color = simplejpeg.decode_jpeg_header(completed)[2]
        # The smallest scale needs little memory, and reads all scan data. libjpeg warns if some is missing.
        simplejpeg.decode_jpeg(completed, "CMYK" if color in ("CMYK", "YCCK") else "GRAY", min_factor=8)
    except ValueError:
        return None
    return completed


def decode_rgb(payload: bytes, size: tuple[int, int], reduction: float) -> NDArray[np.uint8] | None:
    """Decode to (h, w, 3) uint8 RGB at a scale of REDUCTIONS or 1. Return None if libjpeg rejects the file.

    ``size``: width and height in pixels, as the file declares them.
    """
    width, height = (math.ceil(side * reduction) for side in size)
    try:
        # Readers may find different sizes in a damaged file. Decode only the size that was checked.
        if simplejpeg.decode_jpeg_header(payload)[1::-1] != size:
            return None
        pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(payload, "RGB", min_height=height, min_width=width)
    except ValueError:
        return None
    return pixels if pixels.shape[:2] == (height, width) else None


def _segments(payload: bytes) -> Iterator[int]:
    """Yield the marker of each segment up to the end-of-image marker. Raises image_too_large.

    Entropy-coded data is searched, not decoded, for the start of the next segment.
    """
    at = 0
    for _ in range(MAX_SEGMENTS):
        found = SEGMENT.search(payload, at)
        if found is None:
            return
        yield found[0][1]
        if found[0] == END_OF_IMAGE:
            return
        at = found.end() + max(2, int.from_bytes(payload[found.end() : found.end() + 2]))
    raise ImageError("image_too_large", f"the photo has more than {MAX_SEGMENTS} segments, the limit")
