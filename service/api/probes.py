"""Budget of embeddings that a caller may have compared with enrolled subjects.

An embedding can be anything, a photo only what a camera gives: with enough chosen embeddings, answers give a template
(bench/results/template_recovery.md). Most of what an attacker learns comes from probes near a threshold, so that a near
miss costs many times what another probe costs.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, Literal

from service.api.permissions import Caller
from service.audit_writer import AuditWriter
from service.errors import ProbeBudgetError
from service.gallery.subjects import Gallery
from service.measures import Measures
from service.security.limits import Buckets, Limit

BURST_S: Final = 3600
"""Seconds of the rate that a caller may use at once: an hour, so that a busy one does not wait."""
NEAR_MISS_COST: Final = 300
"""Tokens of a probe that ends uncertain or refused: at 2 tokens a second 24 at once, then one in 2.5 minutes."""
PHOTO_NEAR_MISS_COST: Final = 30
"""The same for a photo that is compared at a risk of the request's own: at 2 tokens a second 240 at once. Varied photos
and chosen thresholds measure a similarity by bisection, and cameras send many uncertain photos."""
NEAR_MISSES_NOTED: Final = 20
"""Near misses after which the audit is told, if they are at least the share below of the probes since the last line."""
SUSPICIOUS_SHARE: Final = 0.1
NOTED_AGAIN_S: Final = 60.0
"""Shortest time between two lines of the audit that say that one caller's budget is used up."""


@dataclass
class _Tally:
    """What a caller sent since the last line of the audit. ``exhausted_at``: time of the last line about its budget;
    ``under_way``: tokens of the probes whose outcome is not known yet, if all are near misses; ``waiting``: requests
    that wait for one of those."""

    probes: int = 0
    near_misses: int = 0
    exhausted_at: float = -math.inf
    under_way: int = 0
    waiting: list[asyncio.Future[None]] = field(default_factory=list)


class ProbeBudget:
    """``rate``: tokens a second of each caller. Of one event loop and one process, as rate limits are."""

    def __init__(self, rate: float, audit: AuditWriter, measures: Measures) -> None:
        self._limit = Limit(rate, max(1, math.ceil(rate * BURST_S)))
        self._audit = audit
        self._measures = measures
        self._buckets = Buckets()
        self._tallies: dict[str, _Tally] = {}  # of callers with a valid key, who are few

    @asynccontextmanager
    async def taken(
        self, caller: Caller, gallery: Gallery | None, probes: int, near_miss_cost: int = NEAR_MISS_COST
    ) -> AsyncIterator[None]:
        """Take a token for each probe before it is compared. ``gallery``: None if there are none.

        Until the block ends, each probe may turn out to be a near miss: a request waits while those under way could use
        up the caller's tokens. Otherwise concurrent requests would all pass before the first of them is charged.

        Raises:
            ProbeBudgetError: the caller has too few.
            AuditUnwrittenError: as AuditWriter.probed.
        """
        if gallery is None or not probes:
            yield
            return
        tally = self._tallies.setdefault(caller.name, _Tally())
        possible = probes * near_miss_cost
        while tally.under_way and tally.under_way + possible > self._left(caller):
            tally.waiting.append(asyncio.get_running_loop().create_future())
            await tally.waiting[-1]
        await self._take(caller, gallery, probes, tally)
        tally.under_way += possible
        try:
            yield
        finally:
            tally.under_way -= possible
            waiting, tally.waiting = tally.waiting, []
            for each in waiting:
                if not each.done():
                    each.set_result(None)

    def _left(self, caller: Caller) -> float:
        return self._buckets.left(caller.name, self._limit, time.monotonic())

    async def _take(self, caller: Caller, gallery: Gallery, probes: int, tally: _Tally) -> None:
        now = time.monotonic()
        standing = self._buckets.take(caller.name, self._limit, now, probes)
        if standing.passes:
            tally.probes += probes
            return
        if now - tally.exhausted_at >= NOTED_AGAIN_S:
            tally.exhausted_at = now
            await self._note(gallery, tally, "exhausted")
        raise ProbeBudgetError(
            f"more than {self._limit.rate:g} probes a second, each near miss counted as {NEAR_MISS_COST} (photos: "
            f"{PHOTO_NEAR_MISS_COST})",
            max(1, standing.next_s),
        )

    async def settle(
        self, caller: Caller, gallery: Gallery, near_misses: int, near_miss_cost: int = NEAR_MISS_COST
    ) -> None:
        """Charge the probes that were near misses. Raises AuditUnwrittenError as AuditWriter.probed."""
        if not near_misses:
            return
        self._buckets.charge(caller.name, self._limit, time.monotonic(), near_misses * (near_miss_cost - 1))
        tally = self._tallies.setdefault(caller.name, _Tally())
        tally.near_misses += near_misses
        if tally.near_misses < NEAR_MISSES_NOTED:
            return
        if tally.near_misses >= SUSPICIOUS_SHARE * tally.probes:
            await self._note(gallery, tally, "near_misses")
        tally.probes = tally.near_misses = 0

    async def _note(self, gallery: Gallery, tally: _Tally, reason: Literal["exhausted", "near_misses"]) -> None:
        self._measures.probed.add(reason)
        await self._audit.probed(gallery, reason, tally.probes, tally.near_misses)
