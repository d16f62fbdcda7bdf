"""Threads and connections for imports and exports, separate from those of other requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from service.core.actor import Threads
from service.core.errors import OverloadedError
from service.storage.db.engine import Database
from service.storage.repositories.bulk_templates import BulkStore

THREADS: Final = 2
"""Threads for imports, and for exports. More transfers take turns block by block."""
MAX_EXPORTS: Final = 4
"""Limit of exports; each holds a database snapshot and a connection while its client reads."""
MAX_WAIT_S: Final = 5


class Transfers:
    """Resources of transfers. Create it on the event loop."""

    def __init__(self, database: Database) -> None:
        self._database = database.with_own_pool(THREADS + MAX_EXPORTS)
        self.importing = Threads(THREADS, "imports")
        self.exporting = Threads(THREADS, "exports")
        self._places = asyncio.Semaphore(MAX_EXPORTS)
        self.bulk = BulkStore(self._database)

    async def begin_export(self) -> None:
        """Reserve an export; the caller must call :meth:`end_export`. Raises OverloadedError."""
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                await self._places.acquire()
        except TimeoutError as error:
            raise OverloadedError(f"{MAX_EXPORTS} exports are in progress") from error

    def end_export(self, close: Callable[[], None]) -> None:
        """Close the snapshot without waiting: an await would be canceled with the client's request."""
        closed = asyncio.get_running_loop().run_in_executor(self.exporting, close)
        closed.add_done_callback(lambda _: self._places.release())

    def close(self) -> None:
        self.importing.shutdown()
        self.exporting.shutdown()
        self._database.close()
