"""Pixels of the images in an AVIF file, from the sequence headers of their AV1 data. Pure functions.

The boxes of the file declare a size too. A decoder that finds another one decodes the whole image first, and then
scales it to the declared size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

SEQUENCE_HEADER: Final = 1
"""OBU type (AV1 specification, 6.2.2)."""
MAX_OBUS: Final = 10_000
"""Limit of units in an image. A still image has a handful."""


def max_frame_pixels(data: bytes) -> int:
    """Return the pixels of the largest frame that the sequence headers in the data of an image allow; 0: none found.

    Raises:
        ValueError: The data is truncated, or has too many units.
    """
    largest, at = 0, 0
    for _ in range(MAX_OBUS):
        if at >= len(data):
            return largest
        kind, has_extension, has_size = data[at] >> 3 & 15, data[at] >> 2 & 1, data[at] >> 1 & 1
        at += 1 + has_extension
        size, at = _read_leb128(data, at) if has_size else (len(data) - at, at)
        if kind == SEQUENCE_HEADER:
            largest = max(largest, _frame_pixels(_Bits(data[at : at + size])))
        at += size
    raise ValueError(f"an AV1 image has more than {MAX_OBUS} units")


def _read_leb128(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at a position, and the position after it."""
    value = 0
    for index in range(8):
        if at + index >= len(data):
            break
        value |= (data[at + index] & 127) << 7 * index
        if not data[at + index] & 128:
            return value, at + index + 1
    raise ValueError("the size of an AV1 unit is truncated")


def _frame_pixels(bits: _Bits) -> int:
    """Read a sequence header (AV1 specification, 5.5) up to the size of frames."""
    bits.read(3)  # profile
    bits.read(1)  # still picture
    if bits.read(1):  # reduced header of a still picture
        bits.read(5)  # level
    else:
        _skip_operating_points(bits)
    width_bits, height_bits = bits.read(4) + 1, bits.read(4) + 1
    return (bits.read(width_bits) + 1) * (bits.read(height_bits) + 1)


def _skip_operating_points(bits: _Bits) -> None:
    delay_bits = 0
    if bits.read(1):  # timing info
        bits.read(64)
        if bits.read(1):  # equal picture interval
            bits.skip_uvlc()
        if bits.read(1):  # decoder model info
            delay_bits = bits.read(5) + 1
            bits.read(42)
    has_display_delay = bits.read(1)
    for _ in range(bits.read(5) + 1):
        bits.read(12)
        if bits.read(5) > 7:  # levels from 4.0 have a tier
            bits.read(1)
        if delay_bits and bits.read(1):
            bits.read(2 * delay_bits + 1)
        if has_display_delay and bits.read(1):
            bits.read(4)


class _Bits:
    """Reader of bits, the highest first."""

    def __init__(self, data: bytes) -> None:
        self._bits: Iterator[int] = (byte >> shift & 1 for byte in data for shift in range(7, -1, -1))

    def read(self, count: int) -> int:
        value = 0
        for _ in range(count):
            bit = next(self._bits, None)
            if bit is None:
                raise ValueError("an AV1 sequence header is truncated")
            value = value << 1 | bit
        return value

    def skip_uvlc(self) -> None:
        zeros = 0
        while not self.read(1):
            zeros += 1
        if zeros < 32:
            self.read(zeros)
