"""Bytes to an upright RGB photo, under limits that are checked before pixels are decoded.

A JPEG can be decoded at a half, a quarter or an eighth of its size for much less; EXIF's quarter turns are applied to
what is made of the pixels, not to them.
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

from models.detection import shrink
from models.network import Float
from service.errors import ImageDamagedError, ImageEmptyError, ImageFormatError, ImageTooLargeError, KithError
from service.heif import Heif, is_heif
from service.heif_boxes import costs

# Its own bound would warn, or refuse, where ours decide.
Image.MAX_IMAGE_PIXELS = None

FORMATS: Final = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "AVIF")
"""That Pillow reads; HEIC is read beside them."""
REDUCTIONS: Final = (1 / 8, 1 / 4, 1 / 2)
"""Of a JPEG's sides; others that libjpeg has are slower than the whole."""
TURNS: Final = {1: 0, 3: 2, 6: 3, 8: 1}
"""EXIF's orientations that are not mirrored: turned by so many quarters against the clock."""
MIRRORED: Final = (2, 4, 5, 7)


MOST_SCANNED: Final = 20
"""Times the most pixels that a photo may have: of a JPEG, its scans times its pixels, each scan going over all of them.
Encoders write a dozen; thousands fit in a few kilobytes, and take minutes."""
MOST_SEGMENTS: Final = 65_536
"""Of a JPEG; a file of 20 MB needs 300 for what is beside its pixels."""
SEGMENT: Final = re.compile(rb"\xff[\xc0-\xcf\xd9-\xfe]")
"""Begins with this, then its length, and may hold anything. Between segments, and among what is coded, FF is followed
by other bytes, which decoders pass over."""
MOST_PROFILES: Final = 4
"""Of a PNG, which has one; Pillow unpacks each."""
MOST_TOGETHER: Final = 2
"""Times the most pixels that a photo may have: of a HEIF, what its grids and overlays are put together of. A phone's
photo is of hardly more than it has, with its depth and gain maps."""
MOST_TILES: Final = 65_536
"""Or strips, of a TIFF."""


@dataclass(frozen=True)
class ImageLimits:
    max_bytes: int
    max_pixels: int


@dataclass(frozen=True, eq=False)
class Encoded:
    """A photo of which the header is read: ``height``, ``width`` of the upright photo in pixels.

    An upright JPEG is turned from how it is stored by ``turns`` quarters against the clock. What has no scale to choose
    is there ``whole``, upright.
    """

    height: int
    width: int
    payload: bytes
    turns: int = 0
    whole: NDArray[np.uint8] | None = None

    def decode(self, scale: float = 1.0) -> Picture:
        """Decode it no smaller than ``scale`` of its size, in (0, 1]; larger where that is no dearer.

        Raises:
            ImageDamagedError: it cannot be decoded.
        """
        if self.whole is not None:
            return Picture(self, self.whole, 1.0, 0)
        reduction = next((r for r in REDUCTIONS if r >= scale), 1.0)
        with _errors():
            pixels = self._decode_jpeg(reduction)
            if pixels is None:
                with _open(self.payload) as image:
                    return Picture(self, _by_pillow(image), 1.0, 0)
            return Picture(self, pixels, reduction, self.turns)

    def _decode_jpeg(self, reduction: float) -> NDArray[np.uint8] | None:
        """None: the library has doubts about the file, and Pillow must judge it."""
        stored = (self.height, self.width) if self.turns % 2 == 0 else (self.width, self.height)
        height, width = (math.ceil(side * reduction) for side in stored)
        try:
            # A damaged file may tell each reader another size: what was checked is what is decoded.
            if simplejpeg.decode_jpeg_header(self.payload)[:2] != stored:
                return None
            pixels = simplejpeg.decode_jpeg(self.payload, "RGB", min_height=height, min_width=width)
        except ValueError:
            return None
        return pixels if pixels.shape[:2] == (height, width) else None


