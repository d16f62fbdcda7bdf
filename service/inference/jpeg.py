"""JPEG files: counting scans, and decoding at a reduced scale. The only module that uses simplejpeg.

The entropy-coded data of a scan is searched, not decoded, to find the segments.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Final

import numpy as np
import simplejpeg
from numpy.typing import NDArray

REDUCTIONS: Final = (1 / 8, 1 / 4, 1 / 2)
"""Scales for decoding. Other scales of libjpeg are slower than full size."""
MAX_SEGMENTS: Final = 65_536
"""Limit of segments. A file of 20 MB needs 300 for metadata."""
SEGMENT: Final = re.compile(rb"\xff[\xc0-\xcf\xd9-\xfe]")
"""Start of a segment, followed by its length. In entropy-coded data, FF is followed by other bytes."""
END_OF_IMAGE: Final = b"\xff\xd9"
START_OF_SCAN: Final = 0xDA


class TooManySegmentsError(ValueError):
    """JPEG file with more than MAX_SEGMENTS segments."""


def count_scans(payload: bytes, start: int = 0, end: int | None = None) -> int:
    """Count scans up to the end-of-image marker; videos and other photos may follow.

    Raises:
        TooManySegmentsError: The file has too many segments.
    """
    return sum(marker == START_OF_SCAN for marker in _segments(payload, start, end))


def decode_rgb(payload: bytes, size: tuple[int, int], reduction: float) -> NDArray[np.uint8] | None:
    """Decode to (h, w, 3) uint8 RGB at a scale of REDUCTIONS or 1. Return None if libjpeg rejects the file.

    ``size``: width and height in pixels, as the file declares them.
    """
    width, height = (math.ceil(side * reduction) for side in size)
    try:
        # Readers may find different sizes in a damaged file. Decode only the size that was checked.
        if simplejpeg.decode_jpeg_header(payload)[1::-1] != size:
            return None
        pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(payload, "RGB", min_height=height, min_width=width)
    except ValueError:
        return None
    return pixels if pixels.shape[:2] == (height, width) else None


def _segments(payload: bytes, start: int = 0, end: int | None = None) -> Iterator[int]:
    """Yield the marker of each segment, up to the end-of-image marker."""
    at, end = start, len(payload) if end is None else end
    for _ in range(MAX_SEGMENTS):
        found = SEGMENT.search(payload, at, end)
        if found is None:
            return
        if found[0] == END_OF_IMAGE:
            yield END_OF_IMAGE[1]
            return
        at = found.end() + max(2, int.from_bytes(payload[found.end() : found.end() + 2]))
        yield found[0][1]
    raise TooManySegmentsError(f"the photo has more than {MAX_SEGMENTS} segments, the limit")
