"""Who sends a request: by its key, or nobody in particular where no key was ever made."""

from __future__ import annotations

import hmac
import ipaddress
import math
import re
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final

from starlette.datastructures import Headers
from starlette.types import Scope

from service.api.context import Context
from service.api.permissions import ANONYMOUS, OPERATOR, Caller
from service.errors import ForeignOriginError, RateLimitedError, UnauthorizedError
from service.security.addresses import is_loopback
from service.security.limits import Buckets, Limit, Standing
from service.settings import Settings

WRONG_KEYS: Final = Limit(rate=0.2, burst=10)
"""Of one address, before it is made to wait."""
RIGHT_KEY: Final = "Send a right key, which passes at once; a wrong one is looked at again after Retry-After."
ANOTHER_KEY: Final = "Ask whoever runs the service for another key (docs/keys.md)."
ENDED: Final = {"revoked": "was revoked", "expired": "has expired", "altered": "was altered in the database"}
HOST: Final = re.compile(r"(\[(?P<ipv6>[0-9a-f]*:[0-9a-f:.]*)\]|(?P<name>[a-z0-9.-]+))(:[0-9]{0,5})?", re.IGNORECASE)
"""A Host header: a name or an IPv4 address, or an IPv6 address in brackets, and a port (RFC 9110, 7.2)."""
POLICY: Final = "requests"
"""Its name in the RateLimit fields."""


@dataclass
class Callers:
    """Asked once for each request, on the event loop."""

    settings: Settings
    _wrong: Buckets = field(default_factory=Buckets)
    _requests: Buckets = field(default_factory=Buckets)

    def __post_init__(self) -> None:
        settings = self.settings
        self._operator = settings.api_key.get_secret_value().encode() if settings.api_key else None
        self._may_be_anonymous = settings.allow_anonymous or is_loopback(settings.host)
        self._guard_origin = not settings.allow_anonymous
        self._limit = None if settings.rate_limit is None else limit(settings.rate_limit, settings.rate_burst)

    async def of(self, scope: Scope, headers: Headers, context: Context) -> tuple[Caller, Limit | None]:
        """Who it is, and how many requests they may send.

        Raises:
            UnauthorizedError: a key is needed, and missing or wrong.
            RateLimitedError: the address sent too many wrong ones.
            ForeignOriginError: no key is needed, but it comes from elsewhere.
            StorageError, MasterKeyError: the keys cannot be read.
        """
        token = _token(headers)
        if self._is_operators(token):
            return OPERATOR, self._limit
        if token is None and self._operator is not None:
            raise UnauthorizedError("the API key is missing")
        ring = context.keys.ring_at_once()
        if ring is None:
            ring = await context.run(context.keys.ring)
        if token is None or (self._operator is None and not len(ring)):
            if len(ring) or not self._may_be_anonymous:
                raise UnauthorizedError("the API key is missing")
            if self._guard_origin:
                check_origin(headers)
            return ANONYMOUS, self._limit
        key, now = ring.known(token), datetime.now(UTC)
        if key is None:
            address = _address(scope)
            wait_s = self._wrong.wait_s(address, WRONG_KEYS, time.monotonic())
            if wait_s or not self._wrong.take(address, WRONG_KEYS, time.monotonic()).passes:
                raise RateLimitedError("too many wrong API keys came from this address", max(1, wait_s), RIGHT_KEY)
            raise UnauthorizedError("the API key is wrong")
        if (state := key.state(now)) != "active":
            raise UnauthorizedError(f"the API key {ENDED[state]}", ANOTHER_KEY)
        context.key_uses.note(key.id, now)
        own = self._limit if key.rate is None else limit(key.rate, key.burst)
        return Caller(f"key:{key.id}", key.rights), own

    def _is_operators(self, token: str | None) -> bool:
        if token is None or self._operator is None:
            return False
        return hmac.compare_digest(token.encode("latin-1"), self._operator)

    def standing(self, caller: Caller, kept_to: Limit) -> Standing:
        """After this request."""
        return self._requests.take(caller.name, kept_to, time.monotonic())


def limit(rate: float, burst: int | None) -> Limit:
    """``burst``: None for as many as come in a second."""
    return Limit(rate, max(1, math.ceil(rate)) if burst is None else burst)


def limit_fields(kept_to: Limit, standing: Standing) -> list[tuple[bytes, bytes]]:
    """RateLimit-Policy and RateLimit (draft-ietf-httpapi-ratelimit-headers-11)."""
    policy = f'"{POLICY}";q={kept_to.burst};w={kept_to.window_s}'
    left = f'"{POLICY}";r={standing.remaining};t={standing.full_s}'
    return [(b"ratelimit-policy", policy.encode()), (b"ratelimit", left.encode())]


def check_origin(headers: Headers) -> None:
    """Whoever serves web pages can have a browser ask what listens on its own machine: under a name that is made to
    resolve to it (DNS rebinding), or from the page (CSRF). The browser says so in Host, or in Origin.

    Raises:
        ForeignOriginError: it does.
    """
    host = headers.get("host", "")
    if not _is_here(host):
        raise ForeignOriginError("the request is for another host than this machine's loopback address")
    origin = headers.get("origin")
    if origin is not None and origin.lower() not in (f"http://{host.lower()}", f"https://{host.lower()}"):
        raise ForeignOriginError("the request was sent by a web page of another origin")


@lru_cache(maxsize=64)
def _is_here(host: str) -> bool:
    """Check that the whole header names loopback: a prefix of it proves nothing (``localhost:1@evil.example``)."""
    parts = HOST.fullmatch(host)
    return parts is not None and is_loopback((parts["ipv6"] or parts["name"]).lower())


def _token(headers: Headers) -> str | None:
    if (given := headers.get("x-api-key")) is not None:
        return given
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    return credentials.strip() if scheme.lower() == "bearer" else None


def _address(scope: Scope) -> str:
    """Of an IPv6 client its network of 64 bits, all of which is one household's."""
    host = (scope["client"][0] if scope.get("client") else "")[:64]  # a proxy may pass on what is no address
    if ":" not in host:
        return host
    try:
        return str(ipaddress.ip_network((host.partition("%")[0], 64), strict=False))
    except ValueError:
        return host
