"""Rate limit on embeddings that a caller compares with enrolled subjects.

A caller can choose an embedding freely, but not the embedding of a photo. With enough chosen embeddings, the answers
reveal a template (bench/results/template_recovery.md). Probes near a threshold reveal most, so that a near miss costs
many times as much as another probe.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, Literal

from service.api.http.permissions import Caller
from service.core.deadlines import current_deadline
from service.core.errors import ProbeBudgetError
from service.domain.gallery import Gallery
from service.observability.metrics import Metrics
from service.security.rate_limits import Buckets, Limit
from service.storage.audit.writer import AuditWriter

BURST_S: Final = 3600
"""Size of the token bucket, in seconds of its rate."""
NEAR_MISS_COST: Final = 300
"""Tokens of an uncertain or refused probe. At 2 tokens a second: 24 at once, then one every 2.5 minutes."""
PHOTO_NEAR_MISS_COST: Final = 30
"""The same for a photo that is compared at a risk chosen in the request. At 2 tokens a second: 240 at once.

Varied photos and chosen thresholds measure a similarity by bisection, and cameras send many uncertain photos."""
MIN_AUDITED_NEAR_MISSES: Final = 20
"""Near misses after which an audit entry is considered."""
MIN_AUDITED_SHARE: Final = 0.1
"""Minimum share of near misses among the probes since the last entry."""
EXHAUSTED_ENTRY_INTERVAL_S: Final = 60.0
"""Minimum time between two audit entries about one caller's exhausted budget."""


@dataclass
class _Tally:
    """Probes of one caller since the last audit entry, and the time of the last "exhausted" entry.

    ``pending``: tokens of the probes whose outcome is not known yet, if all are near misses. ``waiting``: requests that
    wait for one of those.
    """

    probes: int = 0
    near_misses: int = 0
    exhausted_at_s: float = -math.inf
    pending: int = 0
    waiting: list[asyncio.Future[None]] = field(default_factory=list)


class ProbeBudget:
    """Token bucket per caller, filled at ``rate`` tokens a second. Per process, for one event loop."""

    def __init__(self, rate: float, audit: AuditWriter, metrics: Metrics) -> None:
        self._limit = Limit(rate, max(1, math.ceil(rate * BURST_S)))
        self._audit = audit
        self._metrics = metrics
        self._buckets = Buckets()
        self._tallies: dict[str, _Tally] = {}  # bounded by the number of valid keys

    @asynccontextmanager
    async def taken(
        self, caller: Caller, gallery: Gallery | None, embeddings: int = 0, photos: int = 0
    ) -> AsyncIterator[None]:
        """Take one token per probe, before it is compared. Not charged: a caller who may export templates anyway.

        Until the block ends, each probe may become a near miss: a request waits while those of other requests could use
        up the caller's tokens. Otherwise concurrent requests would all pass before the first of them is charged. A
        request takes all its tokens in one block, since a second one would wait for the first.

        Args:
            gallery: None if there are no probes.
            photos: number of photos that are compared at a risk chosen in the request.

        Raises:
            ProbeBudgetError: the caller has too few tokens.
            DeadlineExceededError, ClientGoneError: the request ended while it waited.
            AuditWriteError: as AuditWriter.probed.
        """
        probes = embeddings + photos
        if gallery is None or not probes or caller.may_export:
            yield
            return
        tally = self._tallies.setdefault(caller.name, _Tally())
        possible = embeddings * NEAR_MISS_COST + photos * PHOTO_NEAR_MISS_COST
        while tally.pending and tally.pending + possible > self._left(caller):
            await self._wait(tally)
        await self._take(caller, gallery, probes, tally)
        tally.pending += possible
        try:
            yield
        finally:
            tally.pending -= possible
            waiting, tally.waiting = tally.waiting, []
            for each in waiting:
                if not each.done():
                    each.set_result(None)

    @staticmethod
    async def _wait(tally: _Tally) -> None:
        """Wait until a request with pending probes ends, or the current request's deadline."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if (deadline := current_deadline()) is not None:
            deadline.bind(turn)
        tally.waiting.append(turn)
        await turn

    def _left(self, caller: Caller) -> float:
        return self._buckets.left(caller.name, self._limit, time.monotonic())

    async def _take(self, caller: Caller, gallery: Gallery, probes: int, tally: _Tally) -> None:
        now_s = time.monotonic()
        standing = self._buckets.take(caller.name, self._limit, now_s, probes)
        if standing.passes:
            tally.probes += probes
            return
        if now_s - tally.exhausted_at_s >= EXHAUSTED_ENTRY_INTERVAL_S:
            tally.exhausted_at_s = now_s
            await self._write_entry(gallery, tally, "exhausted")
        raise ProbeBudgetError(
            f"more than {self._limit.rate:g} probes a second; a near miss counts as {NEAR_MISS_COST}, a photo's as "
            f"{PHOTO_NEAR_MISS_COST}",
            max(1, standing.next_s),
        )

    async def charge_near_misses(
        self, caller: Caller, gallery: Gallery, near_misses: int, near_miss_cost: int = NEAR_MISS_COST
    ) -> None:
        """Charge the extra cost of near misses, unless the caller may export templates.

        Raises AuditWriteError as AuditWriter.probed.
        """
        if not near_misses or caller.may_export:
            return
        self._buckets.charge(caller.name, self._limit, time.monotonic(), near_misses * (near_miss_cost - 1))
        tally = self._tallies.setdefault(caller.name, _Tally())
        tally.near_misses += near_misses
        if tally.near_misses < MIN_AUDITED_NEAR_MISSES:
            return
        if tally.near_misses >= MIN_AUDITED_SHARE * tally.probes:
            await self._write_entry(gallery, tally, "near_misses")
        tally.probes = tally.near_misses = 0

    async def _write_entry(self, gallery: Gallery, tally: _Tally, reason: Literal["exhausted", "near_misses"]) -> None:
        self._metrics.count_probing(reason)
        await self._audit.probed(gallery, reason, tally.probes, tally.near_misses)
