"""Conversion of photos and embeddings to request bodies. NumPy arrays are accepted without importing NumPy."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Protocol, TypeAlias

if TYPE_CHECKING:
    from PIL.Image import Image


class Array(Protocol):
    """Array with the attributes of ``numpy.ndarray`` that the client uses."""

    @property
    def dtype(self) -> Any: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def tobytes(self) -> bytes: ...

    def tolist(self) -> Any: ...


Photo: TypeAlias = "Path | str | bytes | bytearray | memoryview | BinaryIO | Image | Array"
"""A path, encoded bytes, an open file, a Pillow image, or an (H, W, 3) RGB or (H, W) gray array of uint8."""
Vector: TypeAlias = "Array | Sequence[float]"
"""An embedding of shape (d,): an array or a sequence of numbers."""
PNG_MODES: Final = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16"})
"""Pillow modes that a PNG file can store."""
RGB_MODES: Final = frozenset({"CMYK", "HSV", "LAB", "PA", "RGBX", "YCbCr"})
"""Other modes of 8 bits, which are sent as RGB."""


@dataclass(frozen=True)
class Url:
    """Photo that the server fetches, from a host in its KITH_URL_HOSTS."""

    address: str


def encode_photo(photo: Photo) -> bytes:
    """Return the bytes to send: files unchanged, decoded images as upright PNG.

    Raises:
        OSError: the file cannot be read.
        TypeError, ValueError: the value is not a photo.
    """
    if isinstance(photo, Path | str):
        if str(photo).startswith(("https://", "http://")):
            raise ValueError(f"{photo} is a URL: pass it as urls=[...], or as Url(...) to verify")
        return Path(photo).read_bytes()
    if isinstance(photo, bytes | bytearray | memoryview):
        return bytes(photo)
    if hasattr(photo, "read"):
        content = photo.read()
        if not isinstance(content, bytes):
            raise TypeError("the file is open in text mode: open it with 'rb'")
        return content
    from PIL import Image, ImageOps  # optional: only for callers that pass images

    try:
        image: Any = Image.fromarray(photo) if is_array(photo) else photo  # type: ignore[arg-type]
    except TypeError:
        kind = f"{photo.dtype} {photo.shape}"  # type: ignore[union-attr]
        raise ValueError(f"an array of {kind} is not a photo: pass uint8 of shape (H, W, 3) or (H, W)") from None
    if not isinstance(image, Image.Image):
        kind = type(photo).__name__
        raise TypeError(f"{kind} is not a photo: pass a path, bytes, a file, a Pillow image or an array")
    if image.mode not in PNG_MODES | RGB_MODES:
        raise ValueError(f"a Pillow image of mode {image.mode} is not a photo: convert it to RGB or L")
    upright = ImageOps.exif_transpose(image)  # the PNG has no orientation tag
    file = io.BytesIO()
    (upright if upright.mode in PNG_MODES else upright.convert("RGB")).save(file, "PNG", compress_level=1)
    return file.getvalue()


def is_array(value: object) -> bool:
    """Return whether the value is an array, as opposed to a file or a sequence."""
    return hasattr(value, "dtype") and hasattr(value, "shape") and hasattr(value, "tobytes")


def is_photo(value: object) -> bool:
    """Return whether the value is a photo, as opposed to an embedding."""
    if is_array(value):
        return str(value.dtype) == "uint8"  # type: ignore[attr-defined]
    return isinstance(value, Path | str | bytes | bytearray | memoryview) or not isinstance(value, Sequence)


def to_floats(vector: Vector) -> list[float]:
    """Convert an embedding to a list of floats. A float32 value survives the conversion to JSON and back.

    Raises:
        ValueError: the embedding is not one-dimensional, or has a value that is not finite.
    """
    numbers: Any = vector.tolist() if is_array(vector) else vector  # type: ignore[union-attr]
    if isinstance(numbers, int | float):
        raise ValueError("an embedding is a list of numbers, not a number: pass several as embeddings=[vector, ...]")
    values = [float(value) for value in numbers]
    if not all(map(math.isfinite, values)):
        raise ValueError("the embedding has a value that is NaN or infinite")
    return values
