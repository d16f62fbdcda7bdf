"""Signatures of webhooks by the scheme of Standard Webhooks (standardwebhooks.com). Pure."""

from __future__ import annotations

import base64
import hmac
import secrets
from typing import Final

PREFIX: Final = "whsec_"
SECRET_BYTES: Final = 32


def new_secret() -> str:
    """Return a random secret: PREFIX and 32 bytes in base64."""
    return PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def signature(secret: str, message_id: str, timestamp: int, body: bytes) -> str:
    """Return the header ``webhook-signature``: version, and HMAC-SHA256 of ID, Unix time and body in base64."""
    key = base64.b64decode(secret.removeprefix(PREFIX))
    signed = hmac.digest(key, f"{message_id}.{timestamp}.".encode() + body, "sha256")
    return f"v1,{base64.b64encode(signed).decode()}"
