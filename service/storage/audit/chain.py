"""Lines that each vouch for all before them: whoever alters, removes or inserts one breaks the chain there. Pure.

The hash of a line is SHA-256 of the hash before it and of the line as JSON with sorted keys. A chain cut off at its
end, or made anew from some line on, is sound in itself: that is seen by a hash noted elsewhere, or by the head's MAC,
for which a secret is needed.
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
    """One thing that was done, or refused. ``number``: in its chain, from 1. ``subject``: a pseudonym. ``details``: no
    names, no photos, no embeddings."""

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
        """64 hexadecimal digits; ``before``: the hash of the line before, BEFORE_ALL for the first."""
        document = {**asdict(self), "at": self.at.astimezone(UTC).isoformat(timespec="microseconds")}
        text = json.dumps(document, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(f"{before}\n{text}".encode()).hexdigest()


def mac(secret: bytes, number: int, last_hash: str) -> str:
    """Of a chain's head."""
    return hmac.digest(secret, f"{number} {last_hash}".encode(), "sha256").hex()
