"""Progress of a receiver of events: what is sent to it next, kept in memory while it cannot be recorded."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from service.core.actor import Threads
from service.core.errors import KithError
from service.domain.events import GIVE_UP_AFTER, LONGEST_RETRY, EventFilter, Position, pause_s
from service.storage.events.log import EventLog, StoredEvent
from service.storage.events.outbox import Place
from service.storage.repositories.receivers import ReceiverStore

RECORD_S: Final = 10.0
"""Time after which a place is recorded within a page, or though nothing was sent."""
log = logging.getLogger(__name__)


class Progress:
    """Where a receiver is, and when it is tried again. Waits are on the monotonic clock: no clock change affects them.

    ``stored``: the place in its row. ``place``: what it is now.
    """

    def __init__(self, receivers: ReceiverStore, threads: Threads, receiver_pk: int, stored: Place) -> None:
        self.pk = receiver_pk
        self.stored = self.place = stored
        self.failures = 0
        """Failures since this process last had success."""
        self.has_sent = False
        """Whether an attempt is not recorded."""
        self._receivers = receivers
        self._threads = threads
        self._failed_s = self._due_s = self._recorded_s = time.monotonic()

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._due_s

    def passed(self, position: Position) -> None:
        """Note that events up to a position were sent, or are not wanted."""
        self.place = replace(self.place, position=max(position, self.place.position))

    def succeeded(self) -> None:
        self.failures, self.has_sent = 0, True
        self.place = Place(self.place.position)

    def failed(self, error: str, retry_after_s: float | None = None, is_gone: bool = False) -> None:
        """Note a failed attempt, and wait. Only time between attempts of this process counts as failing."""
        now_s = time.monotonic()
        self.failures, self.has_sent = self.failures + 1, True
        since_s = 0.0 if self.failures == 1 else min(now_s - self._failed_s, LONGEST_RETRY.total_seconds())
        failing_s = GIVE_UP_AFTER.total_seconds() if is_gone else self.place.failing_s + since_s
        since = self.place.failing_since or datetime.now(UTC)
        self.place = Place(self.place.position, failing_s, since, error)
        self._failed_s, self._due_s = now_s, now_s + pause_s(self.failures, retry_after_s)

    async def send(
        self,
        events: EventLog,
        wanted: EventFilter,
        attempt: Callable[[StoredEvent], Awaitable[bool]],
        may_send: Callable[[], bool],
    ) -> bool:
        """Send a page of events in order, up to the first that fails; return whether to go on.

        ``attempt`` sends one, and returns whether the receiver accepted it. ``may_send``: whether this process sends.
        """
        page = await self._threads.run(events.read, self.place.position, wanted)
        try:
            for event in page.events:
                due = await self._threads.run(self._receivers.is_due, self.pk, event.position.event_pk)
                if not may_send() or (due and not await attempt(event)):
                    return False
                self.passed(event.position)
                if not await self.record(at_once=False):
                    return False
            self.passed(page.position)
        finally:
            is_current = await self.record(at_once=self.has_sent)
        return is_current and bool(page.events or page.has_more)  # more may have come while these were sent

    async def record(self, at_once: bool = True) -> bool:
        """Write the place to the row; return False if the receiver was replayed or deleted meanwhile.

        ``at_once``: False if it can wait for RECORD_S.
        """
        if self.place == self.stored or not (at_once or time.monotonic() > self._recorded_s + RECORD_S):
            return True
        wanted = self.place
        try:
            is_current = await self._threads.run(self._receivers.record, self.pk, self.stored, wanted)
        except KithError as error:
            log.warning("the place of receiver %d is not recorded: %s", self.pk, error.detail)
            return True
        if is_current:
            self.stored, self.has_sent, self._recorded_s = wanted, False, time.monotonic()
        return is_current
