"""How many requests somebody may send: a bucket of tokens each (https://en.wikipedia.org/wiki/Token_bucket). Pure: the
clock is the caller's.

A bucket holds ``burst`` tokens and is filled at ``rate`` a second; a request takes one, or is refused. Buckets are
those of one process. Not safe to share between threads.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

MOST_BUCKETS: Final = 10_000
"""Some 200 bytes each; that which was asked least lately goes, full or not."""


@dataclass(frozen=True)
class Limit:
    """``rate``: tokens a second; ``burst``: at most, at least 1."""

    rate: float
    burst: int

    @property
    def window_s(self) -> int:
        """In which an empty bucket is filled, at least 1."""
        return max(1, math.ceil(self.burst / self.rate))


@dataclass(frozen=True)
class Standing:
    """After a request: whether it may pass, how many more may at once, and in how many seconds (rounded up) the bucket
    is full, and has a token again (0: it has one)."""

    passes: bool
    remaining: int
    full_s: int
    next_s: int


class Buckets:
    def __init__(self, most: int = MOST_BUCKETS) -> None:
        self._most = most
        self._buckets = OrderedDict[str, tuple[float, float]]()

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, name: str, limit: Limit, now: float, cost: int = 1) -> Standing:
        """Take ``cost`` tokens if the bucket has them. A cost above the burst passes where the bucket is full, and
        leaves a debt. ``now``: seconds of a clock that never goes back."""
        tokens = self._tokens(name, limit, now)
        needed = min(cost, limit.burst)
        passes = tokens >= needed
        if passes:
            tokens -= cost
        self._put(name, tokens, now)
        next_s = 0 if tokens >= needed else math.ceil((needed - tokens) / limit.rate)
        return Standing(passes, max(0, int(tokens)), math.ceil((limit.burst - tokens) / limit.rate), next_s)

    def charge(self, name: str, limit: Limit, now: float, cost: int) -> None:
        """Take ``cost`` tokens whether the bucket has them or not."""
        self._put(name, self._tokens(name, limit, now) - cost, now)

    def left(self, name: str, limit: Limit, now: float) -> float:
        """Return the tokens that a bucket has; below 0 they are a debt."""
        return self._tokens(name, limit, now)

    def wait_s(self, name: str, limit: Limit, now: float) -> int:
        """Until a request would pass; nothing is taken."""
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