@dataclass(frozen=True, eq=False)
class Picture:
    """A photo's pixels, (h, w, 3) uint8 RGB, at ``reduction`` of its size, and ``turns`` quarters against the clock
    from upright."""

    photo: Encoded
    pixels: NDArray[np.uint8]
    reduction: float
    turns: int

    @property
    def upright(self) -> NDArray[np.uint8]:
        """A view."""
        return np.rot90(self.pixels, self.turns)

    def at_least(self, scale: float) -> Picture:
        """This one, or where it is smaller than ``scale`` of its photo, the photo decoded anew."""
        return self if self.reduction >= min(scale, 1.0) else self.photo.decode(scale)

    def shrunk(self, scale: float) -> NDArray[np.uint8]:
        """The upright photo at ``scale`` of its size, which is no more than that of the pixels here."""
        small = shrink(self.pixels, scale / self.reduction)
        if self.turns == 0:
            return small
        # The last row and column of a reduction may show less of the photo than the others, and would come first.
        height, width = (self.photo.height, self.photo.width)[:: -1 if self.turns % 2 else 1]
        full = small[: max(1, round(height * scale)), : max(1, round(width * scale))]
        return np.asarray(cv2.rotate(full, ROTATIONS[self.turns]), np.uint8)

    def points_stored(self, points_xy: Float) -> Float:
        """(..., 2) points of the upright photo, in pixels of ``pixels``."""
        if self.turns == 0 and self.reduction == 1.0:
            return points_xy
        photo = turned(points_xy, -self.turns, self.photo.width, self.photo.height)
        # Centres of pixels lie at whole numbers, their edges between them.
        return (photo + np.float32(0.5)) * np.float32(self.reduction) - np.float32(0.5)

    def points_upright(self, points_xy: Float) -> Float:
        """(..., 2) points of the upright photo, in pixels of ``upright``."""
        height, width = self.pixels.shape[:2]
        return turned(self.points_stored(points_xy), self.turns, width, height)


ROTATIONS: Final = {1: cv2.ROTATE_90_COUNTERCLOCKWISE, 2: cv2.ROTATE_180, 3: cv2.ROTATE_90_CLOCKWISE}


def turned(points_xy: Float, turns: int, width: int, height: int) -> Float:
    """(..., 2) points of an image of this size, where they are after ``turns`` quarters against the clock."""
    x, y = points_xy[..., 0], points_xy[..., 1]
    across, down = width - 1 - x, height - 1 - y
    return np.stack([(x, y), (y, across), (across, down), (down, x)][turns % 4], -1)


def open_photo(payload: bytes, limits: ImageLimits) -> Encoded:
    """Read a photo's header. What is decoded of it: EXIF orientation applied, alpha over white, first frame of several.

    Raises:
        ImageEmptyError, ImageFormatError, ImageDamagedError, ImageTooLargeError: as their names say.
    """
    if not payload:
        raise ImageEmptyError("the photo has no bytes")
    if len(payload) > limits.max_bytes:
        raise ImageTooLargeError(f"the photo has more than {limits.max_bytes} bytes, the limit")
    if payload.startswith(b"\x89PNG") and payload.count(b"iCCP") > MOST_PROFILES:
        raise ImageDamagedError("the photo has more than one colour profile")
    if is_heif(payload):
        return _open_heif(payload, limits)
    with _errors(), _open(payload) as image:
        width, height = image.size
        _check_pixels(width, height, limits)
        _check_work(image, payload, limits)
        jpeg = image.format in ("JPEG", "MPO") and image.mode in ("L", "RGB")
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1) if jpeg else 1
        if not jpeg or orientation in MIRRORED:
            whole = _by_pillow(image)
            return Encoded(whole.shape[0], whole.shape[1], payload, whole=whole)
        turns = TURNS.get(orientation, 0)
        if turns % 2:
            height, width = width, height
        return Encoded(height, width, payload, turns)


def decode(payload: bytes, limits: ImageLimits) -> NDArray[np.uint8]:
    """The whole photo, upright, (H, W, 3) uint8 RGB. Raises as open_photo and decoding do."""
    return np.ascontiguousarray(open_photo(payload, limits).decode().upright)


def _open(payload: bytes) -> Image.Image:
    return Image.open(io.BytesIO(payload), formats=FORMATS)


