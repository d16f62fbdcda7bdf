"""When keys were used last: noted in memory, written now and then, so that no request waits for it."""

from __future__ import annotations

import asyncio
import logging
from datetime import datetime
from types import TracebackType
from typing import Final, Self

from service.errors import KithError
from service.gallery.key_store import KeyStore

EVERY_S: Final = 300.0
log = logging.getLogger(__name__)


class KeyUses:
    """Use as an async context manager: leaving it writes what is noted."""

    def __init__(self, store: KeyStore, every_s: float = EVERY_S) -> None:
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
        """To be called on the event loop."""
        self._noted[key_id] = at

    async def flush(self) -> None:
        """Write what is noted; where it cannot be written, that is logged, and it is kept for the next time."""
        noted, self._noted = self._noted, {}
        if not noted:
            return
        try:
            await asyncio.to_thread(self._store.used, noted)
        except KithError as error:
            self._noted = noted | self._noted
            log.warning("when keys were used could not be noted: %s", error.detail)
        except Exception:
            self._noted = noted | self._noted
            log.exception("when keys were used could not be noted")

    async def _write(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            await self.flush()
