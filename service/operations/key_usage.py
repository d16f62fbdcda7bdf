"""Last use of API keys: collected in memory and written periodically, so that requests do not wait."""

from __future__ import annotations

import asyncio
import logging
from datetime import datetime
from typing import Final

from service.core.periodic import PeriodicTask
from service.storage.repositories.api_keys import KeyStore

WRITE_INTERVAL_S: Final = 300.0
log = logging.getLogger(__name__)


class KeyUses(PeriodicTask):
    """Writer of last-use times. Leaving it writes the rest."""

    def __init__(self, store: KeyStore, every_s: float = WRITE_INTERVAL_S) -> None:
        super().__init__(every_s, "writing the last use of keys failed", log)
        self._store = store
        self._noted = dict[str, datetime]()

    def note(self, key_id: str, at: datetime) -> None:
        """Record the use of a key. Call on the event loop."""
        self._noted[key_id] = at

    async def _look(self) -> None:
        """Write the collected times. After a failure they are kept and written next time."""
        noted, self._noted = self._noted, {}
        if not noted:
            return
        try:
            await asyncio.to_thread(self._store.record_usage, noted)
        except BaseException:
            self._noted = noted | self._noted
            raise

    async def _close(self) -> None:
        await self._try_to_look()
