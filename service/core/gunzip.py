"""Gzip decompression that limits the expansion ratio (decompression bombs)."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import IO, Final

MAX_RATIO: Final = 100
"""Unpacked bytes per packed byte. Photos and vectors hardly compress; names and metadata shrink to a twentieth."""
RATIO_EXEMPT_BYTES: Final = 100_000_000
"""Unpacked bytes that are allowed at any ratio."""
MAX_SMALL_MEMBERS: Final = 100
MIN_MEAN_MEMBER_BYTES: Final = 1000
"""Mean unpacked bytes per member, required beyond MAX_SMALL_MEMBERS members. bgzip writes members of 64 KB."""
PIECE_BYTES: Final = 65_536


def max_unpacked_bytes(packed: int) -> int:
    return RATIO_EXEMPT_BYTES + MAX_RATIO * packed


class Gunzip:
    """Incremental gzip decompressor. ``packed`` and ``unpacked`` count the bytes so far."""

    def __init__(self) -> None:
        self.packed = self.unpacked = 0
        self._members = 1
        self._stream = zlib.decompressobj(wbits=31)

    def feed(self, packed: bytes) -> Iterator[bytes]:
        """Yield unpacked pieces of at most PIECE_BYTES.

        Raises:
            ValueError: The stream is damaged, or exceeds a limit.
        """
        self.packed += len(packed)
        while packed:
            if self._stream.eof:
                packed = packed.lstrip(b"\0")  # padding
                if not packed:
                    return
                self._members += 1
                self._stream = zlib.decompressobj(wbits=31)
            try:
                piece = self._stream.decompress(packed, PIECE_BYTES)
            except zlib.error as error:
                raise ValueError(f"damaged gzip: {error}") from error
            packed = self._stream.unused_data or self._stream.unconsumed_tail
            self.unpacked += len(piece)
            self._check()
            if piece:
                yield piece

    def end(self) -> None:
        """Raise ValueError if the stream is truncated."""
        if not self._stream.eof:
            raise ValueError("the gzip is truncated")

    def _check(self) -> None:
        if self.unpacked > max_unpacked_bytes(self.packed):
            raise ValueError(f"the gzip unpacks to more than {MAX_RATIO} times its size")
        if self._members > MAX_SMALL_MEMBERS + self.unpacked // MIN_MEAN_MEMBER_BYTES:
            raise ValueError("the gzip has too many almost empty members")


class PiecesFile:
    """File of unpacked pieces, readable once. A read may return fewer bytes than requested; b"" marks the end."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = b""

    def read(self, size: int) -> bytes:
        """Return at most ``size`` bytes. Raises what the pieces raise."""
        rest = self._rest or next(self._pieces, b"")
        self._rest = rest[size:]
        return rest[:size]


def gunzipped_pieces(file: IO[bytes]) -> Iterator[bytes]:
    """Yield unpacked pieces. Raises ValueError as :meth:`Gunzip.feed`."""
    gunzip = Gunzip()
    while packed := file.read(PIECE_BYTES):
        yield from gunzip.feed(packed)
    gunzip.end()
