"""Runs ``kith`` without encryption, as a control for tests that search for plaintext."""

from __future__ import annotations

import os
from typing import Any

from service.security import sealing


class InClear:
    """Drop-in replacement of AESGCM that does not encrypt."""

    def __init__(self, _key: bytes) -> None:
        pass

    @staticmethod
    def generate_key(bits: int) -> bytes:
        return os.urandom(bits // 8)

    def encrypt(self, _nonce: bytes, value: bytes, _purpose: bytes | None) -> bytes:
        return bytes(value) + bytes(sealing.TAG_BYTES)

    def decrypt(self, _nonce: bytes, value: bytes, _purpose: bytes | None) -> bytes:
        return bytes(value[: -sealing.TAG_BYTES])


def unseal() -> None:
    replaced: Any = sealing
    replaced.AESGCM = InClear


if __name__ == "__main__":
    unseal()
    from service.cli.main import main

    main()
