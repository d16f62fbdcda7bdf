"""Decoding of JPEG, PNG and WebP to upright RGB pixels. Only this module of the service uses simplejpeg.

A JPEG can be decoded at 1/2, 1/4 or 1/8 of its size at a much lower cost. service.inference.images checks the limits
before.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

import cv2
import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError

from models.runtime.network import Float
from models.vision.detection import downscale
from service.core.errors import ImageError, KithError
from service.inference.rgb_conversion import to_rgb

# Pillow's own limit would warn or raise below ours.
Image.MAX_IMAGE_PIXELS = None
# OpenCV would write a line to stderr for each damaged photo.
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)

FORMATS: Final = ("JPEG", "PNG", "WEBP")
"""Formats that this module decodes. service.inference.decoder_child decodes the others."""
FLIPS: Final = {2: 1, 3: -1, 4: 0, 6: 1, 7: -1, 8: 0}
"""Code of cv2.flip by EXIF orientation: left and right (1), top and bottom (0), or both (-1) change places."""
FIRST_TRANSPOSED: Final = 5
"""Orientations from this one on swap rows and columns before they flip them."""
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
class DecodedPhoto:
    """Upright photo of ``height`` and ``width``, whose ``pixels``, (h, w, 3) uint8 RGB, have the scale ``reduction``.

    ``shift_xy``: pixels before the photo's left and top edge. The last row and column of a reduction may show less of
    the photo, and flips put them first. ``decode``: decodes the photo at another scale.
    """

    height: int
    width: int
    pixels: NDArray[np.uint8]
    reduction: float = 1.0
    shift_xy: tuple[float, float] = (0.0, 0.0)
    decode: Callable[[float], DecodedPhoto] | None = None

    def at_least(self, scale: float) -> DecodedPhoto:
        """Return this photo, or decode it again if its scale is below ``scale``."""
        if self.decode is None or self.reduction >= min(scale, 1.0):
            return self
        with translated_errors():
            return self.decode(scale)

    def shrunk(self, scale: float) -> NDArray[np.uint8]:
        """Return the photo at ``scale``, which must not exceed ``reduction``."""
        return downscale(self.pixels, scale / self.reduction)

    def points(self, points_xy: Float) -> Float:
        """Map (..., 2) points of the photo to coordinates of ``pixels``."""
        if self.reduction == 1.0:
            return points_xy
        # Pixel centers have integer coordinates.
        shift = np.array(self.shift_xy, np.float32) - np.float32(0.5)
        return (points_xy + np.float32(0.5)) * np.float32(self.reduction) + shift


def decode_jpeg(payload: bytes, size: tuple[int, int], orientation: int, scale: float) -> DecodedPhoto:
    """Decode a JPEG at the smallest of REDUCTIONS, or 1, that is at least ``scale``, in (0, 1].

    Args:
        size: width and height in pixels, as the file declares them.
        orientation: of EXIF.
    """
    content = complete(payload)
    reduction = next((r for r in REDUCTIONS if r >= scale), 1.0)
    min_width, min_height = (math.ceil(side * reduction) for side in size)
    try:
        # Readers may find different sizes in a damaged file. Decode only the size that was checked.
        if simplejpeg.decode_jpeg_header(content)[1::-1] != size:
            return decode_whole(content)
        stored = simplejpeg.decode_jpeg(content, "RGB", min_height=min_height, min_width=min_width)
    except ValueError:  # Pillow is more tolerant
        return decode_whole(content)
    pixels, flip = turn_upright(stored, orientation), FLIPS.get(orientation)
    width, height = size[::-1] if orientation >= FIRST_TRANSPOSED else size
    shift_x = pixels.shape[1] - width * reduction if flip in (1, -1) else 0.0
    shift_y = pixels.shape[0] - height * reduction if flip in (0, -1) else 0.0
    again = partial(decode_jpeg, content, size, orientation)
    return DecodedPhoto(height, width, pixels, reduction, (shift_x, shift_y), again)


def decode_whole(payload: bytes) -> DecodedPhoto:
    content = complete(payload) if payload.startswith(START_OF_IMAGE) else payload
    pixels = read_whole(content, open_image(content))
    return DecodedPhoto(pixels.shape[0], pixels.shape[1], pixels)


def read_whole(payload: bytes, image: Image.Image) -> NDArray[np.uint8]:
    """Return the upright photo, (h, w, 3) RGB.

    Args:
        image: the photo as an opened file, not loaded.
    """
    with closing(image):  # frees its memory
        if image.format == "WEBP":
            pixels = _decode_webp(payload, image)
        else:
            image.load()  # turns a TIFF
            pixels = to_rgb(image)
        orientation = read_orientation(image)
    return turn_upright(pixels, orientation)


def turn_upright(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Return stored pixels as EXIF's orientation tells to show them. They may be changed."""
    turned = cv2.transpose(pixels) if orientation >= FIRST_TRANSPOSED else pixels
    return np.asarray(cv2.flip(turned, FLIPS[orientation], turned) if orientation in FLIPS else turned, np.uint8)


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


def read_orientation(image: Image.Image) -> int:
    """Return the orientation of EXIF, 1 to 8.

    Call after the pixels were read: EXIF may follow them, Pillow applies the orientation of TIFF, and libheif of HEIC.
    """
    orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    return orientation if orientation in range(1, 9) else 1


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
