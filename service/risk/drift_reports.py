"""Reports of drift to webhooks: one event whenever a gallery's drift changes for the worse, or ends."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from service.core.errors import GalleryNotFoundError, KithError
from service.domain.events import Event
from service.risk.drift import Drift, DriftState, Watches
from service.storage.audit.log import record_entries
from service.storage.repositories.store import Store

INTERVAL_S: Final = 60.0
REPORTED: Final[frozenset[DriftState]] = frozenset({"watch", "drifted"})
log = logging.getLogger(__name__)


class DriftReports:
    """Task that compares the drift of all watches with the last report; use as an async context manager."""

    def __init__(self, store: Store, watches: Watches, interval_s: float = INTERVAL_S) -> None:
        self._store = store
        self._watches = watches
        self._interval_s = interval_s
        self._reported: dict[int, DriftState] = {}
        """Last reported state by gallery key; a gallery without an entry has no drift."""
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._work())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._task is not None:
            await self._task

    async def _work(self) -> None:
        while not self._stop.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), self._interval_s)
                return
            try:
                await asyncio.to_thread(self.look)
            except KithError as error:
                log.warning("drift is not reported: %s", error.detail)
            except Exception:
                log.exception("drift is not reported")

    def look(self) -> None:
        """Report all changes since the last call; blocks. Raises StorageError, MasterKeyError."""
        keys = self._watches.known()
        for name, drift in self._watches.drifts().items():
            pk = keys.get(name)
            before, now = self._reported.get(pk or 0), drift.state if drift.state in REPORTED else None
            if pk is None or before == now:
                continue
            self._report(name, pk, drift)
            if now is None:
                del self._reported[pk]
            else:
                self._reported[pk] = now

    def _report(self, name: str, pk: int, drift: Drift) -> None:
        try:
            gallery = self._store.galleries.get(name)
        except GalleryNotFoundError:
            return
        if gallery.pk == pk and gallery.webhooks:
            event = Event("drift", {"state": drift.state, "detail": drift.detail})
            record_entries(self._store.database, [], [(gallery, [event])])
