"""Encrypted files: written sequentially, read at any offset.

A header holds the file's own key, encrypted under the owner's key. Chunks of CHUNK_BYTES follow, each encrypted
separately (service.security.sealing.Chunks). Opening a truncated file fails, even if it was cut between chunks. Reading
an altered chunk fails.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, BinaryIO, Final, Literal

from service.security.sealing import KEY_BYTES, OVERHEAD_BYTES, TAG_BYTES, Chunks, Seal, SealBrokenError, new_key

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

CHUNK_BYTES: Final = 65_536
SEALED_CHUNK_BYTES: Final = CHUNK_BYTES + TAG_BYTES
MAGIC: Final = b"kith sealed 1\n"
HEADER_BYTES: Final = len(MAGIC) + KEY_BYTES + OVERHEAD_BYTES


class SealedWriter:
    """Encrypts a stream into a file. Buffers partial chunks until ``finish``; a file without it is invalid."""

    def __init__(self, file: IO[bytes], key: bytes) -> None:
        self._file, self._chunks = file, Chunks(key)
        self._held = bytearray()
        self._place = 0

    def write(self, block: ReadableBuffer) -> None:
        """Raises OSError."""
        self._held += block
        # The last chunk is marked as such. Keep a full chunk until it is known whether more data follows.
        while len(self._held) > CHUNK_BYTES:
            self._put(self._held[:CHUNK_BYTES], last=False)
            del self._held[:CHUNK_BYTES]

    def finish(self) -> None:
        """Write the last chunk and flush. Call once. Raises OSError."""
        self._put(self._held, last=True)
        self._held.clear()
        self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()

    def _put(self, chunk: bytearray, last: bool) -> None:
        self._file.write(self._chunks.close(chunk, self._place, last))
        self._place += 1


class SealedReader(io.RawIOBase):
    """Decrypts a file of :class:`SealedWriter` that begins at byte ``start``. Closing it closes the file.

    Raises:
      SealBrokenError: truncated, altered, or encrypted under another key; reads raise it too.
    """

    def __init__(self, file: IO[bytes], key: bytes, start: int = 0) -> None:
        self._file, self._chunks, self._start = file, Chunks(key), start
        size = file.seek(0, os.SEEK_END) - start
        self._last = max(0, -(-size // SEALED_CHUNK_BYTES) - 1)
        self._place, self._chunk = -1, b""
        self._at = 0
        self._size = self._last * CHUNK_BYTES + len(self._opened(self._last))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError("seek before the start of the file")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        place, offset = divmod(self._at, CHUNK_BYTES)
        if self._at >= self._size:
            return 0
        view = memoryview(buffer).cast("B")
        piece = self._opened(place)[offset : offset + len(view)]
        view[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)

    def close(self) -> None:
        self._file.close()
        super().close()

    def _opened(self, place: int) -> bytes:
        if place != self._place:
            self._file.seek(self._start + place * SEALED_CHUNK_BYTES)
            sealed = self._file.read(SEALED_CHUNK_BYTES)
            self._chunk = self._chunks.open(sealed, place, place == self._last)
            self._place = place
        return self._chunk


@dataclass(frozen=True)
class SealedFile:
    """Encrypted file of a gallery. ``purpose``: authenticated, so that one file cannot replace another."""

    path: Path
    seal: Seal
    purpose: str

    @contextmanager
    def writing(self) -> Iterator[SealedWriter]:
        """Open for writing. The caller calls ``finish``. Raises OSError."""
        key = new_key()
        with self.path.open("wb") as file:
            file.write(MAGIC + self.seal.close(key, self.purpose))
            yield SealedWriter(file, key)

    def open(self, _mode: Literal["rb"] = "rb", /) -> BinaryIO:
        """Raises OSError; SealBrokenError."""
        file = self.path.open("rb")
        try:
            header = file.read(HEADER_BYTES)
            if not header.startswith(MAGIC):
                raise SealBrokenError(f"{self.purpose} is not an encrypted file")
            key = self.seal.open(header[len(MAGIC) :], self.purpose)
            return io.BufferedReader(SealedReader(file, key, HEADER_BYTES), CHUNK_BYTES)
        except BaseException:
            file.close()
            raise
