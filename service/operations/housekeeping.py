"""Background writes: deletion by age, erasure from memory and SQLite's log, and the last use of API keys."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Final

from service.core.actor import Threads
from service.core.clock import Clock
from service.core.errors import ClockSteppedError, StorageError
from service.core.periodic import PeriodicTask
from service.domain.gallery import Gallery
from service.storage.audit.log import prune_lines
from service.storage.privacy.retention import Retention
from service.storage.repositories.jobs import JobStore
from service.storage.repositories.store import Store

SWEEP_INTERVAL: Final = timedelta(hours=1)
CHECK_INTERVAL_S: Final = 30.0
"""Time between checks of caches, SQLite's log, and the sweep time."""
log = logging.getLogger(__name__)


class Housekeeping(PeriodicTask):
    """Housekeeping task. ``changed``: called with each gallery that lost templates. ``tidy``: deletes files of jobs.

    ``audit_days``, ``jobs_days``: age at which audit lines and finished jobs are deleted.
    """

    def __init__(
        self,
        store: Store,
        retention: Retention,
        audit_days: float = 365,
        jobs_days: float = 14,
        changed: Callable[[Gallery], None] = lambda gallery: None,
        tidy: Callable[[JobStore], None] = lambda jobs: None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(CHECK_INTERVAL_S, "housekeeping failed", log)
        self._database = store.database
        self._store = store
        self._changed = changed
        self._tidy = tidy
        self._jobs_days = jobs_days
        self._clock = Clock() if clock is None else clock
        self._retention = retention
        self._audit_age = timedelta(days=audit_days)
        self._next_s: float | None = None
        """Time of the next sweep on the boot clock, which clock changes do not affect."""
        self.paused: ClockSteppedError | None = None
        """Reason why retention is paused."""
        self._uses = dict[str, datetime]()
        """Last use of API keys that is not written yet."""
        self._threads = Threads(1, "housekeeping")

    def note_use(self, key_id: str, at: datetime) -> None:
        """Note the last use of an API key. Call on the event loop: requests do not wait for the database."""
        self._uses[key_id] = at

    async def _close(self) -> None:
        with suppress(StorageError):
            await self._write_uses()
        self._threads.shutdown()

    async def _look(self) -> None:
        try:
            await self._threads.run(self.look)
        finally:
            await self._write_uses()

    async def _write_uses(self) -> None:
        noted, self._uses = self._uses, {}
        if noted:
            await self._threads.run(self._store.keys.record_usage, noted)

    def look(self) -> None:
        """Do one round of housekeeping; blocks."""
        try:
            self._store.galleries.evict_changed()
            now = self._checked_now()
            if now is not None and (self._next_s is None or self._clock.boot_s() >= self._next_s):
                self._sweep(now)
            self._store.receivers.sweep(now)
        finally:
            self._database.truncate_wal()  # other processes may have deleted data too

    def _checked_now(self) -> datetime | None:
        """Return the current time; None: the clock is not reliable."""
        try:
            now = self._clock.check(self._database.server_time())
        except ClockSteppedError as error:
            if self.paused is None:
                log.error("retention is paused: %s. %s", error.detail, error.remedy)
            self.paused = error
            return None
        self.paused = None
        return now

    def _sweep(self, now: datetime) -> None:
        swept = self._retention.sweep(now, lambda: self._stopping)
        if swept.removed:
            log.info("erased after expiry: %s", ", ".join(f"{count} {kind}" for kind, count in swept.removed.items()))
        for gallery in swept.galleries:
            self._changed(gallery)
        prune_lines(self._database, now - self._audit_age, lambda: self._stopping)
        self._store.changes.trim_all(lambda: self._stopping)
        self._store.jobs.delete_finished(self._jobs_days)
        self._store.albums.delete_expired(now)
        self._tidy(self._store.jobs)
        self._next_s = self._clock.boot_s() + SWEEP_INTERVAL.total_seconds()
