"""Last use of API keys: collected in memory and written periodically, so that requests do not wait."""

from __future__ import annotations

import asyncio
import logging
from datetime import datetime
from types import TracebackType
from typing import Final, Self

from service.core.errors import KithError
from service.storage.repositories.api_keys import KeyStore

WRITE_INTERVAL_S: Final = 300.0
log = logging.getLogger(__name__)


class KeyUses:
    """Writer of last-use times; use as an async context manager. Leaving it writes the rest."""

    def __init__(self, store: KeyStore, every_s: float = WRITE_INTERVAL_S) -> None:
        self._store = store
        self._every_s = every_s
        self._noted = dict[str, datetime]()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._write())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
        await self.flush()

    def note(self, key_id: str, at: datetime) -> None:
        """Record the use of a key. Call on the event loop."""
        self._noted[key_id] = at

    async def flush(self) -> None:
        """Write the collected times. After a failure they are kept and written next time."""
        noted, self._noted = self._noted, {}
        if not noted:
            return
        try:
            await asyncio.to_thread(self._store.record_usage, noted)
        except KithError as error:
            self._noted = noted | self._noted
            log.warning("writing the last use of keys failed: %s", error.detail)
        except Exception:
            self._noted = noted | self._noted
            log.exception("writing the last use of keys failed")

    async def _write(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            await self.flush()
