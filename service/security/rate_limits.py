"""Token buckets for rate limits (https://en.wikipedia.org/wiki/Token_bucket). Pure: callers pass the time.

A bucket holds up to ``burst`` tokens and refills at ``rate`` per second. A request takes one token or is refused. Each
process has its own buckets. Not thread-safe.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

MAX_BUCKETS: Final = 10_000
"""About 200 bytes each. The least recently used bucket is evicted first."""


@dataclass(frozen=True)
class Limit:
    """``rate``: tokens per second. ``burst``: capacity, at least 1."""

    rate: float
    burst: int

    @property
    def window_s(self) -> int:
        """Seconds that an empty bucket takes to fill, at least 1."""
        return max(1, math.ceil(self.burst / self.rate))


@dataclass(frozen=True)
class Standing:
    """Bucket state after a request.

    ``passes``: whether the request is allowed. ``remaining``: further requests allowed now. ``full_s`` and ``next_s``:
    seconds, rounded up, until the bucket is full and until it has a token (0: it has one).
    """

    passes: bool
    remaining: int
    full_s: int
    next_s: int


class Buckets:
    def __init__(self, most: int = MAX_BUCKETS) -> None:
        self._most = most
        self._buckets = OrderedDict[str, tuple[float, float]]()

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, name: str, limit: Limit, now: float) -> Standing:
        """Take a token if the bucket has one. ``now``: seconds of a monotonic clock."""
        tokens = self._tokens(name, limit, now)
        passes = tokens >= 1
        if passes:
            tokens -= 1
        self._put(name, tokens, now)
        next_s = 0 if tokens >= 1 else math.ceil((1 - tokens) / limit.rate)
        return Standing(passes, int(tokens), math.ceil((limit.burst - tokens) / limit.rate), next_s)

    def wait_s(self, name: str, limit: Limit, now: float) -> int:
        """Return the seconds until a request would pass. Takes no token."""
        tokens = self._tokens(name, limit, now)
        return 0 if tokens >= 1 else math.ceil((1 - tokens) / limit.rate)

    def _put(self, name: str, tokens: float, now: float) -> None:
        self._buckets[name] = (tokens, now)
        self._buckets.move_to_end(name)
        if len(self._buckets) > self._most:
            self._buckets.popitem(last=False)

    def _tokens(self, name: str, limit: Limit, now: float) -> float:
        tokens, then = self._buckets.get(name, (float(limit.burst), now))
        return min(float(limit.burst), tokens + max(0.0, now - then) * limit.rate)
