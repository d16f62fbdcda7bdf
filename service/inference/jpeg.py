"""JPEG files: counting scans, completing files, and decoding at a reduced scale. The only module that uses simplejpeg.

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
START_OF_IMAGE: Final = b"\xff\xd8"
END_OF_IMAGE: Final = b"\xff\xd9"
START_OF_SCAN: Final = 0xDA
FRAMES: Final = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
"""Markers of frame headers."""
PROGRESSIVE: Final = frozenset({0xC2, 0xC6, 0xCA, 0xCE})
COEFFICIENTS: Final = 64


class TooManySegmentsError(ValueError):
    """JPEG file with more than MAX_SEGMENTS segments."""


def count_scans(payload: bytes, start: int = 0, end: int | None = None) -> int:
    """Count scans up to the end-of-image marker; videos and other photos may follow.

    Raises:
        TooManySegmentsError: The file has too many segments.
    """
    return sum(marker == START_OF_SCAN for marker, _ in _segments(payload, start, end))


def complete(payload: bytes) -> bytes:
    """Return the file with an end-of-image marker if only that is missing, else unchanged.

    Some cameras and interrupted transfers omit the marker. If scan data is missing too, the file stays truncated, and
    decoders reject it.

    Raises:
        TooManySegmentsError: The file has too many segments.
    """
    if payload.endswith(END_OF_IMAGE):
        return payload
    unpadded = payload.rstrip(b"\0")  # some devices fill the file's last block
    return _completed(payload) or (_completed(unpadded) if unpadded != payload else None) or payload


def _completed(payload: bytes) -> bytes | None:
    """Return the file with an end-of-image marker; None if more is missing, or nothing. Raises as :func:`complete`."""
    segments = list(_segments(payload))
    if (segments and segments[-1][0] == END_OF_IMAGE[1]) or not _has_all_coefficients(segments):
        return None
    completed = payload + END_OF_IMAGE
    try:
        color = simplejpeg.decode_jpeg_header(completed)[2]
        # The smallest scale needs little memory, and reads all scan data. libjpeg warns if some is missing.
        simplejpeg.decode_jpeg(completed, "CMYK" if color in ("CMYK", "YCCK") else "GRAY", min_factor=8)
    except ValueError:
        return None
    return completed


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


def _segments(payload: bytes, start: int = 0, end: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield each segment up to the end-of-image marker, as its marker and the content of a frame or scan header."""
    at, end = start, len(payload) if end is None else end
    for _ in range(MAX_SEGMENTS):
        found = SEGMENT.search(payload, at, end)
        if found is None:
            return
        if found[0] == END_OF_IMAGE:
            yield END_OF_IMAGE[1], b""
            return
        at = found.end() + max(2, int.from_bytes(payload[found.end() : found.end() + 2]))
        marker = found[0][1]
        yield marker, payload[found.end() + 2 : at] if marker in FRAMES or marker == START_OF_SCAN else b""
    raise TooManySegmentsError(f"the photo has more than {MAX_SEGMENTS} segments, the limit")


def _has_all_coefficients(segments: list[tuple[int, bytes]]) -> bool:
    """Return whether the scans cover all components with all coefficients in full precision."""
    progressive, missing = False, dict[int, set[int]]()
    for marker, content in segments:
        if marker in FRAMES:
            progressive = marker in PROGRESSIVE
            missing = {component: set(range(COEFFICIENTS)) for component in content[6::3]}
        elif marker == START_OF_SCAN and content and len(content) == 2 * content[0] + 4:
            first, last, precision = content[-3:]
            for component in content[1:-3:2]:
                # The low half of the last byte is the number of bits that later scans add.
                if not progressive:
                    missing.pop(component, None)
                elif precision & 15 == 0 and component in missing:
                    missing[component] -= set(range(first, last + 1))
    return bool(segments) and not any(missing.values())
