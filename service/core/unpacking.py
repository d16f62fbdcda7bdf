"""Gzip and Zstandard: unpacking of untrusted files with limited work, and zstd's interface of Python 3.14."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from typing import IO, Any, Final, Literal

if sys.version_info >= (3, 14):
    from compression.zstd import ZstdDecompressor, ZstdError, ZstdFile
else:
    from backports.zstd import ZstdDecompressor, ZstdError, ZstdFile

__all__ = ["PiecesFile", "Unpacker", "ZstdError", "ZstdFile", "max_unpacked_bytes", "unpacked_pieces"]

MAX_RATIO: Final = 100
"""Unpacked bytes per packed byte. Photos and vectors hardly compress; names and metadata shrink to a twentieth."""
RATIO_EXEMPT_BYTES: Final = 100_000_000
"""Unpacked bytes that are allowed at any ratio."""
MAX_SMALL_MEMBERS: Final = 100
MIN_MEAN_MEMBER_BYTES: Final = 1000
"""Mean unpacked bytes per member, required beyond MAX_SMALL_MEMBERS members. bgzip writes members of 64 KB."""
PIECE_BYTES: Final = 65_536
Kind = Literal["gzip", "zstd"]


def max_unpacked_bytes(packed: int) -> int:
    return RATIO_EXEMPT_BYTES + MAX_RATIO * packed


class Unpacker:
    """Incremental decompressor. ``packed`` and ``unpacked`` count the bytes so far.

    The standard library's files would take seconds for each megabyte of empty members.
    """

    def __init__(self, kind: Kind) -> None:
        self.packed = self.unpacked = 0
        self._kind = kind
        self._members = 0
        self._begin_member()

    def feed(self, packed: bytes) -> Iterator[bytes]:
        """Yield unpacked pieces of at most PIECE_BYTES.

        Raises:
            ValueError: The stream is damaged, or exceeds a limit. The caller limits the total of zstd.
        """
        self.packed += len(packed)
        holds_more = False
        while packed or holds_more:
            if self._member.eof:
                packed = packed.lstrip(b"\0")  # padding
                if not packed:
                    return
                self._begin_member()
            try:
                piece = self._member.decompress(packed, PIECE_BYTES)
            except (zlib.error, ZstdError) as error:
                raise ValueError(f"damaged {self._kind}: {error}") from error
            # zlib returns the input that it did not use, zstd keeps it.
            packed = self._member.unused_data or getattr(self._member, "unconsumed_tail", b"")
            holds_more = not self._member.eof and not getattr(self._member, "needs_input", True)
            self.unpacked += len(piece)
            if self._kind == "gzip" and self.unpacked > max_unpacked_bytes(self.packed):
                raise ValueError(f"the gzip unpacks to more than {MAX_RATIO} times its size")
            if piece:
                yield piece

    def end(self) -> None:
        """Raise ValueError if the stream is truncated."""
        if not self._member.eof:
            raise ValueError(f"the {self._kind} is truncated")

    def _begin_member(self) -> None:
        self._members += 1
        if self._members > MAX_SMALL_MEMBERS + self.unpacked // MIN_MEAN_MEMBER_BYTES:
            raise ValueError(f"the {self._kind} has too many almost empty members")
        self._member: Any = zlib.decompressobj(wbits=31) if self._kind == "gzip" else ZstdDecompressor()


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


def unpacked_pieces(file: IO[bytes], kind: Kind) -> Iterator[bytes]:
    """Yield unpacked pieces. Raises ValueError as :meth:`Unpacker.feed`."""
    unpacker = Unpacker(kind)
    while packed := file.read(PIECE_BYTES):
        yield from unpacker.feed(packed)
    unpacker.end()
