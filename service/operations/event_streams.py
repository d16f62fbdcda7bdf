"""Event streams of one process: how many are open, and the new events for them.

One task reads and decrypts new events once for all streams at the end of the log. A stream that is behind reads its own
pages, so that a slow reader delays no other and fills no queue.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from service.core.actor import Threads
from service.core.errors import LimitReachedError, OverloadedError, RefusedError
from service.core.periodic import PeriodicTask
from service.domain.events import EventFilter, Position
from service.observability.metrics import Metrics
from service.security.api_keys import Keyring
from service.storage.events.log import EventLog, StoredEvent
from service.storage.repositories.receivers import ReceiverStore

MAX_STREAMS: Final = 200
"""Open streams of a process."""
MAX_STREAMS_PER_KEY: Final = 10
POLL_S: Final = 1.0
TOGETHER_S: Final = 0.25
"""Events within this time wake the streams only once."""
TAIL: Final = 1000
"""Latest events in memory, for all streams."""
RETRY_S: Final = 5


class EventStreams(PeriodicTask):
    """Open streams of this process. Use it on the event loop."""

    def __init__(
        self,
        log: EventLog,
        receivers: ReceiverStore,
        read_ring: Callable[[], Keyring],
        threads: Threads,
        metrics: Metrics,
    ) -> None:
        super().__init__(POLL_S, "event streams wait", logging.getLogger(__name__))
        self._events = log
        self._receivers = receivers
        self._read_ring = read_ring
        self._threads = threads
        self._metrics = metrics
        self._open = Counter[str]()
        self._tail = deque[StoredEvent]()
        """All events after ``_start``, up to ``_end``."""
        self._start = self._end = Position(0, 0)
        self._is_reading = False
        """Whether the end of the log is known, and followed."""
        self._reading = asyncio.Lock()
        self.ring: Keyring
        """API keys, at least as new as the events that were read; set once a stream has begun."""
        self._changed = asyncio.Event()
        self.ending = False
        """Whether open streams should end."""

    def admit(self, caller: str) -> Callable[[], None]:
        """Count a new stream; return the function that ends it. Raises too_many_streams, OverloadedError."""
        if self._open[caller] >= MAX_STREAMS_PER_KEY:
            limit = f"{MAX_STREAMS_PER_KEY} streams of this key are open, the limit"
            raise LimitReachedError("too_many_streams", limit, headers={"Retry-After": str(RETRY_S)})
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

        Raises events_expired, StorageError, MasterKeyError.
        """
        await self._threads.run(self._receivers.claim, "stream")
        await self._read_new()
        if resumed is None:
            return self._end
        await self._check(resumed)
        return resumed

    async def read(self, position: Position, chosen: EventFilter) -> tuple[list[StoredEvent], Position]:
        """Return wanted events after a position, and the position after them. Raises as :meth:`begin`."""
        if position >= self._end:
            return [], position
        if position >= self._start:
            new = (event for event in self._tail if event.position > position)
            return [event for event in new if chosen.wants(event.gallery, event.event)], self._end
        page = await self._threads.run(self._events.read, position, chosen)
        await self._check(position)  # after reading: a sweep may have deleted some events meanwhile
        return page.events, page.position

    async def wait(self, position: Position, timeout_s: float) -> None:
        """Wait until there are events after a position, or the streams end, at most ``timeout_s``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while position >= self._end and not self.ending:
                    await self._changed.wait()

    def end(self) -> None:
        """End all streams: the server stops."""
        self.ending = True
        self._notify()

    async def _check(self, position: Position) -> None:
        _, kept, _ = await self._threads.run(self._receivers.built_in, "stream")
        if not kept.position <= position <= self._end:
            raise RefusedError(
                "events_expired", "events after this position were deleted, or the database was restored"
            )

    async def _look(self) -> None:
        if self._open:
            await self._threads.run(self._receivers.claim, "stream")
            await self._read_new()
            await asyncio.sleep(TOGETHER_S)
        else:
            self._is_reading = False
            self._tail.clear()

    async def _read_new(self) -> None:
        """Read the events since the last look, once for all streams."""
        async with self._reading:
            if not self._is_reading:
                self._start = self._end = max(self._end, await self._threads.run(self._events.end))
                self._is_reading = True
            has_more, has_new = True, False
            while has_more:
                events, self._end, has_more = await self._threads.run(self._events.read, self._end, EventFilter())
                self._tail.extend(events)
                has_new |= bool(events)
            self.ring = await self._threads.run(self._read_ring)
            while len(self._tail) > TAIL:
                self._start = self._tail.popleft().position
        if has_new:
            self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
