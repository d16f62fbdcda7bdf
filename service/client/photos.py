"""What may be given as a photo or an embedding, and what is sent of it."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.Image import Image

Photo: TypeAlias = "Path | str | bytes | bytearray | memoryview | BinaryIO | Image | NDArray[np.uint8]"
"""A path, a file's content, an open file, a Pillow image, or an (H, W, 3) RGB or (H, W) grey array of uint8."""
Vector: TypeAlias = NDArray[np.floating[Any]] | Sequence[float]
SENT_MODES: Final = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16"})
"""Of Pillow's, those that a PNG has."""
REFUSED_MODES: Final = frozenset({"F", "La", "RGBa"})
"""Whose white is anywhere, and which Pillow does not convert."""
MOST_16_BIT: Final = 65_535


@dataclass(frozen=True)
class Url:
    """A photo that the server fetches, from a host in its KITH_URL_HOSTS."""

    address: str


def payload_of(photo: Photo) -> bytes:
    """The bytes to send. Files go as they are; images that are decoded already, as PNGs, upright.

    Raises:
        OSError: the file cannot be read.
        TypeError, ValueError: this is no photo.
    """
    if isinstance(photo, Path | str):
        if str(photo).startswith(("https://", "http://")):
            raise ValueError(f"{photo}: a photo that the server shall fetch is given as urls=[...], or as Url(...)")
        return Path(photo).read_bytes()
    if isinstance(photo, bytes | bytearray | memoryview):
        return bytes(photo)
    if isinstance(photo, np.ndarray):
        return _of_array(photo)
    if hasattr(photo, "read"):
        read = photo.read()
        if not isinstance(read, bytes):
            raise TypeError("the file is open as text: open it with 'rb'")
        return read
    from PIL import Image  # not for those who send files

    if not isinstance(photo, Image.Image):
        raise TypeError(f"{type(photo).__name__} is no photo: give a path, bytes, a file, a Pillow image or an array")
    return _png(photo)


def _of_array(array: NDArray[Any]) -> bytes:
    from PIL import Image

    if array.dtype != np.uint8 or not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 3)):
        raise ValueError(
            f"an array of {array.dtype} {array.shape} is no photo: RGB is (H, W, 3), grey (H, W), both of uint8"
        )
    return _png(Image.fromarray(np.ascontiguousarray(array)))


def _png(image: Image) -> bytes:
    from PIL import ImageOps

    upright = ImageOps.exif_transpose(image)  # the PNG will not say how it is turned
    file = io.BytesIO()
    _sent(upright).save(file, "PNG", compress_level=1)
    return file.getvalue()


def _sent(image: Image) -> Image:
    if image.mode in SENT_MODES:
        return image
    if image.mode in REFUSED_MODES:
        raise ValueError(f"a Pillow image of mode {image.mode} is no photo: convert it to RGB or L")
    if not image.mode.startswith("I"):
        return image.convert("RGB")
    # Conversion would clip everything above 255 to white.
    values = np.asarray(image)
    if values.size and not 0 <= values.min() <= values.max() <= MOST_16_BIT:
        raise ValueError(f"a Pillow image of mode {image.mode} is grey of 16 bits: from 0 to {MOST_16_BIT}")
    from PIL import Image

    return Image.fromarray(values.astype(np.uint16))


def is_photo(given: object) -> bool:
    """Rather than an embedding: an array of uint8, or nothing that numbers could be in."""
    if isinstance(given, np.ndarray):
        return bool(given.dtype == np.uint8)
    return isinstance(given, Path | str | bytes | bytearray | memoryview) or not isinstance(given, Sequence)


def numbers_of(vector: Vector) -> list[float]:
    """For JSON, whose numbers are doubles: a float32 written as one is that float again when it is read."""
    numbers = np.asarray(vector, np.float64).ravel()
    if not np.isfinite(numbers).all():
        raise ValueError("an embedding has a number that is none: NaN or infinite")
    return [float(v) for v in numbers]
