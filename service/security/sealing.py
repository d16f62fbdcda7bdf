"""Encryption of a gallery's rows under its data key, and keyed hashes to look them up. Pure.

AES-256-GCM (NIST SP 800-38D) with a random 96-bit nonce before each ciphertext. The authenticated data name the purpose
of the value, so that a stored crop cannot replace a name. One key encrypts at most 2**32 values (ibid., 8.3). Without
the key, values cannot be read and hashes cannot be tested against guesses; deleting the key erases the gallery.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from models.runtime.network import Float

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16
OVERHEAD_BYTES: Final = NONCE_BYTES + TAG_BYTES
"""Length that encryption adds to a value."""
VECTOR_TYPE: Final = np.dtype("<f4")
PSEUDONYM_DIGITS: Final = 32
ENCODER: Final = json.JSONEncoder(separators=(",", ":"))
"""Reused: json.dumps creates an encoder per value."""


class SealBrokenError(Exception):
    """Value that was altered, or belongs to another key or purpose."""


def new_key() -> bytes:
    return AESGCM.generate_key(8 * KEY_BYTES)


def derived(key: bytes, purpose: str) -> bytes:
    """Derive a key for one purpose (RFC 5869, 2.3). ``key``: uniformly random."""
    return HKDFExpand(SHA256(), KEY_BYTES, b"kith " + purpose.encode()).derive(key)


class Seal:
    """Encryption under the data key of one gallery. Thread-safe."""

    def __init__(self, key: bytes | Callable[[], bytes]) -> None:
        """``key``: the key or a function that returns it. The first use calls the function and passes on its errors."""
        self._key = key

    @cached_property
    def _keys(self) -> tuple[AESGCM, bytes]:
        key = self._key() if callable(self._key) else self._key
        return AESGCM(derived(key, "sealing")), derived(key, "lookup")

    @property
    def _cipher(self) -> AESGCM:
        return self._keys[0]

    def close(self, value: bytes, purpose: str) -> bytes:
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, value, purpose.encode())

    def open(self, sealed: bytes, purpose: str) -> bytes:
        """Raises SealBrokenError."""
        try:
            return self._cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], purpose.encode())
        except (InvalidTag, ValueError) as error:
            raise SealBrokenError(f"an encrypted {purpose} cannot be decrypted") from error

    def close_json(self, value: Any, purpose: str) -> bytes:
        return self.close(ENCODER.encode(value).encode(), purpose)

    def open_json(self, sealed: bytes, purpose: str) -> Any:
        """Raises SealBrokenError."""
        return json.loads(self.open(sealed, purpose))

    def close_vectors(self, vectors: Float, generation: int) -> list[bytes]:
        """Encrypt (n, d) vectors of a generation. All results have the same length."""
        purpose = vector_purpose(generation)
        return [self.close(row.tobytes(), purpose) for row in np.ascontiguousarray(vectors, VECTOR_TYPE)]

    def open_vectors(self, sealed: Sequence[bytes], generation: int, dimension: int) -> Float:
        """Return (n, d) float32. Raises SealBrokenError."""
        purpose, decrypt = vector_purpose(generation).encode(), self._cipher.decrypt
        try:
            opened = [decrypt(value[:NONCE_BYTES], value[NONCE_BYTES:], purpose) for value in sealed]
            return np.frombuffer(b"".join(opened), VECTOR_TYPE).reshape(len(sealed), dimension).astype(np.float32)
        except (InvalidTag, ValueError) as error:
            raise SealBrokenError("an encrypted vector cannot be decrypted") from error

    def pseudonym(self, kind: str, text: str) -> str:
        """Return a keyed hash of ``text`` as 32 hexadecimal digits. The same text always gives the same hash."""
        return hmac.digest(self._keys[1], f"{kind}\0{text}".encode(), "sha256").hex()[:PSEUDONYM_DIGITS]


class Chunks:
    """Encryption of one file's chunks, under a key used for nothing else.

    Each chunk is bound to its position, and the last one is marked, so chunks cannot be removed, moved or cut off
    (STREAM of Hoang, Reyhanitabar, Rogaway and Vizar, CRYPTO 2015, figure 10).
    """

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(derived(key, "chunks"))

    def close(self, chunk: bytes | bytearray, place: int, last: bool) -> bytes:
        """Return TAG_BYTES more than given. Encrypt each position only once."""
        return self._cipher.encrypt(_nonce(place, last), chunk, None)

    def open(self, sealed: bytes, place: int, last: bool) -> bytes:
        """Raises SealBrokenError."""
        try:
            return self._cipher.decrypt(_nonce(place, last), sealed, None)
        except (InvalidTag, ValueError) as error:
            raise SealBrokenError(f"chunk {place} of an encrypted file cannot be decrypted") from error


def _nonce(place: int, last: bool) -> bytes:
    return place.to_bytes(NONCE_BYTES - 1, "big") + bytes([last])


def vector_purpose(generation: int) -> str:
    return f"vector {generation}"
