"""Bytes to an upright RGB photo, under limits that are checked before pixels are decoded."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from service.errors import ImageDamagedError, ImageEmptyError, ImageFormatError, ImageTooLargeError, KithError

# Its own bound would warn, or refuse, where ours decide.
Image.MAX_IMAGE_PIXELS = None

FORMATS: Final = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "AVIF")


@dataclass(frozen=True)
class ImageLimits:
    max_bytes: int
    max_pixels: int


def decode(payload: bytes, limits: ImageLimits) -> NDArray[np.uint8]:
    """Decode a photo to (H, W, 3) uint8 RGB, EXIF orientation applied, alpha over white, first frame of several.

    Raises:
        ImageEmptyError, ImageFormatError, ImageDamagedError, ImageTooLargeError: as their names say.
    """
    if not payload:
        raise ImageEmptyError("the photo has no bytes")
    if len(payload) > limits.max_bytes:
        raise ImageTooLargeError(f"the photo has {len(payload)} bytes, the limit is {limits.max_bytes}")
    try:
        with Image.open(io.BytesIO(payload), formats=FORMATS) as image:
            if image.width * image.height > limits.max_pixels:
                raise ImageTooLargeError(
                    f"the photo has {image.width} x {image.height} pixels, the limit is {limits.max_pixels}"
                )
            return np.asarray(_to_rgb(ImageOps.exif_transpose(image)), np.uint8)
    except KithError:
        raise
    except UnidentifiedImageError as error:
        raise ImageFormatError("the bytes are not a photo in a supported format") from error
    except Exception as error:  # what decoders and EXIF readers raise on damaged files is no one family
        raise ImageDamagedError(f"the photo cannot be decoded: {error}") from error


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":
        # 16-bit grey: keep the high byte, where conversion would clip everything above 255 to white.
        values = np.asarray(image, np.float64)
        scale = 255 / 65535 if values.max(initial=0) > 255 else 1.0
        return Image.fromarray(np.clip(values * scale, 0, 255).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")
