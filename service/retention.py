"""Promises about time, kept in the background: what is old goes, and what was deleted stands nowhere for long."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timedelta
from types import TracebackType
from typing import Final, Self

from service.clock import Clock
from service.errors import ClockSteppedError, KithError, MasterKeyError
from service.gallery.database import Database
from service.gallery.retention import Retention
from service.gallery.store import Store
from service.gallery.subjects import Gallery

SWEPT_EVERY: Final = timedelta(hours=1)
AGAIN_AFTER: Final = timedelta(minutes=10)
"""Where a gallery could not be swept."""
LOOKED_EVERY_S: Final = 30.0
"""At memory that may hold names of people erased by another process, at SQLite's log, and at whether it is time."""
log = logging.getLogger(__name__)


class Housekeeping:
    """Use as an async context manager. ``answers_days``: how long answers to keyed requests are kept. ``changed``: told
    of each gallery from which templates went."""

    def __init__(
        self,
        database: Database,
        store: Store,
        retention: Retention,
        answers_days: float,
        changed: Callable[[Gallery], None] = lambda gallery: None,
        clock: Clock | None = None,
        looked_every_s: float = LOOKED_EVERY_S,
    ) -> None:
        self._database = database
        self._store = store
        self._answers_days = answers_days
        self._changed = changed
        self._clock = Clock() if clock is None else clock
        self._looked_every_s = looked_every_s
        self._retention = retention
        self._name = uuid.uuid4().hex
        self._next_s: float | None = None
        """On the clock that counts from boot, which nobody sets."""
        self.paused: ClockSteppedError | None = None
        """Why nothing is deleted for its age at present."""
        self._took_turn = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="housekeeping")
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._database.keep_reserve)
        self._task = asyncio.create_task(self._work())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._task is not None:
            await self._task
        if self._took_turn:
            with suppress(KithError):  # else its turn runs out
                await asyncio.get_running_loop().run_in_executor(self._thread, self._retention.end_turn, self._name)
        self._thread.shutdown()

    async def _work(self) -> None:
        while not self._stop.is_set():
            await asyncio.get_running_loop().run_in_executor(self._thread, self.look)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), self._looked_every_s)

    def look(self) -> None:
        """One look; blocks. Never raises: what did not succeed is done by the next look."""
        try:
            with suppress(MasterKeyError):  # who needs it asks again
                self._database.learn_secrets()
            self._store.forget_changed()
            now = self._checked_now()
            if now is not None and (self._next_s is None or self._clock.boot_s() >= self._next_s):
                self._sweep(now)
        except KithError as error:
            log.warning("what is past its age could not be erased: %s", error.detail)
        except Exception:
            log.exception("what is past its age could not be erased")
        self._database.keep_reserve()
        self._database.empty_log_if_written()  # whatever else was deleted meanwhile, by whomever

    def _checked_now(self) -> datetime | None:
        """None: the clock cannot be relied on."""
        before, server = self.paused, self._database.server_time()
        try:
            now = self._clock.check(server)
        except ClockSteppedError as error:
            self.paused = error
            if before is None:
                log.error("retention is paused: %s. %s", error.detail, error.remedy)
            return None
        self.paused = None
        if before is not None:
            log.warning("retention resumes: the clocks agree again")
        return now

    def _sweep(self, now: datetime) -> None:
        began_s = self._clock.boot_s()
        # Longer than until its next sweep: who swept goes on, and who takes over comes at most one sweep late.
        if not self._retention.take_turn(self._name, now, 1.5 * SWEPT_EVERY):
            return
        self._took_turn = True
        swept = self._retention.sweep(now, self._answers_days, self._stop.is_set)
        for pk, error in swept.failed:
            log.warning("what is past its age could not be erased of the gallery with the key %d: %s", pk, error.detail)
        for gallery, due in swept.held:
            log.warning(
                "retention of the gallery with the key %d waits for a confirmation: %d of %d templates and %d of %d "
                "subjects are past their age; compare the clock with the right time, then 'kith gallery retention'",
                gallery.pk,
                due.templates,
                due.of_templates,
                due.subjects,
                due.of_subjects,
            )
        self._next_s = began_s + (AGAIN_AFTER if swept.failed else SWEPT_EVERY).total_seconds()
        if swept.templates or swept.subjects:
            log.info("past their age: %d templates and %d subjects", swept.templates, swept.subjects)
        for gallery in swept.galleries:
            self._changed(gallery)
