"""Hash chain of audit lines: altering, removing or inserting a line breaks the chain there. Pure.

The hash of a line is SHA-256 over the previous hash and the line as JSON with sorted keys. Truncating a chain, or
rewriting it from some line on, leaves it consistent in itself. An anchor stored elsewhere detects that, or the MAC of
the head, which requires a secret.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final

BEFORE_ALL: Final = "0" * 64


@dataclass(frozen=True)
class Line:
    """One operation, completed or refused.

    ``number``: position in its chain, from 1. ``subject``: a pseudonym. ``details``: no names, photos or embeddings.
    """

    number: int
    at: datetime
    event: str
    outcome: str
    actor: str
    request_id: str | None
    gallery: str | None
    subject: str | None
    details: dict[str, Any]

    def hash(self, before: str) -> str:
        """Return 64 hexadecimal digits. ``before``: the previous line's hash, BEFORE_ALL for the first line."""
        document = {**asdict(self), "at": self.at.astimezone(UTC).isoformat(timespec="microseconds")}
        text = json.dumps(document, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(f"{before}\n{text}".encode()).hexdigest()


def mac(secret: bytes, number: int, last_hash: str) -> str:
    """Return the MAC of a chain's head."""
    return hmac.digest(secret, f"{number} {last_hash}".encode(), "sha256").hex()
