"""HEIC and HEIF, the photos of phones: a file's primary image. Only this module knows libheif.

libheif turns and mirrors the image as the file's properties (irot, imir) say; EXIF's orientation, which phones write as
well, is not applied again (ISO/IEC 23008-12). Its own limits stay on: what is coded is no larger than the header said.
"""

from __future__ import annotations

from typing import Final

import pi_heif
from PIL import Image

from service.errors import ImageDamagedError, ImageFormatError

# A photo is decoded by the thread that wants it, as many at once as requests are. Nobody asks for the other images.
pi_heif.options.DECODE_THREADS = 1
pi_heif.options.THUMBNAILS = pi_heif.options.DEPTH_IMAGES = pi_heif.options.AUX_IMAGES = False

HEVC_BRANDS: Final = frozenset({b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"})
ANY_CODEC: Final = frozenset({b"mif1", b"mif2", b"msf1"})
AVIF_BRANDS: Final = frozenset({b"avif", b"avis"})
MOST_BRANDS: Final = 64


def is_heif(payload: bytes) -> bool:
    """By the brands it begins with; an AVIF, which is of the same family, is none."""
    if payload[4:8] != b"ftyp":
        return False
    end = min(int.from_bytes(payload[:4]), 16 + 4 * MOST_BRANDS)
    brands = {payload[8:12], *(payload[at : at + 4] for at in range(16, end, 4))}
    return bool(brands & HEVC_BRANDS) or bool(brands & ANY_CODEC and not brands & AVIF_BRANDS)


class Heif:
    """A file of which the header is read. ``size``: (width, height) of the upright image, in pixels. What decoding
    it costs, :func:`service.heif_boxes.costs` tells."""

    def __init__(self, payload: bytes) -> None:
        """Raises ImageFormatError: coded by what is not decoded here; and what is raised on damaged files."""
        try:
            file = pi_heif.open_heif(payload)
        except SyntaxError as error:
            raise ImageFormatError(f"the HEIF file cannot be read here: {error}") from error
        self._image = file[file.primary_index]
        self.size: tuple[int, int] = self._image.size

    def decode(self) -> Image.Image:
        """Upright, 8 bits a value, but 16 of what has grey alone and more than 8.

        Raises:
            ImageDamagedError: the header lied about the size; and what libheif raises on damaged files.
        """
        pixels, said = self._image.data, self.size
        if self._image.size != said:
            raise ImageDamagedError(f"the photo has {self._image.size} pixels, and its header says {said}")
        mode = self._image.mode
        return Image.frombuffer(mode, said, pixels, "raw", mode, self._image.stride, 1)
