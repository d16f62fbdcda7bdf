"""API keys: what a token looks like, what is kept of it, and what its bearer may do. Pure.

A token is ``kith_ID_SECRET``: the id names the key, also in the audit; of the secret, 32 random bytes, only an
HMAC-SHA256 is kept, under a secret of the service that lies in the database wrapped by the master key. Such a secret
cannot be guessed, so that a hash made slow on purpose, as passwords need, would only slow the requests.
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal, get_args

from service.security.sealing import Seal, derived

PREFIX: Final = "kith"
ID_BYTES: Final = 6
SECRET_BYTES: Final = 32
LAST: Final = datetime(9999, 12, 31, tzinfo=UTC)
"""Of all days."""
NOBODYS: Final = "0" * 64
"""Compared with where there is no such key, so that it takes as long."""

Scope = Literal["identify", "read", "enroll", "admin"]
SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)
KeyState = Literal["active", "expired", "revoked", "altered"]


@dataclass(frozen=True)
class Rights:
    """``scopes``: ``admin`` has all of them. ``galleries``: names, None for every gallery that there is or will be."""

    scopes: frozenset[Scope]
    galleries: frozenset[str] | None

    def may(self, scope: Scope | None) -> bool:
        """None: what any key may."""
        return scope is None or scope in self.scopes or "admin" in self.scopes

    @property
    def may_everything(self) -> bool:
        return self.galleries is None and "admin" in self.scopes

    def sees(self, gallery: str) -> bool:
        return self.galleries is None or gallery in self.galleries


EVERYTHING: Final = Rights(frozenset({"admin"}), None)


@dataclass(frozen=True)
class ApiKey:
    """``name``: whose it is, for people. ``rate`` and ``burst``: requests a second and at once; None: as the settings
    say. ``revoked_at``: ahead, where another takes its place. ``used_at``: to some minutes. ``revoked``: whatever a
    clock says. ``altered``: by somebody who had not the service's secret; such a key may nothing."""

    id: str
    digest: str
    name: str
    rights: Rights
    rate: float | None
    burst: int | None
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    used_at: datetime | None = None
    revoked: bool = False
    altered: bool = False

    def state(self, now: datetime) -> KeyState:
        if self.altered:
            return "altered"
        if self.revoked or (self.revoked_at is not None and self.revoked_at <= now):
            return "revoked"
        return "expired" if self.expires_at is not None and self.expires_at <= now else "active"

    def next_expiry(self, now: datetime) -> datetime | None:
        """Of the key that takes its place: it lives as long as this one was meant to."""
        if self.expires_at is None:
            return None
        life = self.expires_at - self.created_at
        return LAST if life > LAST - now else now + life


def new_token() -> tuple[str, str]:
    """A key's id, and its token."""
    key_id = secrets.token_hex(ID_BYTES)
    return key_id, f"{PREFIX}_{key_id}_{secrets.token_hex(SECRET_BYTES)}"


def digest(token: str, secret: bytes) -> str:
    """64 hexadecimal digits, of the whole token: it holds for no other id. ``secret``: the service's."""
    return hmac.digest(secret, token.encode(), "sha256").hex()


def mac(key: ApiKey, secret: bytes) -> str:
    """64 hexadecimal digits: an HMAC-SHA256 of all that is kept of a key but for when it was used, under a key derived
    from ``secret``, the service's. Who can write to the database and has it not gives no key other rights, or life."""
    rights = key.rights
    document = {
        "id": key.id,
        "digest": key.digest,
        "name": key.name,
        "scopes": sorted(rights.scopes),
        "galleries": None if rights.galleries is None else sorted(rights.galleries),
        "rate": None if key.rate is None else float(key.rate),
        "burst": key.burst,
        "created_at": _written(key.created_at),
        "expires_at": _written(key.expires_at),
        "revoked_at": _written(key.revoked_at),
        "revoked": key.revoked,
    }
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hmac.digest(derived(secret, "api key rows"), text.encode(), "sha256").hex()


def _written(at: datetime | None) -> str | None:
    return None if at is None else at.astimezone(UTC).isoformat(timespec="microseconds")


class Keyring:
    """The keys of a database, as they were at one moment. ``seal``: for what is told to a key's bearer and comes back,
    and is not to be read."""

    def __init__(self, secret: bytes, keys: Iterable[ApiKey]) -> None:
        self._secret = secret
        self.seal = Seal(secret)
        self._keys = {key.id: key for key in keys}

    def __len__(self) -> int:
        return len(self._keys)

    def known(self, token: str) -> ApiKey | None:
        """Whose token it is, whatever became of the key; an unknown id takes as long as a wrong secret."""
        key_id = token.split("_", 2)[1] if token.startswith(f"{PREFIX}_") else ""
        key = self._keys.get(key_id)
        expected = NOBODYS if key is None else key.digest
        return key if hmac.compare_digest(digest(token, self._secret), expected) else None
