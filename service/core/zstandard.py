"""Zstandard: the interface of Python 3.14, and unpacking of untrusted files with limited work."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import IO

from service.core.gunzip import MAX_SMALL_MEMBERS, MIN_MEAN_MEMBER_BYTES, PIECE_BYTES

if sys.version_info >= (3, 14):
    from compression.zstd import ZstdDecompressor, ZstdError, ZstdFile
else:
    from backports.zstd import ZstdDecompressor, ZstdError, ZstdFile

__all__ = ["ZstdError", "ZstdFile", "unpacked_pieces"]


def unpacked_pieces(file: IO[bytes]) -> Iterator[bytes]:
    """Yield unpacked pieces of at most PIECE_BYTES. The caller limits their total.

    ZstdFile would take seconds for each megabyte of empty frames.

    Raises:
      ValueError: the file is truncated, or has too many almost empty frames.
      ZstdError: the file is damaged.
    """
    frame, frames, unpacked = ZstdDecompressor(), 1, 0
    while packed := file.read(PIECE_BYTES):
        while packed or not frame.needs_input:
            if frame.eof:
                frame, frames = ZstdDecompressor(), frames + 1
                if frames > MAX_SMALL_MEMBERS + unpacked // MIN_MEAN_MEMBER_BYTES:
                    raise ValueError("the zstd file has too many almost empty frames")
            piece = frame.decompress(packed, PIECE_BYTES)
            packed = frame.unused_data
            unpacked += len(piece)
            if piece:
                yield piece
            if frame.eof and not packed:
                break
    if not frame.eof:
        raise ValueError("the zstd file is truncated")
