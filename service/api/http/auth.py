"""Authentication of requests by API key."""

from __future__ import annotations

import hmac
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final

from starlette.datastructures import Headers

from service.core.errors import ForeignOriginError, UnauthorizedError
from service.security.addresses import is_loopback
from service.security.callers import ANONYMOUS, OPERATOR, Caller
from service.settings import Settings
from service.usecases.backend import Backend

INACTIVE_KEY_REMEDY: Final = "Ask the operator of the service for a new key (docs/keys.md)."
INACTIVE_KEY_STATES: Final = {
    "revoked": "was revoked",
    "expired": "has expired",
    "altered": "was altered in the database",
}
HOST_HEADER: Final = re.compile(
    r"(\[(?P<ipv6>[0-9a-f]*:[0-9a-f:.]*)\]|(?P<name>[a-z0-9.-]+))(:[0-9]{0,5})?", re.IGNORECASE
)
"""A host name, an IPv4 address or a bracketed IPv6 address, with an optional port (RFC 9110, 7.2)."""


@dataclass
class Authenticator:
    """Identify the caller of each request. Use it on the event loop only."""

    settings: Settings

    def __post_init__(self) -> None:
        settings = self.settings
        self._operator_key = settings.api_key.get_secret_value().encode() if settings.api_key else None
        self._allow_anonymous = settings.allow_anonymous or is_loopback(settings.host)
        self._check_origin = not settings.allow_anonymous

    async def authenticate(self, headers: Headers, backend: Backend) -> Caller:
        """Return the caller.

        Raises:
            UnauthorizedError: a key is required, and is missing or invalid.
            ForeignOriginError: no key is required, and the request came from another origin.
            StorageError, MasterKeyError: the keys cannot be read.
        """
        token = _read_token(headers)
        if self._is_operator_key(token):
            return OPERATOR
        if token is None and self._operator_key is not None:
            raise UnauthorizedError("the API key is missing")
        ring = backend.keys.cached_ring()
        if ring is None:
            ring = await backend.threads.run(backend.keys.ring)
        if token is None or (self._operator_key is None and not len(ring)):
            if len(ring) or not self._allow_anonymous:
                raise UnauthorizedError("the API key is missing")
            if self._check_origin:
                check_origin(headers)
            return ANONYMOUS
        key, now = ring.known(token), datetime.now(UTC)
        if key is None:
            raise UnauthorizedError("the API key is wrong")
        if (state := key.state(now)) != "active":
            raise UnauthorizedError(f"the API key {INACTIVE_KEY_STATES[state]}", INACTIVE_KEY_REMEDY)
        backend.key_uses.note(key.id, now)
        return Caller(f"key:{key.id}", key.rights)

    def _is_operator_key(self, token: str | None) -> bool:
        if token is None or self._operator_key is None:
            return False
        return hmac.compare_digest(token.encode("latin-1"), self._operator_key)


def check_origin(headers: Headers) -> None:
    """Reject requests that a web page of another origin makes a local browser send.

    A page can reach a loopback service by DNS rebinding, which shows in Host, or by CSRF, which shows in Origin.

    Raises ForeignOriginError.
    """
    host = headers.get("host", "")
    if not _is_loopback_host(host):
        raise ForeignOriginError("the request is for another host than this machine's loopback address")
    origin = headers.get("origin")
    if origin is not None and origin.lower() not in (f"http://{host.lower()}", f"https://{host.lower()}"):
        raise ForeignOriginError("the request was sent by a web page of another origin")


@lru_cache(maxsize=64)
def _is_loopback_host(host: str) -> bool:
    """Check that the whole header names loopback: a prefix proves nothing (``localhost:1@evil.example``)."""
    parts = HOST_HEADER.fullmatch(host)
    return parts is not None and is_loopback((parts["ipv6"] or parts["name"]).lower())


def _read_token(headers: Headers) -> str | None:
    if (token := headers.get("x-api-key")) is not None:
        return token
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    return credentials.strip() if scheme.lower() == "bearer" else None
