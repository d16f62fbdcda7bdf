"""``kith`` with everything in clear that should be sealed: what looks for it must find it."""

from __future__ import annotations

import os
from typing import Any

from service.security import sealing


class InClear:
    """In the place of AESGCM."""

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
