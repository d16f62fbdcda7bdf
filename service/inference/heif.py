"""HEIF adapter: decodes the primary image of HEIC and HEIF files. The only module that uses libheif.

libheif applies the rotation and mirror properties of the file (irot, imir), so EXIF orientation must not be applied
again (ISO/IEC 23008-12). The built-in limits of libheif stay enabled; they reject images larger than declared.
"""

from __future__ import annotations

import pi_heif
from PIL import Image

from models.vision.photo_files import HEAD_BYTES, photo_format
from service.core.photo_errors import ImageDamagedError, ImageFormatError

# Requests already decode in parallel, so each decodes in its own thread. Auxiliary images are not needed.
pi_heif.options.DECODE_THREADS = 1
pi_heif.options.THUMBNAILS = pi_heif.options.DEPTH_IMAGES = pi_heif.options.AUX_IMAGES = False


def is_heif(payload: bytes) -> bool:
    """Return whether the file's brands are HEIF. AVIF, which shares the container, is not."""
    return photo_format(payload[:HEAD_BYTES]) == "HEIC"


class HeifPhoto:
    """Opened HEIF file. ``size`` is the (width, height) of the upright image in pixels.

    Check :func:`service.inference.heif_boxes.count_pixels` before decoding.
    """

    def __init__(self, payload: bytes) -> None:
        """Read the header. Raises ImageFormatError for an unsupported codec, and libheif errors for damaged files."""
        try:
            file = pi_heif.open_heif(payload)
        except SyntaxError as error:
            raise ImageFormatError(f"the HEIF file is not supported: {error}") from error
        self._image = file[file.primary_index]
        self.size: tuple[int, int] = self._image.size
        self.bit_depth: int = self._image.info["bit_depth"]
        self.has_alpha: bool = self._image.has_alpha

    def decode(self) -> None:
        """Decode the image.

        Raises:
            ImageDamagedError: The size differs from the header. Other libheif errors pass through.
        """
        declared = self.size
        self._pixels = memoryview(self._image.data)
        if self._image.size != declared:
            raise ImageDamagedError(f"the photo has {self._image.size} pixels, but its header declares {declared}")

    def strip(self, top: int, bottom: int) -> Image.Image:
        """Return rows of the decoded, upright image with 8 bits per channel, or 16 for deeper grayscale."""
        mode, stride = self._image.mode, self._image.stride
        rows = bytes(self._pixels[top * stride : bottom * stride])
        return Image.frombuffer(mode, (self.size[0], bottom - top), rows, "raw", mode, stride, 1)
