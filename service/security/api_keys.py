"""API keys: tokens, scopes, the stored records, and the callers that send them. Pure.

A token is ``kith_ID_SECRET``. The id names the key, also in the audit. The service stores an HMAC-SHA256 of the token,
never its 32 random secret bytes. The HMAC key is a secret of the service, stored in the database under the master key.
A random secret of this length cannot be guessed, so a slow password hash would only slow down requests.
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, get_args

from kith.wire.common import KeyState, Scope
from kith.wire.keys import KeyIn, KeyOut
from service.core.errors import ForbiddenError, GalleryNotFoundError, KithError
from service.security.sealing import Seal, derived

PREFIX: Final = "kith"
ID_BYTES: Final = 6
SECRET_BYTES: Final = 32
MAX_EXPIRY: Final = datetime(9999, 12, 31, tzinfo=UTC)
"""Latest time that can be stored."""
DUMMY_DIGEST: Final = "0" * 64
"""Compared for unknown ids, so that they take as long as known ones."""

SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)


@dataclass(frozen=True)
class Rights:
    """Scopes and galleries that a key may use.

    ``scopes``: ``vectors`` extends the others to embeddings, chosen risks and exact similarities; ``admin`` includes
    all. ``galleries``: names; None allows every gallery, including future ones.
    """

    scopes: frozenset[Scope]
    galleries: frozenset[str] | None

    def may(self, scope: Scope | None) -> bool:
        """Return whether the scope is granted. None: an operation open to every key."""
        return scope is None or scope in self.scopes or "admin" in self.scopes

    @property
    def may_everything(self) -> bool:
        return self.galleries is None and "admin" in self.scopes

    def sees(self, gallery: str) -> bool:
        return self.galleries is None or gallery in self.galleries


EVERYTHING: Final = Rights(frozenset({"admin"}), None)


@dataclass(frozen=True)
class Caller:
    """Sender of a request. ``name``: as in the audit (service.core.actor)."""

    name: str
    rights: Rights

    @property
    def sees_vectors(self) -> bool:
        """True if the caller may compare embeddings with subjects, choose a risk and see exact similarities.

        They reveal templates (docs/decisions.md, 56).
        """
        return self.rights.may("vectors")

    def check_vectors(self, what: str) -> None:
        """Raises ForbiddenError if ``what``, a plural, needs the scope vectors and the caller lacks it."""
        if not self.sees_vectors:
            raise ForbiddenError(f"{what} need the scope 'vectors'", scope="vectors")

    def check_gallery(self, name: str) -> None:
        """Raises GalleryNotFoundError if the key is not for the gallery, as if it did not exist."""
        if not self.rights.sees(name):
            raise mark_hidden(GalleryNotFoundError(f"there is no gallery {name!r}"))


def mark_hidden(error: KithError) -> KithError:
    """Mark a 404 that hides a resource from the caller's key, so that the audit records it."""
    error.hides_existence = True
    return error


OPERATOR: Final = Caller("operator", EVERYTHING)
ANONYMOUS: Final = Caller("anonymous", EVERYTHING)


@dataclass(frozen=True)
class ApiKey:
    """Stored record of one API key.

    ``name``: label for people. ``revoked_at``: a future time while a rotation overlaps. ``used_at``: accurate to a
    minute. ``revoked``: revoked regardless of the clock. ``altered``: the row's MAC does not match; the key is
    rejected.
    """

    id: str
    digest: str
    name: str
    rights: Rights
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
        """Return the expiry of a replacement key, which gets the same lifetime as this one."""
        if self.expires_at is None:
            return None
        life = self.expires_at - self.created_at
        return MAX_EXPIRY if life > MAX_EXPIRY - now else now + life


def rights_of(asked: KeyIn) -> Rights:
    """Return the rights of a requested key."""
    return Rights(frozenset(asked.scopes), None if asked.galleries is None else frozenset(asked.galleries))


def to_key_out(key: ApiKey) -> KeyOut:
    """Convert a key, without its token."""
    scopes, galleries = key.rights.scopes, key.rights.galleries
    rights = {"scopes": sorted(scopes), "galleries": None if galleries is None else sorted(galleries)}
    return KeyOut.model_validate(vars(key) | rights | {"state": key.state(datetime.now(UTC))})


def new_token() -> tuple[str, str]:
    """Return a new key id and its token."""
    key_id = secrets.token_hex(ID_BYTES)
    return key_id, f"{PREFIX}_{key_id}_{secrets.token_hex(SECRET_BYTES)}"


def digest(token: str, secret: bytes) -> str:
    """Return the HMAC of the whole token as 64 hexadecimal digits. ``secret``: the service's."""
    return hmac.digest(secret, token.encode(), "sha256").hex()


def mac(key: ApiKey, secret: bytes) -> str:
    """Return an HMAC-SHA256 over a key's record as 64 hexadecimal digits.

    It covers all fields except ``used_at``. Its key is derived from ``secret``, the service's. It keeps an attacker who
    can write to the database, but lacks the secret, from extending a key's rights or lifetime.
    """
    rights = key.rights
    document = {
        "id": key.id,
        "digest": key.digest,
        "name": key.name,
        "scopes": sorted(rights.scopes),
        "galleries": None if rights.galleries is None else sorted(rights.galleries),
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
    """Snapshot of a database's keys. ``seal``: encrypts values that a client returns unread, such as page cursors."""

    def __init__(self, secret: bytes, keys: Iterable[ApiKey]) -> None:
        self._secret = secret
        self.seal = Seal(secret)
        self._keys = {key.id: key for key in keys}

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, key_id: str) -> ApiKey | None:
        """Return a key in any state."""
        return self._keys.get(key_id)

    def known(self, token: str) -> ApiKey | None:
        """Return the key that a token belongs to, in any state. Unknown ids take as long as wrong secrets."""
        key_id = token.split("_", 2)[1] if token.startswith(f"{PREFIX}_") else ""
        key = self._keys.get(key_id)
        expected = DUMMY_DIGEST if key is None else key.digest
        return key if hmac.compare_digest(digest(token, self._secret), expected) else None
