"""Reports of drift to webhooks: one event whenever a gallery's drift changes for the worse, or ends."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from kith.wire.common import DriftState
from service.core.errors import GalleryNotFoundError
from service.core.periodic import PeriodicTask
from service.domain.events import Event
from service.risk.drift import Drift, Watches
from service.storage.audit.log import record_entries
from service.storage.repositories.store import Store

INTERVAL_S: Final = 60.0
REPORTED: Final[frozenset[DriftState]] = frozenset({"watch", "drifted"})
log = logging.getLogger(__name__)


class DriftReports(PeriodicTask):
    """Task that compares the drift of all watches with the last report."""

    def __init__(self, store: Store, watches: Watches, interval_s: float = INTERVAL_S) -> None:
        super().__init__(interval_s, "drift is not reported", log)
        self._store = store
        self._watches = watches
        self._reported: dict[int, DriftState] = {}
        """Last reported state by gallery key; a gallery without an entry has no drift."""

    async def _look(self) -> None:
        await asyncio.to_thread(self.look)

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
