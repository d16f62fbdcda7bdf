"""What is stored of a gallery's people: sealed by the gallery's own key, and found by keyed hashes. Pure.

AES-256-GCM (NIST SP 800-38D) with a random nonce of 96 bits in front of each sealed value; its authenticated data say
what the value is, so that a crop cannot be passed off as a name. A key may seal 2**32 values (ibid., 8.3). Whoever does
not have the key can neither read a value nor guess what a hash is of; without the key the gallery is gone.
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
"""By which a sealed value is longer."""
VECTOR_TYPE: Final = np.dtype("<f4")
PSEUDONYM_DIGITS: Final = 32
ENCODER: Final = json.JSONEncoder(separators=(",", ":"))
"""Made once: json.dumps would make one for each value."""


class SealBrokenError(Exception):
    """A sealed value was altered, or is of another key or purpose."""


def new_key() -> bytes:
    return AESGCM.generate_key(8 * KEY_BYTES)


def derived(key: bytes, purpose: str) -> bytes:
    """A key for one purpose (RFC 5869, 2.3), of a key that is uniformly random already."""
    return HKDFExpand(SHA256(), KEY_BYTES, b"kith " + purpose.encode()).derive(key)


class Seal:
    """Of one gallery. Safe to share between threads."""

    def __init__(self, key: bytes | Callable[[], bytes]) -> None:
        """``key``: or where it is to be had. It is asked for at the first use, which raises what that raises."""
        self._key = key

    @cached_property
    def _keys(self) -> tuple[AESGCM, bytes]:
        key = self._key() if callable(self._key) else self._key
        return AESGCM(derived(key, "sealing")), derived(key, "lookup")

    @property
    def _cipher(self) -> AESGCM:
        return self._keys[0]

    def unlock(self) -> None:
        """Have the key now, as what comes is not to wait for it."""
        self._keys  # noqa: B018 - it is kept

    def close(self, value: bytes, purpose: str) -> bytes:
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, value, purpose.encode())

    def open(self, sealed: bytes, purpose: str) -> bytes:
        """Raises SealBrokenError."""
        try:
            return self._cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], purpose.encode())
        except (InvalidTag, ValueError) as error:
            raise SealBrokenError(f"a sealed {purpose} cannot be opened") from error

    def close_json(self, value: Any, purpose: str) -> bytes:
        return self.close(ENCODER.encode(value).encode(), purpose)

    def open_json(self, sealed: bytes, purpose: str) -> Any:
        """Raises SealBrokenError."""
        return json.loads(self.open(sealed, purpose))

    def close_vectors(self, vectors: Float, generation: int) -> list[bytes]:
        """(n, d) vectors of a generation, each by itself: all as long as one another."""
        purpose, encrypt = vector_purpose(generation).encode(), self._cipher.encrypt
        nonces = os.urandom(NONCE_BYTES * len(vectors))
        each = (nonces[i : i + NONCE_BYTES] for i in range(0, len(nonces), NONCE_BYTES))
        stored = np.ascontiguousarray(vectors, VECTOR_TYPE)
        return [nonce + encrypt(nonce, row.tobytes(), purpose) for nonce, row in zip(each, stored, strict=True)]

    def open_vectors(self, sealed: Sequence[bytes], generation: int, dimension: int) -> Float:
        """(n, d) float32. Raises SealBrokenError."""
        purpose, decrypt = vector_purpose(generation).encode(), self._cipher.decrypt
        try:
            opened = [decrypt(value[:NONCE_BYTES], value[NONCE_BYTES:], purpose) for value in sealed]
            return np.frombuffer(b"".join(opened), VECTOR_TYPE).reshape(len(sealed), dimension).astype(np.float32)
        except (InvalidTag, ValueError) as error:
            raise SealBrokenError("a sealed vector cannot be opened") from error

    def pseudonym(self, kind: str, text: str) -> str:
        """A name for ``text`` that only who has the key can make of it, always the same: 32 hexadecimal digits."""
        return hmac.digest(self._keys[1], f"{kind}\0{text}".encode(), "sha256").hex()[:PSEUDONYM_DIGITS]


class Chunks:
    """Of one file, under a key that seals nothing else: each by its place, and the last one marked, so that none can be
    left out, moved, or taken for the end (STREAM of Hoang, Reyhanitabar, Rogaway and Vizar, CRYPTO 2015, figure 10)."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(derived(key, "chunks"))

    def close(self, chunk: bytes | bytearray, place: int, last: bool) -> bytes:
        """TAG_BYTES longer. No place may be sealed twice."""
        return self._cipher.encrypt(_nonce(place, last), chunk, None)

    def open(self, sealed: bytes, place: int, last: bool) -> bytes:
        """Raises SealBrokenError."""
        try:
            return self._cipher.decrypt(_nonce(place, last), sealed, None)
        except (InvalidTag, ValueError) as error:
            raise SealBrokenError(f"chunk {place} of a sealed file cannot be opened") from error


def _nonce(place: int, last: bool) -> bytes:
    return place.to_bytes(NONCE_BYTES - 1, "big") + bytes([last])


def vector_purpose(generation: int) -> str:
    return f"vector {generation}"
