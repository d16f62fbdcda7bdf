"""Photos of every promised format come out upright and RGB; everything else gets its own error."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from service.errors import (
    ImageDamagedError,
    ImageEmptyError,
    ImageError,
    ImageFormatError,
    ImageTooLargeError,
)
from service.imaging import FORMATS, ImageLimits, decode
from tests.conftest import jpeg

LIMITS = ImageLimits(max_bytes=5_000_000, max_pixels=4_000_000)


def encode(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that declares a size and holds no pixels."""
    body = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", len(body)) + b"IHDR" + body + struct.pack(">I", zlib.crc32(b"IHDR" + body))
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 0) + b"IEND" + struct.pack(">I", zlib.crc32(b"IEND"))


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format(kind: str, astronaut: NDArray[np.uint8]) -> None:
    decoded = decode(encode(Image.fromarray(astronaut), kind), LIMITS)
    assert decoded.shape == astronaut.shape
    assert np.abs(decoded.astype(int) - astronaut).mean() < 12


@pytest.mark.parametrize("mode", ["L", "LA", "P", "1", "CMYK", "RGBA", "I;16"])
def test_every_mode_becomes_rgb(mode: str, astronaut: NDArray[np.uint8]) -> None:
    image = Image.fromarray(astronaut)
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
    else:
        image = image.convert(mode)
    decoded = decode(encode(image, "TIFF"), LIMITS)
    grey = np.asarray(Image.fromarray(astronaut).convert("L"), int)
    assert decoded.shape == astronaut.shape
    assert abs(float(decoded.mean()) - float(grey.mean())) < 12


def test_transparency_lies_over_white() -> None:
    decoded = decode(encode(Image.new("RGBA", (8, 8), (200, 0, 0, 0)), "PNG"), LIMITS)
    assert (decoded == 255).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int) -> None:
    upright = np.zeros((40, 60, 3), np.uint8)
    upright[:20, :30] = 255
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright, 1),
        7: upright.transpose(1, 0, 2)[::-1, ::-1],
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    decoded = decode(encode(Image.fromarray(np.ascontiguousarray(stored)), "PNG", exif=exif), LIMITS)
    assert (decoded == upright).all()


def test_empty() -> None:
    with pytest.raises(ImageEmptyError):
        decode(b"", LIMITS)


@pytest.mark.parametrize("payload", [b"hello", b"<svg/>", b"%PDF-1.7", b"\0" * 100])
def test_not_a_photo(payload: bytes) -> None:
    with pytest.raises(ImageFormatError):
        decode(payload, LIMITS)


def test_truncated(astronaut: NDArray[np.uint8]) -> None:
    whole = jpeg(astronaut)
    with pytest.raises(ImageDamagedError):
        decode(whole[: len(whole) // 2], LIMITS)


@pytest.mark.parametrize("size", [(10_000, 10_000), (60_000, 60_000)], ids=["100 megapixels", "a bomb"])
def test_a_header_of_many_pixels_is_refused_before_decoding(size: tuple[int, int]) -> None:
    with pytest.raises(ImageTooLargeError):
        decode(png_header(*size), LIMITS)


def test_too_many_bytes() -> None:
    with pytest.raises(ImageTooLargeError):
        decode(b"x" * (LIMITS.max_bytes + 1), LIMITS)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 600), st.sampled_from(["JPEG", "PNG", "WEBP", "TIFF", "GIF", "BMP"]))
def test_damage_never_escapes_as_another_error(noise: bytes, position: int, kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "a description"
    options = {"exif": exif} if kind in {"JPEG", "PNG", "WEBP"} else {}
    whole = encode(Image.effect_noise((32, 32), 50).convert("RGB"), kind, **options)
    damaged = whole[:position] + noise + whole[position + len(noise) :]
    try:
        decoded = decode(damaged, LIMITS)
    except ImageError:
        return
    assert decoded.dtype == np.uint8
    assert decoded.ndim == 3
    assert decoded.shape[2] == 3
