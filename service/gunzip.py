"""Gzip from others, unpacked with bounds on what few bytes can cost. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import IO, Final

MAX_RATIO: Final = 100
"""Bytes unpacked of each byte packed. Photos and vectors hardly shrink, names and metadata to a twentieth."""
FREE_BYTES: Final = 100_000_000
"""Bytes unpacked whatever their ratio."""
FREE_MEMBERS: Final = 100
MEMBER_BYTES: Final = 1000
"""Fewest bytes unpacked of a member, on average beyond the first FREE_MEMBERS. bgzip's have 64 KB."""
PIECE_BYTES: Final = 65_536


def max_unpacked(packed: int) -> int:
    return FREE_BYTES + MAX_RATIO * packed


class Gunzip:
    """Unpacker of a stream that arrives in pieces. ``packed``, ``unpacked``: bytes so far."""

    def __init__(self) -> None:
        self.packed = self.unpacked = 0
        self._members = 1
        self._stream = zlib.decompressobj(wbits=31)

    def feed(self, packed: bytes) -> Iterator[bytes]:
        """Unpack in pieces of at most PIECE_BYTES. Raises ValueError."""
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
        """Raises ValueError."""
        if not self._stream.eof:
            raise ValueError("the gzip ends before its end")

    def _check(self) -> None:
        if self.unpacked > max_unpacked(self.packed):
            raise ValueError(f"the gzip unpacks to more than {MAX_RATIO} times its size")
        if self._members > FREE_MEMBERS + self.unpacked // MEMBER_BYTES:
            raise ValueError("the gzip has too many members that are almost empty")


class GunzipFile:
    """Unpacked bytes of a gzip file, to be read once. Reads may return less than asked for; b"" is the end."""

    def __init__(self, file: IO[bytes]) -> None:
        self._pieces = _pieces(file)
        self._rest = b""

    def read(self, size: int) -> bytes:
        """Raises ValueError."""
        rest = self._rest or next(self._pieces, b"")
        self._rest = rest[size:]
        return rest[:size]


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    gunzip = Gunzip()
    while packed := file.read(PIECE_BYTES):
        yield from gunzip.feed(packed)
    gunzip.end()
