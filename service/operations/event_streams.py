"""Event streams of one process: how many are open, and when there are new events to read.

One task looks for new events for all streams. Each stream then reads its own pages, so that a slow reader delays no
other and fills no queue.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final, NamedTuple

from service.core.actor import RequestThreads
from service.core.errors import EventsExpiredError, OverloadedError, TooManyStreamsError
from service.core.periodic import PeriodicTask
from service.domain.events import EventFilter
from service.observability.metrics import Metrics
from service.operations.held_lease import CLAIM_S, HeldClaim
from service.storage.events.deliveries import MAX_AGE, MAX_KEPT
from service.storage.events.log import EventLog, StoredEvent
from service.storage.repositories.webhooks import WebhookStore

MAX_STREAMS: Final = 200
"""Open streams of a process."""
MAX_STREAMS_PER_KEY: Final = 10
POLL_S: Final = 1.0
TOGETHER_S: Final = 0.05
"""Events within this time wake the streams only once."""
RESUMABLE: Final = MAX_AGE - timedelta(seconds=CLAIM_S)
"""Age up to which a position can be resumed."""
RETRY_S: Final = 5
TRIES: Final = 3


class Position(NamedTuple):
    """Place in the log. All events up to the key ``pk`` were read; later ones are not older than ``at`` (Unix time)."""

    pk: int
    at: int


class EventStreams(PeriodicTask):
    """Open streams of this process. Use it on the event loop."""

    def __init__(self, log: EventLog, receivers: WebhookStore, threads: RequestThreads, metrics: Metrics) -> None:
        super().__init__(POLL_S, "event streams wait", logging.getLogger(__name__))
        self._events = log
        self._threads = threads
        self._claim = HeldClaim(lambda: threads.run(receivers.claim, "stream"))
        self._metrics = metrics
        self._open = Counter[str]()
        self._end = Position(0, 0)
        """End of the log when this process last looked."""
        self._changed = asyncio.Event()
        self.ending = False
        """Whether open streams should end."""

    def admit(self, caller: str) -> Callable[[], None]:
        """Count a new stream; return the function that ends it. Raises TooManyStreamsError, OverloadedError."""
        if self._open[caller] >= MAX_STREAMS_PER_KEY:
            raise TooManyStreamsError(f"{MAX_STREAMS_PER_KEY} streams of this key are open, the limit", RETRY_S)
        if self.ending or self._open.total() >= MAX_STREAMS:
            raise OverloadedError(f"{MAX_STREAMS} event streams are open, the limit", RETRY_S)
        self._open[caller] += 1
        self._metrics.open_streams += 1
        return partial(self._leave, caller)

    def _leave(self, caller: str) -> None:
        self._open[caller] -= 1
        self._metrics.open_streams -= 1
        if not self._open[caller]:
            del self._open[caller]

    async def begin(self, resumed: Position | None) -> Position:
        """Return the position of a new stream: ``resumed``, or the end. Later events stay stored while it is open.

        Raises EventsExpiredError, StorageError, MasterKeyError.
        """
        await self._claim.hold()
        await self._find_end()
        if resumed is None:
            return self._end
        for _ in range(TRIES):
            if resumed.pk <= self._end.pk:
                break
            await asyncio.sleep(POLL_S)  # another server may know a later end for as long as a transaction lasts
            await self._find_end()
        self._check(resumed)
        return resumed

    async def read(self, position: Position, chosen: EventFilter) -> tuple[list[StoredEvent], Position]:
        """Return wanted events after a position, and the position after them. Raises as :meth:`begin`."""
        end = self._end
        if position.pk >= end.pk:
            return [], max(position, end)
        found, more = await self._threads.run(self._events.read, position.pk, end.pk, chosen)
        self._check(position)  # after reading: a sweep may have deleted some events meanwhile
        return found, end if more is None else Position(more.pk, int(more.at.timestamp()))

    async def wait(self, position: Position, timeout_s: float) -> None:
        """Wait until there are events after a position, or the streams end, at most ``timeout_s``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while position.pk >= self._end.pk and not self.ending:
                    await self._changed.wait()

    def end(self) -> None:
        """End all streams: the server stops."""
        self.ending = True
        self._notify()

    def _check(self, position: Position) -> None:
        oldest = (datetime.now(UTC) - RESUMABLE).timestamp()
        if not self._end.pk - MAX_KEPT <= position.pk <= self._end.pk or position.at < oldest:
            raise EventsExpiredError("events after this position were deleted, or the database was restored")

    async def _look(self) -> None:
        if self._open:
            await self._claim.hold()
            await self._find_end()
            await asyncio.sleep(TOGETHER_S)

    async def _find_end(self) -> None:
        at = int(datetime.now(UTC).timestamp())
        pk = await self._threads.run(self._events.last)
        is_new = pk > self._end.pk
        self._end = Position(pk, at) if (pk, at) > self._end else self._end
        if is_new:
            self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
