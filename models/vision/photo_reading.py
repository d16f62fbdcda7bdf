"""Photos of files as upright pixels, for packs and training. The service, which sets limits, decodes its own way."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import cv2
import numpy as np
import pi_heif
from numpy.typing import NDArray

from models.errors import PhotoError, summarize
from models.vision.photo_files import HEAD_BYTES, list_photos, photo_format, printable_path

NAMED: Final = 3
"""Unreadable photos that a message names."""


def decode_photo(encoded: bytes, mode: int = cv2.IMREAD_COLOR) -> NDArray[np.uint8]:
    """Return a photo as (H, W, 3) uint8 RGB, turned upright by its metadata, without its transparency.

    ``mode``: one of OpenCV's color modes; HEIC ignores it. Raises PhotoError: the photo cannot be decoded.
    """
    if not encoded:
        raise PhotoError("the file is empty")
    if photo_format(encoded[:HEAD_BYTES]) == "HEIC":
        return _decode_heic(encoded)
    try:
        image = cv2.imdecode(np.frombuffer(encoded, np.uint8), mode)
    except cv2.error as error:  # more pixels than OpenCV allows
        raise PhotoError(summarize(error)) from error
    if image is None:
        raise PhotoError("damaged, or not a photo")
    return np.ascontiguousarray(image[:, :, ::-1], np.uint8)


def _decode_heic(encoded: bytes) -> NDArray[np.uint8]:
    try:
        with pi_heif.HeifImageFile(io.BytesIO(encoded)) as image:  # turned upright by libheif
            pixels = np.asarray(image if image.mode == "I;16" else image.convert("RGB"))
    except (EOFError, OSError, RuntimeError, SyntaxError, ValueError) as error:
        raise PhotoError(f"damaged or unsupported HEIC: {summarize(error)}") from error
    # Gray of more than 8 bits is scaled to 16.
    return np.array(pixels if pixels.ndim == 3 else (pixels >> 8)[..., None].repeat(3, 2), np.uint8)


@dataclass
class PhotoReader:
    """Reader of folders that goes on after photos that cannot be read.

    Attributes:
        unreadable: reason by path of each photo or folder that could not be read.
    """

    unreadable: dict[Path, str] = field(default_factory=dict)

    def find(self, folder: Path) -> list[Path]:
        """Return the photos at any depth below a folder; see :func:`list_photos`."""
        listed = list_photos(folder)
        self.unreadable.update(listed.unreadable)
        return listed.photos

    def read(self, path: Path) -> NDArray[np.uint8] | None:
        """Return a photo as :func:`decode_photo` does; None if it cannot be read."""
        try:
            return decode_photo(path.read_bytes())
        except OSError as error:
            self.unreadable[path] = error.strerror or str(error)
        except PhotoError as error:
            self.unreadable[path] = str(error)
        return None

    def describe(self) -> str:
        """Return a sentence with the number of unreadable photos and the first names; empty if all can be read."""
        if not self.unreadable:
            return ""
        named = [f"{printable_path(path)} ({reason})" for path, reason in sorted(self.unreadable.items())]
        named[NAMED:] = ["..."] if len(named) > NAMED else []
        return f"{len(self.unreadable)} photos cannot be read and are left out: {', '.join(named)}"
