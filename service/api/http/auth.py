"""Authentication of requests by API key, and rate limits per caller."""

from __future__ import annotations

import hmac
import math
import re
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final, NoReturn

from starlette.datastructures import Headers
from starlette.types import Scope

from service.core.errors import ForeignOriginError, RateLimitedError, UnauthorizedError
from service.security.addresses import is_loopback, owner_of
from service.security.callers import ANONYMOUS, OPERATOR, Caller
from service.security.rate_limits import Buckets, Limit, Standing
from service.settings import Settings
from service.usecases.backend import Backend

WRONG_KEY_LIMIT: Final = Limit(rate=0.2, burst=10)
"""Wrong keys that one address may send before it gets 429."""
WRONG_KEY_REMEDY: Final = "Send a valid key, which is accepted at once, or retry after the seconds in Retry-After."
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
RATE_LIMIT_POLICY: Final = "requests"
"""Policy name in the RateLimit headers."""


@dataclass
class Authenticator:
    """Identify the caller of each request. Use it on the event loop only."""

    settings: Settings
    _wrong_keys: Buckets = field(default_factory=Buckets)
    _requests: Buckets = field(default_factory=Buckets)

    def __post_init__(self) -> None:
        settings = self.settings
        self._operator_key = settings.api_key.get_secret_value().encode() if settings.api_key else None
        self._allow_anonymous = settings.allow_anonymous or is_loopback(settings.host)
        self._check_origin = not settings.allow_anonymous
        self._default_limit = (
            None if settings.rate_limit is None else rate_limit(settings.rate_limit, settings.rate_burst)
        )

    async def authenticate(self, scope: Scope, headers: Headers, backend: Backend) -> tuple[Caller, Limit | None]:
        """Return the caller and its rate limit.

        Raises:
            UnauthorizedError: a key is required, and is missing or invalid.
            RateLimitedError: the address sent too many wrong keys.
            ForeignOriginError: no key is required, and the request came from another origin.
            StorageError, MasterKeyError: the keys cannot be read.
        """
        token = _read_token(headers)
        if self._is_operator_key(token):
            return OPERATOR, self._default_limit
        if token is None and self._operator_key is not None:
            raise UnauthorizedError("the API key is missing")
        ring = backend.operations.keys.cached_ring()
        if ring is None:
            ring = await backend.run(backend.operations.keys.ring)
        if token is None or (self._operator_key is None and not len(ring)):
            if len(ring) or not self._allow_anonymous:
                raise UnauthorizedError("the API key is missing")
            if self._check_origin:
                check_origin(headers)
            return ANONYMOUS, self._default_limit
        key, now = ring.known(token), datetime.now(UTC)
        if key is None:
            self._reject_wrong_key(_client_address(scope))
        if (state := key.state(now)) != "active":
            raise UnauthorizedError(f"the API key {INACTIVE_KEY_STATES[state]}", INACTIVE_KEY_REMEDY)
        backend.operations.key_uses.note(key.id, now)
        limit = self._default_limit if key.rate is None else rate_limit(key.rate, key.burst)
        return Caller(f"key:{key.id}", key.rights), limit

    def _is_operator_key(self, token: str | None) -> bool:
        if token is None or self._operator_key is None:
            return False
        return hmac.compare_digest(token.encode("latin-1"), self._operator_key)

    def _reject_wrong_key(self, address: str) -> NoReturn:
        now = time.monotonic()
        wait_s = self._wrong_keys.wait_s(address, WRONG_KEY_LIMIT, now)
        if wait_s or not self._wrong_keys.take(address, WRONG_KEY_LIMIT, now).passes:
            raise RateLimitedError("too many wrong API keys came from this address", max(1, wait_s), WRONG_KEY_REMEDY)
        raise UnauthorizedError("the API key is wrong")

    def count_request(self, caller: Caller, limit: Limit) -> Standing:
        """Take a token for this request from the caller's bucket."""
        return self._requests.take(caller.name, limit, time.monotonic())


def rate_limit(rate: float, burst: int | None) -> Limit:
    """Return a limit of ``rate`` requests a second. ``burst`` None: as many as one second allows, at least 1."""
    return Limit(rate, max(1, math.ceil(rate)) if burst is None else burst)


def rate_limit_headers(limit: Limit, standing: Standing) -> list[tuple[bytes, bytes]]:
    """Return RateLimit-Policy and RateLimit (draft-ietf-httpapi-ratelimit-headers-11)."""
    policy = f'"{RATE_LIMIT_POLICY}";q={limit.burst};w={limit.window_s}'
    remaining = f'"{RATE_LIMIT_POLICY}";r={standing.remaining};t={standing.full_s}'
    return [(b"ratelimit-policy", policy.encode()), (b"ratelimit", remaining.encode())]


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


def _client_address(scope: Scope) -> str:
    return owner_of((scope["client"][0] if scope.get("client") else "")[:64])
