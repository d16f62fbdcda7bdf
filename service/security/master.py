"""The master key, which wraps the galleries' keys: whoever lacks it can read none of them."""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from service.errors import MasterKeyError
from service.files import replacing
from service.security.sealing import KEY_BYTES, NONCE_BYTES, derived, new_key

ID_DIGITS: Final = 16


class Wrapper(Protocol):
    """What wraps keys: a key of our own, or a service that holds one."""

    @property
    def id(self) -> str:
        """Names the key; tells nothing of it. At most 64 characters."""

    def wrap(self, key: bytes, purpose: str) -> bytes:
        """Raises MasterKeyError."""

    def unwrap(self, wrapped: bytes, purpose: str) -> bytes:
        """Raises MasterKeyError: it was altered, or is of another key or purpose."""


class LocalKey:
    """A key of 32 bytes."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(derived(key, "wrapping"))
        self.id = hashlib.sha256(derived(key, "master key id")).hexdigest()[:ID_DIGITS]

    @classmethod
    def of_text(cls, text: str) -> LocalKey:
        """Of 32 bytes in base64 or hexadecimal digits. Raises MasterKeyError."""
        stripped = text.strip()
        for read in (bytes.fromhex, lambda given: base64.b64decode(given, validate=True)):
            try:
                key = read(stripped)
            except (ValueError, binascii.Error):
                continue
            if len(key) == KEY_BYTES:
                return cls(key)
        raise MasterKeyError("a master key is 32 bytes, in base64 or hexadecimal digits")

    def wrap(self, key: bytes, purpose: str) -> bytes:
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, key, purpose.encode())

    def unwrap(self, wrapped: bytes, purpose: str) -> bytes:
        try:
            return self._cipher.decrypt(wrapped[:NONCE_BYTES], wrapped[NONCE_BYTES:], purpose.encode())
        except (InvalidTag, ValueError) as error:
            raise MasterKeyError(f"a key that master key {self.id} wrapped was altered") from error


class MasterKeys:
    """The master key that wraps what is new, and those before it, which are still needed for what is old."""

    def __init__(self, current: Wrapper, previous: Sequence[Wrapper] = ()) -> None:
        self.current = current
        self._known = {each.id: each for each in (*previous, current)}

    def unwrap(self, wrapped: bytes, purpose: str, by: str) -> bytes:
        """``by``: the master key's id. Raises MasterKeyError."""
        known = self._known.get(by)
        if known is None:
            raise MasterKeyError(f"the database's keys are wrapped by master key {by}, here is {self.current.id}")
        return known.unwrap(wrapped, purpose)


def read_key(path: Path) -> LocalKey:
    """Raises MasterKeyError: it cannot be read, or is none."""
    try:
        return LocalKey.of_text(path.read_text("ascii"))
    except (OSError, UnicodeDecodeError) as error:
        raise MasterKeyError(f"the master key cannot be read from {path}: {error}") from error


def make_key(path: Path) -> None:
    """Write a new key to a file that only its owner may read.

    Raises:
        MasterKeyError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(base64.b64encode(new_key()) + b"\n")
    except OSError as error:
        raise MasterKeyError(f"the master key cannot be written to {path}: {error}") from error