def _open_heif(payload: bytes, limits: ImageLimits) -> Encoded:
    with _errors():
        largest, together = costs(payload)
        if largest > limits.max_pixels:
            raise ImageTooLargeError(f"an image of the file has {largest} pixels, the limit is {limits.max_pixels}")
        if together > MOST_TOGETHER * limits.max_pixels:
            raise ImageTooLargeError(f"the images of the file are put together of {together} pixels")
        photo = Heif(payload)
        width, height = photo.size
        _check_pixels(width, height, limits)
        return Encoded(height, width, payload, whole=np.asarray(_to_rgb(photo.decode()), np.uint8))


def _check_pixels(width: int, height: int, limits: ImageLimits) -> None:
    if width * height > limits.max_pixels:
        raise ImageTooLargeError(f"the photo has {width} x {height} pixels, the limit is {limits.max_pixels}")


def _check_work(image: Image.Image, payload: bytes, limits: ImageLimits) -> None:
    """What takes long, or much memory, for its bytes and pixels. Raises ImageTooLargeError."""
    scans = _scans(image, payload)
    if scans * image.width * image.height > MOST_SCANNED * limits.max_pixels:
        raise ImageTooLargeError(f"the photo has {scans} scans of {image.width} x {image.height} pixels")
    tiles = getattr(image, "tile", ())
    if len(tiles) > MOST_TILES:
        raise ImageTooLargeError(f"the photo is in {len(tiles)} pieces, the limit is {MOST_TILES}")


def _scans(image: Image.Image, payload: bytes) -> int:
    """How often a decoder goes over the pixels. Raises ImageTooLargeError."""
    if image.format in ("JPEG", "MPO"):
        return _jpeg_scans(payload, 0, len(payload))
    compression = image.info.get("compression")
    if compression != "jpeg":
        return payload.count(b"\xff\xda") if compression == "tiff_jpeg" else 1
    # Of a TIFF, each piece is a JPEG, and none lies in two of them.
    tags = image.getexif()
    starts, sizes = (_numbers(tags.get(strips, tags.get(tiles))) for strips, tiles in ((273, 324), (279, 325)))
    pieces = {*zip(starts, sizes, strict=False)}
    if len(pieces) > MOST_TILES or sum(size for _, size in pieces) > len(payload):
        raise ImageTooLargeError("the photo is in more pieces than it has bytes for")
    return max((_jpeg_scans(payload, start, start + size) for start, size in pieces), default=1)


def _numbers(values: int | tuple[int, ...] | None) -> tuple[int, ...]:
    return values if isinstance(values, tuple) else () if values is None else (values,)


def _jpeg_scans(payload: bytes, at: int, end: int) -> int:
    """Up to its end, after which files have videos and other photos. Raises ImageTooLargeError."""
    scans = 0
    for _ in range(MOST_SEGMENTS):
        found = SEGMENT.search(payload, at, end)
        if found is None or found[0] == b"\xff\xd9":
            return scans
        scans += found[0] == b"\xff\xda"
        at = found.end() + max(2, int.from_bytes(payload[found.end() : found.end() + 2]))
    raise ImageTooLargeError(f"the photo has more than {MOST_SEGMENTS} segments, the limit")


def _by_pillow(image: Image.Image) -> NDArray[np.uint8]:
    ImageOps.exif_transpose(image, in_place=True)
    return np.asarray(_to_rgb(image), np.uint8)


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except (KithError, MemoryError):  # the server lacks memory, the photo is whole
        raise
    except UnidentifiedImageError as error:
        raise ImageFormatError("the bytes are not a photo in a supported format") from error
    except Exception as error:  # what decoders and EXIF readers raise on damaged files is no one family
        raise ImageDamagedError(f"the photo cannot be decoded: {error}") from error


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":
        # 16-bit grey: keep the high byte, where conversion would clip everything above 255 to white.
        values = np.asarray(image)
        if image.mode == "F" and values.max(initial=0) <= 1:  # of floats, white is 1 more often than 255
            values = values * np.float32(255)
        if values.max(initial=0) > 255:
            values = values / np.float32(257) if image.mode == "F" else values >> 8
        return Image.fromarray(np.clip(values, 0, 255).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")
